"""Decision records: kept in a ring for look-ups and written as JSONL off the request path.

Each record is encoded once, at once, for both uses. Keeping the record for the writer would
scatter some twenty small objects per request over memory, and a thread that encodes a batch
would hold the interpreter for milliseconds. Lines are joined `_JOINED` at a time, so that the
next ones reuse their memory.

A timer hands the lines to one writer thread. Lines that cannot be written (disk full) are kept
up to `MAX_PENDING` records, then dropped and counted, because a full disk must not stop
requests. Replicas on one host append batches to the same file (`appending`): lines stay whole,
and in order within a replica.
"""

import asyncio
import logging
from pathlib import Path
from typing import Final

import msgspec

from gateway.adapters.background_task import PeriodicTask
from gateway.adapters.records.appending import append
from gateway.adapters.records.decision_ring import DecisionRing
from gateway.metrics import Metrics
from gateway.ports import RecordSink
from gateway.records.decision import DecisionRecord

FLUSH_S = 0.5
MAX_PENDING = 50_000
_JOINED: Final = 64
"""Lines joined into one piece until they are written."""
MAX_PENDING_PROMPT_BYTES = 64 * 1024 * 1024
"""Most pending lines with recorded request bodies; beyond it, records are logged without bodies."""

_log = logging.getLogger("sluice.request_log")
_encode: Final = msgspec.json.Encoder().encode


class RequestLog:
    """Appends decision records to a JSONL file."""

    def __init__(self, path: Path, metrics: Metrics) -> None:
        self._path = path
        self._metrics = metrics
        self._lines: list[bytes] = []
        """The newest lines, not joined yet."""
        self._pending: list[bytes] = []
        """Joined lines, each with its newline."""
        self._waiting = 0
        """Records in `_lines` and `_pending`."""
        self._prompt_bytes = 0
        self._writing = asyncio.Lock()
        self._flushing = PeriodicTask(self.flush, FLUSH_S)
        self._failing = False

    def append(self, record: msgspec.Struct) -> None:
        """See RecordSink."""
        if self._waiting >= MAX_PENDING:
            self._metrics.log_dropped.add()
            return
        line = _encode(record)
        if isinstance(record, DecisionRecord) and record.prompt is not None:
            if self._prompt_bytes + len(line) > MAX_PENDING_PROMPT_BYTES:
                line = _encode(without_prompt(record))
            else:
                self._prompt_bytes += len(line)
        self.append_line(line)

    def append_line(self, line: bytes) -> None:
        """Take an encoded record that holds no text of the request."""
        if self._waiting >= MAX_PENDING:
            self._metrics.log_dropped.add()
            return
        self._waiting += 1
        self._lines.append(line)
        if len(self._lines) >= _JOINED:
            self._join()

    def open(self) -> None:
        """Check that the file can be written. Raises OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab"):
            pass

    def start(self) -> None:
        """Start flushing; call within the running loop."""
        self._flushing.start()

    async def close(self) -> None:
        """Write pending lines and stop. A batch in progress is never interrupted."""
        await self._flushing.close()
        await self.flush()

    async def flush(self) -> None:
        """Write pending lines; after a failure they stay pending, in order."""
        async with self._writing:
            await self._flush()

    async def _flush(self) -> None:
        if self._lines:
            self._join()
        batch, self._pending = self._pending, []
        records, self._waiting = self._waiting, 0
        prompt_bytes, self._prompt_bytes = self._prompt_bytes, 0
        if not batch:
            return
        try:
            await asyncio.to_thread(self._write, batch)
        except OSError as error:
            self._pending[:0] = batch
            self._waiting += records
            self._prompt_bytes += prompt_bytes
            if not self._failing:
                _log.error("request log %s cannot be written: %s", self._path, error.strerror)
            self._failing = True
        else:
            self._failing = False

    def _join(self) -> None:
        lines, self._lines = self._lines, []
        self._pending.append(b"\n".join((*lines, b"")))  # with a final newline

    def _write(self, batch: list[bytes]) -> None:
        append(self._path, b"".join(batch))


def without_prompt(record: DecisionRecord) -> DecisionRecord:
    """A copy of the record without the request's body."""
    return msgspec.structs.replace(record, prompt=None)


class Records:
    """Passes records to the ring, the log and further sinks; encodes once for ring and log."""

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
        else:  # request text may go to the file only
            self._ring.append(record.request_id, _encode(without_prompt(record)))
            if log is not None:
                log.append(record)
        for sink in self._others:
            sink.append(record)
