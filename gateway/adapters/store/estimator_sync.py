"""The one background task that joins the estimators to the state store.

Requests read and teach their own process's estimators and never meet the store. Every
`interval_s` this task publishes what was learned and takes over what others learned. When the
store does not answer the estimators go on alone; the breaker says when to ask again, the
change is logged once, and `up` is what `sluice_store_up` shows.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from typing import Final

from gateway.adapters.background_task import BackgroundTasks
from gateway.errors import StateFailure
from gateway.policy.estimate.estimator import LengthEstimator
from gateway.policy.estimate.merge import Ledger, Sums
from gateway.policy.fleet.breaker import FIRST_PAUSE_S, Breaker
from gateway.ports import EstimatorState, Heard

LIMIT_S: Final = 2.0
"""One exchange, whatever the store does."""
CLOSE_LIMIT_S: Final = 1.0
"""The last exchange, at shutdown."""

_log = logging.getLogger("sluice.state")


class NoState:
    """EstimatorState that keeps nothing: what is learned ends with the process."""

    interval_s = 0.0

    async def exchange(self, records: Mapping[str, object]) -> Heard:
        """See EstimatorState."""
        return Heard()

    async def close(self) -> None:
        """See EstimatorState."""


class _Subject:
    """One model's estimator, and how far it was published."""

    def __init__(self, estimator: LengthEstimator, now_s: float) -> None:
        self.estimator = estimator
        self.ledger = Ledger(estimator, now_s)
        self.published = 0
        self.missing = False
        self.heard = False

    def news(self, now_s: float) -> tuple[int, dict[str, Sums] | None]:
        """Observations so far, and what to publish if that is news."""
        taught = self.estimator.observations
        known = taught or self.heard
        if not known or (taught == self.published and not self.missing):
            return taught, None
        return taught, self.ledger.learned(now_s) or None


class Learning:
    """Keeps estimators and store in step."""

    def __init__(
        self,
        state: EstimatorState,
        estimators: Mapping[str, LengthEstimator],
        *,
        clock: Callable[[], float],
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`estimators` by the name they are stored under; `clock` monotonic, in seconds."""
        self._state = state
        self._clock = clock
        self._chance = chance
        self._breaker = Breaker()
        self._away = False
        self._background = BackgroundTasks()
        now_s = clock()
        self._subjects = {name: _Subject(e, now_s) for name, e in estimators.items()}

    @property
    def up(self) -> bool:
        """Whether the store answers; true without one."""
        return self._breaker.closed or not self._state.interval_s

    async def start(self) -> None:
        """Take over what is stored, then keep exchanging. Waits LIMIT_S at most."""
        if self._state.interval_s:
            await self.exchange()
            self._background.start(self._run())

    async def close(self) -> None:
        """Publish what is new, once and briefly, and let go of the store."""
        if await self._background.close() and self.up:
            await self.exchange(limit_s=CLOSE_LIMIT_S)
        await self._state.close()

    async def exchange(self, *, limit_s: float = LIMIT_S) -> None:
        """One exchange, if the breaker allows it. Never raises but for cancellation."""
        if not self._breaker.allows(self._clock()):
            return
        taught, records = {}, {}
        for name, subject in self._subjects.items():
            taught[name], records[name] = subject.news(self._clock())
            await asyncio.sleep(0)  # requests go between two models
        try:
            async with asyncio.timeout(limit_s):
                heard = await self._state.exchange(records)
        except (StateFailure, TimeoutError) as error:
            self._failed(str(error) or f"no answer within {limit_s:g} s")
            return
        except Exception:  # noqa: BLE001 - a defect must not end the task that shares
            _log.exception("exchanging what was learned failed")
            self._failed("a defect, see above")
            return
        self._breaker.succeeded()
        if self._away:
            self._away = False
            _log.warning("the state store is back")
        for name, subject in self._subjects.items():
            subject.missing = name in heard.missing
            if records[name] is not None and not subject.missing:
                subject.published = taught[name]
            if name in heard.peers:
                subject.heard = True
                for _ in subject.ledger.merge(heard.peers[name]):
                    await asyncio.sleep(0)  # requests go between two parts

    def _failed(self, reason: str) -> None:
        self._breaker.failed(self._clock(), self._chance())
        if not self._breaker.closed and not self._away:
            self._away = True
            _log.warning("the state store is away, learning goes on in this process: %s", reason)

    async def _run(self) -> None:
        while True:
            pause_s = self._state.interval_s * (0.9 + 0.2 * self._chance())
            if self._breaker.doubtful:
                pause_s = min(pause_s, FIRST_PAUSE_S)
            elif not self.up:
                pause_s = max(self._breaker.retry_at_s - self._clock(), 0.0)
            await asyncio.sleep(pause_s)
            await self.exchange()
