"""Runs the story in a thread of its own, beside the one that watches the processes."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any


class Teller:
    """One telling; `end` cancels it."""

    def __init__(self, story: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._story = story
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.failure: Exception | None = None
        """Why it ended before its end."""

    def start(self) -> None:
        """Begin to tell."""
        self._thread.start()

    @property
    def over(self) -> bool:
        """Whether the story has ended."""
        return not self._thread.is_alive()

    def end(self) -> None:
        """Stop telling, and wait until its requests are given up."""
        if not self.over:
            self._loop.call_soon_threadsafe(self._cancel)
            self._thread.join(10.0)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._tell())
        except asyncio.CancelledError:
            pass
        except Exception as error:  # noqa: BLE001 - the main thread reports it
            self.failure = error
        finally:
            self._loop.close()

    async def _tell(self) -> None:
        self._task = asyncio.current_task()
        await self._story()
