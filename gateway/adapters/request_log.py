"""Decision records: a bounded ring for look-ups, and JSONL written in batches off the hot path.

Appending is a list append. A timer hands the batch to one writer thread; what cannot be
written (disk full) is kept up to `MAX_PENDING` records, then dropped and counted, because a
full disk must not stop requests. Worker processes append to the same file, each its own batches
(`appending`): lines stay whole, and in order within a process.
"""

import asyncio
import contextlib
import logging
from collections import OrderedDict
from pathlib import Path

import msgspec

from gateway.adapters.appending import append
from gateway.domain import DecisionRecord
from gateway.ports import RecordSink
from gateway.telemetry import Metrics

FLUSH_S = 0.5
MAX_PENDING = 50_000
MAX_PENDING_PROMPT_CHARS = 64 * 1024 * 1024
"""Of recorded request bodies that wait to be written; beyond it records go without theirs."""

_log = logging.getLogger("sluice.request_log")


class DecisionRing:
    """The last `capacity` records by request id."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._records: OrderedDict[str, msgspec.Struct] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def append(self, record: msgspec.Struct) -> None:
        """See RecordSink."""
        if not isinstance(record, DecisionRecord) or self._capacity == 0:
            return
        if record.prompt is not None:  # text belongs to the file, if to anything
            record = msgspec.structs.replace(record, prompt=None)
        self._records.pop(record.request_id, None)
        if len(self._records) >= self._capacity:
            self._records.popitem(last=False)
        self._records[record.request_id] = record

    def find(self, request_id: str) -> msgspec.Struct | None:
        """The record of a request, newest first where an id was used twice."""
        return self._records.get(request_id)

    def latest(self, count: int) -> list[msgspec.Struct]:
        """The newest records, newest first."""
        found: list[msgspec.Struct] = []
        for record in reversed(self._records.values()):
            if len(found) >= count:
                break
            found.append(record)
        return found


class RequestLog:
    """JSONL file of decision records, appended to."""

    def __init__(self, path: Path, metrics: Metrics) -> None:
        self._path = path
        self._metrics = metrics
        self._pending: list[msgspec.Struct] = []
        self._prompt_chars = 0
        self._task: asyncio.Task[None] | None = None
        self._encode = msgspec.json.Encoder().encode
        self._failing = False

    def append(self, record: msgspec.Struct) -> None:
        """See RecordSink."""
        if len(self._pending) >= MAX_PENDING:
            self._metrics.log_dropped.add()
            return
        chars = _prompt_chars(record)
        if self._prompt_chars + chars > MAX_PENDING_PROMPT_CHARS:
            record = msgspec.structs.replace(record, prompt=None)
        else:
            self._prompt_chars += chars
        self._pending.append(record)

    def open(self) -> None:
        """Check that the file can be written. Raises OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab"):
            pass

    def start(self) -> None:
        """Begin flushing; call within the running loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Write what is left and stop."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self.flush()

    async def flush(self) -> None:
        """Write what is pending now."""
        batch, self._pending = self._pending, []
        self._prompt_chars = 0
        if not batch:
            return
        try:
            await asyncio.shield(asyncio.to_thread(self._write, batch))
        except OSError as error:
            self._pending[:0] = batch
            self._prompt_chars += sum(map(_prompt_chars, batch))
            if not self._failing:
                _log.error("request log %s cannot be written: %s", self._path, error.strerror)
            self._failing = True
        else:
            self._failing = False

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            await self.flush()

    def _write(self, batch: list[msgspec.Struct]) -> None:
        lines = b"\n".join(map(self._encode, batch)) + b"\n"
        append(self._path, lines)


def _prompt_chars(record: msgspec.Struct) -> int:
    return len(record.prompt) if isinstance(record, DecisionRecord) and record.prompt else 0


class Sinks:
    """Several record sinks as one."""

    def __init__(self, *sinks: RecordSink) -> None:
        self._sinks = sinks

    def append(self, record: msgspec.Struct) -> None:
        """See RecordSink."""
        for sink in self._sinks:
            sink.append(record)
