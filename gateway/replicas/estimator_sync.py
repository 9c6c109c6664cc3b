"""The background task that synchronizes the estimators with the state store.

Requests read and update their own process's estimators and never access the store. Every
`interval_s` this task publishes what this process learned and merges what others learned. While
the store is away, the estimators continue alone; the breaker decides when to ask again. Each
change of state is logged once, and `sluice_store_up` shows `up`.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from typing import Final

from gateway.background_task import BackgroundTasks
from gateway.errors import StateFailure
from gateway.estimate.estimator import LengthEstimator
from gateway.estimate.merge import EstimatorMerge, PartState
from gateway.fleet.breaker import FIRST_PAUSE_S, Breaker
from gateway.ports import EstimatorState, ExchangeResult

LIMIT_S: Final = 2.0
"""Time limit of one exchange."""
CLOSE_LIMIT_S: Final = 1.0
"""Time limit of the last exchange, at shutdown."""

_log = logging.getLogger("sluice.state")


class NoState:
    """EstimatorState without persistence or sharing."""

    interval_s = 0.0

    async def exchange(self, records: Mapping[str, object]) -> ExchangeResult:
        return ExchangeResult()

    async def close(self) -> None:
        """See EstimatorState."""


class _Subject:
    """One model's estimator, and its publishing state."""

    def __init__(self, estimator: LengthEstimator, now_s: float) -> None:
        self.estimator = estimator
        self.merge = EstimatorMerge(estimator, now_s)
        self.published = 0
        self.missing = False
        self.received = False

    def unpublished(self, now_s: float) -> tuple[int, dict[str, PartState] | None]:
        """Observations so far, and the sums to publish if there are new ones."""
        taught = self.estimator.observations
        known = taught or self.received
        if not known or (taught == self.published and not self.missing):
            return taught, None
        return taught, self.merge.learned(now_s) or None


class EstimatorSync:
    """Synchronizes estimators and store."""

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

    def replace(self, estimators: Mapping[str, LengthEstimator]) -> None:
        """Synchronize these from now on; those that stay keep their state."""
        now_s, known = self._clock(), self._subjects
        self._subjects = {
            name: known[name]
            if name in known and known[name].estimator is estimator
            else _Subject(estimator, now_s)
            for name, estimator in estimators.items()
        }

    @property
    def up(self) -> bool:
        """Whether the store answers; true without one."""
        return self._breaker.closed or not self._state.interval_s

    async def start(self) -> None:
        """Load the stored records, then keep exchanging. Waits LIMIT_S at most."""
        if self._state.interval_s:
            await self.exchange()
            self._background.start(self._run())

    async def close(self) -> None:
        """Publish new observations once, within CLOSE_LIMIT_S, and close the store."""
        if await self._background.close() and self.up:
            await self.exchange(limit_s=CLOSE_LIMIT_S)
        await self._state.close()

    async def exchange(self, *, limit_s: float = LIMIT_S) -> None:
        """Exchange once if the breaker allows it. Raises nothing except for cancellation."""
        if not self._breaker.allows(self._clock()):
            return
        taught, records, subjects = {}, {}, self._subjects
        for name, subject in subjects.items():
            taught[name], records[name] = subject.unpublished(self._clock())
            await asyncio.sleep(0)  # requests run between two models
        try:
            async with asyncio.timeout(limit_s):
                received = await self._state.exchange(records)
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
            _log.info("the state store is back")
        for name, subject in subjects.items():
            subject.missing = name in received.missing
            if records[name] is not None and not subject.missing:
                subject.published = taught[name]
            if name in received.peers:
                subject.received = True
                for _ in subject.merge.merge(received.peers[name]):
                    await asyncio.sleep(0)  # requests run between two parts

    def _failed(self, reason: str) -> None:
        self._breaker.failed(self._clock(), self._chance())
        if not self._breaker.closed and not self._away:
            self._away = True
            _log.info("the state store is away, learning goes on in this process: %s", reason)

    async def _run(self) -> None:
        while True:
            pause_s = self._state.interval_s * (0.9 + 0.2 * self._chance())
            if self._breaker.doubtful:
                pause_s = min(pause_s, FIRST_PAUSE_S)
            elif not self.up:
                pause_s = max(self._breaker.retry_at_s - self._clock(), 0.0)
            await asyncio.sleep(pause_s)
            await self.exchange()
