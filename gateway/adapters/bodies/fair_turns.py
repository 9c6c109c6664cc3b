"""A fair lock: the next turn goes to the waiting owner whose turns took the least time.

An owner that comes anew begins at the time of the latest turn: nobody saves up turns by waiting.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

_OWNERS: Final = 1024
"""Owners whose time is remembered while others wait; more are looked through."""
_Waiting = deque[asyncio.Future[None]]


class TooManyWait(Exception):
    """The queue is full; `own` when the owner's own share of it is used up."""

    def __init__(self, *, own: bool) -> None:
        super().__init__()
        self.own = own


class FairTurns:
    """A lock that passes from owner to owner; each owner's waiters are served in order."""

    def __init__(self, most_waiting: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most: Final = most_waiting
        self._clock = clock
        self._queues: dict[str, _Waiting] = {}
        """Waiters by owner; among equals the first has the next turn."""
        self._used_s: dict[str, float] = {}
        """Time that an owner's turns took, where that is more than `_level_s`."""
        self._level_s = 0.0
        """The time that the owner of the latest turn had used before it."""
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
        self._level_s = max(self._level_s, self._used_s.get(owner, 0.0))
        before_s = self._level_s - self._clock()
        try:
            yield
        finally:
            self._used_s[owner] = before_s + self._clock()
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
            elif waiter in mine:  # otherwise `_pass_on` dropped it
                mine.remove(waiter)
                self._waiting -= 1
                if not mine:
                    del self._queues[owner]
            raise

    def _pass_on(self) -> None:
        """Give the turn to the next waiter, if any."""
        self._taken = False
        if not self._queues:
            self._used_s.clear()
        elif len(self._used_s) > _OWNERS:
            self._used_s = {o: s for o, s in self._used_s.items() if s > self._level_s}
        while self._queues and not self._taken:
            owner = min(self._queues, key=self._time_of)
            waiting = self._queues.pop(owner)
            waiter = waiting.popleft()
            self._waiting -= 1
            if waiting:
                self._queues[owner] = waiting
            if not waiter.done():  # it may have been cancelled just now
                waiter.set_result(None)
                self._taken = True

    def _time_of(self, owner: str) -> float:
        return max(self._level_s, self._used_s.get(owner, 0.0))
