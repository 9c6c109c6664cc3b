"""Computes the replicas that demand requires per pool (`sluice_pool_desired_replicas`).

Demand is what is in use, what is reserved and idle, and what was refused for want of capacity; in
sequences, KV cache and tokens/s, of which the one counts that needs the most workers.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from gateway.admission.capacity import Demand, ReplicaGoal, WorkerShare
from gateway.ports import AccountView, PoolView, TokenPools
from gateway.records.entitlement import Entitlement

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
        self._reserving: Mapping[str, Entitlement] = {}
        self._used: dict[str, int] = {}
        """Tokens that a reserving entitlement had used at the last update."""
        self._last: tuple[float, list[PoolView]] | None = None
        """When the last update was, and what it saw."""
        self.desired = [0] * len(shares)
        """By pool; 0 before the first update."""

    def respecify(self, shares: Sequence[WorkerShare]) -> None:
        """Use other capacities and bounds of the same pools."""
        self._shares = shares

    def entitled(self, reserving: Mapping[str, Entitlement]) -> None:
        """Set whose baselines to hold, by name, each as far as the most replicas can."""
        self._reserving = reserving

    async def update(self, now_s: float) -> None:
        """Compute demand since the last update; `now_s` is monotonic. Raises as the store does."""
        views = await self._store.pools(self._model)
        then_s, before = self._last or (now_s, views)
        elapsed_s = max(1e-3, now_s - then_s)
        idle = await self._idle_reserves(elapsed_s)
        self._last = now_s, views
        # The store may still count pools that the model had before.
        for pool, (view, share) in enumerate(zip(views, self._shares, strict=False)):
            last = before[pool] if pool < len(before) else view
            # Little's law: what comes per second stays for the mean service time. A store that
            # was emptied counts from 0 again.
            waiting = view.service_s / elapsed_s
            sequences = max(0, view.refused_sequences - last.refused_sequences)
            kv_bytes = max(0, view.refused_kv_bytes - last.refused_kv_bytes)
            tokens = max(0, view.refused_tokens - last.refused_tokens)
            tokens += max(0, view.served_tokens - last.served_tokens)
            demand = Demand(
                sequences=view.inflight + idle[pool][0] + sequences * waiting,
                kv_bytes=view.kv_bytes + idle[pool][1] + kv_bytes * waiting,
                tokens_per_s=idle[pool][2] + tokens / elapsed_s,
            )
            worker_kv = float(share.kv_bytes)
            if view.slots:
                worker_kv = view.kv_capacity_bytes * share.slots / view.slots
            needed = demand.binding_sequences(share, worker_kv)
            self.desired[pool] = self._goals[pool].desired(needed, share, now_s)

    async def _idle_reserves(self, elapsed_s: float) -> list[list[float]]:
        """Sequences, KV bytes and tokens/s that are reserved and not in use, by pool."""
        idle = [[0.0, 0.0, 0.0] for _ in self._shares]
        names, used = list(self._reserving), {}
        for start in range(0, len(names), SLICE):
            for view in await self._store.view(self._model, names[start : start + SLICE]):
                used[view.name] = view.used
                tokens = max(0, view.used - self._used.get(view.name, view.used))
                _add_idle(idle, self._reserving[view.name], view, tokens / elapsed_s)
            await asyncio.sleep(0)
        self._used = used
        return idle


def _add_idle(
    idle: Sequence[list[float]], terms: Entitlement, view: AccountView, rate_per_s: float
) -> None:
    """KV and tokens/s are divided over the pools: baselines by theirs, use by what is in flight."""
    total, inflight = max(1, sum(terms.baseline)), max(1, sum(view.inflight))
    for pool, (unused, held) in enumerate(zip(idle, view.inflight, strict=False)):
        baseline = terms.baseline_of(pool)
        part = baseline / total
        unused[0] += max(0, baseline - held)
        unused[1] += max(0.0, terms.kv_bytes * part - view.kv_bytes * held / inflight)
        unused[2] += max(0.0, terms.tokens_per_s - rate_per_s) * part
