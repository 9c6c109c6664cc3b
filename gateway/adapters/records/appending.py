"""Appends batches of lines to a file that several processes may write.

Each batch is one write under a file lock, so batches do not mix. An interrupted write leaves a
torn last line; the next batch, from any process, starts on a new line.
"""

import contextlib
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path


def append(path: Path, data: bytes, *, mode: int = 0o666, sync: bool = False) -> None:
    """Append whole lines, and sync them to disk with `sync`. Raises OSError.

    A new file gets `mode`. After a failure any part of `data` may be in the file.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, mode)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            _write_all(descriptor, data)  # for example a pipe: no last line to check, no sync
            return
        with _locked(descriptor):
            size = os.fstat(descriptor).st_size
            if data and size and os.pread(descriptor, 1, size - 1) != b"\n":
                data = b"\n" + data
            _write_all(descriptor, data)
        if sync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if sync and not size:
        _sync_directory(path.parent)


@contextlib.contextmanager
def _locked(descriptor: int) -> Iterator[None]:
    """Lock the file against other processes during the block; closing the file also unlocks it."""
    if sys.platform == "win32":  # one process there
        yield
        return
    import fcntl  # noqa: PLC0415 - not on Windows

    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _sync_directory(path: Path) -> None:
    """Make a new file's name durable; not every file system supports this."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
