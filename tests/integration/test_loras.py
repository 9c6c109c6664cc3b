"""LoRA adapters and engines that change what they serve, over real sockets."""

import hashlib
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import yaml

from bench.common.fleet import ADMIN_KEY, MODEL, EngineProcess, Fleet
from tests.asking import chat, post, until

SQL, TONE = "sql-lora", "tone-lora"


def ask(fleet: Fleet, model: str, key: str = "", text: str = "hi", **more: Any) -> httpx.Response:
    return post(fleet.url, key, {**chat(2, text), "model": model, **more})


def call(engine: EngineProcess, path: str, body: Any = None) -> None:
    httpx.post(engine.url + path, json=body or {}, trust_env=False).raise_for_status()


def load(engine: EngineProcess, name: str) -> None:
    call(engine, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": "/loras"})


def unload(engine: EngineProcess, name: str) -> None:
    call(engine, "/v1/unload_lora_adapter", {"lora_name": name})


def names(fleet: Fleet, key: str = "") -> dict[str, str | None]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    cards = httpx.get(f"{fleet.url}/v1/models", headers=headers).json()["data"]
    return {card["id"]: card.get("parent") for card in cards}


def asked_of(engine: EngineProcess) -> Counter[str]:
    return Counter(json.loads(request["body"])["model"] for request in engine.last(200))


def not_ready(fleet: Fleet) -> dict[str, str]:
    found: dict[str, str] = httpx.get(f"{fleet.url}/ready").json().get("workers", {})
    return {name.rpartition("/")[2]: why for name, why in found.items()}


def test_adapters_go_to_the_workers_that_have_them_under_their_own_name() -> None:
    fleet = Fleet(short=2, long=0, mock=("--speed", "50"), model={"loras": [SQL, TONE]})
    first, second = fleet.engines
    first.command += ["--lora", SQL]
    with fleet:
        assert names(fleet) == {MODEL: None, SQL: MODEL, TONE: MODEL}
        for number in range(12):
            assert ask(fleet, SQL, text=str(number)).json()["model"] == SQL
            assert ask(fleet, MODEL, text=str(number)).json()["model"] == MODEL
        assert asked_of(first)[SQL] == 12
        assert asked_of(second) == {MODEL: 12 - asked_of(first)[MODEL]}
        assert asked_of(second)[MODEL], "the base is served by both"
        refused = ask(fleet, TONE)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
        assert "LoRA adapter 'tone-lora'" in refused.json()["error"]["message"]
        ready = httpx.get(f"{fleet.url}/ready").json()
        assert ready["adapters"] == {MODEL: [SQL]}
        assert ready["adapters_missing"] == {MODEL: [TONE]}
        workers = f'sluice_lora_workers{{adapter="{TONE}",model="{MODEL}"}}'
        assert fleet.metrics()[workers] == 0
        slots = fleet.admin("/admin/pools").json()[0]["pools"][0]["ready_slots"]
        assert slots == 256, "adapters add no slots"


def test_an_adapter_that_is_discovered_exists_while_a_worker_has_it() -> None:
    fleet = Fleet(short=2, long=0, mock=("--speed", "50"), model={"discover_loras": True})
    fleet.engines[0].command += ["--lora", SQL]
    with fleet:
        assert names(fleet) == {MODEL: None, SQL: MODEL}
        assert ask(fleet, SQL).status_code == 200
        unload(fleet.engines[0], SQL)
        # The engine's own 404 is how the gateway learns of it between two readings of its list.
        assert ask(fleet, SQL).status_code == 503
        gone = ask(fleet, SQL)
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
        assert names(fleet) == {MODEL: None}
        assert not_ready(fleet) == {}, "the base is served all the same"
        load(fleet.engines[0], SQL)
        until(lambda: SQL in names(fleet))
        assert ask(fleet, SQL).status_code == 200


def test_keys_with_a_list_of_models_open_adapters_by_name() -> None:
    digests = {name: hashlib.sha256(f"sk-{name}".encode()).hexdigest() for name in ("all", "sql")}
    config = {
        "entitlements": [{"name": "chat", "tenant": "acme", "model": MODEL}],
        "tenants": [
            {
                "name": "acme",
                "keys": [
                    {"name": "all", "sha256": digests["all"]},
                    {"name": "sql", "sha256": digests["sql"], "models": [SQL]},
                ],
            }
        ],
    }
    loras = {"loras": [SQL, TONE]}
    mock = ("--speed", "50", "--lora", SQL, "--lora", TONE)
    with Fleet(short=1, long=0, mock=mock, model=loras, config=config) as fleet:
        assert names(fleet, "sk-all") == {MODEL: None, SQL: MODEL, TONE: MODEL}
        assert names(fleet, "sk-sql") == {SQL: MODEL}
        assert ask(fleet, SQL, "sk-sql").status_code == 200
        assert ask(fleet, TONE, "sk-all").status_code == 200
        for closed in (MODEL, TONE):
            refused = ask(fleet, closed, "sk-sql")
            assert refused.status_code == 403
            message = refused.json()["error"]["message"]
            assert message == (
                f"This API key does not open the model '{closed}'. It opens: 'sql-lora'."
            )


def test_sglang_s_field_for_an_adapter_opens_no_more_than_its_name() -> None:
    digest = {name: hashlib.sha256(f"sk-{name}".encode()).hexdigest() for name in ("base", "all")}
    tenant = {
        "name": "acme",
        "keys": [
            {"name": "base", "sha256": digest["base"], "models": [MODEL]},
            {"name": "all", "sha256": digest["all"]},
        ],
    }
    chat = {"name": "chat", "tenant": "acme", "model": MODEL}
    config = {"entitlements": [chat], "tenants": [tenant]}
    mock = ("--speed", "50", "--lora", SQL)
    with Fleet(short=1, long=0, mock=mock, model={"loras": [SQL]}, config=config) as fleet:
        refused = ask(fleet, MODEL, "sk-base", lora_path=SQL)
        assert refused.status_code == 403
        assert f"does not open the model '{SQL}'" in refused.json()["error"]["message"]
        unknown = ask(fleet, MODEL, "sk-all", lora_path="other")
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "lora_path")
        assert ask(fleet, MODEL, "sk-base", lora_path=None).status_code == 200
        assert ask(fleet, MODEL, "sk-all", lora_path=SQL).json()["model"] == SQL
        bodies = [json.loads(request["body"]) for request in fleet.engines[0].last(2)]
        assert [(body["model"], body.get("lora_path")) for body in bodies] == [
            (MODEL, None),
            (SQL, SQL),
        ]


def test_the_worker_that_runs_an_adapter_is_preferred() -> None:
    mock = ("--speed", "1", "--lora", SQL, "--max-loras", "2")
    fleet = Fleet(short=3, long=0, mock=mock, model={"loras": [SQL]})
    with fleet, httpx.Client(timeout=60) as client:
        body = {"model": SQL, "prompt": "x", "max_tokens": 3000, "stream": True, "ignore_eos": True}
        url = f"{fleet.url}/v1/completions"
        headers = {"x-mock-output-tokens": "3000"}
        with client.stream("POST", url, json=body, headers=headers) as running:
            home = running.headers["x-sluice-worker"]
            time.sleep(2.5)  # until the engines' pages were read
            workers = {
                ask(fleet, SQL, text=f"question {n}").headers["x-sluice-worker"] for n in range(3)
            }
        assert workers == {home}


def test_engines_that_sleep_are_out_until_they_wake() -> None:
    with Fleet(short=2, long=0, mock=("--speed", "50")) as fleet:
        first, second = fleet.engines
        call(first, "/sleep")
        until(lambda: not_ready(fleet) == {first.id: "it sleeps: wake it with POST /wake_up"})
        for number in range(6):
            answer = ask(fleet, MODEL, text=str(number))
            assert (answer.status_code, answer.headers["x-sluice-worker"]) == (200, second.id)
        call(second, "/sleep")
        until(lambda: len(not_ready(fleet)) == 2)
        assert ask(fleet, MODEL).json()["error"]["code"] == "no_worker_ready"
        call(first, "/wake_up")
        until(lambda: first.id not in not_ready(fleet))
        assert ask(fleet, MODEL).status_code == 200


def test_the_rotation_follows_a_model_that_is_swapped() -> None:
    with Fleet(short=2, long=0, mock=("--speed", "50")) as fleet:
        first, second = fleet.engines
        call(first, "/mock/model", {"model": "another"})
        for number in range(8):
            answer = ask(fleet, MODEL, text=str(number))
            assert (answer.status_code, answer.headers["x-sluice-worker"]) == (200, second.id)
        until(lambda: "it serves 'another', not" in not_ready(fleet).get(first.id, ""))
        assert fleet.metrics().get("sluice_ejections_total", 0) == 0
        call(first, "/mock/model", {"model": MODEL})
        until(lambda: not not_ready(fleet))
        until(lambda: ask(fleet, MODEL).headers["x-sluice-worker"] == first.id)


def test_a_full_queue_is_busy_and_not_ill() -> None:
    model = {"scheduling": {"policy": "round-robin"}}
    fleet = Fleet(short=2, long=0, short_slots=1, mock=("--speed", "1"), model=model)
    fleet.engines[0].command += ["--max-num-queued", "1"]
    with fleet, httpx.Client(timeout=60) as client:
        fleet.engines[0].fail("busy")
        for number in range(10):
            answer = ask(fleet, MODEL, text=str(number))
            assert answer.status_code == 200
            assert answer.headers["x-sluice-worker"] == fleet.engines[1].id
        pool = fleet.admin("/admin/pools").json()[0]["pools"][0]
        assert [worker["in_rotation"] for worker in pool["workers"]] == [True, True]
        fleet.engines[1].fail("busy")
        refused = ask(fleet, MODEL)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "engine_busy"
        assert client.get(f"{fleet.url}/ready").status_code == 200


def test_a_reload_names_adapters_and_refuses_an_alias_that_is_one(tmp_path: Path) -> None:
    fleet = Fleet(short=1, long=0, mock=("--speed", "50", "--lora", SQL))
    with fleet:
        assert ask(fleet, SQL).status_code == 404
        replica = fleet.replicas[0]
        file = Path(replica.command[replica.command.index("-c") + 1])
        good = yaml.safe_load(file.read_text())
        good["models"][0]["loras"] = [SQL]
        assert reload(fleet, file, good).json()["restart_needed"] == []
        until(lambda: ask(fleet, SQL).status_code == 200)
        good["models"][0].update(loras=[], aliases=[SQL])
        refused = reload(fleet, file, good)
        assert refused.status_code == 400
        assert "is a LoRA adapter of its engines" in refused.json()["error"]["message"]
        assert ask(fleet, SQL).json()["model"] == SQL


def reload(fleet: Fleet, file: Path, config: Any) -> httpx.Response:
    file.write_text(yaml.safe_dump(config))
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    return httpx.post(f"{fleet.url}/admin/reload", headers=headers, timeout=20)
