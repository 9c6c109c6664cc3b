"""Bounds what large bodies cost over all connections: the bytes held, and the time of the loop.

Bytes have one bound for all connections together:

- Unfinished requests without a known key may hold an eighth, as far as that is free. Past it, the
  connections that hold most are dropped, so a few large senders cannot keep out many small ones.
- Requests with a known key, from announcement to answer: a tenant may hold as much as is still
  free, over all of its entitlements. One tenant gets at most half of the whole, two get a third
  each, so there is always room for another. The first request of a tenant only has to fit.

Large bodies take turns, so that many at once never hold the event loop for long. In one loop
iteration all connections together read at most `turn_bytes` of them; a connection beyond that
pauses and resumes in order. And the answer to at most one large body begins.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from heapq import nlargest
from typing import Final

from gateway.errors import RateLimited, Refusal, Unavailable

MAX_UNPROVEN_BYTES: Final = 256 * 1024 * 1024
"""Bound per process for unfinished requests without a known key, if it is not less."""
MAX_BYTES: Final = 2 * 1024 * 1024 * 1024
"""Default bound, if the memory limit allows it."""
COUNTED_FROM_BYTES: Final = 16 * 1024
"""Smaller requests are not counted, because all connections together hold little of them."""
_RETRY_AFTER_S: Final = 2.0
LARGE_BYTES: Final = 1024 * 1024
"""The answer to a larger body waits for a turn of its own."""
TURN_BYTES: Final = 1024 * 1024
_READ_BYTES: Final = 256 * 1024
"""Size of one uvloop read; a resumed connection reads at least once."""


class BodyBytes:
    """Bytes held, by connection (without a known key) or by tenant."""

    def __init__(
        self, most_bytes: int = MAX_BYTES, *, most_unproven_bytes: int = MAX_UNPROVEN_BYTES
    ) -> None:
        self._most = most_bytes
        self._most_unproven = min(most_unproven_bytes, most_bytes // 8)
        self._unproven: dict[Callable[[], None], int] = {}
        self._owned: dict[str, int] = {}
        self.unproven = 0
        """Bytes of requests without a known key."""
        self.total = 0
        """Bytes of requests with a known key."""

    def hold(self, drop: Callable[[], None], size: int) -> None:
        """Set the bytes that a connection without a known key holds in total; 0 releases them.

        Its `drop` refuses the request and releases them.
        """
        self.unproven += size - self._unproven.pop(drop, 0)
        if size:
            self._unproven[drop] = size
        bound = min(self._most_unproven, self._most - self.total)
        if self.unproven <= bound:
            return
        # Freeing a quarter at once makes each costly search cost an attacker as many bytes.
        for largest in nlargest(
            len(self._unproven), self._unproven, key=self._unproven.__getitem__
        ):
            if self.unproven <= bound * 3 // 4:
                return
            self.unproven -= self._unproven.pop(largest)
            largest()

    def take(self, owner: str, size: int) -> None:
        """Add `size` bytes to the tenant `owner`; a negative `size` gives bytes back.

        Raises Refusal, with nothing taken, if its share is exceeded.
        """
        mine = self._owned.get(owner, 0)
        free = self._most - self.total - self.unproven
        if size > 0 and mine + size > (free - size if mine else free):
            if mine:
                raise RateLimited(
                    f"This key's requests hold {mine / 2**20:,.1f} MiB of bodies in this gateway, "
                    "as much as it may have now. Send fewer large requests at once, or wait for "
                    "their answers.",
                    reason="too_many_body_bytes",
                    retry_after_s=_RETRY_AFTER_S,
                )
            raise Unavailable(
                f"All requests together hold {self.total / 2**20:,.1f} MiB of bodies in this "
                "gateway, and this one does not fit. Try again shortly, or send a smaller request.",
                reason="too_many_body_bytes",
                retry_after_s=_RETRY_AFTER_S,
            )
        self.total += size
        if mine + size > 0:
            self._owned[owner] = mine + size
        else:
            self._owned.pop(owner, None)


class Share:
    """The part of a tenant's bytes that one request takes."""

    __slots__ = ("_bodies", "_owner", "_size")

    def __init__(self, bodies: BodyBytes, owner: str) -> None:
        self._bodies = bodies
        self._owner = owner
        self._size = 0

    def cover(self, size: int) -> None:
        """Raise the share to `size`, the request's announced or received bytes.

        Raises Refusal, after giving back what was taken.
        """
        if size > max(self._size, COUNTED_FROM_BYTES):
            try:
                self._bodies.take(self._owner, size - self._size)
            except Refusal:
                self.give_back()
                raise
            self._size = size

    def give_back(self) -> None:
        """Release the request's bytes. Idempotent."""
        size, self._size = self._size, 0
        if size:
            self._bodies.take(self._owner, -size)


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
