"""Decision records: a bounded ring for look-ups, and JSONL written in batches off the hot path.

A record is encoded once, for both, while it is at hand, and then let go: kept for the writer,
some twenty small objects a request would be all over the memory, and a thread that encodes a
batch holds the interpreter for milliseconds. A timer hands the lines to one writer thread; what
cannot be written (disk full) is kept up to `MAX_PENDING` records, then dropped and counted,
because a full disk must not stop requests. Worker processes append to the same file, each its
own batches (`appending`): lines stay whole, and in order within a process.
"""

import asyncio
import contextlib
import logging
from collections import OrderedDict
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec

from gateway.adapters.appending import append
from gateway.domain import DecisionRecord
from gateway.ports import RecordSink
from gateway.telemetry import Metrics

FLUSH_S = 0.5
MAX_PENDING = 50_000
MAX_PENDING_PROMPT_BYTES = 64 * 1024 * 1024
"""Of lines with recorded request bodies that wait to be written; beyond it records go without."""

_log = logging.getLogger("sluice.request_log")
_encode: Final = msgspec.json.Encoder().encode


class DecisionRing:
    """The last `capacity` records by request id, as JSON."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lines: OrderedDict[str, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._lines)

    def append(self, request_id: str, line: bytes) -> None:
        """Keep a record; its line holds no text of the request."""
        lines = self._lines
        if request_id in lines:
            lines.move_to_end(request_id)
        lines[request_id] = line
        if len(lines) > self._capacity:
            lines.popitem(last=False)

    def find(self, request_id: str) -> bytes | None:
        """The record of a request, the newest where an id was used twice."""
        return self._lines.get(request_id)

    def latest(self, count: int) -> list[msgspec.Raw]:
        """The newest records, newest first."""
        return [msgspec.Raw(line) for line in islice(reversed(self._lines.values()), count)]


class RequestLog:
    """JSONL file of decision records, appended to."""

    def __init__(self, path: Path, metrics: Metrics) -> None:
        self._path = path
        self._metrics = metrics
        self._pending: list[bytes] = []
        self._prompt_bytes = 0
        self._task: asyncio.Task[None] | None = None
        self._failing = False

    def append(self, record: msgspec.Struct) -> None:
        """See RecordSink."""
        if len(self._pending) >= MAX_PENDING:
            self._metrics.log_dropped.add()
            return
        line = _encode(record)
        if isinstance(record, DecisionRecord) and record.prompt is not None:
            if self._prompt_bytes + len(line) > MAX_PENDING_PROMPT_BYTES:
                line = _encode(without_prompt(record))
            else:
                self._prompt_bytes += len(line)
        self._pending.append(line)

    def append_line(self, line: bytes) -> None:
        """Take a record that is encoded already and holds no text of the request."""
        if len(self._pending) >= MAX_PENDING:
            self._metrics.log_dropped.add()
            return
        self._pending.append(line)

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
        prompt_bytes, self._prompt_bytes = self._prompt_bytes, 0
        if not batch:
            return
        try:
            await asyncio.shield(asyncio.to_thread(self._write, batch))
        except OSError as error:
            self._pending[:0] = batch
            self._prompt_bytes += prompt_bytes
            if not self._failing:
                _log.error("request log %s cannot be written: %s", self._path, error.strerror)
            self._failing = True
        else:
            self._failing = False

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            await self.flush()

    def _write(self, batch: list[bytes]) -> None:
        append(self._path, b"\n".join((*batch, b"")))  # the last line ends, too


def without_prompt(record: DecisionRecord) -> DecisionRecord:
    """The same without the request's body."""
    return msgspec.structs.replace(record, prompt=None)


class Records:
    """Decisions to ring, log and further sinks; encoded once for the first two."""

    def __init__(self, ring: DecisionRing, log: RequestLog | None, *others: RecordSink) -> None:
        self._ring = ring
        self._log = log
        self._others = others

    def append(self, record: msgspec.Struct) -> None:
        """See RecordSink."""
        log = self._log
        if not isinstance(record, DecisionRecord):
            if log is not None:
                log.append(record)
        elif record.prompt is None:
            line = _encode(record)
            self._ring.append(record.request_id, line)
            if log is not None:
                log.append_line(line)
        else:  # text belongs to the file, if to anything
            self._ring.append(record.request_id, _encode(without_prompt(record)))
            if log is not None:
                log.append(record)
        for sink in self._others:
            sink.append(record)
