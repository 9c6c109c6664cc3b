"""`bench budgets`: what 400 clients on four replicas spend of a budget, and what budgets cost.

Four stores, as four gateways have them, share a Redis of the bench's own. 100 clients of each ask,
use up to twice what they reserved, and settle, until the budget refuses them; a part is refunded.
Then one store admits and settles with a tenant's budget, a key's limits and an entitlement's
budget, and without any, by turns: CPU of Redis and of this process by request, and of the
embedded store.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from statistics import median
from typing import Final, NamedTuple

import uvloop
from redis import Redis

from bench.common.redis_server import RedisServer
from bench.common.report import Report, Row, at_most, equals
from bench.scale.traffic import fleet_of
from gateway.adapters.store.memory.leases import MemoryLeases
from gateway.adapters.store.redis.leases import RedisLeases
from gateway.errors import RateLimited, StateFailure, Unavailable
from gateway.policy.entitlements.entitlement import Entitlement
from gateway.policy.token_pool.terms import Terms
from gateway.policy.token_pool.token_pool import TokenPool
from gateway.ports import LeaseStore, Settlement
from gateway.records.attempt import Usage
from gateway.records.lease import Ask
from gateway.records.limit import Limit, LimitView

BUDGET: Final = 10_000_000
REPLICAS: Final = 4
CLIENTS: Final = 400
RESERVED: Final = 4_000
COUNTED: Final = 6_000
"""Requests of each round that is measured."""
ROUNDS: Final = 15
"""In each, every case is measured once: the machine changes its speed between rounds."""
_SEED: Final = 7
_PATIENCE: Final = 100
_PATIENCE_S: Final = 0.3
_MONTH: Final = Limit(
    id="tenant:t:tokens:month",
    scope="tenant",
    name="t",
    unit="tokens",
    amount=BUDGET,
    window="month",
    zone="Europe/Berlin",
    warn=BUDGET * 8 // 10,
)
_LARGE: Final = 1 << 50
LIMITS: Final = (
    Limit(id="k:s", scope="key", name="t/k", unit="sequences", amount=_LARGE),
    Limit(id="k:r", scope="key", name="t/k", unit="requests", amount=_LARGE, window="minute"),
    Limit(id="e:d", scope="entitlement", name="e", unit="tokens", amount=_LARGE, window="day"),
    Limit(id="t:m", scope="tenant", name="t", unit="tokens", amount=_LARGE, window="month"),
)
"""All that one request may be limited by, in the common case."""


class Spending(NamedTuple):
    """What clients had of a budget."""

    used: int
    most: int
    """The highest level, reservations included."""
    counted: int
    reserved: int
    refused: int


def run() -> Report:
    """Both parts."""
    with RedisServer() as server, server.client() as client:
        spent = uvloop.run(spend(server.url))
        client.flushall()
        rows = _spending_rows(spent)
        embedded = uvloop.run(_embedded_us())
        shared = uvloop.run(_shared_us(server.url, client))
    redis = [tuple(case[0] for case in each) for each in shared]
    own = [tuple(case[1] for case in each) for each in shared]
    rows += _more_rows("embedded store, CPU-us a request", embedded)
    rows += _more_rows("gateway on Redis, CPU-us a request", own)
    name = "Redis, CPU-us a request, 64 clients"
    rows.append(Row(metric=f"{name}, no limits", measured=median(case[0] for case in redis)))
    for case, what in enumerate(_WITH, 1):
        figure = median(each[case] for each in redis)
        rows.append(Row(metric=f"{name}, {what}", measured=figure))
    return Report(name="budgets", rows=rows)


_CASES: Final[tuple[tuple[Limit, ...], ...]] = ((), LIMITS[3:], LIMITS)
_WITH: Final = ("one budget", "two budgets, two limits")


def _more_rows(name: str, rounds: Sequence[tuple[float, ...]]) -> list[Row]:
    """The cost without limits, and by how much it rises: the median over pairs of one round."""
    return [
        Row(metric=f"{name}, no limits", measured=median(each[0] for each in rounds)),
        *(
            Row(metric=f"{name}, {what}: more", measured=median(e[case] - e[0] for e in rounds))
            for case, what in enumerate(_WITH, 1)
        ),
    ]


def _spending_rows(spent: Spending) -> list[Row]:
    beyond = max(0, spent.counted - BUDGET)
    return [
        Row(metric="budget, tokens", measured=BUDGET),
        at_most("used beyond it, tokens", beyond, CLIENTS * RESERVED, "a reservation a client"),
        at_most("reserved and used at once, at most", spent.most, BUDGET + CLIENTS * RESERVED),
        equals("counted less used, tokens", spent.counted - spent.used, 0),
        equals("reserved once all ended", spent.reserved, 0),
        Row(metric="refused", measured=spent.refused),
    ]


async def spend(url: str) -> Spending:
    """Have the clients spend the budget on a server."""
    async with AsyncExitStack() as closing:
        stores = [await closing.enter_async_context(_store(url, f"r{n}")) for n in range(REPLICAS)]
        levels: list[int] = []
        tasks = [_client(stores[n % REPLICAS], n) for n in range(CLIENTS)]
        watching = asyncio.create_task(_watch(stores[0], levels))
        found = await asyncio.gather(*tasks)
        watching.cancel()
        for store in stores:
            await store.pools("m")  # what was posted before is done after it
        view = await _view(stores[0])
        used, refused = sum(each[0] for each in found), sum(each[1] for each in found)
        return Spending(used, max(levels), view.used, view.reserved, refused)


async def _view(store: RedisLeases) -> LimitView:
    for _ in range(_PATIENCE):
        if store.up:
            break
        await asyncio.sleep(_PATIENCE_S)  # a busy machine
    return (await store.levels([_MONTH]))[0]


async def _watch(store: RedisLeases, levels: list[int]) -> None:
    while True:
        with contextlib.suppress(StateFailure):
            levels.append((await store.levels([_MONTH]))[0].used)
        await asyncio.sleep(0.01)


async def _client(store: RedisLeases, number: int) -> tuple[int, int]:
    """Ask until the budget is used up; returns tokens used, and refusals."""
    rng = random.Random(_SEED * 10_000 + number)
    used = turn = refused = 0
    while refused < 3:
        turn += 1
        try:
            lease = await store.admit(_ask(f"c{number}.{turn}", (_MONTH,), RESERVED))
        except RateLimited as refusal:
            refused += 1 if refusal.reason == "budget" else 0
            await asyncio.sleep(0.02)
            continue
        except Unavailable:  # a busy machine: Redis answered too late
            await asyncio.sleep(_PATIENCE_S)
            continue
        await asyncio.sleep(rng.random() * 0.02)
        if rng.random() < 0.1:
            store.settle(lease, Settlement(usage=None, dispatched=True))
            continue
        tokens = rng.randrange(2 * RESERVED)
        store.settle(lease, _used(tokens))
        used += tokens
    return used, refused


def _ask(lease_id: str, limits: tuple[Limit, ...], tokens: int = 500) -> Ask:
    return Ask(
        lease_id=lease_id,
        model="m",
        entitlement="e",
        pool=0,
        alternates=(),
        cost_tokens=tokens,
        sequences=1,
        limits=limits,
    )


def _used(tokens: int) -> Settlement:
    usage = Usage(prompt_tokens=tokens, completion_tokens=0)
    return Settlement(usage=usage, dispatched=True)


def _token_pool() -> TokenPool:
    token_pool = TokenPool(Terms(slots=(10_000,), tokens_per_s=1e9, largest_tokens=100_000))
    token_pool.define(Entitlement(name="e", model="m", baseline=(9_000,), tokens_per_s=1e9))
    return token_pool


@asynccontextmanager
async def _store(url: str, owner: str) -> AsyncIterator[RedisLeases]:
    served = {"m": fleet_of("least-loaded", 64)}
    local = MemoryLeases(served, time.monotonic)
    store = RedisLeases(
        url,
        served,
        {"m": _token_pool()},
        time.monotonic,
        local=local,
        fail_mode="closed",
        owner=owner,
    )
    await store.start()
    try:
        yield store
    finally:
        await store.close()


async def _embedded_us() -> list[tuple[float, ...]]:
    """CPU of one admission and its settlement in memory, by round and case."""
    served = {"m": fleet_of("least-loaded", 64)}
    store = MemoryLeases(served, time.monotonic, {"m": _token_pool()})
    return [tuple([await _each_us(store, limits) for limits in _CASES]) for _ in range(ROUNDS)]


async def _shared_us(url: str, client: "Redis") -> list[tuple[tuple[float, float], ...]]:
    """CPU of Redis and of this process by request, with 64 clients by turns; by round and case."""
    client.flushall()
    async with _store(url, "bench") as store:
        return [
            tuple([await _all_us(store, client, limits) for limits in _CASES])
            for _ in range(ROUNDS)
        ]


async def _all_us(
    store: RedisLeases, client: "Redis", limits: tuple[Limit, ...]
) -> tuple[float, float]:
    began_s, own_s = _redis_s(client), time.process_time()
    await asyncio.gather(*(_by_turns(store, limits, n) for n in range(64)))
    await store.pools("m")
    return (
        (_redis_s(client) - began_s) / COUNTED * 1e6,
        (time.process_time() - own_s) / COUNTED * 1e6,
    )


async def _by_turns(store: LeaseStore, limits: tuple[Limit, ...], client: int) -> None:
    for turn in range(COUNTED // 64):
        try:
            lease = await store.admit(_ask(f"{client}.{turn}", limits))
        except Unavailable:
            await asyncio.sleep(_PATIENCE_S)
            continue
        store.settle(lease, _used(300))


async def _each_us(store: LeaseStore, limits: tuple[Limit, ...]) -> float:
    asks: Sequence[Ask] = [_ask(f"l{n}", limits) for n in range(COUNTED)]
    used = _used(300)
    began_s = time.process_time()
    for ask in asks:
        store.settle(await store.admit(ask), used)
    return (time.process_time() - began_s) / COUNTED * 1e6


def _redis_s(client: "Redis") -> float:
    told = client.info("cpu")
    return float(told["used_cpu_user"]) + float(told["used_cpu_sys"])
