"""Usage for billing: one JSON line for each charged request, synced to disk, and the ledger's sums.

Rules:
- Lines are written at least once. A line counts as written when its batch is synced; a failed
  batch is written again as a whole. `id` is unique per request, so billing keeps the first line
  of each id.
- An interrupted write leaves a torn last line, and the next batch starts on a new line. Readers
  skip lines that are not JSON; the request's whole line follows.
- Every batch opens the file anew, so the file may be moved at any time.
- With a ledger, a batch counts there first, and its lines wait there until the file has them
  (`gateway.usage.ledger`). The ledger counts each line once. A file that cannot be
  written keeps nothing from the ledger.
- If the process is killed, requests settled less than FLUSH_S before may be missing, in both.
- Items of batches come by `post`, when their answers are in the output.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import Final

import msgspec

from gateway.metrics import Metrics
from gateway.records.decision import DecisionRecord
from gateway.records.usage import UsageLine
from gateway.usage.ledger import DELIVERY_BYTES, Ledger
from gateway.usage.report import PoolBill
from gateway.usage.request_log import LineWriter, append

BILL_S: Final = 10.0
"""Between two entries of the fleet's cost while no request ends."""
MAX_PENDING: Final = 100_000
"""Pending lines; some 50 MiB."""
NO_BILL: Final = PoolBill("", "", 0.0, 0)

_log = logging.getLogger("sluice.usage_export")
_encode: Final = msgspec.json.Encoder().encode
_decode_lines: Final = msgspec.json.Decoder(UsageLine).decode_lines


def usage_line(record: DecisionRecord, currency: str = "") -> UsageLine | None:
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
        cost_nano=usage.cost_nano,
        currency="" if usage.cost_nano is None else currency,
    )


class UsageExport(LineWriter):
    """A sink of records that writes usage lines to the export, the ledger, or both."""

    def __init__(
        self,
        path: Path | None,
        metrics: Metrics,
        ledger: Ledger | None = None,
        *,
        currency: str = "",
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`path`: the export's file, or None for the ledger alone."""
        super().__init__(
            MAX_PENDING,
            metrics.usage_dropped,
            _log,
            what="usage lines",
            failure="usage cannot be written",
        )
        self._path = path
        self._ledger = ledger
        self._currency = currency
        self._wall_clock = wall_clock
        self._undelivered = False
        """Whether lines wait in the ledger for the export."""
        self._exported = 0
        """End of lines that wait there although the export has them, until that is noted."""
        self._bills: dict[tuple[str, str], PoolBill] = {}
        self._billing = threading.Lock()
        self._billed_unix_s = wall_clock()

    def append(self, record: msgspec.Struct) -> None:
        """Ignores other records, decisions without a charge, and those of batches (see `post`)."""
        line = None
        if isinstance(record, DecisionRecord) and record.batch is None:
            line = usage_line(record, self._currency)
        if line is not None:
            self.append_line(_encode(line))  # encoded now, while the record is in cache

    @property
    def id(self) -> str:
        """Of the ledger, which counts a part of a batch once; of the export's file without one."""
        return f"export {self._path}" if self._ledger is None else self._ledger.id

    async def post(self, part: str, lines: Sequence[bytes]) -> None:
        """Write the usage of a part of a batch's output, by its name. Raises OSError.

        Asked again, a ledger counts nothing twice; without one, the export has the lines twice.
        """
        batch = b"\n".join((*lines, b""))
        async with self._writing:
            await asyncio.to_thread(self._post, part, batch)

    def _post(self, part: str, batch: bytes) -> None:
        ledger, path = self._ledger, self._path
        if ledger is not None:
            now_unix_s, outbox = self._wall_clock(), batch if path is not None else b""
            if ledger.commit(_decode_lines(batch), (), now_unix_s, outbox, part) and outbox:
                self._undelivered = True
        elif path is not None:
            append_synced(path, batch)

    def bill(self, due: PoolBill) -> None:
        """Enter what a pool's workers cost into the ledger."""
        if self._ledger is None:
            return
        with self._billing:
            before = self._bills.get((due.model, due.pool), NO_BILL)
            self._bills[due.model, due.pool] = due._replace(
                worker_s=due.worker_s + before.worker_s, cost_nano=due.cost_nano + before.cost_nano
            )

    def open(self) -> None:
        """Check that the files can be written, and take over what a crash left. Raises OSError."""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            append_synced(self._path, b"")
        if self._ledger is None:
            return
        self._ledger.open()
        if self._path is not None:
            self._ledger.adopt()
            self._undelivered = True

    async def close(self) -> None:
        await self._flushing.close()
        self._billed_unix_s = -inf  # only now: a batch in progress sets it
        await super().close()
        if self._ledger is not None:
            await asyncio.to_thread(self._ledger.close)

    def _due(self) -> bool:
        billed = self._bills and self._wall_clock() - self._billed_unix_s >= BILL_S
        return bool(self.pending or billed or self._undelivered)

    def _write(self, batch: bytes) -> OSError | None:
        ledger, path = self._ledger, self._path
        if ledger is None:
            if path is not None:
                append_synced(path, batch)
            return None
        if self._exported:
            ledger.delivered(self._exported)
            self._exported = 0
        with self._billing:
            bills, self._bills = self._bills, {}
        if batch or bills:
            now_unix_s, outbox = self._wall_clock(), batch if path is not None else b""
            try:
                ledger.commit(_decode_lines(batch), bills.values(), now_unix_s, outbox)
            except OSError:
                for due in bills.values():  # the ledger has not got them
                    self.bill(due)
                raise
            self._billed_unix_s = now_unix_s
            self._undelivered = self._undelivered or bool(outbox)
        if path is None or not self._undelivered:
            return None
        try:
            end, lines = ledger.undelivered()
            if lines:
                append_synced(path, lines)
                self._exported = end
                ledger.delivered(end)
                self._exported = 0
            self._undelivered = len(lines) >= DELIVERY_BYTES
        except OSError as error:
            return error  # the ledger has the lines
        return None


def append_synced(path: Path, data: bytes) -> None:
    """Append whole lines and sync them. Raises OSError, see `append`."""
    append(path, data, mode=0o640, sync=True)
