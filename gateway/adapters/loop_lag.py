"""How long this process's event loop stood still: what nobody else may be blamed for.

A timer that should ring ten times a second notes how late it does. While a long computation
holds the loop no answer is read, however soon it came.
"""

import asyncio
from typing import Final

BEAT_S: Final = 0.1
NOTED_S: Final = 0.05
"""Less is a busy loop, not one that stands still."""


class LoopWatch:
    """Adds up the standstills of the running loop between `start` and `close`."""

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
        """Seconds of standstill so far; never falls."""
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
