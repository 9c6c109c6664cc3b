"""A directory behind time limits and a breaker, so that an unreachable one costs almost nothing."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from gateway.errors import StateFailure
from gateway.policy.fleet.breaker import Breaker
from gateway.ports import Directory, DirectoryState, EntitlementEntry, Written

LIMIT_S: Final = 2.0
"""Time limit of one call."""
LOAD_LIMIT_S: Final = 30.0

_log = logging.getLogger("sluice.entitlements")
_T = TypeVar("_T")
_Answer = TypeVar("_Answer", DirectoryState, Written)


class GuardedDirectory:
    """Directory for one caller at a time. Logs once when it goes away, and when it returns."""

    def __init__(
        self, directory: Directory, clock: Callable[[], float], chance: Callable[[], float]
    ) -> None:
        """`clock` monotonic, in seconds; `chance` gives [0, 1)."""
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
            raise StateFailure("the directory of entitlements is away")

    async def load(self) -> DirectoryState:
        """See Directory."""
        return self._note_revision(await self._ask(self._directory.load(), LOAD_LIMIT_S))

    async def changes(self, since: int, mark: str) -> DirectoryState | None:
        """See Directory."""
        found = await self._ask(self._directory.changes(since, mark), LIMIT_S)
        return None if found is None else self._note_revision(found)

    async def put(self, *entries: EntitlementEntry, after: str) -> Written:
        """See Directory; the new revision is above every known one."""
        call = self._directory.put(*entries, floor=self._floor, after=after)
        return self._note_revision(await self._ask(call, LIMIT_S))

    async def delete(self, entry: EntitlementEntry, after: str) -> Written:
        """See Directory; the new revision is above every known one."""
        call = self._directory.delete(entry, floor=self._floor, after=after)
        return self._note_revision(await self._ask(call, LIMIT_S))

    async def close(self) -> None:
        """See Directory."""
        await self._directory.close()

    def _note_revision(self, answer: _Answer) -> _Answer:
        self._floor = max(self._floor, answer.revision)
        return answer

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
                _log.warning("the directory of entitlements is away: %s", reason)
            raise StateFailure(reason) from error
        self._breaker.succeeded()
        if self._away:
            self._away = False
            _log.warning("the directory of entitlements is back")
        return found
