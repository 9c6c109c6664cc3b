"""The way to the gateways: what was planned is published at once, and confirmed every few seconds.

Gateways distrust entitlements that nobody confirms; each confirmation says how old the controller's
knowledge of the cluster is. Gateways measure how many replicas demand requires; the publisher reads
that.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Mapping
from typing import Final, NoReturn

from controller.election import Superseded
from controller.health import Figures
from gateway.errors import StateFailure
from gateway.records.tenancy import ClusterEntitlement
from gateway.store.redis.cluster import ClusterStore, Fenced, OtherNamespace

HEARTBEAT_S: Final = 5.0
RETRY_S: Final = 1.0
_log = logging.getLogger("sluice.controller")


class Publisher:
    """Keeps the entitlements in Redis as they were last planned."""

    def __init__(
        self,
        store: ClusterStore,
        *,
        age_s: Callable[[], float],
        on_demand: Callable[[], None],
        figures: Figures,
    ) -> None:
        """`age_s` of the plan's knowledge; `on_demand`: the demand has changed."""
        self._store = store
        self._age_s = age_s
        self._on_demand = on_demand
        self._figures = figures
        self._planned: Mapping[str, ClusterEntitlement] | None = None
        self._news = asyncio.Event()
        self._failing = False
        self.refused = False
        """Because the controller of another namespace tells these gateways."""
        self.demand: Mapping[tuple[str, str], int] = {}
        """(model, pool of the gateway) -> replicas."""

    def publish(self, entitlements: Mapping[str, ClusterEntitlement]) -> None:
        """Have the gateways hold exactly these, soon."""
        if entitlements != self._planned:
            self._planned = entitlements
            self._news.set()

    async def run(self, epoch: int) -> NoReturn:
        """Publish what is planned from now on, with this epoch. Raises Superseded."""
        self._planned = None
        while True:
            self._news.clear()
            await self._once(epoch)
            if self._failing:
                await asyncio.sleep(RETRY_S)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._news.wait()

    async def _once(self, epoch: int) -> None:
        try:
            age_s = self._age_s()
            if self._planned is not None and math.isfinite(age_s):
                await self._store.publish(epoch, self._planned, age_s=age_s)
            demand = await self._store.demand()
        except Fenced as error:
            raise Superseded(error.epoch) from error
        except StateFailure as error:
            self.refused = isinstance(error, OtherNamespace)
            if not self._failing:
                _log.warning("the gateways cannot be told: %s", error)
            self._failing = True
            self._figures.published.labels("failed").inc()
            return
        if self._failing:
            _log.info("the gateways are told again")
        self._failing = self.refused = False
        self._figures.published.labels("done").inc()
        self._figures.published_at.set_to_current_time()
        if demand != self.demand:
            self.demand = demand
            self._on_demand()
