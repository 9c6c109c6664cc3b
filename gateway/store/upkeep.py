"""The background task that synchronizes a lease store with the fleet.

Every STEP_S it compares each managed model's capacity (what the available workers hold) with the
last published terms, and publishes new terms if they differ. It surveys the bound baselines again
when capacity or entitlements changed, or when an entitlement expired. It also runs the store's
tick, renews this process's leases and computes desired replicas.

Nothing here raises; a failing step is logged once until it works again. Work is done in slices
with pauses for requests, however many entitlements there are.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

import msgspec

from gateway.admission.token_pool import RENEW_EVERY_S
from gateway.background_task import BackgroundTasks
from gateway.ports import PoolView
from gateway.store.desired_replicas import DesiredReplicas
from gateway.store.model_upkeep import ModelSpec, PublishedModel, Store

__all__ = ["ModelSpec", "Store", "StoreUpkeep"]

STEP_S: Final = 0.25
DEMAND_EVERY_S: Final = 5.0
"""Interval between computations of desired replicas; the same as a tick's."""

_log = logging.getLogger("sluice.pools")


class StoreUpkeep:
    """Keeps capacity, leases and desired replicas of all managed models current."""

    def __init__(
        self,
        store: Store,
        models: Mapping[str, ModelSpec],
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """`models` by name, managed ones only; `clock` monotonic, `wall_clock` Unix seconds."""
        self._store = store
        self._replicas: dict[str, DesiredReplicas] = {}
        self._models: dict[str, PublishedModel] = {}
        for name, spec in models.items():
            self.respecify(name, spec)
        self._clock = clock
        self._wall_clock = wall_clock
        self._renew_at_s = clock() + RENEW_EVERY_S
        self._demand_at_s = clock()
        self._failing: set[str] = set()
        self._background = BackgroundTasks()

    async def start(self) -> None:
        """Publish the present capacity, then keep it current."""
        await self.step()
        self._background.start(self._run())

    async def close(self) -> None:
        await self._background.close()

    def entitlements_changed(self, model: str) -> None:
        """Note that a model's entitlements changed; the next step surveys them."""
        found = self._models.get(model)
        if found is not None:
            found.changed = True

    def respecify(self, model: str, spec: ModelSpec) -> None:
        """Use a configuration of a model, new or known; the next step publishes it."""
        replicas = self._replicas.get(model)
        if replicas is not None and len(replicas.desired) == len(spec.shares):
            replicas.respecify(spec.shares)
            self._models[model].respecify(spec)
            return
        self._replicas[model] = replicas = DesiredReplicas(self._store, model, spec.shares)
        self._models[model] = PublishedModel(self._store, model, spec, replicas)

    def forget(self, model: str) -> None:
        """Publish a model's capacity no more."""
        self._replicas.pop(model, None)
        self._models.pop(model, None)

    def desired_replicas(self, model: str, pool: int) -> int:
        """Workers that demand requires; 0 for a model that is not managed."""
        found = self._replicas.get(model)
        desired = [] if found is None else found.desired
        return desired[pool] if pool < len(desired) else 0

    async def pools(self, model: str) -> list[PoolView]:
        """The store's view of a model's pools, with their desired replicas. Raises as it does."""
        return [
            msgspec.structs.replace(view, desired_replicas=self.desired_replicas(model, pool))
            for pool, view in enumerate(await self._store.pools(model))
        ]

    async def step(self) -> None:
        """Do all work that is due. Raises nothing except for cancellation."""
        for name, model in list(self._models.items()):
            keep = model.publish(self._clock(), self._wall_clock())
            await self._tried(f"keeping the capacity of {name}", keep)
        await self._tried("the tick", self._store.tick())
        now_s = self._clock()
        if now_s >= self._renew_at_s:
            self._renew_at_s = now_s + RENEW_EVERY_S
            await self._tried("renewing leases", self._store.renew())
        if now_s >= self._demand_at_s:
            self._demand_at_s = now_s + DEMAND_EVERY_S
            for name, replicas in list(self._replicas.items()):
                await self._tried(f"the demand for {name}", replicas.update(now_s))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            await self.step()

    async def _tried(self, what: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:  # noqa: BLE001 - the next step has to come whatever fails in this one
            if what not in self._failing:
                self._failing.add(what)
                _log.exception("%s failed, trying again", what)
        else:
            self._failing.discard(what)
