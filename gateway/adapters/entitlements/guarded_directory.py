"""A directory behind time limits and a breaker, so that an unreachable one costs almost nothing."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

from gateway.errors import StateFailure
from gateway.policy.fleet.breaker import Breaker
from gateway.ports import Directory, DirectoryState, Entry, Written

LIMIT_S: Final = 2.0
"""Time limit of one call."""
LOAD_LIMIT_S: Final = 30.0

_log = logging.getLogger("sluice.entitlements")
_T = TypeVar("_T")


class GuardedDirectory(Generic[Entry]):
    """Directory for one caller at a time. Logs once when it goes away, and when it returns."""

    def __init__(
        self,
        directory: Directory[Entry],
        clock: Callable[[], float],
        chance: Callable[[], float],
        of: str = "entitlements",
    ) -> None:
        """`clock` monotonic, in seconds; `chance` gives [0, 1); `of` is for messages."""
        self._of = of
        self._directory = directory
        self._clock = clock
        self._chance = chance
        self._breaker = Breaker()
        self._away = False
        self._floor = 0

    @property
    def up(self) -> bool:
        """Whether the directory answers."""
        return self._breaker.closed

    def check(self) -> None:
        """Raise StateFailure while the breaker is open."""
        if not self._breaker.allows(self._clock()):
            raise StateFailure(f"the directory of {self._of} is away")

    async def load(self) -> DirectoryState[Entry]:
        state = await self._ask(self._directory.load(), LOAD_LIMIT_S)
        self._note(state.revision)
        return state

    async def changes(self, since: int, mark: str) -> DirectoryState[Entry] | None:
        found = await self._ask(self._directory.changes(since, mark), LIMIT_S)
        if found is not None:
            self._note(found.revision)
        return found

    async def put(self, *entries: Entry, after: str) -> Written:
        """See Directory; the new revision is above every known one."""
        return await self._write(self._directory.put(*entries, floor=self._floor, after=after))

    async def delete(self, entry: Entry, after: str) -> Written:
        """See Directory; the new revision is above every known one."""
        return await self._write(self._directory.delete(entry, floor=self._floor, after=after))

    async def close(self) -> None:
        await self._directory.close()

    async def _write(self, call: Awaitable[Written]) -> Written:
        written = await self._ask(call, LIMIT_S)
        self._note(written.revision)
        return written

    def _note(self, revision: int) -> None:
        self._floor = max(self._floor, revision)

    async def _ask(self, call: Awaitable[_T], limit_s: float) -> _T:
        """The result of a call. Raises StateFailure, also for time-outs."""
        try:
            async with asyncio.timeout(limit_s):
                found = await call
        except (StateFailure, TimeoutError) as error:
            reason = str(error) or f"no answer within {limit_s:g} s"
            self._breaker.failed(self._clock(), self._chance())
            if not self._away:
                self._away = True
                _log.info("the directory of %s is away: %s", self._of, reason)
            raise StateFailure(reason) from error
        self._breaker.succeeded()
        if self._away:
            self._away = False
            _log.info("the directory of %s is back", self._of)
        return found
