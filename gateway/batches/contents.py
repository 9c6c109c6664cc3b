"""The contents of files and of batches' output: a directory, or a bucket of an S3-compatible store.

A content appears whole or not at all: in a directory by a temporary name and a rename, in a bucket
because an upload takes effect at its end. Names are the gateway's own ids, never a client's words.
Calls block, so they run in threads; each raises StateFailure, and StorageFull where no room is
left, ContentGone where nothing is.
"""

import asyncio
import errno
import importlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, TypeVar

from gateway.errors import StateFailure, StorageFull

THREADS: Final = 8
PART_BYTES: Final = 8 << 20
"""What a bucket's upload holds in memory before it sends it."""
UNFINISHED: Final = ".unfinished"
"""In a directory: ends the name of what is not whole."""
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_TIMEOUTS: Final = {"connect_timeout": 5, "read_timeout": 30, "retries": {"max_attempts": 2}}
_T = TypeVar("_T")


class ContentGone(StateFailure):
    """There is no such content, or no storage where it was."""


class Contents:
    """Contents by name, below `file:///PATH` or `s3://BUCKET/PREFIX`."""

    def __init__(self, url: str) -> None:
        """Nothing is opened before a call. Of a bucket, boto3's AWS_* variables say the rest."""
        scheme, _, path = url.partition("://")
        self.root = path.rstrip("/")
        self._local = scheme == "file"
        more = {"auto_mkdir": True} if self._local else {"config_kwargs": _TIMEOUTS}
        fsspec: Any = importlib.import_module("fsspec")  # an extra
        self.system: Any = fsspec.filesystem(
            scheme, skip_instance_cache=True, use_listings_cache=False, **more
        )
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="sluice-batches")

    @asynccontextmanager
    async def open(self, name: str) -> AsyncIterator[Callable[[bytes], Awaitable[None]]]:
        """Write a content in pieces. It is there whole after the block, or not if that raises."""
        path = f"{self.root}/{name}"
        where = f"{path}{UNFINISHED}" if self._local else path
        file = await self._begin(lambda: self.system.open(where, "wb", block_size=PART_BYTES))
        running: asyncio.Future[Any] | None = None

        async def run(work: Callable[[], Any]) -> None:
            nonlocal running
            if running is not None:  # a call that its caller gave up
                await asyncio.wait([running])
            running = self._begin(work)
            await asyncio.shield(running)

        def commit() -> None:
            if self._local:
                file.flush()
                os.fsync(file.fileno())
            file.close()
            if self._local:
                os.replace(where, path)  # noqa: PTH105 - paths of fsspec are text

        def discard() -> None:
            with suppress(Exception):
                if self._local:
                    file.close()
                else:
                    file.discard()
                    file.closed = True  # or it would be uploaded when it is collected
            with suppress(OSError):
                if self._local:
                    os.unlink(where)  # noqa: PTH108

        try:
            yield lambda data: run(lambda: file.write(data))
            await run(commit)
        except BaseException:
            await run(discard)
            raise

    async def write(self, name: str, data: bytes) -> None:
        """Write a whole content, which replaces one of this name."""
        async with self.open(name) as write:
            await write(data)

    async def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """The bytes from `start` up to `end`, or up to the content's own end."""

        def work() -> bytes:
            try:
                return bytes(self.system.cat_file(f"{self.root}/{name}", start=start, end=end))
            except OSError as error:
                if error.errno == errno.EINVAL:  # S3: nothing is there from `start` on
                    return b""
                raise

        return await self._begin(work)

    async def delete(self, name: str) -> None:
        """Delete a content, what is unfinished of it, or all below a name; or nothing is there."""

        def work() -> None:
            for end in ("", UNFINISHED) if self._local else ("",):
                with suppress(FileNotFoundError):
                    self.system.rm(f"{self.root}/{name}{end}", recursive=True)

        await self._begin(work)

    def _begin(self, work: Callable[[], _T]) -> asyncio.Future[_T]:
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
