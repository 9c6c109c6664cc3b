"""A directory behind time limits and a breaker, so that one that is away costs next to nothing."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from gateway.errors import StateFailure
from gateway.policy.breaker import Breaker
from gateway.ports import Directory, EntitlementEntry

LIMIT_S: Final = 2.0
"""One call, whatever the directory does."""
LOAD_LIMIT_S: Final = 30.0

_log = logging.getLogger("sluice.entitlements")
_T = TypeVar("_T")


class GuardedDirectory:
    """Directory for one caller at a time. Its absence is logged once, and its return."""

    def __init__(
        self, directory: Directory, clock: Callable[[], float], chance: Callable[[], float]
    ) -> None:
        """`clock` monotonic, in seconds; `chance` gives [0, 1)."""
        self._directory = directory
        self._clock = clock
        self._chance = chance
        self._breaker = Breaker()
        self._away = False
        self._heard_s = clock()

    @property
    def up(self) -> bool:
        """Whether it answers."""
        return self._breaker.closed

    @property
    def silence_s(self) -> float:
        """Since its last answer."""
        return self._clock() - self._heard_s

    def check(self) -> None:
        """Whether it may be asked now. Raises StateFailure while the breaker is open."""
        if not self._breaker.allows(self._clock()):
            raise StateFailure("the directory of entitlements is away")

    async def load(self) -> tuple[int, list[EntitlementEntry]]:
        """See Directory."""
        return await self._ask(self._directory.load(), LOAD_LIMIT_S)

    async def changes(self, since: int) -> tuple[int, list[EntitlementEntry], list[str]]:
        """See Directory."""
        return await self._ask(self._directory.changes(since), LIMIT_S)

    async def put(self, *entries: EntitlementEntry) -> int:
        """See Directory."""
        return await self._ask(self._directory.put(*entries), LIMIT_S)

    async def delete(self, name: str) -> int:
        """See Directory."""
        return await self._ask(self._directory.delete(name), LIMIT_S)

    async def close(self) -> None:
        """See Directory."""
        await self._directory.close()

    async def _ask(self, call: Awaitable[_T], limit_s: float) -> _T:
        """Its answer. Raises StateFailure, time-outs included."""
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
        self._heard_s = self._clock()
        if self._away:
            self._away = False
            _log.warning("the directory of entitlements is back")
        return found
