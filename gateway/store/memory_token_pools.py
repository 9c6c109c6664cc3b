"""The embedded token pools: entitlements, counters and upkeep.

All work is done in slices of SLICE with pauses for requests, however many entitlements there
are. Each slice is atomic because it does not await.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from gateway.admission import admission, debt
from gateway.admission.terms import Terms
from gateway.admission.token_pool import REAP_BATCH, Account, TokenPool
from gateway.ports import AccountView, PoolView
from gateway.records.entitlement import Entitlement

SLICE = 250
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


class MemoryPools:
    """TokenPools and most of Upkeep over plain objects."""

    def __init__(self, token_pools: Mapping[str, TokenPool], now: SteadyClock) -> None:
        """`token_pools`: token pools by model."""
        self.token_pools = dict(token_pools)
        self.pending: set[str] = set()
        """Models whose token pool is being prepared: it does not decide yet."""
        self.event_sink: Callable[[str, str, float, object], None] = lambda *_: None
        """Called with (model, event, Unix s, detail) on changes of a pool, except leases."""
        self._now = now

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

    async def tick(self) -> None:
        for model, token_pool in list(self.token_pools.items()):
            reaped = REAP_BATCH
            while reaped == REAP_BATCH:
                reaped = admission.reap(token_pool, self._now())
                await asyncio.sleep(0)
            if token_pool.ticked_s <= 0:
                token_pool.ticked_s = self._now()
            elif self._now() - token_pool.ticked_s >= token_pool.terms.profile.tick_s:
                await self._tick(model, token_pool)

    async def _tick(self, model: str, token_pool: TokenPool) -> None:
        names = list(token_pool.active)
        contended = debt.is_contended(token_pool)
        now_s = self._now()
        elapsed_s = now_s - token_pool.ticked_s
        for start in range(0, len(names), SLICE):
            if start:
                await asyncio.sleep(0)
            debt.tick(
                token_pool, names[start : start + SLICE], elapsed_s, now_s, contended=contended
            )
        debt.close(token_pool, elapsed_s, now_s)
        if names:
            self.event_sink(model, "tick", now_s, elapsed_s)


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
    depth = admission.depth_tokens(token_pool, account)
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
        weight=admission.weight_now(token_pool, account),
        debited=account.debited,
        refunded=account.refunded,
        used=account.used,
    )
