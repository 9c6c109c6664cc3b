"""Usage for billing: one JSON line for each charged request, synced to disk.

Rules:
- Lines are written at least once. A line counts as written when its batch is synced; a failed
  batch is written again as a whole. `id` is unique per request, so billing keeps the first line
  of each id.
- An interrupted write leaves a torn last line, and the next batch starts on a new line. Readers
  skip lines that are not JSON; the request's whole line follows.
- Every batch opens the file anew, so the file may be moved at any time.
- Pending lines are bounded. While the disk is full the newest are dropped and counted, because
  a full disk must not stop requests.
- If the process is killed, requests settled less than FLUSH_S before may be missing.
"""

import asyncio
import logging
from pathlib import Path
from typing import Final

import msgspec

from gateway.adapters.background_task import PeriodicTask
from gateway.adapters.records.appending import append
from gateway.metrics import Metrics
from gateway.records.decision import DecisionRecord
from gateway.records.record import Record

FLUSH_S: Final = 0.5
MAX_PENDING: Final = 100_000
"""Pending lines; some 50 MiB."""

_log = logging.getLogger("sluice.usage_export")
_encode: Final = msgspec.json.Encoder().encode


class UsageLine(Record, frozen=True, kw_only=True):
    """Usage and cost of one request. Cached input is part of the input."""

    id: str
    time_unix_s: float
    """When it was settled."""
    tenant: str
    entitlement: str
    key: str
    """The key's name, or its fingerprint where it has none; empty without a key."""
    model: str
    endpoint: str
    input_tokens: int
    cached_input_tokens: int
    output_tokens: int
    charge_tokens: int
    """Tokens that the entitlement's bucket paid, by the weights of the model's profile."""
    source: str
    """Source of the usage: engine (reported), counted (by the gateway) or proxy (reported)."""
    status: str
    """The outcome, as in the request log."""


def usage_line(record: DecisionRecord) -> UsageLine | None:
    """The line of a decision; None if nothing was charged."""
    lease, usage = record.admission, record.usage
    if lease.charge_tokens is None or lease.lease_id is None:
        return None
    settled_unix_s = lease.settled_unix_s
    if settled_unix_s is None:
        settled_unix_s = record.time_unix_s + (record.timing.duration_s or 0.0)
    return UsageLine(
        id=lease.lease_id,
        time_unix_s=settled_unix_s,
        tenant=record.tenant or "",
        entitlement=record.entitlement or "",
        key=record.key or "",
        model=record.model or "",
        endpoint=record.endpoint,
        input_tokens=usage.prompt_tokens or 0,
        cached_input_tokens=usage.cached_tokens or 0,
        output_tokens=usage.completion_tokens or 0,
        charge_tokens=lease.charge_tokens,
        source=usage.source or "",
        status=record.outcome,
    )


class UsageExport:
    """RecordSink that appends usage lines to a file."""

    def __init__(self, path: Path, metrics: Metrics) -> None:
        self._path = path
        self._metrics = metrics
        self._pending: list[bytes] = []
        self._writing = asyncio.Lock()
        self._flushing = PeriodicTask(self.flush, FLUSH_S)
        self._failing = False

    @property
    def pending(self) -> int:
        """Number of lines that wait to be written."""
        return len(self._pending)

    def append(self, record: msgspec.Struct) -> None:
        """See RecordSink. Ignores other records, and decisions without a charge."""
        line = usage_line(record) if isinstance(record, DecisionRecord) else None
        if line is None:
            return
        if len(self._pending) >= MAX_PENDING:
            self._metrics.usage_dropped.add()
            return
        self._pending.append(_encode(line) + b"\n")  # encoded now, while the record is in cache

    def open(self) -> None:
        """Check that the file can be written. Raises OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        append_synced(self._path, b"")

    def start(self) -> None:
        """Start flushing; call within the running loop."""
        self._flushing.start()

    async def close(self) -> None:
        """Write pending lines and stop. A batch in progress is never interrupted."""
        await self._flushing.close()
        await self.flush()
        if self._pending:
            _log.error("%d usage lines were not written and are lost", len(self._pending))
            self._metrics.usage_dropped.add(by=len(self._pending))

    async def flush(self) -> None:
        """Write pending lines; after a failure they stay pending, in order."""
        async with self._writing:
            batch = self._pending[:]
            if not batch:
                return
            try:
                await asyncio.to_thread(append_synced, self._path, b"".join(batch))
            except OSError as error:
                if not self._failing:
                    _log.error("usage export %s cannot be written: %s", self._path, error.strerror)
                self._failing = True
                return
            del self._pending[: len(batch)]
            self._failing = False


def append_synced(path: Path, data: bytes) -> None:
    """Append whole lines and sync them. Raises OSError, see `append`."""
    append(path, data, mode=0o640, sync=True)
