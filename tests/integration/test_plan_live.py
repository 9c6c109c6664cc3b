"""`sluice plan --live` against a running gateway: its demand, its fleet, and nothing changed."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import openai
import yaml

from bench.common.fleet import ADMIN_KEY, MODEL, Fleet
from planner.profile import PAPER_A100
from tests.asking import admin, chat, get
from tests.integration.test_compression import UNHURRIED, post, rag
from tests.running import sluice

SHORT = 110


def ask_all(fleet: Fleet) -> None:
    """Short chats, and one long prompt that the gateway cuts for the short pool."""
    with openai.OpenAI(base_url=fleet.url + "/v1", api_key="any", max_retries=0) as client:

        def one(number: int) -> None:
            body = chat(tokens=20, text=f"Question {number}. " * 40)
            messages = body.pop("messages")
            client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=20, extra_body=body
            )

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(one, range(SHORT)))
    assert post(fleet, rag(max_tokens=50)).headers["x-sluice-pool"] == "short"


def plan(fleet: Fleet, *more: object) -> dict[str, Any]:
    found = sluice(
        *("plan", "--live", fleet.url, "--slo-ttft-ms", 5000, "--json", *more),
        SLUICE_ADMIN_KEY=ADMIN_KEY,
    )
    assert found.exit_code == 0, found.output
    document: dict[str, Any] = json.loads(found.stdout)
    return document


def test_a_running_fleet_is_planned_anew_from_what_it_was_asked(tmp_path: Path) -> None:
    log, profile = tmp_path / "requests.jsonl", tmp_path / "node.json"
    profile.write_bytes(msgspec.json.encode(PAPER_A100))
    model = {
        "compression": {"enabled": True, "only_when_busy": False, "when": "any"},
        "scheduling": {"policy": "least-loaded"},
    }
    logged = {"request_log": {"path": str(log)}}
    with Fleet(short=2, long=1, model=model, config={**UNHURRIED, **logged}) as fleet:
        ask_all(fleet)
        before = get(fleet.url, ADMIN_KEY, "/admin/pools").json()
        (demand,) = admin(fleet.url, "GET", f"/admin/demand?model={MODEL}").json()["data"]
        assert sum(count for _, count, _ in demand["hours"]) == SHORT + 1
        assert sum(lost for _, _, lost in demand["hours"]) == 0
        assert len(demand["records"]) == SHORT + 1
        assert admin(fleet.url, "GET", "/admin/demand?model=none").status_code == 404

        found = plan(fleet, "--rate", 20)
        live = found["live"]
        assert (live["nodes"], live["boundaries"]) == ({"short": 2, "long": 1}, [8192])
        assert live["saves_nodes"] == 3 - found["total_nodes"]
        assert live["lacks"]["short"] < 2
        assert live["proof"] is None
        # The prompt that was cut counts as the client sent it.
        assert "1 of 1 prompts in the log's compression window" in found["pc_said"]

        # Of the log, with the tenants of a file: the verdict of `sluice prove` on the plan.
        file = tmp_path / "sluice.yaml"
        pools = {
            name: {"max_model_len": size, "max_num_seqs": 16, "workers": [f"http://{name}.invalid"]}
            for name, size in (("short", 8192), ("long", 65_536))
        }
        entitlement = {"name": "all", "tenant": "t", "model": MODEL, "concurrency": 8}
        document = {
            "version": 1,
            "models": [{"name": MODEL, "pools": pools, "kv_bytes_per_token": 327_680}],
            "entitlements": [{**entitlement, "service_class": "elastic"}],
        }
        file.write_text(yaml.safe_dump(document))
        proved = plan(fleet, "--log", log, "-c", file, "--profile", profile)
        assert proved["live"]["proof"]["verdict"] in {"holds", "breaks", "cannot tell"}
        subjects = {one["name"] for one in proved["live"]["proof"]["findings"]}
        assert "all" in subjects
        after = get(fleet.url, ADMIN_KEY, "/admin/pools").json()
        assert [p["b_short"] for p in after[0]["pools"]] == [
            p["b_short"] for p in before[0]["pools"]
        ]


def test_too_few_requests_and_a_wrong_key_are_said() -> None:
    with Fleet(short=1, long=1) as fleet:
        few = sluice("plan", "--live", fleet.url, SLUICE_ADMIN_KEY=ADMIN_KEY)
        assert few.exit_code == 2
        assert "knows of 0 requests" in few.output
        assert "--log FILE" in few.output
        other = sluice("plan", "--live", fleet.url, SLUICE_ADMIN_KEY="other")
        assert other.exit_code == 2
        assert "refuses this key" in other.output
        both = sluice("plan", "--live", fleet.url, "--workload", "azure")
        assert both.exit_code == 2
