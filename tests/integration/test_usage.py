"""Ledger, export and metrics over real sockets: the same to the token, also after kill -9."""

import hashlib
import json
import signal
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from bench.common.fleet import ADMIN_KEY, MODEL, Fleet
from simulator.mock_server import tokenizer
from simulator.mock_server.api import answers
from tests.asking import until
from tests.running import sluice

PRICE = {"input": 0.6, "cached_input": 0.15, "output": 1.8}
FLUSHED_S = 1.2
"""After so long the last settled request is in ledger and export."""
TENANTS = ("acme", "zeta")
TOKENS = {"input": "input_tokens", "cached_input": "cached_input_tokens", "output": "output_tokens"}


def keeping(folder: Path, *, long: int = 0, faults: str = "", **model: Any) -> Fleet:
    """A fleet with a ledger and an export, and a key for each tenant."""
    digest = {name: hashlib.sha256(f"sk-{name}".encode()).hexdigest() for name in TENANTS}
    config = {
        "currency": "EUR",
        "ledger": {"path": str(folder / "ledger.db")},
        "usage_export": {"path": str(folder / "usage.jsonl")},
        "entitlements": [{"name": name, "tenant": name, "model": MODEL} for name in TENANTS],
        "tenants": [
            {"name": name, "keys": [{"name": f"{name}-key", "sha256": digest[name]}]}
            for name in TENANTS
        ],
    }
    mock = ("--speed", "50", *(("--fail", faults) if faults else ()))
    return Fleet(short=1, long=long, mock=mock, config=config, model=model)


def client_of(fleet: Fleet, tenant: str) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{fleet.url}/v1", api_key=f"sk-{tenant}", max_retries=0, timeout=20
    )


def ask(client: openai.OpenAI, number: int) -> None:
    """A plain answer, a stream, or a stream that the client leaves in the middle."""
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Tell me a story of owls. " * (1 + number % 7)}],
        "max_tokens": 60,
    }
    if number % 3 == 0:
        client.chat.completions.create(**asked)
        return
    with client.chat.completions.create(**asked, stream=True) as stream:
        for at, _ in enumerate(stream):
            if number % 3 == 2 and at == 5:
                break


def ask_many(fleet: Fleet, count: int) -> None:
    clients = [client_of(fleet, tenant) for tenant in TENANTS]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: ask(clients[n % 2], n), range(count)))
    fleet.wait_until_idle()
    time.sleep(FLUSHED_S)


def reported(path: Path, by: str = "tenant") -> dict[str, Any]:
    """What `sluice usage` says of a ledger or an export."""
    done = sluice("usage", path, "--by", by, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.output)
    return found


def metered(fleet: Fleet) -> dict[str, int]:
    """Tokens and cost of the gateway's own metrics, all tenants together."""
    metrics = fleet.metrics()
    found = {
        name: int(sum(v for k, v in metrics.items() if k.startswith("sluice_tokens") and kind in k))
        for kind, name in ((f'kind="{kind}"', name) for kind, name in TOKENS.items())
    }
    cost = sum(round(v * 1e9) for k, v in metrics.items() if k.startswith("sluice_cost_total"))
    return {**found, "cost_nano": cost}


def figures(total: dict[str, Any], less: dict[str, Any] | None = None) -> dict[str, int]:
    names = (*TOKENS.values(), "cost_nano")
    return {name: total[name] - (less[name] if less else 0) for name in names}


def leave_after(fleet: Fleet, events: int) -> str:
    """The text that a client got which leaves a stream after so many events with text."""
    asked: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Go on"}]}
    pieces: list[str] = []
    completions = client_of(fleet, "acme").chat.completions
    asked["extra_body"] = {"ignore_eos": True}
    with completions.create(**asked, max_tokens=2_000, stream=True) as stream:
        for chunk in stream:
            assert chunk.usage is None, "the client did not ask for it"
            pieces += [piece] if (piece := chunk.choices[0].delta.content) else []
            if len(pieces) == events:
                break
    fleet.wait_until_idle()
    time.sleep(FLUSHED_S)
    return "".join(pieces)


@pytest.mark.parametrize("engine", ["vllm", "another"])
def test_a_stream_that_its_client_leaves_is_charged_the_text_that_was_delivered(
    tmp_path: Path, engine: str
) -> None:
    """However many tokens an event has, and whether or not the engine says how many."""
    ledger, export = tmp_path / "ledger.db", tmp_path / "usage.jsonl"
    kind = "" if engine == "vllm" else "sglang-metrics,"
    with keeping(tmp_path, price=PRICE, faults=kind.rstrip(",")) as fleet:
        completions = client_of(fleet, "acme").chat.completions
        for number in range(30):  # its texts are like the answers
            content = answers.text(7 * number, 600)
            messages: Any = [{"role": "user", "content": content}]
            completions.create(model=MODEL, messages=messages, max_tokens=1)
        time.sleep(2 * FLUSHED_S)  # the engine's metrics are read every two seconds
        for interval in (1, 4, 10, 50):
            before = reported(ledger)["total"]["output_tokens"]
            events = 950 // interval
            spec = f"{kind}interval:{interval},stall:{events}"
            httpx.post(f"{fleet.engines[0].url}/mock/fail", json={"spec": spec}).raise_for_status()
            delivered = tokenizer.count(leave_after(fleet, events))
            after = reported(ledger)
            assert after == reported(export)
            assert figures(after["total"]) == metered(fleet)
            charged = after["total"]["output_tokens"] - before
            assert charged == pytest.approx(delivered, rel=0.02), (interval, delivered)


def test_ledger_export_and_metrics_are_the_same_also_after_kill_9(tmp_path: Path) -> None:
    ledger, export = tmp_path / "ledger.db", tmp_path / "usage.jsonl"
    with keeping(tmp_path, price=PRICE) as fleet:
        ask_many(fleet, 90)
        before = reported(ledger)
        assert before == reported(export)
        assert figures(before["total"]) == metered(fleet)
        assert before["total"]["requests"] == 90
        assert [row["tenant"] for row in before["rows"]] == list(TENANTS)
        assert before["total"]["cost_nano"] > 0

        answered = kill_under_load(fleet)
        fleet.start_replica(fleet.replicas[0])
        fleet.wait_ready(fleet.replicas[0])
        until(lambda: reported(ledger) == reported(export))  # what one has, the other gets
        after = reported(ledger)
        new = after["total"]["requests"] - 90
        assert new >= answered, "no request is lost that ended before the last second"

        ask_many(fleet, 30)
        last = reported(ledger)
        assert last == reported(export)
        assert figures(last["total"], after["total"]) == metered(fleet)
        assert last["total"]["requests"] == after["total"]["requests"] + 30


def kill_under_load(fleet: Fleet) -> int:
    """Kill the gateway while clients ask it; requests that it had answered a second before."""
    ended: list[float] = []
    stop = threading.Event()

    def load(tenant: str) -> None:
        client = client_of(fleet, tenant)
        while not stop.is_set():
            with suppress(openai.OpenAIError, httpx.HTTPError):
                ask(client, 0)
                ended.append(time.monotonic())

    with ThreadPoolExecutor(6) as pool:
        for n in range(6):
            pool.submit(load, TENANTS[n % 2])
        time.sleep(3.0)
        fleet.kill_replica(fleet.replicas[0])
        killed_s = time.monotonic()
        stop.set()
    early = [s for s in ended if s < killed_s - FLUSHED_S]
    assert len(early) > 20
    return len(early)


def test_a_tenants_key_reads_its_own_usage_and_an_operators_all(tmp_path: Path) -> None:
    with keeping(tmp_path, price=PRICE) as fleet:
        ask_many(fleet, 12)
        everybody = usage(fleet, "/admin/usage?by=tenant,key", ADMIN_KEY).json()
        assert [(row["tenant"], row["key"]) for row in everybody["rows"]] == [
            ("acme", "acme-key"),
            ("zeta", "zeta-key"),
        ]
        assert everybody["currency"] == "EUR"
        assert everybody["total"]["requests"] == 12
        own = usage(fleet, "/v1/sluice/usage?by=tenant,day", "sk-zeta").json()
        assert [row["tenant"] for row in own["rows"]] == ["zeta"]
        assert own["total"]["requests"] == 6
        assert figures(own["total"]) == figures(everybody["rows"][1])
        past = usage(fleet, "/v1/sluice/usage?to=2020-01-01", "sk-zeta").json()
        assert (past["rows"], past["total"]["requests"]) == ([], 0)
        refused = usage(fleet, "/v1/sluice/usage?by=colour", "sk-zeta")
        assert refused.status_code == 400
        assert "day, tenant, entitlement" in refused.json()["error"]["message"]
        assert usage(fleet, "/v1/sluice/usage", "sk-nobody").status_code == 401
        assert usage(fleet, "/admin/usage", "sk-zeta").status_code == 401


def test_without_a_ledger_the_routes_say_how_to_get_one() -> None:
    with Fleet(short=1, long=0) as fleet:
        answer = usage(fleet, "/admin/usage", ADMIN_KEY)
        assert (answer.status_code, answer.headers["x-sluice-reason"]) == (404, "no_ledger")
        assert "ledger.path" in answer.json()["error"]["message"]


def usage(fleet: Fleet, path: str, key: str) -> httpx.Response:
    return httpx.get(fleet.url + path, headers={"authorization": f"Bearer {key}"}, trust_env=False)


def test_costs_by_the_hour_add_up_to_the_fleets_bill(tmp_path: Path) -> None:
    fleet = keeping(tmp_path)
    for pool in fleet.replicas[0].config["models"][0]["pools"].values():
        pool.update(max_num_seqs=8, gpu_hour=3600, gpus=2)  # two a second
    with fleet:
        began = time.monotonic()
        ask_many(fleet, 40)
        metrics = fleet.metrics()
        bill = sum(v for k, v in metrics.items() if k.startswith("sluice_fleet_cost_total"))
        lasted_s = time.monotonic() - began
        fleet.kill_replica(fleet.replicas[0], sig=signal.SIGTERM)
        ended_s = time.monotonic() - began
    found = reported(tmp_path / "ledger.db")
    *tenants, idle = found["rows"]
    assert [row["tenant"] for row in found["rows"]] == [*TENANTS, "(idle)"]
    assert all(row["cost_nano"] > 0 for row in tenants)
    assert idle["cost_nano"] > 0
    costs = sum(row["cost_nano"] for row in tenants)
    assert costs == sum(
        round(v * 1e9) for k, v in metrics.items() if k.startswith("sluice_cost_total")
    )
    assert bill >= 2 * (lasted_s - 0.5), "it is counted four times a second"
    with sqlite3.connect(tmp_path / "ledger.db") as file:
        (billed_nano,) = file.execute("SELECT SUM(cost_nano) FROM fleet").fetchone()
    assert found["total"]["cost_nano"] == billed_nano
    assert bill * 1e9 <= billed_nano <= 2e9 * (ended_s + 0.5), "of which two are due each second"
