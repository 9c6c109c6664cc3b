"""Makes large bodies take turns, so that many at once never hold the event loop for long.

Rules:
- In one loop iteration all connections together read at most `turn_bytes` of large bodies. A
  connection beyond that pauses and resumes in order.
- In one loop iteration the answer to at most one large body begins.
"""

import asyncio
from collections import deque
from typing import Final

LARGE_BYTES: Final = 1024 * 1024
"""The answer to a larger body waits for a turn of its own."""
TURN_BYTES: Final = 1024 * 1024
_READ_BYTES: Final = 256 * 1024
"""Size of one uvloop read; a resumed connection reads at least once."""


class LargeBodies:
    """Turns for all connections of a process."""

    def __init__(self, turn_bytes: int = TURN_BYTES) -> None:
        self._turn_bytes = self._left = turn_bytes
        self._paused: deque[asyncio.Transport] = deque()
        self._beginning: deque[asyncio.Future[None]] = deque()
        self._waits = False
        """Whether a callback for the next turn is scheduled."""

    def took(self, body: asyncio.Transport, size: int, loop: asyncio.AbstractEventLoop) -> None:
        """Count `size` bytes read for an unfinished body; pauses reading if over the limit."""
        self._left -= size
        if self._left < 0:
            body.pause_reading()
            self._paused.append(body)
        self._wait(loop)

    async def alone(self) -> None:
        """Wait for a turn in which no other large body's answer begins."""
        loop = asyncio.get_running_loop()
        mine = loop.create_future()
        self._beginning.append(mine)
        self._wait(loop)
        await mine

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._waits:
            self._waits = True
            loop.call_soon(self._next, loop)

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        self._waits = False
        self._left = self._turn_bytes
        while self._beginning:
            beginning = self._beginning.popleft()
            if not beginning.done():  # its client may have left
                beginning.set_result(None)
                self._left = 0
                break
        else:
            for _ in range(min(len(self._paused), max(1, self._turn_bytes // _READ_BYTES))):
                if not (body := self._paused.popleft()).is_closing():
                    body.resume_reading()
        if self._paused or self._beginning:
            self._wait(loop)
