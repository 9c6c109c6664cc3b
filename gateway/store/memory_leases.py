"""The embedded lease store: in memory, for one process.

A managed model's leases live in its `TokenPool`, and `gateway.admission.admission` decides.
Every call is atomic because it does not await. A model that is not managed has a plain ledger
that counts and spills over, but never refuses. Either way `PoolState.inflight` counts what this
process has in flight.
"""

import asyncio
import random
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from gateway.admission import admission
from gateway.admission.admission import AdmissionRequest, Denial, Grant
from gateway.admission.denials import limits_of, refusal_of
from gateway.admission.leases import charge_tokens, spent_by
from gateway.admission.limit_book import LimitBook
from gateway.admission.token_pool import TokenPool
from gateway.fleet import fleet
from gateway.fleet.fleet import PoolState
from gateway.fleet.model_runtime import ModelRuntime
from gateway.ports import Settlement
from gateway.records.lease import Lease
from gateway.records.limit import Limit, LimitUse, LimitView
from gateway.store.memory_token_pools import SLICE, MemoryPools, SteadyClock


class MemoryLeases(MemoryPools):
    """LeaseStore, TokenPools, Budgets and Upkeep over plain objects."""

    def __init__(
        self,
        models: Mapping[str, ModelRuntime],
        clock: Callable[[], float],
        token_pools: Mapping[str, TokenPool] | None = None,
        *,
        wall_clock: Callable[[], float] = time.time,
        jitter: Callable[[], float] = random.random,
        owner: str = "",
    ) -> None:
        """`models` by name (not by alias); `token_pools`: the token pools of managed models.

        `clock` monotonic, `wall_clock` Unix time (read once), both in seconds; `jitter` gives
        [0, 1). `owner` names this process: leases of a former process are never renewed.
        """
        self.owner = owner or secrets.token_hex(4)
        super().__init__(token_pools or {}, SteadyClock(clock, wall_clock))
        self._models = models
        self._clock = clock
        self._jitter = jitter
        self._leases: dict[str, Lease] = {}
        self._pools: dict[str, Sequence[PoolState]] = {}
        """Lease id -> the pools of the model that it was planned for."""
        self._evict: Callable[[str], None] = lambda _: None
        self.limits = LimitBook()
        self.on_warning: Callable[[Limit, LimitUse], None] = lambda _limit, _use: None
        """Called for the first request in a window that reaches a level that warns."""
        for token_pool in self.token_pools.values():
            token_pool.limits = self.limits

    @property
    def active(self) -> int:
        """Leases in force."""
        return len(self._leases)

    def holds(self, lease_id: str) -> bool:
        """Whether a lease is in force here."""
        return lease_id in self._leases

    async def manage(self, served: ModelRuntime, token_pool: TokenPool) -> None:
        """Have a model's token pool ready; it decides once the model is not `pending` any more."""
        self.pending.add(served.name)
        token_pool.limits = self.limits
        self.token_pools[served.name] = token_pool

    def unmanage(self, model: str) -> None:
        """Decide about a model no more; its leases end without a charge."""
        self.token_pools.pop(model, None)

    async def admit(self, ask: AdmissionRequest) -> Lease:
        found = self.take(ask)
        if isinstance(found, Denial):
            raise refusal_of(found, ask.entitlement, self._jitter(), ask.limits)
        if found.uses:
            warn(found, self.on_warning)
        return found

    async def transfer(self, lease: Lease, pool: int, *, force: bool = True) -> Lease:
        found = self.move(lease.id, pool, force=force)
        if isinstance(found, Denial):
            raise refusal_of(found, lease.entitlement, self._jitter())
        return found or lease

    def resize(self, lease: Lease, cost_tokens: int, kv_bytes: int) -> None:
        self.extend(lease.id, lease.model, cost_tokens, kv_bytes)

    def settle(self, lease: Lease, settlement: Settlement, *, heard: bool = False) -> None:
        self.end(lease.id, lease.model, settlement)

    async def reclaim(self, lease: Lease) -> None:
        for lease_id in self.victims(lease.id):
            self._evict(lease_id)

    def on_evict(self, evict: Callable[[str], None]) -> None:
        self._evict = evict

    async def tick(self) -> None:
        self.limits.ahead_s += self._now.astray_s(self.limits.ahead_s)
        await super().tick()

    async def renew(self) -> None:
        held = list(self._leases)
        for start in range(0, len(held), SLICE):
            # Each slice uses its own time, because leases are kept in the order of their expiry.
            self.prolong(held[start : start + SLICE])
            await asyncio.sleep(0)

    # -- Budgets

    def know(self, limits: Mapping[str, Limit]) -> None:
        """See Budgets: the counters are here."""

    async def levels(self, limits: Sequence[Limit]) -> list[LimitView]:
        return [self.limits.view(limit, self.limits.time_s(self._now())) for limit in limits]

    async def add(self, limit: Limit, amount: int) -> LimitView:
        return self.limits.add(limit, amount, self.limits.time_s(self._now()))

    async def sweep(self, defined: Callable[[str], bool]) -> None:
        ids = list(self.limits.counters)
        for start in range(0, len(ids), SLICE):
            now_s = self.limits.time_s(self._now())
            self.limits.sweep(ids[start : start + SLICE], defined, now_s)
            await asyncio.sleep(0)

    # -- synchronous forms

    def take(self, ask: AdmissionRequest) -> Lease | Denial:
        """Decide and take the lease; a known lease id gets its existing lease."""
        known = self._leases.get(ask.lease_id)
        if known is not None:
            return known
        token_pool = self.token_pools.get(ask.model)
        if self.pending and ask.model in self.pending:
            token_pool = None
        pools: Sequence[PoolState] = ask.pools or self._models[ask.model].fleet.pools
        if token_pool is None:
            lease: Lease | Denial = self._counted(ask, pools)
        else:
            lease = self._decided(ask, token_pool)
        if isinstance(lease, Denial):
            return lease
        pools[lease.pool].inflight += ask.sequences
        self._leases[ask.lease_id], self._pools[ask.lease_id] = lease, pools
        return lease

    def move(self, lease_id: str, pool: int, *, force: bool) -> Lease | Denial | None:
        """Move a lease to another pool; None if it is not held or is there already."""
        held = self._leases.get(lease_id)
        if held is None or held.pool == pool:
            return None
        token_pool = self.token_pools.get(held.model)
        if token_pool is not None:
            denial = admission.transfer(token_pool, lease_id, pool, self._now(), force=force)
            if denial is not None:
                return denial
        pools = self._pools[lease_id]
        pools[held.pool].inflight -= held.sequences
        pools[pool].inflight += held.sequences
        moved = msgspec.structs.replace(held, pool=pool)
        self._leases[lease_id] = moved
        return moved

    def extend(self, lease_id: str, model: str, cost_tokens: int, kv_bytes: int) -> None:
        """Change what a lease reserves."""
        token_pool = self.token_pools.get(model)
        if token_pool is not None:
            admission.resize(token_pool, lease_id, cost_tokens, kv_bytes, self._now())

    def end(self, lease_id: str, model: str, settlement: Settlement) -> None:
        """Settle a lease, once."""
        held = self._leases.pop(lease_id, None)
        if held is not None:
            self._pools.pop(lease_id)[held.pool].inflight -= held.sequences
        # A lease not held is a former process's, has expired, or was settled before.
        token_pool = self.token_pools.get(model)
        if token_pool is not None:
            self._charge(token_pool, lease_id, settlement)

    def victims(self, lease_id: str) -> list[str]:
        """Ids of held leases to evict for this lease."""
        lease = self._leases.get(lease_id)
        token_pool = None if lease is None else self.token_pools.get(lease.model)
        if lease is None or token_pool is None or lease_id not in token_pool.leases:
            return []
        chosen = admission.evict(token_pool, token_pool.leases[lease_id].pool, lease.sequences)
        return [record.id for record in chosen if record.id in self._leases]

    def prolong(self, lease_ids: Iterable[str]) -> None:
        """Renew those of the leases that are held."""
        now_s = self._now()
        for lease_id in lease_ids:
            lease = self._leases.get(lease_id)
            token_pool = None if lease is None else self.token_pools.get(lease.model)
            if token_pool is not None:
                admission.renew(token_pool, lease_id, now_s)

    # -- inside

    def _decided(self, ask: AdmissionRequest, token_pool: TokenPool) -> Lease | Denial:
        served = self._models[ask.model]
        now_s = self._now()
        found = admission.admit(
            token_pool,
            ask,
            now_s,
            observe=served.admission.observe or served.routing.observe,
            owner=self.owner,
        )
        if isinstance(found, Denial):
            return found
        return lease_of(ask, found, now_s)

    def _charge(self, token_pool: TokenPool, lease_id: str, settlement: Settlement) -> None:
        usage, charge = settlement.usage, None
        if usage is not None:
            charge = charge_tokens(
                token_pool.terms.profile,
                usage.prompt_tokens,
                usage.completion_tokens,
                usage.cached_tokens,
            )
        now_s = self._now.at(settlement.unix_s)
        spent = spent_by(usage, settlement.money, dispatched=settlement.dispatched)
        admission.settle(token_pool, lease_id, charge, now_s, spent)

    def _counted(self, ask: AdmissionRequest, pools: Sequence[PoolState]) -> Lease:
        # The asked pool, or the first alternate with room when it is overloaded.
        spill_queue, now_s = self._models[ask.model].admission.spill_queue, self._clock()
        asked = (ask.pool, *ask.alternates)
        pool = next(
            (p for p in asked if not fleet.overloaded(pools[p], spill_queue, now_s)), ask.pool
        )
        return Lease(
            id=ask.lease_id,
            model=ask.model,
            entitlement=ask.entitlement,
            pool=pool,
            spilled=pool != ask.pool,
            cost_tokens=ask.estimate_tokens,
            sequences=ask.sequences,
            kv_bytes=ask.kv_bytes,
        )


def lease_of(ask: AdmissionRequest, grant: Grant, issued_unix_s: float = 0.0) -> Lease:
    """The lease of a grant."""
    return Lease(
        id=ask.lease_id,
        model=ask.model,
        entitlement=ask.entitlement,
        pool=grant.pool,
        spilled=grant.spilled,
        cost_tokens=ask.estimate_tokens,
        sequences=ask.sequences,
        kv_bytes=ask.kv_bytes,
        weight=grant.weight,
        contended=grant.contended,
        protected=grant.protected,
        would_deny=grant.would_deny,
        limits=limits_of(grant),
        issued_unix_s=issued_unix_s,
        asked=ask.limits,
        uses=grant.uses,
    )


def warn(lease: Lease, hear: Callable[[Limit, LimitUse], None]) -> None:
    """Tell of the limits whose level that warns this lease was the first to reach."""
    for limit, use in zip(lease.asked, lease.uses, strict=False):
        if use.crossed:
            hear(limit, use)
