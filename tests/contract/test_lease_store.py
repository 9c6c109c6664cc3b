"""The lease store's contract: one suite for every store.

Invariants: a pool's in-flight is the sum of its leases' sequences and never negative; admit,
transfer and settle are idempotent by lease id; nothing is left when all are settled.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
    run_state_machine_as_test,
)

from bench.common.fleet import RedisServer
from gateway.admission.terms import Denial, Terms
from gateway.admission.token_pool import TokenPool
from gateway.errors import RateLimited, Refusal
from gateway.fleet.model_runtime import ModelRuntime
from gateway.ports import LeaseStore, Settlement
from gateway.records.attempt import Usage
from gateway.records.entitlement import Entitlement
from gateway.records.lease import Lease
from gateway.records.limit import Limit
from gateway.store.memory_leases import MemoryLeases
from gateway.store.redis.leases import RedisLeases
from gateway.store.sqlite_leases import SqliteLeases
from tests.builders import LONG, SHORT, ask, routing, served_model
from tests.fakes import FakeClock, FakeStore

USED = Settlement(usage=Usage(prompt_tokens=1, completion_tokens=1), dispatched=True)
REFUND = Settlement(usage=None, dispatched=False)


class Opened(Protocol):
    """A store under test, and how to look inside."""

    @property
    def store(self) -> LeaseStore:
        """The port."""

    def inflight(self, pool: int) -> int:
        """Sequences that hold a lease in the pool."""

    def active(self) -> int:
        """Leases in force."""


class OpenedMemory:
    def __init__(self, served: ModelRuntime) -> None:
        self.served = served
        self.store = MemoryLeases({"m": served}, FakeClock())

    def inflight(self, pool: int) -> int:
        return self.served.fleet.pools[pool].inflight

    def active(self) -> int:
        return self.store.active


class OpenedFake:
    def __init__(self, served: ModelRuntime) -> None:
        self.store = FakeStore()

    def inflight(self, pool: int) -> int:
        return self.store.inflight(pool)

    def active(self) -> int:
        return self.store.active


class OpenedRedis:
    """A managed model with room for everything: what is refused is the differential's subject."""

    def __init__(self, url: str, served: ModelRuntime) -> None:
        self.served = served
        token_pool = TokenPool(Terms(slots=(99, 99)))
        token_pool.define(Entitlement(name="open", model="m"))
        self.store = RedisLeases(
            url,
            {"m": served},
            {"m": token_pool},
            FakeClock(),
            local=MemoryLeases({"m": served}, FakeClock()),
            fail_mode="closed",
            owner="o",
        )

    def inflight(self, pool: int) -> int:
        return self.served.fleet.pools[pool].inflight

    def active(self) -> int:
        return self.store.active


STORES: dict[str, Callable[[ModelRuntime], Opened]] = {"memory": OpenedMemory, "fake": OpenedFake}
ENFORCING = {k: v for k, v in STORES.items() if k != "fake"}
"""Stores that decide on spillover themselves."""


def small_fleet() -> ModelRuntime:
    """Two pools of one worker with two slots; one may wait."""
    return served_model(workers=(1, 1), slots=2, spill_queue=1)


@pytest.fixture(params=[*STORES, pytest.param("redis", marks=pytest.mark.redis)])
async def opened(request: pytest.FixtureRequest) -> AsyncIterator[Opened]:
    if request.param != "redis":
        yield STORES[request.param](small_fleet())
        return
    server: RedisServer = request.getfixturevalue("redis_server")
    on_redis = OpenedRedis(server.url, small_fleet())
    await on_redis.store.start()
    yield on_redis
    await on_redis.store.close()


@pytest.fixture(params=[*ENFORCING])
def enforcing(request: pytest.FixtureRequest) -> Opened:
    return ENFORCING[request.param](small_fleet())


async def test_a_lease_repeats_what_was_asked(opened: Opened) -> None:
    lease = await opened.store.admit(ask("a", pool=LONG, sequences=3, cost_tokens=77))
    assert (lease.id, lease.model, lease.entitlement) == ("a", "m", "open")
    assert (lease.pool, lease.sequences, lease.cost_tokens, lease.spilled) == (LONG, 3, 77, False)


async def test_admitting_twice_gives_the_same_lease_and_counts_once(opened: Opened) -> None:
    first = await opened.store.admit(ask("a", sequences=2))
    assert await opened.store.admit(ask("a", pool=LONG, sequences=5)) == first
    assert (opened.inflight(SHORT), opened.inflight(LONG)) == (2, 0)


@pytest.mark.parametrize(
    "opened", ["memory", pytest.param("redis", marks=pytest.mark.redis)], indirect=True
)
async def test_a_lease_counts_in_the_pools_of_the_model_that_it_was_planned_for(
    opened: Opened,
) -> None:
    planned = small_fleet()  # which a reload has replaced since, by another order of pools
    short, long = planned.fleet.pools
    asked = msgspec.structs.replace(ask("a", sequences=2), pools=planned.fleet.pools)
    lease = await opened.store.admit(asked)
    assert (short.inflight, long.inflight) == (2, 0)
    lease = await opened.store.transfer(lease, LONG)
    assert (short.inflight, long.inflight) == (0, 2)
    opened.store.settle(lease, USED)
    assert (short.inflight, long.inflight) == (0, 0)
    assert (opened.inflight(SHORT), opened.inflight(LONG)) == (0, 0)


async def test_settling_releases_the_place(opened: Opened) -> None:
    opened.store.settle(await opened.store.admit(ask("a", sequences=2)), USED)
    assert (opened.active(), opened.inflight(SHORT)) == (0, 0)


async def test_settling_twice_releases_once(opened: Opened) -> None:
    lease = await opened.store.admit(ask("a"))
    await opened.store.admit(ask("b"))
    opened.store.settle(lease, USED)
    opened.store.settle(lease, REFUND)
    assert (opened.active(), opened.inflight(SHORT)) == (1, 1)


async def test_a_transfer_moves_the_place(opened: Opened) -> None:
    lease = await opened.store.admit(ask("a", sequences=2))
    moved = await opened.store.transfer(lease, LONG)
    assert (moved.pool, moved.spilled) == (LONG, False)
    assert (opened.inflight(SHORT), opened.inflight(LONG)) == (0, 2)


async def test_transferring_twice_moves_once(opened: Opened) -> None:
    lease = await opened.store.admit(ask("a"))
    await opened.store.transfer(lease, LONG)
    await opened.store.transfer(lease, LONG)
    assert (opened.inflight(SHORT), opened.inflight(LONG)) == (0, 1)


async def test_the_lease_as_it_was_before_a_transfer_settles_it_all_the_same(
    opened: Opened,
) -> None:
    """A request that is cancelled within the transfer holds the old record."""
    lease = await opened.store.admit(ask("a"))
    await opened.store.transfer(lease, LONG)
    opened.store.settle(lease, USED)
    assert (opened.active(), opened.inflight(SHORT), opened.inflight(LONG)) == (0, 0, 0)


async def test_a_settled_lease_cannot_be_moved(opened: Opened) -> None:
    lease = await opened.store.admit(ask("a"))
    opened.store.settle(lease, USED)
    await opened.store.transfer(lease, LONG)
    assert (opened.active(), opened.inflight(LONG)) == (0, 0)


async def test_an_id_may_come_again_once_it_is_settled(opened: Opened) -> None:
    opened.store.settle(await opened.store.admit(ask("a")), USED)
    assert (await opened.store.admit(ask("a", pool=LONG))).pool == LONG


async def test_a_pool_with_room_does_not_spill(enforcing: Opened) -> None:
    leases = [await enforcing.store.admit(ask(f"{n}", alternates=(LONG,))) for n in range(3)]
    assert [(lease.pool, lease.spilled) for lease in leases] == [(SHORT, False)] * 3


async def test_an_overloaded_pool_spills_to_the_alternate(enforcing: Opened) -> None:
    for n in range(3):
        await enforcing.store.admit(ask(f"{n}"))
    lease = await enforcing.store.admit(ask("x", alternates=(LONG,)))
    assert (lease.pool, lease.spilled) == (LONG, True)


async def test_without_an_alternate_it_stays(enforcing: Opened) -> None:
    leases = [await enforcing.store.admit(ask(f"{n}")) for n in range(5)]
    assert [lease.pool for lease in leases] == [SHORT] * 5


async def test_when_all_are_overloaded_it_stays(enforcing: Opened) -> None:
    for n in range(3):
        await enforcing.store.admit(ask(f"s{n}"))
        await enforcing.store.admit(ask(f"l{n}", pool=LONG))
    lease = await enforcing.store.admit(ask("x", alternates=(LONG,)))
    assert (lease.pool, lease.spilled) == (SHORT, False)


async def test_the_first_alternate_with_room_takes_it() -> None:
    table = routing(("s", 4096, 2048), ("m", 8192, 4096), ("l", 65536, None))
    for opener in ENFORCING.values():
        opened = opener(served_model(table=table, workers=(1, 1, 1), slots=1, spill_queue=0))
        await opened.store.admit(ask("s", pool=0))
        await opened.store.admit(ask("m", pool=1))
        assert (await opened.store.admit(ask("x", pool=0, alternates=(1, 2)))).pool == 2


async def test_settling_makes_room_again(enforcing: Opened) -> None:
    leases = [await enforcing.store.admit(ask(f"{n}")) for n in range(3)]
    enforcing.store.settle(leases[0], USED)
    assert not (await enforcing.store.admit(ask("x", alternates=(LONG,)))).spilled


class LeaseMachine(RuleBasedStateMachine):
    """Any order of admit, transfer and settle, repeated ones too, against a plain model."""

    opener: Callable[[ModelRuntime], Opened]
    leases: Bundle[Lease] = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.opened = self.open()
        self.held: dict[str, Lease] = {}

    def open(self) -> Opened:
        return type(self).opener(small_fleet())

    def close(self) -> None:
        """Let go of the store."""

    def run(self, call: Coroutine[Any, Any, Lease]) -> Lease:
        return self.runner.run(call)

    @rule(
        target=leases,
        name=st.sampled_from("abcdef"),
        pool=st.sampled_from([SHORT, LONG]),
        alternates=st.sampled_from([(), (SHORT,), (LONG,)]),
        sequences=st.integers(1, 4),
    )
    def admit(self, name: str, pool: int, alternates: tuple[int, ...], sequences: int) -> Lease:
        lease = self.run(
            self.opened.store.admit(
                ask(name, pool=pool, alternates=alternates, sequences=sequences)
            )
        )
        if name in self.held:
            assert lease == self.held[name]
        else:
            assert lease.pool in (pool, *alternates)
            assert lease.spilled == (lease.pool != pool)
        self.held[name] = lease
        return lease

    @rule(target=leases, lease=leases, pool=st.sampled_from([SHORT, LONG]))
    def transfer(self, lease: Lease, pool: int) -> Lease:
        held = self.held.get(lease.id)
        moved = self.run(self.opened.store.transfer(lease, pool))
        if held is not None and held.pool != pool:
            assert moved.pool == pool
            assert moved.sequences == held.sequences
            self.held[lease.id] = moved
        return moved

    @rule(lease=leases, settlement=st.sampled_from([USED, REFUND]))
    def settle(self, lease: Lease, settlement: Settlement) -> None:
        self.opened.store.settle(lease, settlement)
        self.held.pop(lease.id, None)

    @rule(lease=consumes(leases))
    def settle_three_times(self, lease: Lease) -> None:
        for _ in range(3):
            self.settle(lease, USED)

    @invariant()
    def inflight_is_the_sum_of_the_leases(self) -> None:
        for pool in (SHORT, LONG):
            expected = sum(lease.sequences for lease in self.held.values() if lease.pool == pool)
            assert self.opened.inflight(pool) == expected
        assert self.opened.active() == len(self.held)

    def teardown(self) -> None:
        for lease in list(self.held.values()):
            self.settle(lease, REFUND)
        left = (self.opened.inflight(SHORT), self.opened.inflight(LONG), self.opened.active())
        self.close()
        self.runner.close()
        assert left == (0, 0, 0)


@pytest.mark.parametrize("name", STORES)
def test_any_history_keeps_the_invariants(name: str) -> None:
    class Machine(LeaseMachine):
        opener = staticmethod(STORES[name])

    limits = settings(max_examples=60, stateful_step_count=30, deadline=None)
    run_state_machine_as_test(Machine, settings=limits)


# -- quotes


PER_MINUTE = Limit(
    id="key:t/k:requests", scope="key", name="t/k", unit="requests", amount=9, window="minute"
)
BUDGET = Limit(id="key:t/k:day", scope="key", name="t/k", unit="tokens", amount=1500, window="day")
ENTITLED = (
    Entitlement(name="a", model="m", service_class="guaranteed", baseline=(2, 1)),
    Entitlement(name="b", model="m", service_class="elastic", tokens_per_s=40.0),
    Entitlement(name="c", model="m", service_class="spot"),
)


class Managed:
    """One managed model in a store of this kind, whose time stands still."""

    def __init__(self, kind: str, url: str, folder: Path) -> None:
        self.served, self.clock = served_model(workers=(1, 1), slots=4, spill_queue=1), FakeClock()
        self.token_pool = TokenPool(Terms(slots=(4, 4), kv_bytes=(9_000, 9_000)))
        for entitlement in ENTITLED:
            self.token_pool.define(entitlement)
        models, pools = {"m": self.served}, {"m": self.token_pool}
        common: Any = {"jitter": lambda: 0.0, "wall_clock": lambda: 1e9}
        memory = MemoryLeases(models, self.clock, {} if kind == "redis" else pools, **common)
        self.store: MemoryLeases | RedisLeases = memory
        self.file: SqliteLeases | None = None
        if kind == "redis":
            self.store = RedisLeases(
                *(url, models, pools, self.clock),
                local=memory,
                fail_mode="closed",
                owner="o",
                script_clock=lambda: 1e9 + self.clock(),
                **common,
            )
        elif kind == "sqlite":
            self.file = SqliteLeases(folder / "state.db", pools, memory.limits)

    async def seen(self) -> tuple[Any, ...]:
        """All that the store tells of the model and the limits; what a file would be told."""
        names = [entitlement.name for entitlement in ENTITLED]
        views = await self.store.view("m", names), await self.store.pools("m")
        return *views, await self.store.levels([BUDGET]), self.store.active


@pytest.mark.parametrize(
    "kind", ["memory", "sqlite", pytest.param("redis", marks=pytest.mark.redis)]
)
async def test_a_quote_changes_nothing_and_says_what_admission_says(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url = request.getfixturevalue("redis_server").url if kind == "redis" else ""
    managed = Managed(kind, url, tmp_path)
    store = managed.store
    said: set[str] = set()
    await store.start()
    if managed.file is not None:
        await managed.file.start()
    asks = [
        msgspec.structs.replace(
            ask(f"{name}{number}", pool=pool, cost_tokens=tokens, sequences=sequences),
            entitlement=name,
            kv_bytes=4 * tokens,
            limits=(BUDGET,) if name == "c" else (),
            alternates=(1 - pool,),
        )
        for number, (pool, tokens, sequences) in enumerate(
            [(SHORT, 90, 1), (LONG, 300, 1), (SHORT, 350, 2), (LONG, 900, 1), (SHORT, 2000, 1)]
        )
        for name in ("c", "b", "a")
    ]
    for asked in asks:
        before = await managed.seen()
        quotes = [await store.quote(asked, ()) for _ in range(3)]
        assert quotes == [quotes[0]] * 3
        assert await managed.seen() == before
        quoted = quotes[0]
        if isinstance(quoted, Denial):
            with pytest.raises(Refusal) as refused:
                await store.admit(asked)
            assert refused.value.reason == quoted.reason
            said.add(quoted.reason)
        else:
            lease = await store.admit(asked)
            assert (lease.pool, lease.spilled) == (quoted.pool, quoted.spilled)
            assert (lease.weight, lease.contended) == (quoted.weight, quoted.contended)
            said.add("spilled" if lease.spilled else "taken")
    assert said >= {"taken", "concurrency", "priority", "exceeds_entitlement"}
    # It counts as a request, and nothing else of it does.
    for left in range(PER_MINUTE.amount, 0, -1):
        quoted = await store.quote(
            msgspec.structs.replace(asks[0], lease_id=f"q{left}", limits=(PER_MINUTE,)),
            (PER_MINUTE,),
        )
        over = isinstance(quoted, Denial) and quoted.reason == "key_requests"
        assert over == (left == 1)
    before = await managed.seen()
    with pytest.raises(RateLimited) as itself:
        await store.quote(asks[0], (PER_MINUTE,))
    assert itself.value.reason == "key_requests"
    assert await managed.seen() == before
    assert (await store.levels([PER_MINUTE]))[0].used == PER_MINUTE.amount
    if managed.file is not None:
        await managed.file.close()
    await store.close()
