"""Large bodies take turns on the event loop, so that it is never held long by many at once.

Rules:
- In a turn of the loop all connections together read so much of large bodies; a connection over
  that pauses, and reads on in its order.
- Of one large body an answer begins in a turn.
"""

import asyncio
from collections import deque
from typing import Final, Protocol

LARGE_BYTES: Final = 1024 * 1024
"""A body over this is answered from a turn of its own on."""
TURN_BYTES: Final = 1024 * 1024
_READ_BYTES: Final = 256 * 1024
"""Of one read, as uvloop reads: a connection that goes on reads once at least."""


class Reader(Protocol):
    """A connection that a large body comes in on."""

    def pause_body(self) -> None:
        """Read no more."""

    def resume_body(self) -> None:
        """Read on. May come after the connection was lost."""


class LargeBodies:
    """The turns of all connections of a process."""

    def __init__(self, turn_bytes: int = TURN_BYTES) -> None:
        self._turn_bytes = self._left = turn_bytes
        self._paused: deque[Reader] = deque()
        self._beginning: deque[asyncio.Future[None]] = deque()
        self._waits = False
        """For the next turn."""

    def took(self, reader: Reader, size: int, loop: asyncio.AbstractEventLoop) -> None:
        """A connection has read `size` bytes, and a body wants more."""
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
