"""Measures how long this process's event loop stalled, so that no engine is blamed for it.

A timer fires ten times a second and notes its delay. While a long computation holds the loop,
the gateway reads no response, however early it arrived.
"""

import asyncio
from typing import Final

BEAT_S: Final = 0.1
NOTED_S: Final = 0.05
"""A shorter delay is a busy loop, not a stall."""


class LoopWatch:
    """Adds up the stalls of the running loop between `start` and `close`."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self._late_s = 0.0

    def start(self) -> None:
        """Begin."""
        self._loop = asyncio.get_running_loop()
        self._set(self._loop)

    def close(self) -> None:
        """Stop."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop = None

    @property
    def late_s(self) -> float:
        """Seconds of stall so far; never falls."""
        if self._loop is None:
            return self._late_s
        late_s = self._loop.time() - self._due_s
        return self._late_s + (late_s if late_s > NOTED_S else 0.0)

    def _set(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due_s = loop.time() + BEAT_S
        self._timer = loop.call_at(self._due_s, self._beat, loop)

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        self._late_s = self.late_s
        self._set(loop)
