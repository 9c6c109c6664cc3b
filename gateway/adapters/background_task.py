"""Work that goes on beside the requests: started once, ended and waited for at shutdown."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

_log = logging.getLogger("sluice")


class BackgroundTasks:
    """Coroutines that run until `close` cancels them."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, *works: Coroutine[Any, Any, None]) -> None:
        """Run these from now on; call within the running loop."""
        loop = asyncio.get_running_loop()
        self._tasks += [loop.create_task(work) for work in works]

    async def close(self) -> bool:
        """Cancel all and wait until they have ended; whether there were any. Idempotent.

        A task that failed is logged: shutdown goes on.
        """
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                _log.error("a background task had failed", exc_info=error)
        return bool(tasks)


class PeriodicTask:
    """Calls `work` every `every_s` seconds until `close`, which never cuts a call short."""

    def __init__(self, work: Callable[[], Awaitable[None]], every_s: float) -> None:
        self._work = work
        self._every_s = every_s
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Make the first call in `every_s`; call within the running loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> bool:
        """End, once the call in progress has; whether it was running. Idempotent.

        Raises what `work` raised.
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
                await asyncio.wait_for(self._stop.wait(), self._every_s)
            await self._work()
