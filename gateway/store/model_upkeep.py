"""Publishes one managed model's capacity: what its available workers hold, and the bound baselines.

Rules:
- New terms are published only when the available workers, their engines' KV capacity or the
  entitlements changed, or when an entitlement expired.
- Reserving entitlements are bound oldest first, pool by pool. When a pool's capacity falls, the
  newest are degraded there, and recover when it returns. One that never fitted is pending.
- The idle baseline of an expired dedicated entitlement is released.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from math import inf
from typing import Protocol

import msgspec

from gateway.admission.capacity import (
    Capacity,
    EntitlementState,
    WorkerShare,
    assess_capacity,
    capacity_of,
    max_capacity,
)
from gateway.admission.terms import Terms
from gateway.fleet import fleet
from gateway.fleet.fleet import PoolState
from gateway.ports import TokenPools, Upkeep
from gateway.records.entitlement import Entitlement
from gateway.records.record import Record
from gateway.store.desired_replicas import DesiredReplicas

_log = logging.getLogger("sluice.pools")


class Store(Upkeep, TokenPools, Protocol):
    """The parts of a lease store that upkeep uses."""


class ModelSpec(Record, frozen=True, kw_only=True):
    """A managed model's configuration for upkeep. Tuples are by pool, smallest window first."""

    base: Terms
    """The model's rules; their capacity is ignored. `mean_slo_ms` 0: compute the mean."""
    pools: tuple[PoolState, ...]
    shares: tuple[WorkerShare, ...]
    """Capacity of one worker, and the bounds on workers, by pool."""
    entitlements: Callable[[], Iterable[Entitlement]]
    """The model's entitlements, oldest first; read in slices while they may change."""
    kv_bytes: Callable[[int, int], int] = lambda _pool, _worker: 0
    """(pool, worker) -> bytes of KV cache that its engine reported; 0 if unknown."""


class PublishedModel:
    """A model's last published terms."""

    def __init__(self, store: Store, name: str, spec: ModelSpec, replicas: DesiredReplicas) -> None:
        """Nothing is published before the first `keep`."""
        self.changed = True
        """Whether its entitlements changed since the last survey."""
        self._store = store
        self._name = name
        self._spec = spec
        self._replicas = replicas
        self._capacity: Capacity | None = None
        self._unbound = 0
        self._ever_bound_until = 0
        self._next_expiry_unix_s = inf

    def respecify(self, spec: ModelSpec) -> None:
        """Use another configuration; the next `publish` publishes it."""
        self._spec = spec
        self.changed = True

    async def publish(self, now_s: float, now_unix_s: float) -> None:
        """Publish changes. Raises as the store does; the next call tries again."""
        found = self._available(now_s)
        due = self.changed or self._next_expiry_unix_s <= now_unix_s
        if found == self._capacity and not due:
            return
        self.changed = False
        try:
            # Read anew each time, because copying 100,000 would hold up requests. A change
            # meanwhile sets `changed`, so the next step surveys again.
            state = await _assessed(self._spec.entitlements(), found, now_unix_s)
            if due:
                await self._entitled(now_unix_s)
            await self._publish(found, state)
        except BaseException:
            self.changed = True
            raise

    def _available(self, now_s: float) -> Capacity:
        # A pool whose workers all missed their probes keeps its slots: requests are still tried
        # there, and refusing all of them would turn a doubt into an outage.
        reported = [
            [
                self._spec.kv_bytes(index, worker)
                for worker in fleet.available(pool, now_s) or fleet.last_resort(pool, refused=False)
            ]
            for index, pool in enumerate(self._spec.pools)
        ]
        return capacity_of(self._spec.shares, reported)

    async def _entitled(self, now_unix_s: float) -> None:
        largest = max_capacity(self._spec.shares)
        most = await _assessed(self._spec.entitlements(), largest, now_unix_s)
        reserving = {}
        for number, e in enumerate(self._spec.entitlements(), start=1):
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
        self._replicas.entitled(reserving)

    async def _publish(self, found: Capacity, state: EntitlementState) -> None:
        ever = max(self._ever_bound_until, state.newest_bound)
        base = self._spec.base
        terms = msgspec.structs.replace(
            base,
            slots=found.slots,
            kv_bytes=found.kv_bytes,
            tokens_per_s=found.tokens_per_s,
            mean_slo_ms=base.mean_slo_ms or state.mean_slo_ms,
            bound_until=state.bound_until,
            ever_bound_until=ever,
        )
        await self._store.change(self._name, terms)
        self._capacity, self._ever_bound_until = found, ever
        self._next_expiry_unix_s = state.next_expiry_unix_s
        self._log_unbound(found, state)

    def _log_unbound(self, found: Capacity, state: EntitlementState) -> None:
        if state.unbound == self._unbound:
            return
        slots = ", ".join(
            f"{pool.name} {slots}"
            for pool, slots in zip(self._spec.pools, found.slots, strict=True)
        )
        if state.unbound > self._unbound:
            _log.warning(
                "model %s: capacity (slots: %s) does not hold the baselines of %d entitlements; "
                "the newest wait",
                self._name,
                slots,
                state.unbound,
            )
        elif state.unbound:
            _log.warning(
                "model %s: capacity (slots: %s) holds more baselines again; those of %d "
                "entitlements still wait",
                self._name,
                slots,
                state.unbound,
            )
        else:
            _log.warning("model %s: capacity holds all baselines again", self._name)
        self._unbound = state.unbound


async def _assessed(
    entitlements: Iterable[Entitlement], found: Capacity, now_unix_s: float
) -> EntitlementState:
    for state in assess_capacity(entitlements, found, now_unix_s):
        if state is not None:
            return state
        await asyncio.sleep(0)
    raise AssertionError("a survey ends with a standing")
