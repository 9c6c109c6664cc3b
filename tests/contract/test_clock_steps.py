"""No step of any clock admits beyond a limit or refuses for longer than the true wait.

The embedded store is told by a monotonic clock what has passed, Redis by its own clock, which
may be set or be another server's after a failover, and by what its replicas say has passed.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from bench.common.fleet import RedisServer
from gateway.admission.terms import AdmissionRequest, Terms
from gateway.admission.token_pool import LEASE_TTL_S, TokenPool
from gateway.errors import RateLimited
from gateway.ports import Settlement
from gateway.records.attempt import Usage
from gateway.records.lease import Lease
from gateway.records.limit import Limit
from gateway.store.memory_leases import MemoryLeases
from gateway.store.redis import scripts
from gateway.store.redis.leases import RedisLeases
from gateway.store.sqlite_leases import SqliteLeases
from tests.builders import served_model
from tests.fakes import FakeClock
from tests.token_pools import NOW_S, entitled

SLOTS = 4
RATE = 100.0
TICK_EVERY_S = 0.25
"""As the keeper does."""
STEPS = [-3600.0, -31.0, -1.0, 1.0, 31.0, 3600.0]
TERMS = Terms(slots=(SLOTS, SLOTS), largest_tokens=1000, headroom=0)
TENANT = entitled("e", tokens_per_s=RATE, tokens_per_s_limit=RATE, limit=SLOTS)


class Embedded:
    """In this process."""

    def __init__(self, wrong_s: float = 0.0) -> None:
        """`wrong_s`: of the machine's clock, to begin with."""
        self.true, self.machine = FakeClock(50.0), FakeClock(NOW_S + wrong_s)
        token_pool = TokenPool(TERMS)
        token_pool.define(TENANT)
        self.store = MemoryLeases(
            {"m": served_model()},
            self.true,
            {"m": token_pool},
            wall_clock=self.machine,
        )


class OnRedis:
    """In a server whose clock may be set."""

    def __init__(self, url: str, ahead_s: float = 0.0, wrong_s: float = 0.0) -> None:
        """`ahead_s`: of the gateway's clock before the server's."""
        self.true, self.machine = FakeClock(50.0), FakeClock(NOW_S + wrong_s)
        token_pool = TokenPool(TERMS)
        token_pool.define(TENANT)
        served = {name: served_model(name=name) for name in "mn"}
        self.store = RedisLeases(
            url,
            served,
            {"m": token_pool},
            self.true,
            local=MemoryLeases(served, self.true),
            fail_mode="closed",
            owner="o",
            wall_clock=lambda: self.machine() + ahead_s,
            jitter=lambda: 0.0,
            script_clock=self.machine,
        )


Store = Embedded | OnRedis
"""`true` is what has really passed, `machine` what the machine's clock shows."""


@pytest.fixture(autouse=True)
def _settable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts read a clock that tests set where they would read the server's."""
    monkeypatch.setattr(scripts, "_SERVER_CLOCK", "local t = call('TIME')")
    monkeypatch.setattr(scripts, "_TEST_CLOCK", "local t = {ARGV[#ARGV], 0}")


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.redis)])
async def opened(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    if request.param == "memory":
        yield Embedded()
        return
    server: RedisServer = request.getfixturevalue("redis_server")
    found = OnRedis(server.url)
    await found.store.start()
    await found.store.tick()
    yield found
    await found.store.close()


async def passes(opened: Store, seconds: float, *, renewed: bool = False) -> None:
    """Time goes by, and the keeper does what it does."""
    steps = round(seconds / TICK_EVERY_S)
    for step in range(steps):
        opened.true.advance(TICK_EVERY_S)
        opened.machine.advance(TICK_EVERY_S)
        await opened.store.tick()
        if renewed and step % 40 == 0:
            await opened.store.renew()


def ask(
    lease_id: str, tokens: int = 100, model: str = "m", limits: tuple[Limit, ...] = ()
) -> AdmissionRequest:
    return AdmissionRequest(
        lease_id=lease_id,
        model=model,
        entitlement="e",
        limits=limits,
        pool=0,
        alternates=(),
        estimate_tokens=tokens,
        sequences=1,
    )


def end(opened: Store, lease: Lease, tokens: int) -> None:
    usage = Usage(prompt_tokens=tokens, completion_tokens=0)
    settled = Settlement(usage=usage, dispatched=True, unix_s=opened.machine())
    opened.store.settle(lease, settled)


async def level(opened: Store) -> float:
    (view,) = await opened.store.view("m", ["e"])
    return view.level_tokens


async def in_flight(opened: Store) -> int:
    return sum(pool.inflight for pool in await opened.store.pools("m"))


@pytest.mark.parametrize("step_s", STEPS)
async def test_a_bucket_fills_by_what_has_passed(opened: Store, step_s: float) -> None:
    end(opened, await opened.store.admit(ask("a", 1000)), 1000)
    with pytest.raises(RateLimited):
        await opened.store.admit(ask("b", 200))
    opened.machine.advance(step_s)
    await passes(opened, 1.0)
    # A server's clock says nothing of the time since the last look: that much may be amiss.
    assert await level(opened) <= RATE * (1.0 + 2.0) + 1
    with pytest.raises(RateLimited):
        await opened.store.admit(ask("c", 500))
    await passes(opened, 4.0)
    end(opened, await opened.store.admit(ask("d", 400)), 400)


@pytest.mark.redis
async def test_a_step_before_the_first_tick_fills_no_bucket(redis_server: RedisServer) -> None:
    opened = OnRedis(redis_server.url)
    await opened.store.start()
    end(opened, await opened.store.admit(ask("a", 1000)), 1000)
    opened.machine.advance(31.0)
    with pytest.raises(RateLimited):
        await opened.store.admit(ask("b", 500))
    await opened.store.close()


@pytest.mark.parametrize("step_s", STEPS)
async def test_what_is_settled_after_a_step_moves_no_time(opened: Store, step_s: float) -> None:
    leases = [await opened.store.admit(ask(f"l{n}", 250)) for n in range(4)]
    opened.machine.advance(step_s)
    await passes(opened, 1.0)
    for lease in leases:
        end(opened, lease, 250)
    assert await level(opened) <= RATE * (1.0 + 2.0) + 1
    await passes(opened, 5.0)
    end(opened, await opened.store.admit(ask("next", 400)), 400)


@pytest.mark.parametrize("step_s", STEPS)
async def test_a_lease_lives_while_it_is_renewed_and_no_longer_than_its_time(
    opened: Store, step_s: float
) -> None:
    for n in range(SLOTS):
        await opened.store.admit(ask(f"l{n}"))
    opened.machine.advance(step_s)
    await passes(opened, LEASE_TTL_S + 10.0, renewed=True)
    assert await in_flight(opened) == SLOTS
    with pytest.raises(RateLimited):
        await opened.store.admit(ask("beyond"))
    opened.machine.advance(step_s)
    await passes(opened, LEASE_TTL_S + 1.0)
    assert await in_flight(opened) == 0


async def test_many_steps_add_up_to_nothing(opened: Store) -> None:
    end(opened, await opened.store.admit(ask("a", 1000)), 1000)
    for step_s in STEPS * 4:
        opened.machine.advance(step_s)
        await passes(opened, 0.25)
    # 6 s have passed, and each step forward is worth 2 s at most.
    assert await level(opened) <= RATE * (6.0 + 12 * 2.0) + 1


HOUR = Limit(id="h", scope="tenant", name="t", unit="tokens", amount=10_000, window="hour")


@pytest.mark.redis
@pytest.mark.parametrize("ahead_s", [-90_000.0, -7_200.0, 7_200.0, 1e8])
@pytest.mark.parametrize("ticked", [False, True])
async def test_a_gateway_whose_clock_is_wrong_turns_no_window(
    redis_server: RedisServer, ahead_s: float, *, ticked: bool
) -> None:
    right, wrong = OnRedis(redis_server.url), OnRedis(redis_server.url, ahead_s)
    for each in (right, wrong):
        await each.store.start()
    await right.store.tick()
    await right.store.admit(ask("a", limits=(HOUR,)))
    if ticked:
        await wrong.store.tick()
    await wrong.store.admit(ask("b", limits=(HOUR,)))
    for each in (right, wrong)[: 1 + ticked]:
        (view,) = await each.store.levels([HOUR])
        assert (view.used, view.resets_unix_s) == (200, NOW_S // 3600 * 3600 + 3600)
    for each in (right, wrong):
        await each.store.close()


@pytest.mark.redis
async def test_a_model_that_is_new_after_a_step_shares_the_time_of_limits(
    redis_server: RedisServer,
) -> None:
    opened = OnRedis(redis_server.url)
    await opened.store.start()
    await opened.store.tick()
    await opened.store.admit(ask("a", limits=(HOUR,)))
    opened.machine.advance(3600.0)
    token_pool = TokenPool(TERMS)
    token_pool.define(msgspec.structs.replace(TENANT, model="n"))
    await opened.store.manage(served_model(name="n"), token_pool)
    opened.store.pending.clear()
    await opened.store.tick()
    await opened.store.admit(ask("b", model="n", limits=(HOUR,)))
    (view,) = await opened.store.levels([HOUR])
    assert view.used == 200
    await opened.store.close()


@pytest.mark.parametrize("step_s", [-3600.0, -31.0])
async def test_a_clock_set_back_between_two_starts_refuses_nobody(
    tmp_path: Path, step_s: float
) -> None:
    machine = FakeClock(NOW_S)
    for turn in range(2):
        token_pool = TokenPool(TERMS)
        token_pool.define(TENANT)
        store = MemoryLeases({"m": served_model()}, machine, {"m": token_pool}, wall_clock=machine)
        kept = SqliteLeases(
            tmp_path / "s.db", {"m": token_pool}, token_pool.limits, wall_clock=machine
        )
        await kept.start()
        if turn == 0:
            usage = Usage(prompt_tokens=900, completion_tokens=0)
            lease = await store.admit(ask("a", 900))
            await store.admit(ask("left", 100))
            store.settle(lease, Settlement(usage=usage, dispatched=True))
        else:
            machine.advance(5.0)
            await store.admit(ask("b", 400))
            machine.advance(LEASE_TTL_S)
            await store.tick()
            assert token_pool.pools[0].inflight == 0
        await kept.close()
        machine.advance(step_s)


MONTH = Limit(
    id="tenant:t:tokens:month",
    scope="tenant",
    name="t",
    unit="tokens",
    amount=9_999,
    window="month",
)
DAYS_S = 200 * 86_400.0


@asynccontextmanager
async def with_budget(redis: RedisServer | None, wrong_s: float = 0.0) -> AsyncIterator[Store]:
    """A store whose machine's clock is wrong to begin with; 70 tokens of a budget are used."""
    if redis is None:
        opened: Store = Embedded(wrong_s)
    else:
        with redis.client() as client:
            client.flushall()
        opened = OnRedis(redis.url, wrong_s=wrong_s)
        await opened.store.start()
    await opened.store.tick()
    end(opened, await opened.store.admit(ask("a", limits=(MONTH,))), 70)
    yield opened
    if isinstance(opened, OnRedis):
        await opened.store.close()


async def counted(opened: Store) -> tuple[int, str]:
    """What a budget counts, and the day when it is next counted from nothing."""
    await opened.store.pools("m")
    (view,) = await opened.store.levels([MONTH])
    return view.used, datetime.fromtimestamp(view.resets_unix_s, UTC).date().isoformat()


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.redis)])
def redis(request: pytest.FixtureRequest) -> RedisServer | None:
    """None for the embedded store."""
    if request.param == "memory":
        return None
    server: RedisServer = request.getfixturevalue("redis_server")
    return server


async def test_a_clock_that_leaps_for_seconds_moves_no_window(redis: RedisServer | None) -> None:
    async with with_budget(redis) as opened:
        opened.machine.advance(DAYS_S)
        await passes(opened, 3.0)
        assert await counted(opened) == (70, "2023-12-01")
        opened.machine.advance(-DAYS_S)
        await passes(opened, 90.0)
        assert await counted(opened) == (70, "2023-12-01")


@pytest.mark.parametrize("wrong_s", [DAYS_S, -DAYS_S])
async def test_a_clock_that_was_wrong_at_the_start_is_followed_once_it_is_right(
    redis: RedisServer | None, wrong_s: float
) -> None:
    async with with_budget(redis, wrong_s) as opened:
        running = await opened.store.admit(ask("b", limits=(MONTH,)))
        opened.machine.advance(-wrong_s)
        await passes(opened, 90.0, renewed=True)
        used, resets = await counted(opened)
        assert resets == "2023-12-01"
        assert used == 100 + (70 if wrong_s > 0 else 0), "a window of the past is over"
        end(opened, running, 50)
        assert (await counted(opened))[0] == (120 if wrong_s > 0 else 0)
