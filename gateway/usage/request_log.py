"""What requests leave: decision records in a ring for look-ups, and lines in files.

Each record is encoded once, at once, for both uses. Keeping the record for the writer would
scatter some twenty small objects per request over memory, and a thread that encodes a batch
would hold the interpreter for milliseconds.

Records in the ring stay for minutes and are rarely looked up. If each were a separate object, a
new record would reuse the oldest one's memory, which is no longer in the processor's cache. So up
to `MAX_IN_PIECE` records are collected and then joined into one piece (bytes and an array), and
the next records reuse the memory that was just freed; likewise lines that wait to be written.
Clients choose request ids and may repeat them, so an index finds the newest record of an id, and
of each tenant with that id, however many others have it.

Lines are written by a thread, a batch at a time. They wait until a batch with them is written;
after a failure they stay, in order. Their number is bounded: beyond it the newest are dropped and
counted, because a full disk must not stop requests.

Several processes may write one file. Each batch is one write under a file lock, so batches do not
mix. An interrupted write leaves a torn last line; the next batch, from any process, starts on a new
line. Nothing waits for longer than `WAIT_S`: another program may hold the lock, or not read its
pipe.
"""

import asyncio
import contextlib
import errno
import logging
import os
import select
import stat
import sys
import time
from array import array
from collections import deque
from collections.abc import Iterator
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from gateway.background_task import PeriodicTask
from gateway.metrics import Counter, Metrics
from gateway.ports import RecordSink
from gateway.records.decision import DecisionRecord

MAX_IN_PIECE: Final = 64
_PIECES: Final = 32
"""Fewest pieces in a full ring, so that dropping one loses a small part."""
MAX_PENDING: Final = 50_000
MAX_PENDING_PROMPT_BYTES: Final = 64 * 1024 * 1024
"""Most pending bytes with which request bodies are recorded; beyond it, records go without them."""
FLUSH_S: Final = 0.5
JOINED: Final = 64
"""Lines joined into one piece until they are written."""
WAIT_S: Final = 5.0
_LOCK_EVERY_S: Final = 0.01

_log = logging.getLogger("sluice.request_log")
_encode: Final = msgspec.json.Encoder().encode


class _Piece(NamedTuple):
    keys: "array[int]"
    """The two keys of each record, in order; see `_keys`."""
    ends: "array[int]"
    """Where each record ends in `data`."""
    data: bytes

    def record(self, at: int) -> bytes:
        return self.data[self.ends[at - 1] if at else 0 : self.ends[at]]


class DecisionRing:
    """The last `capacity` records by request id, and at most one piece more."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._most = max(1, min(MAX_IN_PIECE, capacity // _PIECES))
        self._keys: list[int] = []
        self._lines: list[bytes] = []
        """The newest records, not joined into a piece yet."""
        self._pieces: deque[_Piece] = deque()
        self._dropped = 0
        """Pieces dropped so far."""
        self._newest: dict[int, int] = {}
        """Key -> number of the newest record with it, counted since the start."""

    def __len__(self) -> int:
        return self._most * len(self._pieces) + len(self._lines)

    def append(self, request_id: str, line: bytes, tenant: str | None = None) -> None:
        """Keep a record. Its line must hold no text of the request."""
        number = self._most * (self._dropped + len(self._pieces)) + len(self._lines)
        keys = _keys(request_id, tenant)
        for key in keys:
            self._newest[key] = number
        self._keys += keys
        self._lines.append(line)
        if len(self._lines) >= self._most:
            ends = array("L", accumulate(map(len, self._lines)))
            self._pieces.append(_Piece(array("q", self._keys), ends, b"".join(self._lines)))
            self._keys, self._lines = [], []
            if self._most * (len(self._pieces) - 1) >= self._capacity:
                self._dropped += 1
                kept_from = self._most * self._dropped
                for key in self._pieces.popleft().keys:
                    if self._newest.get(key, kept_from) < kept_from:
                        del self._newest[key]

    def find(self, request_id: str, tenant: str | None = None) -> bytes | None:
        """The newest record of a request, or of the tenant's one; ids are compared by hash."""
        number = self._newest.get(_keys(request_id, tenant)[tenant is not None])
        if number is None:
            return None
        piece, at = divmod(number - self._most * self._dropped, self._most)
        return self._lines[at] if piece == len(self._pieces) else self._pieces[piece].record(at)

    def latest(self, count: int) -> list[msgspec.Raw]:
        """The newest records, newest first."""
        joined = (
            piece.record(at)
            for piece in reversed(self._pieces)
            for at in reversed(range(len(piece.ends)))
        )
        return [msgspec.Raw(line) for line in islice(chain(reversed(self._lines), joined), count)]


def _keys(request_id: str, tenant: str | None) -> tuple[int, int]:
    """Keys of a record in the index: any with this request id, and this tenant's."""
    return hash(request_id), hash((request_id, tenant))


# -- lines in files


class LineWriter:
    """Lines that wait for a thread to write them. A subclass says how a batch is written."""

    def __init__(
        self, most: int, dropped: Counter, log: logging.Logger, *, what: str, failure: str
    ) -> None:
        """`most` lines wait, others count as `dropped`; `what` they are called, and a failure.

        The log has the error after the words of `failure`.
        """
        self.pending = 0
        """Lines that wait, or are being written."""
        self.pending_bytes = 0
        self._lines: list[bytes] = []
        """The newest lines, not joined yet."""
        self._pieces: list[bytes] = []
        """Joined lines, each with its newline."""
        self._most = most
        self._dropped = dropped
        self._log = log
        self._what = what
        self._failure = failure
        self._failing = False
        self._writing = asyncio.Lock()
        self._flushing = PeriodicTask(self.flush, FLUSH_S)

    @property
    def full(self) -> bool:
        """Whether `append_line` drops what it is given now."""
        return self.pending >= self._most

    def append_line(self, line: bytes) -> None:
        """Take a line, without its newline."""
        if self.pending >= self._most:
            self._dropped.add()
            return
        self.pending += 1
        self.pending_bytes += len(line)
        self._lines.append(line)
        if len(self._lines) >= JOINED:
            self._join()

    def start(self) -> None:
        """Start flushing; call within the running loop."""
        self._flushing.start()

    async def close(self) -> None:
        """Write pending lines and stop. A batch in progress is never interrupted."""
        await self._flushing.close()
        await self.flush()
        if self.pending:
            self._log.error("%d %s were not written and are lost", self.pending, self._what)
            self._dropped.add(by=self.pending)

    async def flush(self) -> None:
        """Write what waits."""
        async with self._writing:
            if not self._due():
                return
            self._join()
            pieces, lines, size = len(self._pieces), self.pending, self.pending_bytes
            batch = b"".join(self._pieces)
            try:
                problem = await asyncio.to_thread(self._write, batch)
            except OSError as error:
                problem = error
            else:
                del self._pieces[:pieces]
                self.pending -= lines
                self.pending_bytes -= size
            if problem is not None and not self._failing:
                self._log.error("%s: %s", self._failure, problem)
            self._failing = problem is not None

    def _due(self) -> bool:
        return self.pending > 0

    def _write(self, batch: bytes) -> OSError | None:
        """Write these lines, in a thread. Raises OSError; returns what failed beside them."""
        raise NotImplementedError

    def _join(self) -> None:
        if self._lines:
            lines, self._lines = self._lines, []
            self._pieces.append(b"\n".join((*lines, b"")))  # with a final newline


class RequestLog(LineWriter):
    """Appends decision records to a JSONL file."""

    def __init__(self, path: Path, metrics: Metrics) -> None:
        super().__init__(
            MAX_PENDING,
            metrics.log_dropped,
            _log,
            what="records",
            failure=f"request log {path} cannot be written",
        )
        self._path = path

    def append(self, record: msgspec.Struct) -> None:
        line = b"" if self.full else _encode(record)
        if (
            isinstance(record, DecisionRecord)
            and record.prompt is not None
            and self.pending_bytes + len(line) > MAX_PENDING_PROMPT_BYTES
        ):
            line = _encode(without_prompt(record))
        self.append_line(line)

    def open(self) -> None:
        """Check that the file can be written. Raises OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        append(self._path, b"")

    def _write(self, batch: bytes) -> None:
        append(self._path, batch)


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
        log, line = self._log, b""
        if isinstance(record, DecisionRecord):
            # Request text may go to the file only.
            line = _encode(record if record.prompt is None else without_prompt(record))
            self._ring.append(record.request_id, line, record.tenant)
        if log is not None:
            if isinstance(record, DecisionRecord) and record.prompt is None:
                log.append_line(line)
            else:
                log.append(record)
        for sink in self._others:
            sink(record)


def append(path: Path, data: bytes, *, mode: int = 0o666, sync: bool = False) -> None:
    """Append whole lines, and sync them to disk with `sync`. Raises OSError.

    A new file gets `mode`. After a failure any part of `data` may be in the file.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0)
    descriptor = os.open(path, flags, mode)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            _write_all(descriptor, data)  # for example a pipe: no last line to check, no sync
            return
        with _locked(descriptor) if data else contextlib.nullcontext():
            size = os.fstat(descriptor).st_size
            if data and size and os.pread(descriptor, 1, size - 1) != b"\n":
                data = b"\n" + data
            _write_all(descriptor, data)
        if sync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if sync and not size:
        # Make the new file's name durable; not every file system supports this.
        folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(OSError):
                os.fsync(folder)
        finally:
            os.close(folder)


@contextlib.contextmanager
def _locked(descriptor: int) -> Iterator[None]:
    """Lock the file against other processes during the block; closing the file also unlocks it."""
    if sys.platform == "win32":  # one process there
        yield
        return
    import fcntl  # noqa: PLC0415 - not on Windows

    until_s = time.monotonic() + WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > until_s:
                raise OSError(errno.EWOULDBLOCK, "another program holds its lock") from error
            time.sleep(_LOCK_EVERY_S)
        else:
            break
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError as error:
            writable = select.poll()
            writable.register(descriptor, select.POLLOUT)
            if not writable.poll(WAIT_S * 1000):
                raise OSError(errno.EWOULDBLOCK, "nobody reads this pipe") from error
