"""Makes large bodies take turns, so that many at once never hold the event loop for long.

Rules:
- In one loop iteration all connections together read at most `turn_bytes` of large bodies. A
  connection beyond that pauses and resumes in order.
- In one loop iteration the answer to at most one large body begins.
"""

import asyncio
from collections import deque
from typing import Final, Protocol

LARGE_BYTES: Final = 1024 * 1024
"""The answer to a larger body waits for a turn of its own."""
TURN_BYTES: Final = 1024 * 1024
_READ_BYTES: Final = 256 * 1024
"""Size of one uvloop read; a resumed connection reads at least once."""


class BodyConnection(Protocol):
    """A connection that receives a large body."""

    def pause_body(self) -> None:
        """Pause reading."""

    def resume_body(self) -> None:
        """Resume reading. May be called after the connection was lost."""


class LargeBodies:
    """Turns for all connections of a process."""

    def __init__(self, turn_bytes: int = TURN_BYTES) -> None:
        self._turn_bytes = self._left = turn_bytes
        self._paused: deque[BodyConnection] = deque()
        self._beginning: deque[asyncio.Future[None]] = deque()
        self._waits = False
        """Whether a callback for the next turn is scheduled."""

    def took(self, reader: BodyConnection, size: int, loop: asyncio.AbstractEventLoop) -> None:
        """Count `size` bytes read for an unfinished body; pauses the reader if over the limit."""
        self._left -= size
        if self._left < 0:
            reader.pause_body()
            self._paused.append(reader)
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
                self._paused.popleft().resume_body()
        if self._paused or self._beginning:
            self._wait(loop)
