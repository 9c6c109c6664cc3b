"""Appends batches of lines to a file that several processes may write.

Each batch is one write under a file lock, so batches do not mix. An interrupted write leaves a
torn last line; the next batch, from any process, starts on a new line. Nothing waits for longer
than `WAIT_S`: another program may hold the lock, or not read its pipe.
"""

import contextlib
import errno
import os
import select
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

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
