"""`bench budgets`: what 400 clients on four replicas spend of a budget, and what budgets cost.

Four stores, as four gateways have them, share a Redis of the bench's own. The 400 clients are one
tenant's: they teach the gateways' estimators short answers, and then all at once use up to their
limit of each request, until a budget in tokens or in money refuses them; a part is refunded. Then
one store admits and settles with a tenant's budget, a key's limits and an entitlement's budget, and
without any, by turns: CPU of Redis and of this process by request, and of the embedded store.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from statistics import median
from typing import Final, Literal, NamedTuple

import orjson
import uvloop
from redis import Redis

from bench.common.redis_server import RedisServer
from bench.common.report import Report, Row, at_most, equals
from bench.scale.traffic import fleet_of
from gateway.admission.terms import AdmissionRequest, Terms
from gateway.admission.token_pool import TokenPool
from gateway.errors import RateLimited, Unavailable
from gateway.pipeline import estimate as estimating
from gateway.pipeline.admit import admit
from gateway.ports import LeaseStore, Settlement
from gateway.records.attempt import Usage
from gateway.records.endpoint import CHAT
from gateway.records.entitlement import Entitlement
from gateway.records.estimate import LengthEstimate, Observation, Plan
from gateway.records.lease import Lease
from gateway.records.limit import Limit, LimitView
from gateway.records.request import Principal, RequestHead
from gateway.records.usage import cost_nano, token_price
from gateway.store.memory_leases import MemoryLeases
from gateway.store.redis.leases import RedisLeases

BUDGET: Final = 1_000_000
"""Tokens, or nano-units of money: at this price they are the same."""
REPLICAS: Final = 4
CLIENTS: Final = 400
SHORT: Final = 60
"""Tokens of the answers that teach."""
SHORT_TURNS: Final = 5
LONG: Final = 8_000
"""Limit of every answer (`max_tokens`)."""
COUNTED: Final = 6_000
"""Requests of each round that is measured."""
ROUNDS: Final = 15
"""In each, every case is measured once: the machine changes its speed between rounds."""
_SEED: Final = 7
_PATIENCE: Final = 100
_PATIENCE_S: Final = 0.3
_PRICE: Final = token_price(0.001, 0.001, None)
_BODY: Final = orjson.dumps(
    {"model": "m", "max_tokens": LONG, "messages": [{"role": "user", "content": "Go on, please."}]}
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
    counted: int
    reserved: int
    refused: int
    expected: int
    """Tokens that an estimator expected of a request once it was taught."""
    most: int
    """What a request can use at most."""


def run() -> Report:
    """Both parts."""
    with RedisServer() as server, server.client() as client:
        rows: list[Row] = []
        for unit in UNITS:
            rows += _spending_rows(unit, uvloop.run(spend(server.url, unit)))
            client.flushall()
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


UNITS: Final[tuple[Literal["tokens", "money"], ...]] = ("tokens", "money")


def _spending_rows(unit: str, spent: Spending) -> list[Row]:
    beyond = max(0, spent.counted - BUDGET)
    return [
        Row(metric=f"budget of {unit}", measured=BUDGET),
        Row(metric=f"{unit}: expected of a request by what was taught", measured=spent.expected),
        at_most(f"{unit}: used beyond the budget", beyond, spent.most, "one request at its limit"),
        equals(f"{unit}: counted less used", spent.counted - spent.used, 0),
        equals(f"{unit}: reserved once all ended", spent.reserved, 0),
        Row(metric=f"{unit}: refused", measured=spent.refused),
    ]


async def spend(url: str, unit: Literal["tokens", "money"]) -> Spending:
    """Have the clients spend a budget on a server."""
    limit = Limit(
        id=f"tenant:t:{unit}:month",
        scope="tenant",
        name="t",
        unit=unit,
        amount=BUDGET,
        window="month",
        zone="Europe/Berlin",
        warn=BUDGET * 8 // 10,
    )
    async with AsyncExitStack() as closing:
        gateways = [
            _Gateway(await closing.enter_async_context(_store(url, f"r{n}")), limit)
            for n in range(REPLICAS)
        ]
        taught = asyncio.Barrier(CLIENTS)
        tasks = [_client(gateways[n % REPLICAS], n, taught) for n in range(CLIENTS)]
        found = await asyncio.gather(*tasks)
        for gateway in gateways:
            await gateway.store.pools("m")  # what was posted before is done after it
        view = await _view(gateways[0].store, limit)
        used, refused = sum(each[0] for each in found), sum(each[1] for each in found)
        most = (gateways[0].estimate().most_input_tokens or 0) + LONG
        return Spending(used, view.used, view.reserved, refused, found[0][2], most)


async def _view(store: RedisLeases, limit: Limit) -> LimitView:
    for _ in range(_PATIENCE):
        if store.up:
            break
        await asyncio.sleep(_PATIENCE_S)  # a busy machine
    return (await store.levels([limit]))[0]


class _Gateway:
    """A store, and the stages that decide what is asked of it."""

    def __init__(self, store: RedisLeases, limit: Limit) -> None:
        self.store = store
        self._served = fleet_of("least-loaded", 64)
        self._served.price = _PRICE
        self._principal = Principal(entitlement="e", tenant="t", limits=(limit,))
        self._facts = estimating.read(CHAT, _BODY, RequestHead())

    def estimate(self) -> LengthEstimate:
        """Of any of the requests, which are all alike."""
        return estimating.estimate(self._served, CHAT, self._facts, self._principal)

    async def admit(self, lease_id: str) -> Lease:
        """Admit one request. Raises Refusal."""
        plan = Plan(pool=0, alternates=(), reason="bench")
        return await admit(
            self.store, self._served, self._principal, lease_id, self.estimate(), plan
        )

    def settle(self, lease: Lease, usage: Usage | None) -> None:
        """End it, and learn from it."""
        if usage is None:
            self.store.settle(lease, Settlement(usage=None, dispatched=True))
            return
        money = cost_nano(_PRICE, usage.prompt_tokens, usage.completion_tokens)
        self.store.settle(lease, Settlement(usage=usage, dispatched=True, money=money))
        self._served.estimator.learn(
            Observation(
                endpoint=CHAT.name,
                tenant="t",
                measure=self._facts.measure,
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                sequences=1,
                output_censored=usage.completion_tokens == LONG,
            )
        )


async def _client(gateway: _Gateway, number: int, taught: asyncio.Barrier) -> tuple[int, int, int]:
    """Ask until the budget is used up; returns tokens used, refusals, and what was taught."""
    rng = random.Random(_SEED * 10_000 + number)
    used = turn = refused = expected = 0
    while refused < 3:
        if turn == SHORT_TURNS and not expected:
            await taught.wait()
            expected = gateway.estimate().cost_tokens
        try:
            lease = await gateway.admit(f"c{number}.{turn}")
        except RateLimited as refusal:
            refused += 1 if refusal.reason == "budget" else 0
            await asyncio.sleep(0.02)
            continue
        except Unavailable:  # a busy machine: Redis answered too late
            await asyncio.sleep(_PATIENCE_S)
            continue
        await asyncio.sleep(rng.random() * 0.02)
        turn += 1
        if rng.random() < 0.1:
            gateway.settle(lease, None)
            continue
        answer = SHORT if turn <= SHORT_TURNS else rng.choice((LONG // 2, LONG))
        gateway.settle(lease, Usage(prompt_tokens=10, completion_tokens=answer))
        used += 10 + answer
    return used, refused, expected


def _ask(lease_id: str, limits: tuple[Limit, ...], tokens: int = 500) -> AdmissionRequest:
    return AdmissionRequest(
        lease_id=lease_id,
        model="m",
        entitlement="e",
        pool=0,
        alternates=(),
        estimate_tokens=tokens,
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
    asks: Sequence[AdmissionRequest] = [_ask(f"l{n}", limits) for n in range(COUNTED)]
    used = _used(300)
    began_s = time.process_time()
    for ask in asks:
        store.settle(await store.admit(ask), used)
    return (time.process_time() - began_s) / COUNTED * 1e6


def _redis_s(client: "Redis") -> float:
    told = client.info("cpu")
    return float(told["used_cpu_user"]) + float(told["used_cpu_sys"])
