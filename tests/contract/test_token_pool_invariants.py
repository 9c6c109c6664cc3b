"""What holds of token pools whatever happens, for every store: thirteen invariants.

1 a pool's in-flight and KV are the sums over its entitlements and over its leases, never
negative. 2 in-flight of an entitlement <= its limit, a guaranteed one's <= its baseline. 3 what
is not protected takes a pool beyond its overshoot only in the place of lower classes. 4 an
in-baseline guaranteed request is never denied for the pool's sake, whichever workers are lost,
while a pool that can hold it serves a lower class. 5 admit and settle are idempotent by id. 6
debited - refunded is what was used and what is reserved. 7 after a lease's time without traffic
nothing is in flight. 8 an idle entitlement's debt never rises, only elastic ones have any, and
classes keep their order. 9 under constant overload every elastic entitlement with a baseline
gets in. 10 nobody is denied for the pool's sake while there is room. 11 of equal classes the
tighter SLO, the larger debt and the smaller burst weigh more. 12 Retry-After is in [1, 60] and
what can never fit gets no 429. 13 any interleaving equals some serial order. 14 over any window a
bucket pays its rate, its depth and what is in flight at most, whatever was used, refused, asked
for or left behind.

A store joins by an entry in `OPENERS`; Redis by the suite's own server.
"""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, TypeVar

import msgspec
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from bench.common.fleet import RedisServer
from gateway.admission.capacity import Capacity, assess_capacity
from gateway.admission.checks import overshoot
from gateway.admission.terms import AdmissionRequest, Terms
from gateway.admission.token_pool import LEASE_TTL_S, TokenPool
from gateway.errors import RateLimited, Refusal, Unavailable
from gateway.ports import AccountView, LeaseStore, PoolView, Settlement, Upkeep
from gateway.records.attempt import Usage
from gateway.records.entitlement import Entitlement, kv_limit
from gateway.records.lease import Lease
from gateway.store.memory_leases import MemoryLeases
from gateway.store.redis.leases import RedisLeases
from gateway.store.sqlite_leases import SqliteLeases
from tests.builders import served_model
from tests.fakes import FakeClock
from tests.histories import histories
from tests.token_pools import NOW_S, entitled

_T = TypeVar("_T")


class PoolStore(LeaseStore, Upkeep, Protocol):
    """A store of managed models, as the gateway uses it."""


class Opened(Protocol):
    """A store under test with one managed model, "m", of two pools."""

    takes_up_again: bool
    """Whether a renewal that comes too late counts a request that still runs again.

    The expiry charged it, and late usage still replaces that charge; in flight it is once more
    until it is settled or expires again."""
    starts_again: bool
    """Whether a later process finds what this one left."""

    @property
    def store(self) -> PoolStore:
        """The ports."""

    def at(self, now_s: float) -> None:
        """Let the store's own clock show this (it never runs by itself)."""

    async def quiet(self) -> None:
        """Return once all that was asked of the store has taken effect."""

    async def start_again(self, terms: Terms, entitlements: Sequence[Entitlement]) -> None:
        """End the process, and start one that knows these."""

    async def close(self) -> None:
        """Let go of it."""


class OpenedMemory:
    starts_again = False
    takes_up_again = False
    """Nothing but this process could have run, and it stood still."""

    def __init__(
        self, terms: Terms, entitlements: Sequence[Entitlement], clock: FakeClock | None = None
    ) -> None:
        self.clock = clock or FakeClock(NOW_S)
        token_pool = TokenPool(terms)
        for each in entitlements:
            token_pool.define(each)
        self.store = MemoryLeases(
            {"m": served_model()}, self.clock, {"m": token_pool}, wall_clock=self.clock
        )

    def at(self, now_s: float) -> None:
        self.clock.now_s = now_s

    async def quiet(self) -> None:
        pass

    async def start_again(self, terms: Terms, entitlements: Sequence[Entitlement]) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        pass


class OpenedSqlite(OpenedMemory):
    """That store, kept in a file."""

    starts_again = True

    def __init__(self, terms: Terms, entitlements: Sequence[Entitlement]) -> None:
        super().__init__(terms, entitlements)
        self.folder = TemporaryDirectory()
        self.file = self.kept()

    def kept(self) -> SqliteLeases:
        path = Path(self.folder.name) / "sluice.db"
        return SqliteLeases(path, self.store.token_pools, self.store.limits, wall_clock=self.clock)

    async def start_again(self, terms: Terms, entitlements: Sequence[Entitlement]) -> None:
        await self.file.close()
        assert self.file.up
        self.store = OpenedMemory(terms, entitlements, self.clock).store
        self.file = self.kept()
        await self.file.start()

    async def close(self) -> None:
        await self.file.close()
        self.folder.cleanup()


async def open_sqlite(terms: Terms, entitlements: Sequence[Entitlement]) -> Opened:
    opened = OpenedSqlite(terms, entitlements)
    await opened.file.start()
    return opened


async def open_memory(terms: Terms, entitlements: Sequence[Entitlement]) -> Opened:
    return OpenedMemory(terms, entitlements)


class OpenedRedis:
    """A store of one process over a server that holds nothing else."""

    starts_again = False
    """That others go on with what it holds is the subject of other tests."""
    takes_up_again = True
    """The server reaps on time for all replicas, whether or not it heard of one of them."""

    def __init__(self, url: str, terms: Terms, entitlements: Sequence[Entitlement]) -> None:
        self.clock = FakeClock(NOW_S)
        token_pool = TokenPool(terms)
        for each in entitlements:
            token_pool.define(each)
        served = {"m": served_model()}
        self.store = RedisLeases(
            url,
            served,
            {"m": token_pool},
            self.clock,
            local=MemoryLeases(served, time.monotonic),
            fail_mode="closed",
            owner="o",
            wall_clock=self.clock,
            script_clock=self.clock,
        )

    def at(self, now_s: float) -> None:
        self.clock.now_s = now_s

    async def start_again(self, terms: Terms, entitlements: Sequence[Entitlement]) -> None:
        raise NotImplementedError

    async def quiet(self) -> None:
        """What is asked goes out in order, so an answer says that all before it took effect."""
        await self.store.pools("m")

    async def close(self) -> None:
        await self.store.close()


def opener_on(server: RedisServer) -> "Opener":
    async def open_redis(terms: Terms, entitlements: Sequence[Entitlement]) -> Opened:
        with server.client() as client:
            client.flushall()
        opened = OpenedRedis(server.url, terms, entitlements)
        await opened.store.start()
        assert opened.store.up
        return opened

    return open_redis


Opener = Callable[[Terms, Sequence[Entitlement]], Awaitable[Opened]]
OPENERS: dict[str, Opener] = {"memory": open_memory, "sqlite": open_sqlite}


@pytest.fixture(params=[*OPENERS, pytest.param("redis", marks=pytest.mark.redis)])
def opener(request: pytest.FixtureRequest) -> Opener:
    known = OPENERS.get(request.param)
    return known or opener_on(request.getfixturevalue("redis_server"))


LIMITS = {
    "memory": histories(60, steps=40),
    "sqlite": histories(12, steps=40),
    # Each step is some round trips: fewer histories, and a failing one is shown as it was found.
    "redis": settings(
        histories(15, steps=40),
        phases=(Phase.explicit, Phase.reuse, Phase.generate),
    ),
}


TERMS = Terms(
    slots=(6, 5),
    kv_bytes=(6000, 9000),
    tokens_per_s=120.0,
    largest_tokens=600,
    mean_slo_ms=1000.0,
    headroom=1,
    spill_queue=1,
)
ENTITLEMENTS = (
    entitled("d", "dedicated", baseline=(1, 0), limit=4, tokens_per_s=40.0, created=1),
    entitled("g", "guaranteed", baseline=(2, 1), limit=3, tokens_per_s=60.0, created=2),
    entitled("tight", slo_ms=100, baseline=(2, 1), tokens_per_s=30.0, kv_bytes=4000, created=3),
    entitled("loose", slo_ms=5000, baseline=(2, 1), limit=7, tokens_per_s=30.0, created=4),
    entitled("s", "spot", kv_bytes=3000, created=5),
    entitled("p", "preemptible", created=6),
    entitled("h", "guaranteed", baseline=(1, 1), limit=2, kv_bytes=2000, created=7),
    entitled("slots", slo_ms=2000, baseline=(2, 2), created=8),
    entitled("memory", slo_ms=2000, kv_bytes=3000, kv_bytes_limit=5000, created=9),
)
NAMES = tuple(e.name for e in ENTITLEMENTS)
METERED = {"g": 60.0}
"""Who pays from a bucket of its own alone, and its rate."""
RESERVING = ("dedicated", "guaranteed")
RANK = {"dedicated": 3, "guaranteed": 3, "elastic": 2, "spot": 1, "preemptible": 0}
FOR_THE_POOL_S_SAKE = ("priority", "kv")


class Meter:
    """What a tenant has taken beyond its rate, in tokens."""

    def __init__(self, now_s: float) -> None:
        self.over = 0.0
        self.at_s = now_s

    def take(self, tokens: float, now_s: float, rate: float) -> None:
        self.over = max(0.0, self.over - rate * (now_s - self.at_s)) + tokens
        self.over = max(0.0, self.over)
        self.at_s = now_s


class OpenLease:
    """What the test remembers of a lease."""

    def __init__(self, lease: Lease, ask: AdmissionRequest, now_s: float) -> None:
        self.lease = lease
        self.ask = ask
        self.pool = lease.pool
        self.spilled = lease.spilled
        self.tokens = ask.estimate_tokens
        self.kv_bytes = ask.kv_bytes
        self.expires_s = now_s + LEASE_TTL_S
        self.former = False
        """A former process's: nobody renews it, and it stays where it is."""


class PoolMachine(RuleBasedStateMachine):
    """Any history of one model, against plain sums."""

    opener: Opener

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.now_s = NOW_S
        self.terms = TERMS
        self.entitlements = {e.name: e for e in ENTITLEMENTS}
        self.opened = self.run(type(self).opener(TERMS, ENTITLEMENTS))
        self.store = self.opened.store
        self.evicted: list[str] = []
        self.store.on_evict(self.evicted.append)
        self.kept: dict[str, OpenLease] = {}
        self.gone: dict[str, OpenLease] = {}
        """Settled leases."""
        self.late: dict[str, OpenLease] = {}
        """Expired leases of which no usage was heard."""
        self.orphaned: dict[str, OpenLease] = {}
        """Expired ones whose entitlement was made anew meanwhile; their requests may run on."""
        self.used = dict.fromkeys(NAMES, 0)
        self.debts = dict.fromkeys(NAMES, 0.0)
        self.busy: dict[str, int] = {}
        """Entitlements that asked for anything -> ticks that may still tell."""
        self.ids = itertools.count()
        self.meters = {name: Meter(NOW_S) for name in METERED}
        self.apply_capacity(TERMS.slots)

    def run(self, call: Awaitable[_T]) -> _T:
        async def awaited() -> _T:
            return await call

        return self.runner.run(awaited())

    def views(self) -> tuple[dict[str, AccountView], list[PoolView]]:
        """The store's counters, expired leases reaped."""
        self.run(self.opened.quiet())
        self.run(self.store.tick())
        for name, kept in list(self.kept.items()):
            if kept.expires_s <= self.now_s:
                self.late[name] = self.kept.pop(name)
                self.used[kept.ask.entitlement] += kept.tokens
        accounts = {view.name: view for view in self.run(self.store.view("m", NAMES))}
        assert set(accounts) == set(NAMES)
        return accounts, self.run(self.store.pools("m"))

    # -- what may happen

    @rule(
        name=st.sampled_from(NAMES),
        pool=st.sampled_from([0, 0, 1]),
        spills=st.booleans(),
        sequences=st.sampled_from([1, 1, 1, 2, 5]),
        tokens=st.sampled_from([10, 50, 100, 300, 700]),
        kv=st.sampled_from([0, 10, 900, 2500, 7000]),
    )
    def admit(
        self, name: str, pool: int, spills: bool, sequences: int, tokens: int, kv: int
    ) -> None:
        ask = AdmissionRequest(
            lease_id=f"l{next(self.ids)}",
            model="m",
            entitlement=name,
            pool=pool,
            alternates=(1 - pool,) if spills else (),
            estimate_tokens=tokens,
            sequences=sequences,
            kv_bytes=kv,
        )
        accounts, pools = self.views()
        self.busy[name] = 2
        try:
            lease = self.run(self.store.admit(ask))
        except Refusal as refusal:
            self.check_refused(ask, refusal, accounts[name], pools)
            return
        self.kept[ask.lease_id] = OpenLease(lease, ask, self.now_s)
        self.paid(name, ask.estimate_tokens)
        if name in METERED:
            depth = self.run(self.store.view("m", [name]))[0].depth_tokens
            assert self.meters[name].over <= max(depth, accounts[name].depth_tokens) + 1e-6
        self.check_granted(ask, lease)

    @rule(
        name=st.sampled_from(NAMES),
        sequences=st.sampled_from([1, 16, 10_000]),
        tokens=st.sampled_from([0, 1, 10**6, 2**53]),
        kv=st.sampled_from([0, 2**50]),
    )
    def ask_for_everything(self, name: str, sequences: int, tokens: int, kv: int) -> None:
        for pool, spills in ((0, True), (1, True), (0, False)):
            self.admit(name, pool, spills, sequences, tokens, kv)

    @rule(
        name=st.sampled_from(NAMES),
        count=st.sampled_from([2, 4, 8, 30]),
        tokens=st.sampled_from([10, 10, 300]),
    )
    def crowd(self, name: str, count: int, tokens: int) -> None:
        for _ in range(count):
            self.admit(name, 0, False, 1, tokens, 10)

    @rule(data=st.data(), share=st.sampled_from([None, 0.0, 0.5, 1.0, 3.0, 50.0]))
    def settle(self, data: st.DataObject, share: float | None) -> None:
        if not self.kept:
            return
        lease_id = data.draw(st.sampled_from(sorted(self.kept)))
        self.views()
        if lease_id in self.kept:
            kept = self.kept.pop(lease_id)
            self.gone[lease_id] = kept
            self.post(kept, share)

    @rule(data=st.data(), share=st.sampled_from([None, 0.5, 2.0]))
    def settle_late(self, data: st.DataObject, share: float | None) -> None:
        if self.late:
            lease_id = data.draw(st.sampled_from(sorted(self.late)))
            kept = self.late.pop(lease_id)
            self.used[kept.ask.entitlement] -= kept.tokens
            self.gone[lease_id] = kept
            self.post(kept, share)

    @rule(data=st.data())
    def settle_again(self, data: st.DataObject) -> None:
        if self.gone:
            kept = self.gone[data.draw(st.sampled_from(sorted(self.gone)))]
            before = self.views()
            self.store.settle(kept.lease, Settlement(usage=None, dispatched=False))
            assert self.views() == before

    @rule(data=st.data())
    def admit_again(self, data: st.DataObject) -> None:
        before = self.views()
        if self.kept:
            kept = self.kept[data.draw(st.sampled_from(sorted(self.kept)))]
            if kept.former:
                return
            again = self.run(self.store.admit(kept.ask))
            assert (again.id, again.entitlement) == (kept.lease.id, kept.lease.entitlement)
            assert (again.pool, again.weight) == (kept.pool, kept.lease.weight)
            assert self.views() == before

    @rule(data=st.data(), tokens=st.sampled_from([5, 120, 900]), kv=st.sampled_from([0, 40, 3000]))
    def resize(self, data: st.DataObject, tokens: int, kv: int) -> None:
        self.views()
        if self.kept:
            kept = self.kept[data.draw(st.sampled_from(sorted(self.kept)))]
            self.store.resize(kept.lease, tokens, kv)
            self.paid(kept.ask.entitlement, tokens - kept.tokens)
            kept.tokens, kept.kv_bytes = tokens, kv

    @rule(data=st.data(), pool=st.sampled_from([0, 1]), force=st.booleans())
    def transfer(self, data: st.DataObject, pool: int, force: bool) -> None:
        accounts, pools = self.views()
        if not self.kept:
            return
        kept = self.kept[data.draw(st.sampled_from(sorted(self.kept)))]
        if kept.former:
            return
        try:
            moved = self.run(self.store.transfer(kept.lease, pool, force=force))
        except RateLimited:
            assert not force
            assert self.views() == (accounts, pools)
            return
        assert moved.pool == pool
        kept.lease, kept.pool = moved, pool

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 5.0, 12.0, 31.0]))
    def pass_time(self, seconds: float) -> None:
        self.views()
        self.now_s += seconds
        self.opened.at(self.now_s)
        if seconds >= TERMS.profile.tick_s:
            self.busy = {name: left - 1 for name, left in self.busy.items() if left}

    @rule()
    def renew(self) -> None:
        self.views()
        self.run(self.store.renew())
        if self.opened.takes_up_again:
            for kept in self.late.values():
                self.used[kept.ask.entitlement] -= kept.tokens
            self.kept |= self.late | self.orphaned  # they count where their name leads now
            self.late.clear()
            self.orphaned.clear()
        for kept in self.kept.values():
            if not kept.former:
                kept.expires_s = self.now_s + LEASE_TTL_S

    @precondition(lambda self: self.opened.starts_again)
    @rule()
    def start_again(self) -> None:
        """Its requests have ended with it, for all that the next process knows."""
        before = self.views()
        for kept in self.kept.values():
            kept.former = True
        self.run(self.opened.start_again(self.terms, list(self.entitlements.values())))
        self.store = self.opened.store
        self.store.on_evict(self.evicted.append)
        accounts, pools = self.views()
        for name, account in accounts.items():
            was = before[0][name]
            assert account.level_tokens <= was.level_tokens + 1e-6, name
            assert (account.debited, account.used) == (was.debited, was.used), name
        assert [(p.inflight, p.kv_bytes) for p in pools] == [
            (p.inflight, p.kv_bytes) for p in before[1]
        ]

    @rule(short=st.integers(0, 8), long=st.integers(0, 6))
    def change_capacity(self, short: int, long: int) -> None:
        self.views()
        self.apply_capacity((short, long))

    @rule(name=st.sampled_from(NAMES), suspended=st.booleans(), kv=st.sampled_from([0, 2000]))
    def change_terms(self, name: str, suspended: bool, kv: int) -> None:
        self.views()
        changed = msgspec.structs.replace(self.entitlements[name], suspended=suspended, kv_bytes=kv)
        self.entitlements[name] = changed
        self.run(self.store.define(changed))

    @rule(name=st.sampled_from(NAMES), after_s=st.sampled_from([0.0, 0.0, 1.0, -1.0]))
    def change_expiry(self, name: str, after_s: float) -> None:
        """It ends now or soon, or (0) no longer."""
        self.views()
        expires_s = self.now_s + after_s if after_s else 0.0
        changed = msgspec.structs.replace(self.entitlements[name], expires_unix_s=expires_s)
        self.entitlements[name] = changed
        self.run(self.store.define(changed))

    @rule(name=st.sampled_from(NAMES))
    def make_anew(self, name: str) -> None:
        """Delete an entitlement, and make another of its name."""
        accounts, _ = self.views()
        idle = not sum(accounts[name].inflight)
        assert self.run(self.store.remove("m", name)) == idle
        if not idle:
            return
        created = max(e.created for e in self.entitlements.values()) + 1
        terms = self.entitlements[name]
        again = msgspec.structs.replace(terms, created=created, suspended=False, expires_unix_s=0.0)
        self.entitlements[name] = again
        self.run(self.store.define(again))
        self.used[name], self.debts[name] = 0, 0.0
        self.orphaned |= {i: k for i, k in self.late.items() if k.ask.entitlement == name}
        self.late = {i: k for i, k in self.late.items() if i not in self.orphaned}
        if name in METERED:
            self.meters[name] = Meter(self.now_s)
        self.apply_capacity(self.terms.slots)

    @rule(data=st.data(), crowding=st.sampled_from(["p", "p", "s", "loose"]))
    def reclaim(self, data: st.DataObject, crowding: str) -> None:
        self.crowd(crowding, 8, 10)
        self.crowd("g", 2, 10)
        before = self.views()
        protected = [
            name
            for name, kept in sorted(self.kept.items())
            if kept.lease.protected and not kept.former
        ]
        if not protected:
            return
        kept = self.kept[data.draw(st.sampled_from(protected))]
        self.evicted.clear()
        self.run(self.store.reclaim(kept.lease))
        self.run(self.opened.quiet())
        self.run(self.store.tick())
        for lease_id in list(self.evicted):
            victim = self.kept[lease_id]
            assert victim.pool == kept.pool
            assert self.class_of(victim.ask.entitlement) == "preemptible"
        assert self.views() == before

    # -- what must hold of a decision

    def check_granted(self, ask: AdmissionRequest, lease: Lease) -> None:
        accounts, pools = self.views()
        account, terms = accounts[ask.entitlement], self.entitlements[ask.entitlement]
        assert not terms.suspended
        assert not 0 < terms.expires_unix_s <= self.now_s
        assert lease.pool in (ask.pool, *ask.alternates)
        assert lease.spilled == (lease.pool != ask.pool)
        total = sum(account.inflight)
        if terms.service_class == "guaranteed":
            assert total <= sum(terms.baseline)
        else:
            # Without any worker C is no limit: binding says that nobody is there.
            assert total <= (terms.limit or sum(self.terms.slots) or total)
        pool, slots = pools[lease.pool], self.terms.slots[lease.pool]
        if lease.spilled:
            assert not lease.protected
            assert lease.weight <= 1
            lower = self.lower(lease.pool)
            reserves = terms.service_class in RESERVING and lower > 0
            assert pool.inflight - (lower if reserves else 0) <= slots - (
                0 if reserves else self.terms.headroom
            )
        elif not lease.protected and slots:
            assert pool.inflight <= slots + overshoot(slots)
            assert pool.kv_bytes <= pool.kv_capacity_bytes * 9 / 8 or not ask.kv_bytes
        if lease.protected:
            assert self.own(ask.entitlement, lease.pool) <= terms.baseline_of(lease.pool)

    def check_refused(
        self, ask: AdmissionRequest, refusal: Refusal, account: AccountView, pools: list[PoolView]
    ) -> None:
        terms, pool = self.entitlements[ask.entitlement], pools[ask.pool]
        if isinstance(refusal, RateLimited | Unavailable):
            assert refusal.retry_after_s is not None
            assert 1 <= refusal.retry_after_s <= 60
        most_kv = kv_limit(terms)
        rate = terms.tokens_per_s
        misfit = (
            (rate and ask.estimate_tokens > account.depth_tokens)
            or (most_kv and ask.kv_bytes > most_kv)
            or ask.kv_bytes > max(pools[p].kv_capacity_bytes for p in (ask.pool, *ask.alternates))
        )
        if misfit:
            assert refusal.status != 429
        if terms.suspended or 0 < terms.expires_unix_s <= self.now_s:
            assert refusal.status == 403
        if refusal.reason in (*FOR_THE_POOL_S_SAKE, "entitlement_degraded", "entitlement_pending"):
            self.check_nobody_lower_is_served_instead(ask, refusal.reason, account, pools)
        if refusal.status == 429 and refusal.reason in FOR_THE_POOL_S_SAKE:
            own_kv = refusal.reason == "kv" and 0 < most_kv < account.kv_bytes + ask.kv_bytes
            self.check_refused_for_the_pool(ask, account, pool, own_kv)

    def check_nobody_lower_is_served_instead(
        self, ask: AdmissionRequest, reason: str, account: AccountView, pools: list[PoolView]
    ) -> None:
        terms, n = self.entitlements[ask.entitlement], ask.sequences
        most_kv = kv_limit(terms)
        if reason == "kv" and 0 < most_kv < account.kv_bytes + ask.kv_bytes:
            return
        within = self.own(terms.name, ask.pool) + n <= terms.baseline_of(ask.pool)
        if terms.service_class not in RESERVING or not within:
            return
        assert reason not in FOR_THE_POOL_S_SAKE
        assert ask.pool not in self.holding(terms)
        for index in (ask.pool, *ask.alternates):
            pool, lower = pools[index], self.lower(index)
            kept_idle = pool.idle_dedicated
            if terms.service_class == "dedicated" and index in self.holding(terms):
                kept_idle -= max(0, terms.baseline_of(index) - account.inflight[index])
            taken = pool.inflight + kept_idle - lower
            assert not lower or taken + n > pool.slots

    def holding(self, terms: Entitlement) -> list[int]:
        """Pools that hold the entitlement's reserve today."""
        return [p for p, until in enumerate(self.terms.bound_until) if terms.created <= until]

    def own(self, name: str, pool: int) -> int:
        """Sequences in flight in a pool that were meant for it."""
        kept = [k for k in self.kept.values() if k.ask.entitlement == name and k.pool == pool]
        return sum(k.ask.sequences for k in kept if not k.spilled)

    def lower(self, pool: int) -> int:
        """Sequences in flight of classes that reserve nothing."""
        kept = [k for k in self.kept.values() if k.pool == pool]
        return sum(
            k.ask.sequences for k in kept if self.class_of(k.ask.entitlement) not in RESERVING
        )

    def check_refused_for_the_pool(
        self, ask: AdmissionRequest, account: AccountView, pool: PoolView, own_kv: bool
    ) -> None:
        if own_kv:
            return
        taken = pool.inflight + pool.idle_dedicated + ask.sequences
        kv_full = pool.kv_bytes + ask.kv_bytes > pool.kv_capacity_bytes
        assert taken > pool.slots - self.terms.headroom or kv_full

    # -- what must always hold

    @invariant()
    def counters_are_sums_over_the_leases(self) -> None:
        accounts, pools = self.views()
        for index, pool in enumerate(pools):
            here = [k for k in self.kept.values() if k.pool == index]
            assert pool.inflight == sum(k.ask.sequences for k in here)
            assert pool.inflight == sum(a.inflight[index] for a in accounts.values())
            assert pool.kv_bytes == sum(k.kv_bytes for k in here)
            assert pool.idle_dedicated >= 0
        for name, account in accounts.items():
            own = [k for k in self.kept.values() if k.ask.entitlement == name]
            assert account.kv_bytes == sum(k.kv_bytes for k in own)
            assert account.used == self.used[name]
            reserved = sum(k.tokens for k in own)
            assert account.debited - account.refunded == account.used + reserved

    @invariant()
    def debts_and_weights_keep_their_order(self) -> None:
        accounts, _ = self.views()
        for name, account in accounts.items():
            elastic = self.class_of(name) == "elastic"
            assert -0.2 <= account.debt <= 1 if elastic else account.debt == 0
            if name not in self.busy:
                assert account.debt <= max(0.0, self.debts[name]) + 1e-9
            self.debts[name] = account.debt
        for one, other in itertools.permutations(accounts.values(), 2):
            mine, theirs = self.class_of(one.name), self.class_of(other.name)
            if RANK[mine] > RANK[theirs]:
                assert one.weight > other.weight
            tighter = 0 < self.entitlements[one.name].slo_ms < self.entitlements[other.name].slo_ms
            if mine == theirs and tighter and one.debt >= other.debt and one.burst <= other.burst:
                assert one.weight >= other.weight

    def teardown(self) -> None:
        try:
            self.now_s += LEASE_TTL_S + 1
            self.opened.at(self.now_s)
            accounts, pools = self.views()
            assert not self.kept
            assert [(pool.inflight, pool.kv_bytes) for pool in pools] == [(0, 0)] * 2
            assert all(a.debited - a.refunded == a.used for a in accounts.values())
        finally:
            self.run(self.opened.close())
            self.runner.close()

    # -- parts

    def class_of(self, name: str) -> str:
        return self.entitlements[name].service_class

    def paid(self, name: str, tokens: int) -> None:
        if name in METERED:
            self.meters[name].take(tokens, self.now_s, METERED[name])

    def post(self, kept: OpenLease, share: float | None) -> None:
        usage = None
        self.paid(kept.ask.entitlement, int(kept.tokens * (share or 0.0)) - kept.tokens)
        if share is not None:
            usage = Usage(prompt_tokens=int(kept.tokens * share), completion_tokens=0)
            self.used[kept.ask.entitlement] += usage.prompt_tokens
        self.store.settle(kept.lease, Settlement(usage=usage, dispatched=usage is not None))

    def apply_capacity(self, slots: tuple[int, ...]) -> None:
        """As the keeper does: survey, then publish."""
        capacity = Capacity(slots=slots, kv_bytes=TERMS.kv_bytes, tokens_per_s=TERMS.tokens_per_s)
        (*_, state) = assess_capacity(self.entitlements.values(), capacity, self.now_s)
        assert state is not None
        self.terms = msgspec.structs.replace(TERMS, slots=slots, bound_until=state.bound_until)
        self.run(self.store.change("m", self.terms))


def test_any_history_keeps_the_invariants(opener: Opener, request: pytest.FixtureRequest) -> None:
    class Machine(PoolMachine):
        pass

    Machine.opener = staticmethod(opener)

    name = request.node.callspec.params["opener"]
    run_state_machine_as_test(Machine, settings=LIMITS[name])


def test_requests_that_outlive_their_entitlement_count_in_the_next_of_its_name(
    opener: Opener,
) -> None:
    class Machine(PoolMachine):
        pass

    Machine.opener = staticmethod(opener)
    machine = Machine()
    machine.admit("slots", 0, False, 2, 10, 10)
    machine.pass_time(31.0)
    machine.make_anew("slots")
    machine.renew()
    machine.counters_are_sums_over_the_leases()
    assert bool(machine.kept) == machine.opened.takes_up_again
    for lease_id in list(machine.kept):
        machine.gone[lease_id] = kept = machine.kept.pop(lease_id)
        machine.post(kept, 1.0)
    machine.counters_are_sums_over_the_leases()
    machine.teardown()


def ask_of(name: str, number: int) -> AdmissionRequest:
    return AdmissionRequest(
        lease_id=f"{name}{number}",
        model="m",
        entitlement=name,
        pool=0,
        alternates=(),
        estimate_tokens=20,
        sequences=1,
    )


async def admitted(store: LeaseStore, ask: AdmissionRequest) -> Lease | None:
    try:
        return await store.admit(ask)
    except Refusal:
        return None


USED = Settlement(usage=Usage(prompt_tokens=20, completion_tokens=0), dispatched=True)


@pytest.mark.parametrize(
    "owed",
    [{"baseline": (4, 0), "tokens_per_s": 9.0}, {"baseline": (2, 0)}],
    ids=["tokens", "slots"],
)
async def test_under_constant_overload_everybody_with_a_baseline_gets_in(
    opener: Opener, owed: dict[str, Any]
) -> None:
    """The loose SLO always asks last, and yet is served in every few ticks."""
    opened = await opener(
        msgspec.structs.replace(TERMS, slots=(4, 4), tokens_per_s=0.0),
        [
            entitled("tight", slo_ms=100, limit=20, created=1, **owed),
            entitled("loose", slo_ms=5000, limit=20, created=2, **owed),
        ],
    )
    store, running, now_s = opened.store, list[Lease](), NOW_S
    served: list[tuple[float, str]] = []
    for number in range(400):  # a fifth of a second each
        now_s += 0.2
        opened.at(now_s)
        await store.tick()
        if number % 5 == 0 and running:
            store.settle(running.pop(0), USED)
            await opened.quiet()
        for who in ("tight", "loose"):
            lease = await admitted(store, ask_of(who, number))
            if lease is not None:
                running.append(lease)
                served.append((now_s, who))
        if number % 20 == 0:
            await store.renew()
    await opened.close()
    for who in ("tight", "loose"):
        times = [NOW_S, *(at_s for at_s, name in served if name == who), now_s]
        longest_s = max(b - a for a, b in itertools.pairwise(times))
        assert longest_s <= 6 * TERMS.profile.tick_s, who


async def test_any_interleaving_of_requests_equals_a_serial_order(opener: Opener) -> None:
    """Of many that come at once exactly as many enter as one after the other would."""
    counts = []
    for at_once in (True, False):
        opened = await opener(TERMS, ENTITLEMENTS)
        store = opened.store
        asks = [ask_of(who, number) for number in range(12) for who in ("g", "loose", "s")]
        calls: list[Coroutine[Any, Any, Lease | None]] = [admitted(store, ask) for ask in asks]
        if at_once:
            found = await asyncio.gather(*calls, store.tick(), store.renew())
        else:
            found = [await call for call in calls]
        leases = [lease for lease in found if lease is not None]
        (pool, _) = await store.pools("m")
        assert pool.inflight == len(leases) <= TERMS.slots[0] + overshoot(TERMS.slots[0]) + 2
        held = await store.view("m", NAMES)
        assert sum(sum(view.inflight) for view in held) == len(leases)
        counts.append(sum(lease.entitlement == "g" for lease in leases))
        for lease in leases:
            store.settle(lease, USED)
        await opened.quiet()
        assert [pool.inflight for pool in await store.pools("m")] == [0, 0]
        assert sum(view.used for view in await store.view("m", NAMES)) == 20 * len(leases)
        await opened.close()
    assert counts == [2, 2]
