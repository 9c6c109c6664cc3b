"""One at a time, by turns: of each owner one, however many of them somebody else has waiting."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

_Waiting = deque[asyncio.Future[None]]


class TooManyWait(Exception):
    """Nobody more may wait: `own` when it is the owner's share that is used up."""

    def __init__(self, *, own: bool) -> None:
        super().__init__()
        self.own = own


class FairTurns:
    """A lock that goes round: owners in their order, of each owner who came first."""

    def __init__(self, most_waiting: int) -> None:
        self._most: Final = most_waiting
        self._queues: dict[str, _Waiting] = {}
        """By owner; the first has the next turn."""
        self._waiting = 0
        self._taken = False

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """Hold the only turn. Raises TooManyWait.

        An owner may have as many waiting as others still may, and one in any case.
        """
        if self._taken:
            await self._wait(owner)
        self._taken = True
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, owner: str) -> None:
        mine = self._queues.get(owner)
        free = self._most - self._waiting
        if free <= 0 or (mine is not None and len(mine) >= free):
            raise TooManyWait(own=mine is not None)
        if mine is None:
            mine = self._queues[owner] = deque()
        waiter = asyncio.get_running_loop().create_future()
        mine.append(waiter)
        self._waiting += 1
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():  # the turn came, and is not used
                self._pass_on()
            else:
                self._forget(owner, waiter)
            raise

    def _forget(self, owner: str, waiter: asyncio.Future[None]) -> None:
        waiting = self._queues.get(owner)
        if waiting is not None and waiter in waiting:  # else it was passed over
            waiting.remove(waiter)
            self._waiting -= 1
            if not waiting:
                del self._queues[owner]

    def _pass_on(self) -> None:
        """Give the turn to the next, or nobody."""
        self._taken = False
        while self._queues and not self._taken:
            owner = next(iter(self._queues))
            waiting = self._queues.pop(owner)
            waiter = waiting.popleft()
            self._waiting -= 1
            if waiting:
                self._queues[owner] = waiting
            if not waiter.done():  # it may have been cancelled just now
                waiter.set_result(None)
                self._taken = True
