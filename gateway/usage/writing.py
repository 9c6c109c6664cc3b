"""Writes lines to files: collected on the event loop, written by a thread, a batch at a time.

Lines wait until a batch with them is written; after a failure they stay, in order. Their number is
bounded: beyond it the newest are dropped and counted, because a full disk must not stop requests.
So that a new line reuses memory that is still in the processor's cache, lines that wait are joined
into larger pieces.

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
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gateway.background_task import PeriodicTask
from gateway.metrics import Counter

FLUSH_S: Final = 0.5
JOINED: Final = 64
"""Lines joined into one piece until they are written."""


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


WAIT_S: Final = 5.0
_LOCK_EVERY_S: Final = 0.01


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
