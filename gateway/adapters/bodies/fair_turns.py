"""A fair lock: owners take turns, no matter how many waiters another owner has."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

_Waiting = deque[asyncio.Future[None]]


class TooManyWait(Exception):
    """The queue is full; `own` when the owner's own share of it is used up."""

    def __init__(self, *, own: bool) -> None:
        super().__init__()
        self.own = own


class FairTurns:
    """A lock that passes from owner to owner; each owner's waiters are served in order."""

    def __init__(self, most_waiting: int) -> None:
        self._most: Final = most_waiting
        self._queues: dict[str, _Waiting] = {}
        """Waiters by owner; the first owner has the next turn."""
        self._waiting = 0
        self._taken = False

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """Hold the lock. Raises TooManyWait.

        An owner may have as many waiters as there are free places left, and at least one.
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
            if waiter.done() and not waiter.cancelled():  # got the turn but cannot use it
                self._pass_on()
            else:
                self._forget(owner, waiter)
            raise

    def _forget(self, owner: str, waiter: asyncio.Future[None]) -> None:
        waiting = self._queues.get(owner)
        if waiting is not None and waiter in waiting:  # otherwise `_pass_on` dropped it
            waiting.remove(waiter)
            self._waiting -= 1
            if not waiting:
                del self._queues[owner]

    def _pass_on(self) -> None:
        """Give the turn to the next waiter, if any."""
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
