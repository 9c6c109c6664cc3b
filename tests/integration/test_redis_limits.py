"""Limits over all models on a real Redis: two models, two replicas, and a Redis that goes away."""

import asyncio
import contextlib
from pathlib import Path

import msgspec
import pytest

from bench.common.fleet import RedisServer, redis_program
from gateway.admission.terms import Terms
from gateway.errors import RateLimited, Unavailable
from gateway.records.lease import Lease
from gateway.records.limit import Limit
from gateway.store.redis.leases import RedisLeases
from tests.asking import eventually
from tests.fakes import FakeClock
from tests.integration.test_redis_leases import asked, opened, tenant, used
from tests.redis_nodes import RedisCluster
from tests.token_pools import NOW_S

pytestmark = pytest.mark.redis
BUDGET = Limit(
    id="tenant:t:tokens:month",
    scope="tenant",
    name="t",
    unit="tokens",
    amount=10_000,
    window="month",
)
FLIGHT = Limit(id="key:t/k:sequences", scope="key", name="t/k", unit="sequences", amount=8)
WIDE = Terms(slots=(500, 500))


async def take(
    store: RedisLeases, lease_id: str, *limits: Limit, model: str = "m", tokens: int = 100
) -> Lease:
    ask = asked(lease_id, model=model, entitlement=f"e-{model}", tokens=tokens)
    return await store.admit(msgspec.structs.replace(ask, limits=limits))


async def taken(store: RedisLeases, count: int, *limits: Limit, name: str) -> list[Lease]:
    """Those of so many requests that are admitted."""
    asks = [take(store, f"{name}{n}", *limits) for n in range(count)]
    found = await asyncio.gather(*asks, return_exceptions=True)
    refused = [each for each in found if not isinstance(each, Lease)]
    assert all(isinstance(each, RateLimited) for each in refused), refused
    return [each for each in found if isinstance(each, Lease)]


TENANTS = (tenant("e-m"), tenant("e-n", model="n"))


async def test_a_budget_is_one_over_all_models_and_replicas(redis_server: RedisServer) -> None:
    with redis_server.client() as client:
        client.flushall()
    models = ("m", "n")
    async with (
        opened(redis_server.url, *TENANTS, models=models, terms=WIDE, owner="a") as one,
        opened(redis_server.url, *TENANTS, models=models, terms=WIDE, owner="b") as other,
    ):
        leases = []
        for number in range(100):
            store, model = (one, other)[number % 2], models[number // 2 % 2]
            leases.append((store, await take(store, f"l{number}", BUDGET, model=model)))
        for model in models:
            with pytest.raises(RateLimited):
                await take(other, f"x{model}", BUDGET, model=model)
        for store, lease in leases:
            store.settle(lease, used(30, 0))
        for store in (one, other):
            for model in models:
                await store.pools(model)
        (view,) = await one.levels([BUDGET])
        assert (view.used, view.reserved) == (3_000, 0)


async def test_in_a_cluster_a_budget_is_seen_and_raised_where_its_entitlement_counts(
    tmp_path: Path,
) -> None:
    if redis_program() is None:
        pytest.skip("redis-server is not on PATH")
    budgets = [
        msgspec.structs.replace(BUDGET, id=name, scope="entitlement", name=name)
        for name in ("e-n", "e-m")
    ]
    with RedisCluster(tmp_path) as cluster:
        async with opened(cluster.url, *TENANTS, models=("m", "n"), terms=WIDE) as store:
            await take(store, "a", budgets[1], model="m", tokens=10)
            await take(store, "b", budgets[0], model="n", tokens=10_000)
            assert [view.used for view in await store.levels(budgets)] == [10_000, 10]
            with pytest.raises(RateLimited):
                await take(store, "c", budgets[0], model="n")
            await store.add(budgets[0], 100)
            await take(store, "c", budgets[0], model="n")


async def test_without_redis_each_replica_has_its_part_and_redis_learns_of_it(
    own_server: RedisServer,
) -> None:
    async with (
        opened(own_server.url, TENANTS[0], terms=WIDE, owner="a") as one,
        opened(own_server.url, TENANTS[0], terms=WIDE, owner="b") as other,
    ):
        for store in (one, other):
            await store.tick()
        await one.tick()
        assert one.replicas("m") == other.replicas("m") == 2
        for store in (one, other):
            lease = await take(store, f"{store}", BUDGET, FLIGHT, tokens=2_000)
            store.settle(lease, used(2_000, 0))
            await store.pools("m")
        await take(one, "again", BUDGET)  # it hears of the other's
        own_server.hang()
        assert len(await taken(one, 9, FLIGHT, name="f")) == 4, "half of 8"
        alone = await taken(one, 60, BUDGET, name="alone")
        assert len(alone) == 29, "half of 10,000, less half of the 4,100 known"
        own_server.resume()
        await eventually(lambda: one.up and other.up)
        for lease in alone:
            one.settle(lease, used(50, 0))
        await one.pools("m")
        (view,) = await one.levels([BUDGET])
        assert view.used == 4_000 + 100 + 29 * 50
        assert (await one.levels([FLIGHT]))[0].used == 4


@pytest.mark.parametrize("heard", ["by a refusal", "at its start"])
async def test_without_redis_a_used_up_budget_stays_used_up(
    own_server: RedisServer, heard: str
) -> None:
    async with (
        opened(own_server.url, TENANTS[0], terms=WIDE, owner="a") as one,
        opened(own_server.url, TENANTS[0], terms=WIDE, owner="b") as other,
    ):
        other.settle(await take(other, "a", BUDGET, tokens=9_990), used(9_990, 0))
        await other.pools("m")
        if heard == "by a refusal":
            with pytest.raises(RateLimited):
                await take(one, "b", BUDGET)
        else:
            one.know({BUDGET.id: BUDGET})
            await one.tick()
        own_server.hang()
        assert await taken(one, 20, BUDGET, name="alone") == []


async def test_a_redis_that_flaps_gives_no_part_twice(own_server: RedisServer) -> None:
    async with opened(own_server.url, TENANTS[0], terms=WIDE) as store:
        await store.tick()
        store.settle(await take(store, "a", BUDGET, tokens=9_000), used(9_000, 0))
        await store.pools("m")
        admitted = 0
        for turn in range(3):
            own_server.hang()
            leases = await taken(store, 20, BUDGET, name=f"t{turn}.")
            admitted += len(leases)
            own_server.resume()
            await eventually(lambda: store.up)
        assert admitted == 10


async def test_what_a_model_reserved_that_nobody_serves_any_more_comes_back(
    redis_server: RedisServer,
) -> None:
    clock = FakeClock(NOW_S)
    with redis_server.client() as client:
        client.flushall()
    async with opened(redis_server.url, *TENANTS, models=("m", "n"), clock=clock) as killed:
        await killed.tick()
        for number in range(4):
            await take(killed, f"l{number}", FLIGHT, model="n")
    async with opened(redis_server.url, TENANTS[0], terms=WIDE, clock=clock) as store:
        await store.tick()
        await take(store, "own", FLIGHT)
        assert (await store.levels([FLIGHT]))[0].used == 5
        for _ in range(3):
            clock.advance(20.5)
            await store.renew()
            await store.tick()
        assert (await store.levels([FLIGHT]))[0].used == 1
        assert len(await taken(store, 9, FLIGHT, name="f")) == 7


async def test_a_model_that_redis_lost_counts_what_runs_once(redis_server: RedisServer) -> None:
    with redis_server.client() as client:
        client.flushall()
        async with opened(redis_server.url, *TENANTS, models=("m", "n"), terms=WIDE) as store:
            await store.tick()
            lease = await take(store, "a", BUDGET, FLIGHT)
            client.delete(*client.keys("sluice:7:{m}:*"))
            await store.renew()
            await eventually(lambda: store.up)
            await store.tick()
            (budget, flight) = await store.levels([BUDGET, FLIGHT])
            assert (budget.used, budget.reserved, flight.used) == (100, 100, 1)
            store.settle(lease, used(70, 0))
            await store.pools("m")
            (budget, flight) = await store.levels([BUDGET, FLIGHT])
            assert (budget.used, budget.reserved, flight.used) == (70, 0, 0)


async def test_lost_counters_count_what_runs_and_never_less_than_nothing(
    redis_server: RedisServer,
) -> None:
    with redis_server.client() as client:
        client.flushall()
        async with opened(redis_server.url, TENANTS[0], terms=WIDE) as store:
            await store.tick()
            first = await taken(store, 6, BUDGET, FLIGHT, name="a")
            client.delete("sluice:7:limits")
            await store.tick()
            assert len(await taken(store, 9, BUDGET, FLIGHT, name="b")) == 2
            for lease in first:
                store.settle(lease, used(1, 0))
            await store.pools("m")
            (budget, flight) = await store.levels([BUDGET, FLIGHT])
            assert budget.used >= 0
            assert (budget.reserved, flight.used) == (200, 2)
            assert len(await taken(store, 9, FLIGHT, name="c")) == 6


async def test_who_waits_for_a_settlement_waits_no_longer_than_for_redis(
    own_server: RedisServer,
) -> None:
    async with opened(own_server.url, TENANTS[0], terms=WIDE) as store:
        known, lost = [await take(store, name, FLIGHT, BUDGET) for name in ("known", "lost")]
        arrival = store.settle(known, used(30, 0), heard=True)
        assert arrival is not None
        await arrival
        assert (await store.levels([FLIGHT]))[0].used == 1, "it arrived"
        own_server.hang()
        arrival = store.settle(lost, used(40, 0), heard=True)
        assert arrival is not None
        await arrival
        own_server.resume()
        await eventually(lambda: store.up)
        assert [view.used for view in await store.levels([FLIGHT, BUDGET])] == [0, 70]


class SlowWay:
    """A way to Redis that can hold what is on it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._to_redis: list[asyncio.StreamWriter] = []
        self._to_clients: list[asyncio.StreamWriter] = []
        self._slow = 0
        """So many of these are slow: the first ones."""
        self._held: list[tuple[asyncio.StreamWriter, bytes]] = []

    async def open(self, closing: contextlib.AsyncExitStack) -> str:
        """Its URL."""
        server = await asyncio.start_server(self._pass, "127.0.0.1", 0)
        closing.push_async_callback(self._close)
        closing.callback(server.close)
        return f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    def hold(self) -> None:
        """From now on hold what present connections send."""
        self._slow = len(self._to_redis)

    def go_on(self) -> None:
        """Pass it on."""
        for to_redis, data in self._held:
            to_redis.write(data)

    async def _close(self) -> None:
        for writer in (*self._to_redis, *self._to_clients):
            writer.close()
        for writer in (*self._to_redis, *self._to_clients):
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_redis, to_redis = await asyncio.open_connection("127.0.0.1", self._port)
        self._to_redis.append(to_redis)
        self._to_clients.append(writer)
        back = asyncio.ensure_future(self._back(from_redis, writer))
        while data := await reader.read(65_536):
            if to_redis in self._to_redis[: self._slow]:
                self._held.append((to_redis, data))
            else:
                to_redis.write(data)
        await back

    async def _back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                writer.write(data)
        writer.close()


async def test_an_admission_that_comes_after_its_give_back_takes_nothing(
    redis_server: RedisServer,
) -> None:
    with redis_server.client() as client:
        client.flushall()
    way = SlowWay(int(redis_server.url.rpartition(":")[2].partition("/")[0]))
    async with (
        contextlib.AsyncExitStack() as closing,
        opened(await way.open(closing), TENANTS[0], terms=WIDE, fail_mode="closed") as store,
    ):
        await take(store, "known", BUDGET)
        way.hold()
        with pytest.raises(Unavailable):
            await take(store, "late", BUDGET)
        await eventually(lambda: store.up)
        await store.pools("m")
        way.go_on()
        await asyncio.sleep(0.1)
        assert (await store.levels([BUDGET]))[0].used == 100
        assert sum(pool.inflight for pool in await store.pools("m")) == 1
