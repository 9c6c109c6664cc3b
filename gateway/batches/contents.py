"""The contents of files and of batches' output: a directory, or a bucket of an S3-compatible store.

A content appears whole or not at all: in a directory by a temporary name and a rename, in a bucket
because an upload takes effect at its end. Names are the gateway's own ids, never a client's words.
Calls block, so they run in threads; each raises StateFailure, and StorageFull where no room is
left, ContentGone where nothing is.
"""

import asyncio
import contextlib
import errno
import importlib
import os
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any, Final, TypeVar

from gateway.errors import StateFailure, StorageFull

THREADS: Final = 8
PART_BYTES: Final = 8 << 20
"""What a bucket's upload holds in memory before it sends it."""
TEMPORARY: Final = ".unfinished"
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_TIMEOUTS: Final = {"connect_timeout": 5, "read_timeout": 30, "retries": {"max_attempts": 2}}
_T = TypeVar("_T")


class ContentGone(StateFailure):
    """There is no such content, or no storage where it was."""


class Contents:
    """Contents by name, below `file:///PATH` or `s3://BUCKET/PREFIX`."""

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        """Nothing is opened before a call. `options` are those of s3fs."""
        scheme, _, path = url.partition("://")
        self.root = path.rstrip("/")
        self.local = scheme == "file"
        more: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
        more |= {"auto_mkdir": True} if self.local else {"config_kwargs": _TIMEOUTS}
        fsspec: Any = importlib.import_module("fsspec")  # an extra
        self.system: Any = fsspec.filesystem(scheme, **more, **(options or {}))
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="sluice-batches")

    async def open(self, name: str) -> "Writing":
        """Begin a content, which replaces one of this name when it is committed."""
        path = f"{self.root}/{name}"
        where = f"{path}.{secrets.token_hex(4)}{TEMPORARY}" if self.local else path
        file = await self.begin(lambda: self.system.open(where, "wb", block_size=PART_BYTES))
        return Writing(self, file, where, path)

    async def write(self, name: str, data: bytes) -> None:
        """Write a whole content."""
        writing = await self.open(name)
        try:
            await writing.write(data)
            await writing.commit()
        finally:
            await writing.discard()

    async def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """The bytes from `start` up to `end`, or up to the content's own end."""

        def work() -> bytes:
            try:
                return bytes(self.system.cat_file(f"{self.root}/{name}", start=start, end=end))
            except OSError as error:
                if error.errno == errno.EINVAL:  # S3: nothing is there from `start` on
                    return b""
                raise

        return await self.begin(work)

    async def delete(self, name: str) -> None:
        """Delete a content, or all below a name. Nothing happens if there is none."""

        def work() -> None:
            with contextlib.suppress(FileNotFoundError):
                self.system.rm(f"{self.root}/{name}", recursive=True)

        await self.begin(work)

    async def names(self) -> dict[str, float]:
        """All names, also of unfinished ones, with the time of their last change in Unix s."""

        def work() -> dict[str, float]:
            skip = len(self.root.lstrip("/" if not self.local else "")) + 1
            found = (
                self.system.find(self.root, detail=True) if self.system.exists(self.root) else {}
            )
            return {path[skip:]: _modified(about) for path, about in found.items()}

        return await self.begin(work)

    def begin(self, work: Callable[[], _T]) -> asyncio.Future[_T]:
        """Work in a thread; the future raises StateFailure."""

        def run() -> _T:
            try:
                return work()
            except Exception as error:  # each kind of store has errors of its own
                text = f"the storage of batches: {str(error) or type(error).__name__}"
                if isinstance(error, FileNotFoundError):
                    raise ContentGone(text) from error
                if isinstance(error, OSError) and error.errno in _FULL:
                    raise StorageFull(text) from error
                raise StateFailure(text) from error

        return asyncio.get_running_loop().run_in_executor(self._threads, run)

    def close(self) -> None:
        """Let running calls end, and take no more. Idempotent."""
        self._threads.shutdown(wait=False)


class Writing:
    """A content that is being written."""

    def __init__(self, contents: Contents, file: Any, where: str, path: str) -> None:
        self._contents = contents
        self._file = file
        self._where = where
        self._path = path
        self._running: asyncio.Future[Any] | None = None
        self._ended = False

    async def write(self, data: bytes) -> None:
        """Append."""
        await self._run(lambda: self._file.write(data))

    async def commit(self) -> None:
        """Make it the content of its name, lastingly."""

        def work() -> None:
            if self._contents.local:
                self._file.flush()
                os.fsync(self._file.fileno())
            self._file.close()
            if self._contents.local:
                os.replace(self._where, self._path)  # noqa: PTH105 - paths of fsspec are text

        await self._run(work)
        self._ended = True

    async def discard(self) -> None:
        """Leave nothing of it, unless it is committed. Raises nothing; idempotent."""
        if self._ended:
            return
        self._ended = True

        def work() -> None:
            with contextlib.suppress(Exception):
                if self._contents.local:
                    self._file.close()
                else:
                    self._file.discard()
                    self._file.closed = True  # or it would be uploaded when it is collected
            if self._contents.local:
                with contextlib.suppress(OSError):
                    os.unlink(self._where)  # noqa: PTH108

        await self._run(work)

    async def _run(self, work: Callable[[], Any]) -> None:
        if self._running is not None:  # a call that its caller gave up
            await asyncio.wait([self._running])
        self._running = self._contents.begin(work)
        await asyncio.shield(self._running)


def _modified(about: Mapping[str, Any]) -> float:
    changed = about.get("mtime", about.get("LastModified", 0.0))
    return changed.timestamp() if isinstance(changed, datetime) else float(changed)
