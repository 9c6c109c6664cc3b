"""Budgets and limits of keys over real sockets: refused, warned, raised, exact over replicas."""

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
import uvloop
from typer.testing import CliRunner

from bench.budgets import run as bench
from bench.common.fleet import ADMIN_KEY, MODEL, Fleet
from bench.common.redis_server import RedisServer
from sluice.operate.budget import budget
from tests.integration.test_tenants import CODER, get, hashed, post, two_models

WEB: list[dict[str, Any]] = [{"name": "web"}]


def tenant(*keys: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"tenants": [{"name": "acme", "keys": [{**k, **hashed(k)} for k in keys], **more}]}


def cli(fleet: Fleet, *args: str) -> str:
    runner = CliRunner(env={"SLUICE_ADMIN_KEY": ADMIN_KEY, "COLUMNS": "200"})
    result = runner.invoke(budget, [*args, "--url", fleet.url])
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


def test_a_restart_keeps_what_was_spent(tmp_path: Path) -> None:
    state = {"state": {"url": f"sqlite:///{tmp_path / 'state.db'}"}}
    more = tenant(*WEB, budgets=[{"tokens": 100_000}]) | state
    with two_models(WEB, more) as fleet:
        used = post(fleet, "web", MODEL).json()["usage"]["total_tokens"]
        assert settled(fleet, "tenant:acme:tokens:month")["used"] == used
        fleet.kill_replica(fleet.replicas[0], sig=signal.SIGTERM)
        fleet.start_replica(fleet.replicas[0])
        fleet.wait_ready(fleet.replicas[0])
        assert budgets(fleet)["tenant:acme:tokens:month"]["used"] == used


@pytest.mark.redis
@pytest.mark.parametrize("unit", bench.UNITS)
def test_400_clients_that_teach_short_answers_pass_a_budget_by_less_than_one_request(
    redis_server: RedisServer, unit: Literal["tokens", "money"]
) -> None:
    with redis_server.client() as client:
        client.flushall()
    spent = uvloop.run(bench.spend(redis_server.url, unit))
    assert spent.used == spent.counted
    assert spent.reserved == 0
    assert bench.BUDGET * 0.99 <= spent.counted < bench.BUDGET + spent.most
    assert spent.refused >= bench.CLIENTS
