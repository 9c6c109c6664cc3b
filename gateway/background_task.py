"""Background tasks: started once, then cancelled or awaited at shutdown."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from typing import Any

_log = logging.getLogger("sluice")


class BackgroundTasks:
    """Coroutines that run until `end` or `close` cancels them."""

    def __init__(self) -> None:
        self._tasks: dict[Hashable, asyncio.Task[None]] = {}

    def start(self, *works: Coroutine[Any, Any, None], key: Hashable = None) -> None:
        """Start these coroutines; call within the running loop.

        One with a `key` replaces the key's earlier one.
        """
        loop = asyncio.get_running_loop()
        if key is None:
            self._tasks = {k: t for k, t in self._tasks.items() if not _succeeded(t)}
        else:
            self.end(key)
        for work in works:
            self._tasks[object() if key is None else key] = loop.create_task(work)

    def end(self, key: Hashable) -> None:
        """Cancel a key's coroutine, if it runs."""
        task = self._tasks.pop(key, None)
        if task is not None:
            task.cancel()

    async def close(self) -> bool:
        """Cancel all tasks and wait for their end; returns whether there were any. Idempotent.

        A task's failure is logged and does not stop the shutdown.
        """
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                _log.error("a background task had failed", exc_info=error)
        return bool(tasks)


def _succeeded(task: asyncio.Task[None]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


class PeriodicTask:
    """Calls `work` every `every_s` seconds until `close`, which never interrupts a call."""

    def __init__(self, work: Callable[[], Awaitable[None]], every_s: float) -> None:
        self._work = work
        self._every_s = every_s
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Make the first call after `every_s` seconds; call within the running loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> bool:
        """Stop after the call in progress; returns whether the task was running. Idempotent.

        Raises any exception that `work` raised.
        """
        task, self._task = self._task, None
        if task is None:
            return False
        self._stop.set()
        await task
        return True

    async def _run(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._every_s):
                    await self._stop.wait()
            await self._work()
