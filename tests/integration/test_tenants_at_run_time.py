"""Tenants and keys made by the command, over real sockets, on one gateway and on two."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from typer.testing import Result

from bench.common.fleet import ADMIN_KEY, MODEL, Fleet, RedisServer
from tests.asking import post
from tests.crds import misfits
from tests.running import sluice


def said(fleet: Fleet, *args: str) -> Result:
    return sluice(*args, "--url", fleet.url, SLUICE_ADMIN_KEY=ADMIN_KEY, COLUMNS="200")


def made(fleet: Fleet, *args: str) -> Any:
    result = said(fleet, *args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def status(url: str, key: str) -> int:
    return chat(url, key).status_code


def chat(url: str, key: str) -> httpx.Response:
    return post(url, key)


def until(true: Callable[[], bool], limit_s: float = 5.0) -> bool:
    end_s = time.monotonic() + limit_s
    while not true() and time.monotonic() < end_s:
        time.sleep(0.1)
    return true()


@contextmanager
def fleet_on(state: str, *further: dict[str, Any]) -> Iterator[Fleet]:
    config = {
        "state": {"url": state},
        "entitlements": [{"name": "chat", "tenant": "acme", "model": MODEL}],
    }
    with Fleet(short=1, long=0, mock=("--speed", "50"), config=config, further=further) as fleet:
        yield fleet


def test_a_key_s_whole_life_by_the_command(tmp_path: Path) -> None:
    with fleet_on(f"sqlite:///{tmp_path}/sluice.db") as fleet:
        made(fleet, "tenant", "create", "acme", "--display-name", "Acme", "--label", "cost=7")
        key = made(fleet, "key", "add", "acme", "web", "--models", MODEL)["key"]
        assert status(fleet.url, key) == 200
        shown = said(fleet, "key", "list", "acme").output
        assert "web" in shown
        assert key not in shown

        fresh = made(fleet, "key", "rotate", "acme", "web", "--grace-s", "60")["key"]
        assert (status(fleet.url, key), status(fleet.url, fresh)) == (200, 200)
        made(fleet, "key", "suspend", "acme", "web")
        assert (status(fleet.url, key), status(fleet.url, fresh)) == (403, 403)
        made(fleet, "key", "resume", "acme", "web")
        made(fleet, "tenant", "suspend", "acme")
        assert status(fleet.url, fresh) == 403
        made(fleet, "tenant", "resume", "acme")

        fleet.kill_replica(fleet.replicas[0])
        fleet.start_replica(fleet.replicas[0])
        fleet.wait_ready(fleet.replicas[0])
        assert (status(fleet.url, key), status(fleet.url, fresh)) == (200, 200)
        (row,) = made(fleet, "tenant", "list")
        assert (row["name"], row["key_count"], row["uses"]) == ("acme", 2, ["chat"])
        made(fleet, "key", "expire", "acme", "web", "--at", "2020-01-01T00:00:00Z")
        assert status(fleet.url, fresh) == 403
        made(fleet, "key", "revoke", "acme", "web")
        assert (status(fleet.url, key), status(fleet.url, fresh)) == (401, 401)
        assert "tenant acme" in said(fleet, "entitlement", "audit").output
        refused = said(fleet, "tenant", "delete", "acme", "--force")
        assert (refused.exit_code, "is in the configuration file" in refused.output) == (1, True)
        made(fleet, "tenant", "create", "beta")
        made(fleet, "tenant", "delete", "beta")
        refused = said(fleet, "tenant", "show", "beta")
        assert (refused.exit_code, "sluice tenant list" in refused.output) == (2, True)


def test_a_key_s_own_limits_hold_are_raised_and_outlive_rotation_and_restart(
    tmp_path: Path,
) -> None:
    with fleet_on(f"sqlite:///{tmp_path}/sluice.db") as fleet:
        made(fleet, "tenant", "create", "acme")
        free = made(fleet, "key", "add", "acme", "free")["key"]
        limits = ("--requests-per-minute", "2", "--budget", "tokens=100000,window=day")
        key = made(fleet, "key", "add", "acme", "web", *limits)["key"]
        answers = [chat(fleet.url, key) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert answers[2].headers["x-sluice-reason"] == "key_requests"
        assert "the API key 'web'" in answers[2].json()["error"]["message"]
        assert status(fleet.url, free) == 200

        row = made(fleet, "key", "change", "acme", "web", "--requests-per-minute", "3")
        assert (row["requests_per_minute"], row["budgets"][0]["tokens"]) == (3, 100_000)
        answers[2] = chat(fleet.url, key)
        fresh = made(fleet, "key", "rotate", "acme", "web", "--grace-s", "600")["key"]
        assert (status(fleet.url, key), status(fleet.url, fresh)) == (429, 429)

        fleet.kill_replica(fleet.replicas[0], sig=signal.SIGTERM)
        fleet.start_replica(fleet.replicas[0])
        fleet.wait_ready(fleet.replicas[0])
        assert status(fleet.url, fresh) == 429
        requests, budget = "key:acme/web:requests:minute", "key:acme/web:tokens:day"
        found = {each["id"]: each for each in made(fleet, "budget", "list", "--of", "web")}
        used = sum(answer.json()["usage"]["total_tokens"] for answer in answers)
        assert found.keys() == {requests, budget}
        assert (found[requests]["used"], found[budget]["used"]) == (3, used)
        assert made(fleet, "budget", "raise", budget, "--by", "500")["added"] == 500
        headers = {"authorization": f"Bearer {fresh}"}
        mine = httpx.get(f"{fleet.url}/v1/sluice/me", headers=headers).json()
        seen = {each["id"]: each["added"] for each in mine["entitlements"][0]["limits"]}
        assert seen == {requests: 0, budget: 500}

        refused = said(fleet, "key", "change", "acme", "web", "--budget", "tokens=5,window=year")
        assert refused.exit_code == 2
        assert "budgets[0].window: not a window of time; write hour" in refused.output
        made(fleet, "key", "change", "acme", "web", "--unset", "requests-per-minute")
        assert status(fleet.url, fresh) == 200


@pytest.mark.redis
def test_a_key_s_limit_counts_over_two_gateways(redis_server: RedisServer) -> None:
    with fleet_on(redis_server.url, {}) as fleet:
        other = fleet.replicas[1].url
        made(fleet, "tenant", "create", "acme")
        key = made(fleet, "key", "add", "acme", "web", "--requests-per-minute", "8")["key"]

        def used() -> int:
            (limit,) = made(fleet, "budget", "list")
            return int(limit["used"])

        assert until(lambda: status(other, key) == 200 and used() > 0)
        left = 8 - used()
        found = [status(url, key) for url in (fleet.url, other) * 5]
        assert (found.count(200), found.count(429)) == (left, 10 - left)
        assert used() == 8


# -- nothing opens after a delete, and whoever deletes learns what would still open


def test_a_deleted_tenant_leaves_nothing_that_opens(tmp_path: Path) -> None:
    with fleet_on(f"sqlite:///{tmp_path}/sluice.db") as fleet:

        def make() -> list[str]:
            """Keys of a new tenant: its own, and that of its entitlement."""
            made(fleet, "tenant", "create", "beta")
            entitlement = ("entitlement", "create", "beta-chat", "--tenant", "beta")
            own = made(fleet, *entitlement, "--model", MODEL)["key"]
            return [own, made(fleet, "key", "add", "beta", "web")["key"]]

        def open_to(keys: list[str]) -> list[int]:
            return [status(fleet.url, key) for key in keys]

        keys = make()
        refused = said(fleet, "tenant", "delete", "beta")
        assert refused.exit_code != 0
        assert "beta-chat" in refused.output
        assert "--force" in refused.output
        assert open_to(keys) == [200, 200], "what was refused changes nothing"
        assert "beta" in [row["name"] for row in made(fleet, "tenant", "list")]

        made(fleet, "tenant", "delete", "beta", "--force")
        assert open_to(keys) == [401, 401]
        assert "beta" not in [row["name"] for row in made(fleet, "tenant", "list")]
        assert "beta" not in [row["tenant"] for row in made(fleet, "entitlement", "list")]

        fresh = make()
        assert open_to([*keys, *fresh]) == [401, 401, 200, 200], "old keys open no namesake"
        fleet.kill_replica(fleet.replicas[0])
        fleet.start_replica(fleet.replicas[0])
        fleet.wait_ready(fleet.replicas[0])
        assert open_to([*keys, *fresh]) == [401, 401, 200, 200]


def test_what_a_gateway_grants_becomes_manifests_and_a_file_again(tmp_path: Path) -> None:
    digest = f"sha256:{'ab' * 32}"
    terms = {"service_class": "guaranteed", "concurrency": 8, "api_keys": [digest]}
    config = {"entitlements": [{"name": "chat", "tenant": "acme", "model": MODEL, **terms}]}
    with Fleet(short=1, long=0, config=config) as fleet:
        made(fleet, "entitlement", "create", "Batch", "--tenant", "acme", "--model", MODEL)
        made(fleet, "entitlement", "suspend", "Batch")
        found = said(fleet, "entitlement", "export", "--crd", "-c", str(fleet.replicas[0].file))
    assert found.exit_code == 0
    objects = [o for o in yaml.safe_load_all(found.stdout) if o]
    assert [problem for o in objects if o["kind"] != "Secret" for problem in misfits(o)] == []
    by_name = {(o["kind"], o["metadata"]["name"]): o for o in objects}
    assert by_name["Secret", "chat-key"]["stringData"] == {"api-key": digest}
    assert by_name["TokenEntitlement", "batch"]["spec"]["suspend"] is True
    (pool,) = [o["spec"] for o in objects if o["kind"] == "TokenPool"]
    assert (pool["model"], pool["replicas"]) == (MODEL, 1)
    assert "make the Secret of each key" in found.stderr
    manifests = tmp_path / "manifests.yaml"
    manifests.write_text(found.stdout, encoding="utf-8")
    section = yaml.safe_load(sluice("import", "crd", manifests).stdout)
    assert section["entitlements"][0] == config["entitlements"][0]
