"""Computes the replicas that demand requires per pool (`sluice_pool_desired_replicas`)."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from gateway.policy.admission.capacity import (
    ReplicaGoal,
    WorkerShare,
    demand_sequences,
)
from gateway.policy.entitlements.entitlement import Entitlement
from gateway.ports import TokenPools

SLICE: Final = 250
"""Entitlements read between two pauses for requests."""


class DesiredReplicas:
    """Desired replicas of one managed model."""

    def __init__(self, store: TokenPools, model: str, shares: Sequence[WorkerShare]) -> None:
        """`shares`, by pool: the capacity of one worker and the bounds on workers."""
        self._store = store
        self._model = model
        self._shares = shares
        self._goals = [ReplicaGoal() for _ in shares]
        self._reserved: tuple[int, ...] = (0,) * len(shares)
        self._reserving: Mapping[str, Entitlement] = {}
        self._since_s: float | None = None
        self.desired = [0] * len(shares)
        """By pool; 0 before the first update."""

    def respecify(self, shares: Sequence[WorkerShare]) -> None:
        """Use other capacities and bounds of the same pools."""
        self._shares = shares

    def entitled(self, reserved: tuple[int, ...], reserving: Mapping[str, Entitlement]) -> None:
        """Set the baselines to hold: `reserved` slots by pool, as far as the most replicas can.

        `reserving`: the entitlements with these baselines by name, not changed afterwards.
        """
        self._reserved = reserved
        self._reserving = reserving

    async def update(self, now_s: float) -> None:
        """Compute demand since the last update; `now_s` is monotonic. Raises as the store does."""
        within = await self._within_baseline()
        since_s, self._since_s = self._since_s, now_s
        elapsed_s = 0.0 if since_s is None else now_s - since_s
        views = await self._store.pools(self._model)
        # The store may still count pools that the model had before.
        for pool, (view, share) in enumerate(zip(views, self._shares, strict=False)):
            demand = demand_sequences(
                self._reserved[pool],
                max(0, view.inflight - within[pool]),
                view.denied if elapsed_s else 0,
                view.service_s,
                elapsed_s,
            )
            self.desired[pool] = self._goals[pool].desired(demand, share, now_s)

    async def _within_baseline(self) -> list[int]:
        """Sequences in flight within reserved baselines, by pool."""
        within = [0] * len(self._shares)
        names = list(self._reserving)
        for start in range(0, len(names), SLICE):
            for view in await self._store.view(self._model, names[start : start + SLICE]):
                terms = self._reserving[view.name]
                for pool, inflight in enumerate(view.inflight[: len(within)]):
                    within[pool] += min(inflight, terms.baseline_of(pool))
            await asyncio.sleep(0)
        return within
