"""Budgets and limits of keys over real sockets: refused, warned, raised, exact over replicas."""

import asyncio
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import httpx
import orjson
import pytest
import uvloop

from bench.common.fleet import ADMIN_KEY, MODEL, Fleet, RedisServer
from bench.scale.traffic import fleet_of
from gateway.admission.terms import Terms
from gateway.admission.token_pool import TokenPool
from gateway.errors import RateLimited, Unavailable
from gateway.pipeline import plan as estimating
from gateway.pipeline.plan import admit
from gateway.ports import Settlement
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
from tests.integration.test_tenants import CODER, get, hashed, post, two_models
from tests.running import sluice

WEB: list[dict[str, Any]] = [{"name": "web"}]


def tenant(*keys: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"tenants": [{"name": "acme", "keys": [{**k, **hashed(k)} for k in keys], **more}]}


def cli(fleet: Fleet, *args: str) -> str:
    given = ("budget", *args, "--url", fleet.url)
    result = sluice(*given, SLUICE_ADMIN_KEY=ADMIN_KEY, COLUMNS="200")
    assert result.exit_code == 0, result.output
    return result.stdout


def budgets(fleet: Fleet) -> dict[str, dict[str, Any]]:
    return {each["id"]: each for each in fleet.admin("/admin/budgets").json()["data"]}


def settled(fleet: Fleet, name: str) -> dict[str, Any]:
    deadline = time.monotonic() + 10
    while float((found := budgets(fleet)[name])["reserved"]):
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    return found


def test_a_tenants_budget_counts_all_models_and_can_be_raised() -> None:
    limit = {"tokens": 300, "window": "day", "timezone": "Europe/Berlin", "warn_at": 0.3}
    fleet = two_models(WEB, tenant(*WEB, budgets=[limit]), fallbacks=[CODER])
    name = "tenant:acme:tokens:day"
    with fleet:
        used = 0
        for number in range(40):
            answer = post(fleet, "web", (MODEL, CODER)[number % 2])
            if answer.status_code == 429:
                break
            used += answer.json()["usage"]["total_tokens"]
            warned = answer.headers.get("x-sluice-budget", "")
            assert warned == "" or warned.startswith("tenant acme: budget of tokens a day ")
        assert warned
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == (*["insufficient_quota"] * 2,)
        assert answer.headers["x-should-retry"] == "false"
        assert answer.headers["x-sluice-reason"] == "budget"
        assert "x-sluice-model" not in answer.headers, "no fallback is asked"
        assert "of 300 tokens are used" in error["message"]
        assert "resets_at: 20" in error["message"]
        found = settled(fleet, name)
        assert (found["used"], found["total"]) == (used, used)
        assert used <= 300

        assert "300 and 500 more until" in cli(fleet, "raise", name, "--by", "500")
        assert post(fleet, "web", MODEL).status_code == 200
        assert name in cli(fleet, "list", "--of", "acme")
        events = [each["what"] for each in fleet.admin("/admin/audit").json()["data"]]
        assert events == ["raise_budget", "budget_warning"]
        assert fleet.metrics()['sluice_budget_warnings_total{scope="tenant"}'] == 1
        (mine,) = get(fleet, "web", "/v1/sluice/me")["entitlements"][0]["limits"]
        assert (mine["id"], mine["added"]) == (name, 500)
        missing = httpx.post(
            f"{fleet.url}/admin/budgets/tenant:x/raise",
            json={"by": 5},
            headers={"authorization": f"Bearer {ADMIN_KEY}"},
        )
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "budget_not_found")


def test_a_budget_in_money_is_spent_by_the_price_of_each_model() -> None:
    more = tenant(*WEB, budgets=[{"money": 0.001}])
    fleet = two_models(WEB, more, price={"input": 2.0, "output": 10.0})
    with fleet:
        answer = post(fleet, "web", MODEL)
        usage = answer.json()["usage"]
        cost = 2000 * usage["prompt_tokens"] + 10_000 * usage["completion_tokens"]
        assert post(fleet, "web", CODER).status_code == 200, "a model without a price is free"
        found = settled(fleet, "tenant:acme:money:month")
        assert (found["used"], found["unit"]) == (f"0.{cost:09d}".rstrip("0"), "USD")
        codes = [post(fleet, "web", MODEL).status_code for _ in range(20)]
        assert 429 in codes
        assert post(fleet, "web", CODER).status_code == 200


def test_a_keys_own_limits_are_exact_and_its_own_alone() -> None:
    keys: list[dict[str, Any]] = [{"name": "web", "requests_per_minute": 12, "max_concurrency": 99}]
    keys.append({"name": "other"})
    fleet = two_models(WEB, tenant(*keys))
    with fleet, ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda n: post(fleet, "web", (MODEL, CODER)[n % 2]), range(40)))
        refused = [answer for answer in answers if answer.status_code == 429]
        assert len(refused) == 28
        assert {answer.headers["x-sluice-reason"] for answer in refused} == {"key_requests"}
        assert "the API key 'web'" in refused[0].json()["error"]["message"]
        assert 50 <= int(refused[0].headers["retry-after"]) <= 65
        assert post(fleet, "other", MODEL).status_code == 200


# 400 clients on four replicas: they teach the gateways' estimators short answers, and then all at
# once use up to their limit of each request, until a budget in tokens or in money refuses them.

BUDGET = 1_000_000
"""Tokens, or nano-units of money: at this price they are the same."""
REPLICAS, CLIENTS = 4, 400
SHORT, SHORT_TURNS = 60, 5
"""Tokens of the answers that teach, and how many of them each client gets."""
LONG = 8_000
"""Limit of every answer (`max_tokens`)."""
PRICE = token_price(0.001, 0.001, None)
BODY = orjson.dumps(
    {"model": "m", "max_tokens": LONG, "messages": [{"role": "user", "content": "Go on, please."}]}
)


class Gateway:
    """A store, and the stages that decide what is asked of it."""

    def __init__(self, url: str, owner: str, limit: Limit) -> None:
        self.served = fleet_of("least-loaded", 64)
        self.served.price = PRICE
        token_pool = TokenPool(Terms(slots=(10_000,), tokens_per_s=1e9, largest_tokens=100_000))
        token_pool.define(Entitlement(name="e", model="m", baseline=(9_000,), tokens_per_s=1e9))
        self.store = RedisLeases(
            url,
            {"m": self.served},
            {"m": token_pool},
            time.monotonic,
            local=MemoryLeases({"m": self.served}, time.monotonic),
            fail_mode="closed",
            owner=owner,
        )
        self.principal = Principal(entitlement="e", tenant="t", limits=(limit,))
        self.facts = estimating.read(CHAT, BODY, RequestHead())

    def estimate(self) -> LengthEstimate:
        """Of any of the requests, which are all alike."""
        return estimating.estimate(self.served, CHAT, self.facts, self.principal)

    async def admit(self, lease_id: str) -> Lease:
        plan = Plan(pool=0, alternates=(), reason="test")
        return await admit(self.store, self.served, self.principal, lease_id, self.estimate(), plan)

    def settle(self, lease: Lease, answer: int | None) -> int:
        """End it, and learn from it; what is used. None: it is refunded."""
        if answer is None:
            self.store.settle(lease, Settlement(usage=None, dispatched=True))
            return 0
        usage = Usage(prompt_tokens=10, completion_tokens=answer)
        money = cost_nano(PRICE, usage.prompt_tokens, usage.completion_tokens)
        self.store.settle(lease, Settlement(usage=usage, dispatched=True, money=money))
        self.served.estimator.learn(
            Observation(
                endpoint=CHAT.name,
                tenant="t",
                measure=self.facts.measure,
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                sequences=1,
                output_censored=answer == LONG,
            )
        )
        return 10 + answer


async def spending(gateway: Gateway, number: int, taught: asyncio.Barrier) -> tuple[int, int]:
    """Ask until the budget is used up: tokens used, refusals."""
    rng = random.Random(70_000 + number)
    used = turn = refused = 0
    waits = True
    while refused < 3:
        if turn == SHORT_TURNS and waits:
            await taught.wait()
            waits = False
        try:
            lease = await gateway.admit(f"c{number}.{turn}")
        except RateLimited as refusal:
            refused += 1 if refusal.reason == "budget" else 0
            await asyncio.sleep(0.02)
            continue
        except Unavailable:  # a busy machine: Redis answered too late
            await asyncio.sleep(0.3)
            continue
        await asyncio.sleep(rng.random() * 0.02)
        turn += 1
        answer = SHORT if turn <= SHORT_TURNS else rng.choice((LONG // 2, LONG))
        used += gateway.settle(lease, None if rng.random() < 0.1 else answer)
    return used, refused


async def spend(url: str, limit: Limit) -> tuple[int, int, int, LimitView]:
    """Tokens used, refusals, what a request uses at most, and the budget as the store has it."""
    gateways = [Gateway(url, f"r{number}", limit) for number in range(REPLICAS)]
    for gateway in gateways:
        await gateway.store.start()
    try:
        taught = asyncio.Barrier(CLIENTS)
        tasks = [spending(gateways[n % REPLICAS], n, taught) for n in range(CLIENTS)]
        found = await asyncio.gather(*tasks)
        for gateway in gateways:
            await gateway.store.pools("m")  # what was posted before is done after it
        for _ in range(100):
            if gateways[0].store.up:
                break
            await asyncio.sleep(0.3)  # a busy machine
        (view,) = await gateways[0].store.levels([limit])
        most = (gateways[0].estimate().most_input_tokens or 0) + LONG
        return sum(used for used, _ in found), sum(refused for _, refused in found), most, view
    finally:
        for gateway in gateways:
            await gateway.store.close()


@pytest.mark.redis
@pytest.mark.parametrize("unit", ["tokens", "money"])
def test_400_clients_that_teach_short_answers_pass_a_budget_by_less_than_one_request(
    redis_server: RedisServer, unit: Literal["tokens", "money"]
) -> None:
    with redis_server.client() as client:
        client.flushall()
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
    used, refused, most, view = uvloop.run(spend(redis_server.url, limit))
    assert view.used == used
    assert view.reserved == 0
    assert BUDGET * 0.99 <= view.used < BUDGET + most
    assert refused >= CLIENTS
