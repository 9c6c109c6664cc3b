"""Leases in virtual time: what the gateway's embedded store does, on the same decisions.

A managed model's leases are decided by `gateway.admission`; a model that is not managed
counts and spills over. Time 0 is the token pool's epoch. Renewals and ticks come at the gateway's
intervals, whenever the next call is late enough.
"""

from collections.abc import Sequence
from math import ceil
from typing import Final, NamedTuple

import msgspec

from gateway.admission import admission, debt
from gateway.admission.capacity import Capacity, EntitlementState, assess_capacity
from gateway.admission.terms import AdmissionRequest, Denial, Grant
from gateway.admission.token_pool import RENEW_EVERY_S, TokenPool
from gateway.fleet import fleet
from gateway.fleet.model_runtime import ModelRuntime
from gateway.records.estimate import LengthEstimate, Plan
from simulator.pipeline.records import Gateway

_OPEN: Final = "open"


class Held(NamedTuple):
    """A lease in force."""

    pool: int
    cost_tokens: int
    spilled: bool = False
    protected: bool = False
    """Within a reserved baseline, in a pool that is full: others may have to give way."""


class Refused(NamedTuple):
    """A request that is not served, or not now."""

    reason: str
    wait_s: float = 0.0
    """Until it may help to come back; 0 where nobody knows, or waiting does not help."""


class Leases:
    """The leases of one model."""

    def __init__(self, gateway: Gateway) -> None:
        self._served: ModelRuntime = gateway.served
        self._token_pool = None if gateway.terms is None else _token_pool(gateway)
        self._held: dict[int, Held] = {}
        self._ticked_s = self._renewed_s = 0.0

    def admit(
        self, index: int, entitlement: str, estimate: LengthEstimate, plan: Plan, now_s: float
    ) -> Held | Refused:
        """A lease, or why there is none."""
        self._upkeep(now_s)
        window_tokens = self._served.routing.pools[-1].window_tokens
        cost_tokens = min(estimate.cost_tokens, window_tokens)
        token_pool = self._token_pool
        if token_pool is None:
            pool = self._room(plan, now_s)
            held = Held(pool, cost_tokens, pool != plan.pool)
        else:
            found = self._decide(token_pool, index, entitlement, cost_tokens, plan, now_s)
            if isinstance(found, Denial) and found.reason == "exceeds_entitlement":
                doubt = 1 - min(estimate.input_tokens_lowest / max(estimate.input_tokens, 1), 1.0)
                cost_tokens = ceil(estimate.cost_tokens - estimate.input_tokens_total * doubt)
                found = self._decide(token_pool, index, entitlement, cost_tokens, plan, now_s)
            if isinstance(found, Denial):
                return Refused(found.reason, found.wait_s)
            gives_way = found.protected and found.contended
            held = Held(found.pool, cost_tokens, found.spilled, gives_way)
        self._held[index] = held
        self._served.fleet.pools[held.pool].inflight += 1
        return held

    def resize(self, index: int, cost_tokens: int, now_s: float) -> Held:
        """Reserve less, as a compressed prompt needs."""
        held = self._held[index] = self._held[index]._replace(cost_tokens=cost_tokens)
        if self._token_pool is not None:
            kv_bytes = cost_tokens * self._served.admission.kv_bytes_per_token
            admission.resize(self._token_pool, str(index), cost_tokens, kv_bytes, now_s)
        return held

    def move(self, index: int, pool: int, now_s: float, *, force: bool) -> Held | Refused:
        """The lease in another pool, or why it may not go there."""
        held = self._held[index]
        if held.pool == pool:
            return held
        if self._token_pool is not None:
            denial = admission.transfer(self._token_pool, str(index), pool, now_s, force=force)
            if denial is not None:
                return Refused(denial.reason, denial.wait_s)
        pools = self._served.fleet.pools
        pools[held.pool].inflight -= 1
        pools[pool].inflight += 1
        moved = self._held[index] = held._replace(pool=pool)
        return moved

    def settle(self, index: int, charge: int | None, now_s: float) -> None:
        """End the lease; None refunds all."""
        self._upkeep(now_s)
        held = self._held.pop(index)
        self._served.fleet.pools[held.pool].inflight -= 1
        if self._token_pool is not None:
            admission.settle(self._token_pool, str(index), charge, now_s)

    def victims(self, index: int) -> list[int]:
        """Requests that have to give way to this one."""
        token_pool = self._token_pool
        lease = None if token_pool is None else token_pool.leases.get(str(index))
        if token_pool is None or lease is None:
            return []
        chosen = admission.evict(token_pool, lease.pool, lease.sequences)
        return [int(record.id) for record in chosen]

    def _decide(
        self,
        token_pool: TokenPool,
        index: int,
        entitlement: str,
        cost_tokens: int,
        plan: Plan,
        now_s: float,
    ) -> Grant | Denial:
        terms = self._served.admission
        asked = AdmissionRequest(
            lease_id=str(index),
            entitlement=entitlement or _OPEN,
            pool=plan.pool,
            alternates=plan.alternates,
            estimate_tokens=cost_tokens,
            kv_bytes=cost_tokens * terms.kv_bytes_per_token,
        )
        return admission.admit(token_pool, asked, now_s, observe=terms.observe)

    def _room(self, plan: Plan, now_s: float) -> int:
        pools, queue = self._served.fleet.pools, self._served.admission.spill_queue
        for pool in (plan.pool, *plan.alternates):
            if not fleet.overloaded(pools[pool], queue, now_s):
                return pool
        return plan.pool

    def _upkeep(self, now_s: float) -> None:
        token_pool = self._token_pool
        if token_pool is None:
            return
        tick_s = token_pool.terms.profile.tick_s
        while now_s - self._ticked_s >= tick_s:
            self._ticked_s += tick_s
            debt.tick(token_pool, list(token_pool.active), tick_s, self._ticked_s)
            debt.close(token_pool, tick_s, self._ticked_s)
        while now_s - self._renewed_s >= RENEW_EVERY_S:
            self._renewed_s += RENEW_EVERY_S
            for index in self._held:
                admission.renew(token_pool, str(index), self._renewed_s)


def state_of(gateway: Gateway) -> EntitlementState | None:
    """Which reserves the configured capacity holds; None for a model that is not managed."""
    terms = gateway.terms
    if terms is None:
        return None
    capacity = Capacity(slots=terms.slots, kv_bytes=terms.kv_bytes, tokens_per_s=terms.tokens_per_s)
    found: Sequence[EntitlementState | None] = list(
        assess_capacity(gateway.entitlements, capacity, 0.0)
    )
    return found[-1]


def _token_pool(gateway: Gateway) -> TokenPool:
    terms, state = gateway.terms, state_of(gateway)
    if terms is None or state is None:
        raise ValueError("a model that is not managed has no token pool")
    token_pool = TokenPool(
        msgspec.structs.replace(
            terms,
            bound_until=state.bound_until,
            ever_bound_until=state.newest_bound,
            mean_slo_ms=terms.mean_slo_ms or state.mean_slo_ms,
        )
    )
    for entitlement in gateway.entitlements:
        token_pool.define(entitlement)
        gateway.served.admission.rates.add(entitlement.tokens_per_s)
    return token_pool
