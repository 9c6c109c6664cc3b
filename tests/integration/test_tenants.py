"""Tenants over real sockets: one key, several models, and a choice of entitlement."""

import hashlib
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import yaml

from bench.common.fleet import MODEL, Fleet
from tests import asking
from tests.asking import ADMIN, CHAT, chat

CODER = "coder"


def two_models(
    keys: list[dict[str, Any]],
    more: dict[str, Any] | None = None,
    *,
    gateways: int = 1,
    **first: Any,
) -> Fleet:
    """A model on each of two engines, and a tenant with two entitlements for the first."""
    fleet = Fleet(short=2, long=0, mock=("--speed", "50"), further=[{}] * (gateways - 1))
    names = (MODEL, CODER)
    pool = {"max_model_len": 8192, "max_num_seqs": 128}
    config: dict[str, Any] = {}
    config["models"] = [
        {
            "name": name,
            "pools": {"only": {**pool, "workers": [{"url": engine.url, "model": MODEL}]}},
            **(first if name == MODEL else {}),
        }
        for name, engine in zip(names, fleet.engines, strict=True)
    ]
    config["entitlements"] = [
        {"name": "chat", "tenant": "acme", "model": MODEL, "service_class": "elastic"},
        {"name": "batch", "tenant": "acme", "model": MODEL, "service_class": "spot"},
        {"name": "code", "tenant": "acme", "model": CODER},
    ]
    config["tenants"] = [{"name": "acme", "keys": [{**key, **hashed(key)} for key in keys]}]
    config.update(more or {})
    for replica in fleet.replicas:
        replica.config.update(config)
    return fleet


def hashed(key: dict[str, Any]) -> dict[str, str]:
    return {"sha256": hashlib.sha256(f"sk-{key['name']}".encode()).hexdigest()}


def post(fleet: Fleet, key: str, model: str, body: Any = None, **headers: str) -> httpx.Response:
    told = {name.replace("_", "-"): value for name, value in headers.items()}
    sent = {**chat(), "model": model, **(body or {})}
    return asking.post(fleet.url, f"sk-{key}", sent, **told)


def get(fleet: Fleet, key: str, path: str) -> Any:
    return asking.get(fleet.url, f"sk-{key}", path).json()


def test_one_key_opens_several_models_and_chooses_its_entitlement(tmp_path: Path) -> None:
    usage = tmp_path / "usage.jsonl"
    keys: list[dict[str, Any]] = [{"name": "web"}, {"name": "coding", "models": [CODER]}]
    with two_models(keys, {"usage_export": {"path": str(usage)}}) as fleet:
        asked: list[tuple[str, Any, dict[str, str]]] = [
            (MODEL, None, {}),
            (CODER, None, {}),
            (MODEL, {"service_tier": "flex"}, {}),
            (MODEL, None, {"x_sluice_entitlement": "batch"}),
        ]
        used = []
        for number, (model, body, headers) in enumerate(asked):
            answer = post(fleet, "web", model, body, x_request_id=f"r{number}", **headers)
            assert answer.status_code == 200, answer.text
            record = fleet.decision(f"r{number}")
            used.append((record["entitlement"], record["tenant"], record["key"]))
        names = ("chat", "code", "batch", "batch")
        assert used == [(name, "acme", "web") for name in names]

        refused = post(fleet, "web", MODEL, x_sluice_entitlement="code")
        assert (refused.status_code, refused.headers["x-sluice-reason"]) == (
            *(403, "entitlement_not_of_key"),
        )
        assert "'chat', 'batch'" in refused.json()["error"]["message"]
        assert post(fleet, "coding", MODEL).status_code == 403
        assert post(fleet, "coding", CODER).status_code == 200
        assert post(fleet, "nobody", MODEL).status_code == 401

        assert [card["id"] for card in get(fleet, "web", "/v1/models")["data"]] == [MODEL, CODER]
        assert [card["id"] for card in get(fleet, "coding", "/v1/models")["data"]] == [CODER]
        me = get(fleet, "web", "/v1/sluice/me")
        assert (me["tenant"], me["key"]) == ("acme", "web")
        assert [one["entitlement"] for one in me["entitlements"]] == ["chat", "batch", "code"]
        assert me["entitlements"][0]["usage"]["used_tokens"] > 0
        time.sleep(0.8)  # the export is flushed twice a second
        lines = [json.loads(line) for line in usage.read_text().splitlines()]
        assert [line["key"] for line in lines] == ["web"] * 4 + ["coding"]


def test_another_proxy_asks_with_a_tenants_key() -> None:
    with two_models([{"name": "web"}]) as fleet:
        headers = {"authorization": "Bearer sk-web"}
        body = {"model": MODEL, "input_tokens": 100, "max_tokens": 10, "request_id": "r1"}
        granted = httpx.post(
            fleet.url + "/admission/authorize",
            json=body,
            headers={**headers, "x-sluice-entitlement": "batch"},
        )
        assert granted.status_code == 200, granted.text
        report = {"lease_id": granted.json()["lease_id"], "status": "ok"}
        usage = {"prompt_tokens": 90, "completion_tokens": 9}
        settled = httpx.post(
            fleet.url + "/admission/usage", json={**report, **usage}, headers=headers
        )
        assert settled.status_code == 200, settled.text
        record = fleet.decision("r1")
        assert (record["entitlement"], record["key"]) == ("batch", "web")
        assert record["usage"]["prompt_tokens"] == 90


def test_a_dead_model_is_answered_by_its_fallback() -> None:
    with two_models(
        [{"name": "web"}, {"name": "only", "models": [MODEL]}], fallbacks=[CODER]
    ) as fleet:
        assert "x-sluice-model" not in post(fleet, "web", MODEL).headers
        fleet.kill_engine(fleet.engines[0])
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(lambda _: post(fleet, "web", MODEL), range(40)))
        assert [answer.status_code for answer in answers] == [200] * 40
        assert {answer.headers["x-sluice-model"] for answer in answers} == {CODER}
        assert post(fleet, "only", MODEL).status_code == 503, "its key does not open the fallback"
        fell = fleet.metrics()
        assert sum(n for name, n in fell.items() if 'outcome="fell_back"' in name) == 40
        assert fleet.wait_until_idle() < 10


def test_a_tenants_own_limit_is_answered_with_its_own_refusal() -> None:
    limited = {"name": "chat", "tenant": "acme", "model": MODEL, "tokens_per_second": 1.0}
    limited["max_tokens_per_second"] = 1.0
    code = {"name": "code", "tenant": "acme", "model": CODER}
    fleet = two_models([{"name": "web"}], {"entitlements": [limited, code]}, fallbacks=[CODER])
    with fleet:
        body = {"max_tokens": 4000, "mock_output_tokens": 4000}
        answers = [post(fleet, "web", MODEL, body) for _ in range(4)]
        refused = [answer for answer in answers if answer.status_code == 429]
        assert refused
        assert {answer.headers["x-sluice-reason"] for answer in refused} == {"tokens"}
        assert all("x-sluice-model" not in answer.headers for answer in answers)


def test_a_split_alias_is_listed_and_keeps_its_users() -> None:
    aliases = [{"name": "gpt-4o", "split": {MODEL: 50, CODER: 50}}]
    keys: list[dict[str, Any]] = [{"name": "web"}, {"name": "coding", "models": [CODER]}]
    with two_models(keys, {"aliases": aliases}) as fleet:
        found: dict[str, set[str]] = {}
        for user in [f"u{n}" for n in range(12)] * 2:
            answer = post(fleet, "web", "gpt-4o", {"user": user})
            assert answer.status_code == 200
            found.setdefault(user, set()).add(answer.headers["x-sluice-model"])
        assert all(len(models) == 1 for models in found.values())
        assert set.union(*found.values()) == {MODEL, CODER}
        cards = get(fleet, "coding", "/v1/models")["data"]
        assert [card["id"] for card in cards] == [CODER, "gpt-4o"]
        assert post(fleet, "coding", "gpt-4o").headers["x-sluice-model"] == CODER


def reload(fleet: Fleet, change: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    """Change the fleet's file and reload it; what changed."""
    path = Path(fleet.replicas[0].command[fleet.replicas[0].command.index("-c") + 1])
    config = yaml.safe_load(path.read_text())
    change(config)
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    answer = httpx.post(f"{fleet.url}/admin/reload", headers=ADMIN)
    assert answer.status_code == 200, answer.text
    assert not answer.json()["restart_needed"]
    changes: list[dict[str, Any]] = answer.json()["changes"]
    return changes


def test_a_reload_ends_and_adds_keys_while_streams_run_on() -> None:
    with two_models([{"name": "web"}, {"name": "old"}]) as fleet:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
        with httpx.stream(
            "POST",
            fleet.url + CHAT,
            json={**body, "max_tokens": 800, "stream": True},
            headers={"authorization": "Bearer sk-old"},
            timeout=30,
        ) as stream:
            lines = stream.iter_lines()
            next(lines)

            def edit(config: dict[str, Any]) -> None:
                web = config["tenants"][0]["keys"][0]
                config["tenants"][0]["keys"] = [{**web, "models": [CODER]}]
                other = {"name": "fresh", **hashed({"name": "fresh"})}
                config["tenants"].append({"name": "beta", "keys": [other]})
                config["entitlements"].append({"name": "b", "tenant": "beta", "model": MODEL})

            changes = {each["path"]: each for each in reload(fleet, edit)}
            assert post(fleet, "old", MODEL).status_code == 401
            assert post(fleet, "web", MODEL).status_code == 403
            assert post(fleet, "web", CODER).status_code == 200
            assert post(fleet, "fresh", MODEL).status_code == 200
            assert list(lines)[-2:] == ["data: [DONE]", ""]
        shown = json.dumps(list(changes.values()))
        digest = hashed({"name": "old"})["sha256"]
        assert digest[:8] in changes["tenants[acme].keys[old]"]["before"]
        assert digest not in shown
        assert hashed({"name": "fresh"})["sha256"] not in shown
        assert set(changes) == {
            *("tenants[acme].keys[web].models", "tenants[acme].keys[old]"),
            *("tenants[beta]", "entitlements[b]"),
        }


def test_a_reload_moves_a_key_to_another_tenant_and_expires_one() -> None:
    with two_models([{"name": "web"}, {"name": "old"}]) as fleet:

        def edit(config: dict[str, Any]) -> None:
            web, old = config["tenants"][0]["keys"]
            config["tenants"] = [
                {"name": "beta", "keys": [web]},
                {"name": "acme", "keys": [{**old, "expires_at": "2020-01-01T00:00:00Z"}]},
            ]
            config["entitlements"].append({"name": "b", "tenant": "beta", "model": MODEL})

        reload(fleet, edit)
        assert get(fleet, "web", "/v1/sluice/me")["tenant"] == "beta"
        refused = post(fleet, "old", MODEL)
        assert (refused.status_code, refused.headers["x-sluice-reason"]) == (403, "key_expired")
