"""The background task that keeps a lease store in step with the fleet.

Every STEP_S it compares each managed model's capacity (what the available workers hold) with the
last published terms, and publishes new terms if they differ. It also runs the store's tick, renews
this process's leases and computes desired replicas. Nothing here raises; a failing step is logged
once until it works again. Work is done in slices with pauses for requests, however many
entitlements there are.

Rules of a model's capacity:
- New terms are published only when the available workers, their engines' KV capacity or the
  entitlements changed, or when an entitlement expired.
- Reserving entitlements are bound oldest first, pool by pool. When a pool's capacity falls, the
  newest are degraded there, and recover when it returns. One that never fitted is pending.
- The idle baseline of an expired dedicated entitlement is released.

Desired replicas (`sluice_pool_desired_replicas`) are those that demand requires. Demand is what is
in use, what is reserved and idle, and what was refused for want of capacity; in sequences, KV cache
and tokens/s, of which the one counts that needs the most workers.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from math import inf
from typing import Any, Final

import msgspec

from gateway.admission.capacity import (
    NO_DEMAND,
    NO_PREFILLS,
    Capacity,
    Demand,
    EntitlementState,
    ReplicaGoal,
    WorkerShare,
    assess_capacity,
    capacity_of,
    max_capacity,
)
from gateway.admission.terms import Terms
from gateway.admission.token_pool import RENEW_EVERY_S
from gateway.background_task import BackgroundTasks
from gateway.fleet import fleet
from gateway.fleet.model_runtime import Pool
from gateway.ports import PoolView, Upkeep
from gateway.records.entitlement import Entitlement
from gateway.records.record import Record

STEP_S: Final = 0.25
DEMAND_EVERY_S: Final = 5.0
"""Interval between computations of desired replicas; the same as a tick's."""
SLICE: Final = 250
"""Entitlements read between two pauses for requests."""

_log = logging.getLogger("sluice.pools")


class ModelSpec(Record, frozen=True, kw_only=True):
    """A managed model's configuration for upkeep. Tuples are by pool, smallest window first."""

    base: Terms
    """The model's rules; their capacity is ignored. `mean_slo_ms` 0: compute the mean."""
    pools: tuple[Pool, ...]
    """The prefill pools of those in phases come last."""
    shares: tuple[WorkerShare, ...]
    """Capacity of one worker, and the bounds on workers, by pool."""
    prefills: Mapping[int, int] = NO_PREFILLS
    """Of pools in phases, by place: the place of that which computes their prompts."""
    entitlements: Callable[[], Iterable[Entitlement]]
    """The model's entitlements, oldest first; read in slices while they may change."""
    kv_bytes_per_token: int = 0
    kv_bytes: Callable[[int, int], int] = lambda _pool, _worker: 0
    """(pool, worker) -> bytes of KV cache that its engine reported; 0 if unknown."""


class _Model:
    """A managed model: its last published terms, and its desired replicas."""

    def __init__(self, store: Upkeep, name: str, spec: ModelSpec) -> None:
        """Nothing is published before the first `publish`."""
        self.changed = True
        """Whether its entitlements changed since the last survey."""
        self.spec = spec
        self.desired = [0] * len(spec.shares)
        """Replicas that demand requires, by pool; 0 before the first `measure_demand`."""
        self._store = store
        self._name = name
        self._capacity: Capacity | None = None
        self._unbound = 0
        self._ever_bound_until = 0
        self._next_expiry_unix_s = inf
        self._reserving: dict[str, Entitlement] = {}
        """Whose baselines replicas should hold, by name, each as far as the most replicas can."""
        self._used: dict[str, int] = {}
        """Tokens that a reserving entitlement had used at the last `measure_demand`."""
        self._last: tuple[float, list[PoolView]] | None = None
        """When the last `measure_demand` was, and what it saw."""
        self._prefilled: dict[int, int] = {}
        """Tokens that prefill pools had been sent by then."""
        self.prefilling: dict[int, PoolView] = {}
        """What prefill pools hold, by place."""
        self._goals = [ReplicaGoal() for _ in spec.shares]

    async def publish(self, now_s: float, now_unix_s: float) -> None:
        """Publish changes. Raises as the store does; the next call tries again."""
        spec = self.spec
        # A pool whose workers all missed their probes keeps its slots: requests are still tried
        # there, and refusing all of them would turn a doubt into an outage.
        reported = [
            [
                spec.kv_bytes(index, worker)
                for worker in fleet.available(pool, now_s) or fleet.last_resort(pool, refused=False)
            ]
            for index, pool in enumerate(spec.pools)
        ]
        capacity = capacity_of(spec.shares, reported, spec.prefills)
        due = self.changed or self._next_expiry_unix_s <= now_unix_s
        if capacity == self._capacity and not due:
            return
        self.changed = False
        try:
            # Read anew each time, because copying 100,000 would hold up requests. A change
            # meanwhile sets `changed`, so the next step surveys again.
            state = await _assessed(spec.entitlements(), capacity, now_unix_s)
            if due:
                await self._note_reserving(now_unix_s)
            ever = max(self._ever_bound_until, state.newest_bound)
            terms = msgspec.structs.replace(
                spec.base,
                slots=capacity.slots,
                kv_bytes=capacity.kv_bytes,
                tokens_per_s=capacity.tokens_per_s,
                mean_slo_ms=spec.base.mean_slo_ms or state.mean_slo_ms,
                bound_until=state.bound_until,
                ever_bound_until=ever,
            )
            await self._store.change(self._name, terms)
        except BaseException:
            self.changed = True
            raise
        self._capacity, self._ever_bound_until = capacity, ever
        self._next_expiry_unix_s = state.next_expiry_unix_s
        if state.unbound == self._unbound:
            return
        named = zip(spec.pools, capacity.slots, strict=False)
        slots = ", ".join(f"{pool.name} {slots}" for pool, slots in named)
        waiting = f"{state.unbound} entitlements"
        if state.unbound > self._unbound:
            change = f"(slots: {slots}) does not hold the baselines of {waiting}; the newest wait"
        elif state.unbound:
            change = f"(slots: {slots}) holds more baselines again; those of {waiting} still wait"
        else:
            change = "holds all baselines again"
        _log.warning("model %s: capacity %s", self._name, change)
        self._unbound = state.unbound

    async def _note_reserving(self, now_unix_s: float) -> None:
        spec = self.spec
        most_capacity = max_capacity(spec.shares, spec.prefills)
        most = await _assessed(spec.entitlements(), most_capacity, now_unix_s)
        reserving = {}
        for number, e in enumerate(spec.entitlements(), start=1):
            if number % 1000 == 0:
                await asyncio.sleep(0)
            if not e.reserves or e.suspended:
                continue
            if not 0 < e.expires_unix_s <= now_unix_s:
                held = tuple(
                    sequences if e.created <= until else 0
                    for sequences, until in zip(e.baseline, most.bound_until, strict=False)
                )
                if part := sum(held) / max(1, sum(e.baseline)):
                    reserving[e.name] = msgspec.structs.replace(
                        e,
                        baseline=held,
                        kv_bytes=int(e.kv_bytes * part),
                        tokens_per_s=e.tokens_per_s * part,
                    )
            elif e.service_class == "dedicated":
                await self._store.define(msgspec.structs.replace(e, baseline=()))
        self._reserving = reserving

    async def measure_demand(self, now_s: float) -> None:
        """Compute demand since the last call; `now_s` is monotonic. Raises as the store does."""
        views = await self._store.pools(self._name)
        then_s, before = self._last or (now_s, views)
        elapsed_s = max(1e-3, now_s - then_s)
        shares = self.spec.shares
        # What is reserved and idle, by pool: sequences, KV bytes, tokens/s. KV and tokens/s are
        # divided over the pools: baselines by theirs, use by what is in flight.
        idle = [[0.0, 0.0, 0.0] for _ in shares]
        reserving, used = self._reserving, {}
        names = list(reserving)
        for start in range(0, len(names), SLICE):
            for seen in await self._store.view(self._name, names[start : start + SLICE]):
                used[seen.name], terms = seen.used, reserving[seen.name]
                rate_per_s = max(0, seen.used - self._used.get(seen.name, seen.used)) / elapsed_s
                total, inflight = max(1, sum(terms.baseline)), max(1, sum(seen.inflight))
                for pool, (unused, held) in enumerate(zip(idle, seen.inflight, strict=False)):
                    part = terms.baseline_of(pool) / total
                    unused[0] += max(0, terms.baseline_of(pool) - held)
                    unused[1] += max(0.0, terms.kv_bytes * part - seen.kv_bytes * held / inflight)
                    unused[2] += max(0.0, terms.tokens_per_s - rate_per_s) * part
            await asyncio.sleep(0)
        self._used = used
        self._last = now_s, views
        in_prefill = {
            pool: self._measure_prefill(prefill, elapsed_s, now_s)
            for pool, prefill in self.spec.prefills.items()
        }
        # The store may still count pools that the model had before.
        routed = shares[: len(shares) - len(in_prefill)]
        for pool, (view, share) in enumerate(zip(views, routed, strict=False)):
            prefill = in_prefill.get(pool, NO_DEMAND)
            last = before[pool] if pool < len(before) else view
            # Little's law: what comes per second stays for the mean service time. A store that
            # was emptied counts from 0 again.
            waiting = view.service_s / elapsed_s
            sequences = max(0, view.refused_sequences - last.refused_sequences)
            kv_bytes = max(0, view.refused_kv_bytes - last.refused_kv_bytes)
            tokens = max(0, view.refused_tokens - last.refused_tokens)
            tokens += max(0, view.served_tokens - last.served_tokens)
            demand = Demand(
                sequences=max(0.0, view.inflight - prefill.sequences)
                + idle[pool][0]
                + sequences * waiting,
                kv_bytes=view.kv_bytes + idle[pool][1] + kv_bytes * waiting,
                tokens_per_s=idle[pool][2] + max(0.0, tokens / elapsed_s - prefill.tokens_per_s),
            )
            worker_kv = float(share.kv_bytes)
            if view.slots:
                worker_kv = view.kv_capacity_bytes * share.slots / view.slots
            needed = demand.binding_sequences(share, worker_kv)
            self.desired[pool] = self._goals[pool].desired(needed, share, now_s)

    def _measure_prefill(self, place: int, elapsed_s: float, now_s: float) -> Demand:
        """The load of a prefill pool: this gateway's own, and as much again for others' sequences.

        The store does not know it, because a lease is never moved between phases.
        """
        spec, pool, share = self.spec, self.spec.pools[place], self.spec.shares[place]
        sequences = pool.here + pool.total_elsewhere
        all_gateways = 1 + pool.total_elsewhere / max(1, pool.here)
        sent = pool.started_tokens - self._prefilled.get(place, pool.started_tokens)
        self._prefilled[place] = pool.started_tokens
        demand = Demand(
            sequences=sequences,
            kv_bytes=pool.total_tokens * spec.kv_bytes_per_token * all_gateways,
            tokens_per_s=sent / elapsed_s * all_gateways,
        )
        workers = fleet.available(pool, now_s)
        sizes = [share.kv_bytes or spec.kv_bytes(place, worker) for worker in workers]
        kv_bytes = sum(sizes) if sizes and all(sizes) else 0
        needed = demand.binding_sequences(share, kv_bytes / max(1, len(sizes)))
        self.desired[place] = self._goals[place].desired(needed, share, now_s)
        self.prefilling[place] = PoolView(
            slots=share.slots * len(workers),
            inflight=sequences,
            kv_capacity_bytes=kv_bytes,
            kv_bytes=round(demand.kv_bytes),
            idle_dedicated=0,
            service_s=0.0,
            desired_replicas=self.desired[place],
        )
        return demand


async def _assessed(
    entitlements: Iterable[Entitlement], capacity: Capacity, now_unix_s: float
) -> EntitlementState:
    for state in assess_capacity(entitlements, capacity, now_unix_s):
        if state is not None:
            return state
        await asyncio.sleep(0)
    raise AssertionError("a survey ends with a standing")


class StoreUpkeep:
    """Keeps capacity, leases and desired replicas of all managed models current."""

    def __init__(
        self,
        store: Upkeep,
        models: Mapping[str, ModelSpec],
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """`models` by name, managed ones only; `clock` monotonic, `wall_clock` Unix seconds."""
        self._store = store
        self._models: dict[str, _Model] = {}
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

        async def stepping() -> None:
            while True:
                await asyncio.sleep(STEP_S)
                await self.step()

        await self.step()
        self._background.start(stepping())

    async def close(self) -> None:
        await self._background.close()

    def entitlements_changed(self, model: str) -> None:
        """Note that a model's entitlements changed; the next step surveys them."""
        managed = self._models.get(model)
        if managed is not None:
            managed.changed = True

    def respecify(self, model: str, spec: ModelSpec) -> None:
        """Use a configuration of a model, new or known; the next step publishes it."""
        managed = self._models.get(model)
        if managed is not None and len(managed.desired) == len(spec.shares):
            managed.spec, managed.changed = spec, True
        else:
            self._models[model] = _Model(self._store, model, spec)

    def forget(self, model: str) -> None:
        """Publish a model's capacity no more."""
        self._models.pop(model, None)

    def desired_replicas(self, model: str, pool: int) -> int:
        """Workers that demand requires; 0 for a model that is not managed."""
        managed = self._models.get(model)
        desired = [] if managed is None else managed.desired
        return desired[pool] if pool < len(desired) else 0

    async def pools(self, model: str) -> list[PoolView]:
        """The store's view of a model's pools, with their desired replicas. Raises as it does."""
        views = [
            msgspec.structs.replace(view, desired_replicas=self.desired_replicas(model, pool))
            for pool, view in enumerate(await self._store.pools(model))
        ]
        managed = self._models.get(model)
        if managed is None or not managed.prefilling:
            return views
        routed = len(managed.spec.pools) - len(managed.spec.prefills)
        return [*views[:routed], *managed.prefilling.values()]

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
            for name, model in list(self._models.items()):
                await self._tried(f"the demand for {name}", model.measure_demand(now_s))

    async def _tried(self, what: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:  # noqa: BLE001 - the next step has to come whatever fails in this one
            if what not in self._failing:
                self._failing.add(what)
                _log.exception("%s failed, trying again", what)
        else:
            self._failing.discard(what)
