"""The embedded lease store: in memory, for one process.

A managed model's leases live in its `TokenPool`, and `gateway.admission.admission` decides.
Every call is atomic because it does not await; upkeep does its work in slices of SLICE with pauses
for requests, however many entitlements there are. A model that is not managed has a plain ledger
that counts and spills over, but never refuses. Either way `PoolState.inflight` counts what this
process has in flight.
"""

import asyncio
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from gateway.admission import admission, debt
from gateway.admission.admission import charge_tokens, spent_by
from gateway.admission.denials import limits_of, refusal_of
from gateway.admission.limit_book import LimitBook
from gateway.admission.terms import AdmissionRequest, Denial, Grant, Terms
from gateway.admission.token_pool import REAP_BATCH, Account, TokenPool
from gateway.fleet import fleet
from gateway.fleet.fleet import PoolState
from gateway.fleet.model_runtime import ModelRuntime
from gateway.ports import AccountView, PoolView, Settlement
from gateway.records.entitlement import AdmissionProfile, Entitlement
from gateway.records.lease import Lease
from gateway.records.limit import Limit, LimitUse, LimitView

SLICE: Final = 250
"""Accounts or leases that upkeep processes between two pauses for requests."""
LATE_S: Final = 5.0
"""Longest plausible age of a settlement's time; beyond it, the machine's clock was set."""
EARLY_S: Final = 0.1
"""Most drift of the machine's clock against this one."""
ASTRAY_S: Final = 1.0
"""By so much the machine's clock may differ from a calendar's before that follows it."""
ASTRAY_FOR_S: Final = 60.0
"""For so long it must have shown the same other time: a leap of seconds moves no window."""


class SteadyClock:
    """Unix time that never jumps: the time at the start plus the monotonic time since.

    Buckets, lease expiry and ticks depend on elapsed time. A clock set back would refuse requests
    for that long; a clock set forward would refill buckets and reap live leases.
    """

    def __init__(self, clock: Callable[[], float], wall_clock: Callable[[], float]) -> None:
        """`clock` monotonic, `wall_clock` Unix time, in seconds."""
        self._clock = clock
        self._wall_clock = wall_clock
        self._ahead_s = wall_clock() - clock()
        self._astray_s, self._since_s = 0.0, clock()
        """How far the machine's clock is from a calendar, and since when."""
        self.follows = False
        """Whether it shows a shared store's time."""

    def __call__(self) -> float:
        """Unix time in seconds."""
        return self._clock() + self._ahead_s

    def follow(self, unix_s: float) -> None:
        """Show this time now, which a shared store has."""
        self._ahead_s = unix_s - self._clock()
        self.follows = True

    def astray_s(self, ahead_s: float) -> float:
        """What to add to a calendar that is so far ahead of this clock; 0 unless it is time.

        Ask regularly. The machine's clock may have been wrong at the start, and set right later.
        """
        now_s = self._clock()
        differs_s = self._wall_clock() - self() - ahead_s
        if abs(differs_s) < ASTRAY_S or abs(differs_s - self._astray_s) > ASTRAY_S:
            self._astray_s, self._since_s = differs_s, now_s
            return 0.0
        return differs_s if now_s - self._since_s >= ASTRAY_FOR_S else 0.0

    def at(self, unix_s: float) -> float:
        """Convert a recent event's time by the machine's clock to this clock."""
        now_s = self()
        return unix_s if -EARLY_S <= now_s - unix_s <= LATE_S else now_s


class MemoryLeases:
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
        self.token_pools = dict(token_pools or {})
        self.pending: set[str] = set()
        """Models whose token pool is being prepared: it does not decide yet."""
        self.event_sink: Callable[[str, str, float, object], None] = lambda *_: None
        """Called with (model, event, Unix s, detail) on changes of a pool, except leases."""
        self._models = models
        self._clock = clock
        self._now = SteadyClock(clock, wall_clock)
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

    up = True
    alone_total = 0
    failures_total = 0
    dropped_total = 0
    """As the shared store: nothing is away from this one."""

    def replicas(self, model: str) -> int:
        """Gateways that share a model's token pool."""
        return 1

    async def start(self) -> None:
        """Nothing to connect to."""

    async def close(self) -> None:
        """Nothing to end."""

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

    # -- LeaseStore

    async def admit(self, ask: AdmissionRequest) -> Lease:
        earlier = self._leases.get(ask.lease_id)
        if earlier is not None:
            return earlier
        served = self._models[ask.model]
        pools: Sequence[PoolState] = ask.pools or served.fleet.routed
        token_pool = self.token_pools.get(ask.model)
        if token_pool is None or (self.pending and ask.model in self.pending):
            lease = self._counted(ask, pools)
        else:
            now_s = self._now()
            observe = served.admission.observe or served.routing.observe
            decided = admission.admit(token_pool, ask, now_s, observe=observe, owner=self.owner)
            if isinstance(decided, Denial):
                raise refusal_of(decided, ask.entitlement, self._jitter(), ask.limits)
            lease = lease_of(ask, decided, now_s)
        pools[lease.pool].inflight += ask.sequences
        self._leases[ask.lease_id], self._pools[ask.lease_id] = lease, pools
        if lease.uses:
            warn(lease, self.on_warning)
        return lease

    async def quote(self, ask: AdmissionRequest, counted: Sequence[Limit]) -> Lease | Denial:
        served, token_pool = self._models[ask.model], self.token_pools.get(ask.model)
        if token_pool is None or (self.pending and ask.model in self.pending):
            return self._counted(ask, ask.pools or served.fleet.routed)
        now_s, observe = self._now(), served.admission.observe or served.routing.observe
        decided = quoted(token_pool, ask, counted, now_s, self._jitter, observe=observe)
        return decided if isinstance(decided, Denial) else lease_of(ask, decided, now_s)

    async def transfer(self, lease: Lease, pool: int, *, force: bool = True) -> Lease:
        held = self._leases.get(lease.id)
        if held is None or held.pool == pool:
            return lease
        token_pool = self.token_pools.get(held.model)
        if token_pool is not None:
            denied = admission.transfer(token_pool, lease.id, pool, self._now(), force=force)
            if denied is not None:
                raise refusal_of(denied, lease.entitlement, self._jitter())
        pools = self._pools[lease.id]
        pools[held.pool].inflight -= held.sequences
        pools[pool].inflight += held.sequences
        self._leases[lease.id] = moved = msgspec.structs.replace(held, pool=pool)
        return moved

    def resize(self, lease: Lease, cost_tokens: int, kv_bytes: int) -> None:
        token_pool = self.token_pools.get(lease.model)
        if token_pool is not None:
            admission.resize(token_pool, lease.id, cost_tokens, kv_bytes, self._now())

    def settle(self, lease: Lease, settlement: Settlement, *, heard: bool = False) -> None:
        held = self._leases.pop(lease.id, None)
        if held is not None:
            self._pools.pop(lease.id)[held.pool].inflight -= held.sequences
        # A lease not held is a former process's, has expired, or was settled before.
        token_pool = self.token_pools.get(lease.model)
        if token_pool is not None:
            charge = charge_of(token_pool.terms.profile, settlement)
            now_s = self._now.at(settlement.unix_s)
            spent = spent_by(settlement.usage, settlement.money, dispatched=settlement.dispatched)
            admission.settle(token_pool, lease.id, charge, now_s, spent)

    async def reclaim(self, lease: Lease) -> None:
        token_pool = self.token_pools.get(lease.model)
        waiting = None if token_pool is None else token_pool.leases.get(lease.id)
        if token_pool is None or waiting is None or lease.id not in self._leases:
            return
        for victim in admission.evict(token_pool, waiting.pool, lease.sequences):
            if victim.id in self._leases:
                self._evict(victim.id)

    def on_evict(self, evict: Callable[[str], None]) -> None:
        self._evict = evict

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

    # -- TokenPools

    async def define(self, terms: Entitlement) -> None:
        self.token_pools[terms.model].define(terms)
        self.event_sink(terms.model, "entitlement", self._now(), terms)

    async def remove(self, model: str, name: str) -> bool:
        token_pool = self.token_pools[model]
        account = token_pool.accounts.get(name)
        if account is not None and account.total:
            return False
        token_pool.remove(name)
        self.event_sink(model, "removed", self._now(), name)
        return True

    async def view(self, model: str, names: Sequence[str]) -> list[AccountView]:
        token_pool = self.token_pools[model]
        now_s = self._now()
        return [
            account_view(token_pool, account, now_s)
            for account in map(token_pool.accounts.get, names)
            if account is not None
        ]

    async def pools(self, model: str) -> list[PoolView]:
        return pool_views(self.token_pools[model])

    # -- Upkeep

    async def change(self, model: str, terms: Terms) -> None:
        self.token_pools[model].change(terms)
        self.event_sink(model, "terms", self._now(), terms)

    async def renew(self) -> None:
        held = list(self._leases)
        for start in range(0, len(held), SLICE):
            # Each slice uses its own time, because leases are kept in the order of their expiry.
            now_s = self._now()
            for lease_id in held[start : start + SLICE]:
                lease = self._leases.get(lease_id)
                token_pool = None if lease is None else self.token_pools.get(lease.model)
                if token_pool is not None:
                    admission.renew(token_pool, lease_id, now_s)
            await asyncio.sleep(0)

    async def tick(self) -> None:
        self.limits.ahead_s += self._now.astray_s(self.limits.ahead_s)
        for model, token_pool in list(self.token_pools.items()):
            reaped = REAP_BATCH
            while reaped == REAP_BATCH:
                reaped = admission.reap(token_pool, self._now())
                await asyncio.sleep(0)
            if token_pool.ticked_s <= 0:
                token_pool.ticked_s = self._now()
            elif self._now() - token_pool.ticked_s >= token_pool.terms.profile.tick_s:
                names = list(token_pool.active)
                contended = debt.is_contended(token_pool)
                now_s = self._now()
                elapsed_s = now_s - token_pool.ticked_s
                for start in range(0, len(names), SLICE):
                    if start:
                        await asyncio.sleep(0)
                    some = names[start : start + SLICE]
                    debt.tick(token_pool, some, elapsed_s, now_s, contended=contended)
                debt.close(token_pool, elapsed_s, now_s)
                if names:
                    self.event_sink(model, "tick", now_s, elapsed_s)


def quoted(
    token_pool: TokenPool,
    ask: AdmissionRequest,
    counted: Sequence[Limit],
    now_s: float,
    jitter: Callable[[], float],
    *,
    observe: bool,
) -> Grant | Denial:
    """What admission would say; see `LeaseStore.quote`. Raises Refusal."""
    itself = msgspec.structs.replace(ask, limits=tuple(counted))
    over = admission.count_request(token_pool, itself, now_s)
    if over is not None:
        raise refusal_of(over, ask.entitlement, jitter(), counted)
    return admission.admit(token_pool, ask, now_s, observe=observe, dry=True)


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


def charge_of(profile: AdmissionProfile, settlement: Settlement) -> int | None:
    """The charge for a request, in tokens; None without usage."""
    return None if settlement.usage is None else charge_tokens(profile, settlement.usage)


def warn(lease: Lease, hear: Callable[[Limit, LimitUse], None]) -> None:
    """Tell of the limits whose level that warns this lease was the first to reach."""
    for limit, use in zip(lease.asked, lease.uses, strict=False):
        if use.crossed:
            hear(limit, use)


def pool_views(token_pool: TokenPool) -> list[PoolView]:
    """The counters of a model's pools."""
    return [
        PoolView(
            slots=token_pool.terms.slots[index],
            inflight=pool.inflight,
            kv_capacity_bytes=token_pool.terms.kv_of(index),
            kv_bytes=pool.kv_bytes,
            idle_dedicated=pool.idle_dedicated,
            service_s=pool.service_s,
            desired_replicas=0,
            refused_sequences=pool.refused_sequences,
            refused_kv_bytes=pool.refused_kv_bytes,
            refused_tokens=pool.refused_tokens,
            served_tokens=pool.served_tokens,
        )
        for index, pool in enumerate(token_pool.pools)
    ]


def account_view(token_pool: TokenPool, account: Account, now_s: float) -> AccountView:
    """An account's counters, with its bucket filled up to now."""
    terms = account.terms
    depth = token_pool.depth_tokens(account)
    gained = terms.tokens_per_s * max(0.0, now_s - account.level_s)
    state = "bound"
    if terms.suspended:
        state = "suspended"
    elif 0 < terms.expires_unix_s <= now_s:
        state = "expired"
    elif not token_pool.bound_everywhere(terms):
        state = "degraded" if terms.created <= token_pool.terms.ever_bound_until else "pending"
    return AccountView(
        name=terms.name,
        state=state,
        inflight=tuple(account.inflight),
        kv_bytes=account.kv_bytes,
        level_tokens=min(depth, account.level + gained),
        depth_tokens=depth,
        debt=account.debt,
        burst=account.burst,
        weight=token_pool.weight_now(account),
        debited=account.debited,
        refunded=account.refunded,
        used=account.used,
    )
