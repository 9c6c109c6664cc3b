"""`sluice plan` and `sluice whatif`: tables, JSON, files, and what they refuse."""

import json
import sys
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import respx
from matplotlib.image import imread
from typer.testing import Result

from gateway.settings import ConfigError, load, parse
from sluice.hash_key import hashed_key
from sluice.plan.question import load_workload
from tests.builders import decision
from tests.running import sluice

KEYS = {
    *("mode", "workload", "rate_per_s", "b_short", "gamma", "pc", "homogeneous", "pools"),
    *("total_nodes", "cost_per_year_usd", "savings", "feasible", "elapsed_ms", "verified"),
}
METRICS = """\
vllm:request_prompt_tokens_bucket{engine="0",le="1000"} 10
vllm:request_prompt_tokens_bucket{engine="0",le="+Inf"} 10
vllm:request_generation_tokens_bucket{engine="0",le="200"} 10
vllm:request_generation_tokens_bucket{engine="0",le="+Inf"} 10
"""


def run(*args: str) -> Result:
    return sluice(*args, COLUMNS="120")


def plan_json(*args: str) -> dict[str, Any]:
    result = run("plan", *args, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_the_published_fleet_for_machines() -> None:
    found = plan_json(
        "--workload", "lmsys", "--rate", "1000", "--mode", "paper", "--b-short", "1536",
        "--gamma", "2", "--pc", "1",
    )  # fmt: skip
    assert found.keys() >= KEYS
    assert found["homogeneous"]["nodes"] == 139
    assert {name: pool["nodes"] for name, pool in found["pools"].items()} == {
        "short": 7,
        "long": 52,
    }
    assert found["b_short"] == 1536
    assert round(found["cost_per_year_usd"] / 1000) == 1142
    assert found["verified"] is None
    for key in ("slots_per_node", "utilisation", "ttft_p99_s", "tpot_p99_s"):
        assert found["pools"]["long"][key] > 0


def azure_log(tmp_path: Path, *rates: float) -> str:
    """A trace with a quarter of an hour at each rate."""
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for part, rate in enumerate(rates):
        count = round(900 * rate)
        rows += [f"{900 * part + i / rate},{500 + i % 100},20" for i in range(count)]
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(rows), encoding="utf-8")
    return str(path)


def test_the_rate_taken_from_a_log_is_named(tmp_path: Path) -> None:
    log = azure_log(tmp_path, 1.0, 1.0, 0.0, 0.0, 4.0)
    mean = plan_json("--workload", log)
    assert mean["rate_per_s"] == pytest.approx(2.0, rel=0.02)  # idle time is not averaged in
    assert "busy five-minute windows of 15" in mean["rate_said"]
    busiest = plan_json("--workload", log, "--rate-quantile", "0.95")
    assert busiest["rate_per_s"] == pytest.approx(4.0, rel=0.02)
    shown = run("plan", "--workload", log, "--rate-quantile", "0.95").stdout
    assert "the 0.95 quantile of 9" in " ".join(shown.split())


def test_two_rates_are_refused(tmp_path: Path) -> None:
    log = azure_log(tmp_path, 1.0)
    result = run("plan", "--workload", log, "--rate", "3", "--rate-quantile", "0.9")
    assert (result.exit_code, "give one of them" in result.output) == (2, True)


def test_the_default_for_people() -> None:
    result = run("plan", "--workload", "azure", "--rate", "1000")
    assert result.exit_code == 0, result.output
    for words in ("one pool, slots", "one pool, paged", "277", "106", "two pools", "archetype I"):
        assert words in result.stdout
    assert "at 106 nodes either way" in result.stdout


def test_the_written_file_passes_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_ADMIN_KEY", "sk-admin")
    monkeypatch.setenv("SLUICE_KEY_HASH", hashed_key("sk-everybody"))
    path = tmp_path / "sluice.yaml"
    result = run(
        "plan", "--workload", "azure", "--rate", "100", "--b-short", "4096", "-o", str(path),
        "--worker", "long=http://10.0.0.9:8000",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    checked = run("check", "-c", str(path))
    assert checked.exit_code == 0, checked.output
    assert "note:" not in checked.output
    assert "10.0.0.9:8000" in checked.stdout
    assert "short-1.invalid:8000" in checked.stdout


def test_plots_are_written(tmp_path: Path) -> None:
    run("plan", "--workload", "azure", "--rate", "100", "--plot", str(tmp_path / "plots"))
    for name in ("plan-cost.png", "plan-distribution.png"):
        pixels = imread(tmp_path / "plots" / name)
        assert pixels.std() > 0.05


def test_a_measured_profile_wins_over_names(tmp_path: Path) -> None:
    path = tmp_path / "node.json"
    node = {
        "name": "mine",
        "gpu": "H100",
        "model": "m",
        "gpus": 2,
        "w_s": 0.01,
        "h_s_per_token": 1e-8,
        "kv_tokens": 400_000,
        "verified": False,
    }
    path.write_text(json.dumps(node), encoding="utf-8")
    found = plan_json("--workload", "azure", "--rate", "100", "--profile", str(path))
    assert {pool["profile"] for pool in found["pools"].values()} == {"mine"}
    assert any("mine is unverified" in note for note in found["notes"])


def test_no_fleet_exits_1() -> None:
    result = run(
        "plan", "--workload", "agent-heavy", "--rate", "10", "--slo-ttft-ms", "100", "--json"
    )
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert not found["feasible"]
    assert found["total_nodes"] is None


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--rate", "0"), "a rate of 0/s"),
        (("--rate", "10", "--slo-ttft-ms", "10"), "below 2 empty iteration"),
        (("--rate", "10", "--slo-tpot-ms", "5"), "below 1 empty iteration"),
        (("--rate", "10", "--gamma", "0.9"), "gamma is 0.9"),
        (("--rate", "10", "--gamma", "x"), "--gamma x"),
        (("--rate", "10", "--gamma", "1.5"), "p_c, the share of prompts that can be, is not known"),
        (("--rate", "10", "--b-short", "x"), "--b-short x"),
        (("--rate", "10", "--gpu", "V100"), "unknown GPU V100"),
        (("--rate", "10", "--model", "m"), "unknown model m"),
        (("--rate", "10", "--pc", "code"), "--pc code"),
        (("--rate", "10", "--pc", "code=0"), "does not say what its requests hold"),
        (("--rate", "10", "--input-share", "1"), "an input share of 1"),
        (("--rate", "10", "--profile", "missing.json"), "missing.json"),
        ((), "has no times"),
    ],
)
def test_bad_questions_exit_2_with_what_to_change(args: tuple[str, ...], words: str) -> None:
    result = run("plan", "--workload", "azure", *args)
    assert result.exit_code == 2
    assert words in result.stderr
    assert "\nfix: " in result.stderr


def test_a_file_that_is_not_there_names_the_shipped_workloads() -> None:
    result = run("plan", "--workload", "nowhere.csv", "--rate", "1")
    assert result.exit_code == 2
    assert "azure, lmsys, agent-heavy" in result.stderr


@respx.mock
def test_engines_are_asked_for_their_histograms() -> None:
    one = respx.get("http://a:8000/metrics").mock(httpx.Response(200, text=METRICS))
    two = respx.get("http://b:8000/metrics").mock(httpx.Response(200, text=METRICS))
    found = load_workload("metrics:http://a:8000,http://b:8000/metrics")
    assert one.called
    assert two.called
    assert found.source == "vLLM histograms of 20 requests"
    assert found.mean_lengths() == pytest.approx((500, 100), rel=0.01)


@respx.mock
def test_prometheus_is_asked_for_the_last_week() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        query = request.url.params["query"]
        edge = {"vllm:request_prompt_tokens": "1000", "vllm:request_generation_tokens": "200"}
        found = [edge[name] for name in edge if f"{name}_bucket[7d]" in query]
        series = [{"metric": {"le": le}, "value": [0, "10"]} for le in found]
        return httpx.Response(200, json={"status": "success", "data": {"result": series}})

    respx.get("http://prom:9090/api/v1/query").mock(side_effect=answer)
    found = load_workload("prom:http://prom:9090")
    assert found.mean_lengths() == pytest.approx((500, 100), rel=0.01)


def test_whatif_sweeps_rates_and_gpus() -> None:
    args = ("--workload", "azure", "--rates", "100,200", "--gpus", "A100,B200")
    result = run("whatif", *args, "--slo-ttft-ms", "2000", "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert [(row["rate_per_s"], row["gpu"]) for row in rows] == [
        (100.0, "A100"),
        (100.0, "B200"),
        (200.0, "A100"),
        (200.0, "B200"),
    ]
    assert rows[0]["total_nodes"] < rows[2]["total_nodes"]
    table = run("whatif", *args, "--slo-ttft-ms", "2000").stdout
    assert table.count("A100") == 2


def test_whatif_refuses_what_is_no_number() -> None:
    result = run("whatif", "--workload", "azure", "--rates", "1,x")
    assert result.exit_code == 2
    assert "--rates 1,x" in result.stderr


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.special", None)
    result = run("plan", "--workload", "azure", "--rate", "10")
    assert result.exit_code == 2
    assert "pip install '.[plan]'" in result.stderr


TENANTS = """\
entitlements:
  - {name: gold, tenant: a, model: x, service_class: dedicated, concurrency: 2000}
  - {name: team, tenant: b, model: x, tokens_per_second: 5000}
  - {name: spot, tenant: c, model: x, service_class: spot}
"""


def test_reserved_baselines_are_a_floor_under_the_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_ADMIN_KEY", "a")
    file, output = tmp_path / "tenants.yaml", tmp_path / "out.yaml"
    file.write_text(TENANTS, encoding="utf-8")
    args = ("--workload", "azure", "--rate", "20", "--slo-ttft-ms", "900", "--b-short", "4096")
    alone = plan_json(*args)
    found = plan_json(*args, "--entitlements", str(file), "-o", str(output))
    slots = sum(p["serving_nodes"] * p["slots_per_node"] for p in found["pools"].values())
    assert sum(p["serving_nodes"] * p["slots_per_node"] for p in alone["pools"].values()) < 2000
    assert slots >= 2001
    assert any("more than the demand needs" in note for note in found["notes"])
    assert found["total_nodes"] > alone["total_nodes"]
    assert found["floor_nodes"] > 0 == alone["floor_nodes"]
    # The gateway's own check of reserves accepts what was planned, and no fleet below the floor.
    written = load(output)
    assert [e.name for e in written.entitlements] == ["gold", "team", "spot"]
    assert written.entitlements[0].concurrency == 2000
    fewer = output.read_text(encoding="utf-8").replace("concurrency: 2000", "concurrency: 9000")
    with pytest.raises(ConfigError):
        parse(fewer, "fewer.yaml", {"SLUICE_ADMIN_KEY": "a"})


WHOLE = """\
version: 1
server: {admin_key: "${OWN_ADMIN_KEY}"}
models:
  - name: demo-model
    aliases: [gpt-4o-mini]
    boundary: {b_short: 2048, b_short_min: 1024, mode: observe}
    compression: {enabled: true, when: header, mark: false}
    pools:
      little: {max_model_len: 4096, max_num_seqs: 8, workers: ["http://10.0.0.1:8000"]}
      long: {max_model_len: 65536, max_num_seqs: 8, workers: ["http://10.0.0.2:8000"]}
  - {name: other, pools: {p: {max_model_len: 9, max_num_seqs: 1, workers: ["http://o:1"]}}}
tenants: [{name: acme, keys: [{name: first, sha256: "${ACME_KEY_HASH}"}]}]
entitlements:
  - {name: e, tenant: acme, model: demo-model, concurrency: {little: 2, long: 1}}
"""


def log_with_a_window(tmp_path: Path) -> Path:
    """20 requests/s of which a third are a little longer than a boundary at 4,096; most are cut."""
    records = []
    for i in range(3000):
        given: dict[str, Any] = {"prompt_tokens": 800}
        if i % 3 == 0:
            given = {"prompt_tokens": 3500, "kept_share": 0.7, "when": "header"}
        if i % 30 == 0:
            given = {"prompt_tokens": 5000, "not_compressed": "tools", "when": "header"}
        record = decision(
            str(i), time_unix_s=i / 20, model="demo-model", completion_tokens=20, **given
        )
        records.append(msgspec.json.encode(record).decode())
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(records), encoding="utf-8")
    return path


def test_a_plan_changes_the_file_it_is_given_and_enables_what_it_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OWN_ADMIN_KEY", "sk-own")
    monkeypatch.setenv("ACME_KEY_HASH", hashed_key("sk-acme"))
    file, output = tmp_path / "sluice.yaml", tmp_path / "planned.yaml"
    file.write_text(WHOLE, encoding="utf-8")
    log = log_with_a_window(tmp_path)
    found = plan_json(
        "--workload", str(log), "--rate", "300", "--slo-ttft-ms", "5000", "--b-short", "4096",
        "--gamma", "1.5", "-c", str(file), "-o", str(output),
    )  # fmt: skip
    assert found["pc"] == pytest.approx(0.9)
    assert "900 of 1000 prompts" in found["pc_said"]
    text = output.read_text(encoding="utf-8")
    assert "${OWN_ADMIN_KEY}" in text
    assert "${ACME_KEY_HASH}" in text
    config = load(output)
    model, other = config.models
    assert (model.name, model.aliases, other.name) == ("demo-model", ("gpt-4o-mini",), "other")
    assert (model.boundary.b_short, model.boundary.gamma) == ((4096,), 1.5)
    assert (model.compression.enabled, model.compression.only_when_busy) == (True, False)
    assert (model.compression.when, model.compression.mark) == ("header", False)
    urls = {name: [str(w.url) for w in pool.workers] for name, pool in model.pools.items()}
    assert urls == {"short": ["http://10.0.0.1:8000"], "long": ["http://10.0.0.2:8000"]}
    assert (config.entitlements[0].tenant, config.entitlements[0].concurrency) == ("acme", 3)
    assert [key.name for key in config.tenants[0].keys] == ["first"]


def test_a_reserved_token_rate_is_planned_for_even_when_nobody_asks(tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    rate = "entitlements: [{name: g, tenant: a, model: x, service_class: guaranteed, "
    file.write_text(rate + "concurrency: 1, tokens_per_second: 200000}]", encoding="utf-8")
    found = plan_json(
        "--workload", "azure", "--rate", "20", "-c", str(file), "--slo-ttft-ms", "900"
    )
    assert found["rate_per_s"] > 50
    assert found["rate_said"] == "the token rate that entitlements reserve"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "give a sluice.yaml"),
        ("[]", "is no mapping"),
        ("entitlements: []", "has no entitlements"),
        ("entitlements: [{name: a, tenant: a, model: x, service_class: gold}]", "tenants.yaml:1"),
        (
            "entitlements: [{name: a, tenant: a, model: x}, {name: b, tenant: a, model: y}]",
            "give --serves with one of: x, y",
        ),
    ],
)
def test_a_bad_file_of_entitlements_is_refused_with_the_fix(
    tmp_path: Path, text: str, words: str
) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(text, encoding="utf-8")
    result = run("plan", "--workload", "azure", "--rate", "20", "--entitlements", str(file))
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.output.split())


PHASED = (
    *("plan", "--workload", "synthetic:prompt=1500,answer=250,spread=0.7", "--gpu", "H100"),
    *("--rate", "30", "--slo-ttft-ms", "2000", "--slo-tpot-ms", "40", "--max-pools", "1"),
)


def test_phases_are_planned_where_a_link_is_given_and_said(tmp_path: Path) -> None:
    file = tmp_path / "sluice.yaml"
    text = sluice(*PHASED, "--transfer-gb-per-s", "20", "-o", str(file), COLUMNS="80").stdout
    assert max(map(len, text.splitlines())) <= 80
    assert "apart wins: 6 prefill + 2 decode against 10 together, -20 %" in text
    assert "all/prefill" in text
    assert "skip_below_tokens" in file.read_text()
    found = json.loads(sluice(*PHASED, "--transfer-gb-per-s", "20", "--json").stdout)
    (compared,) = found["phases"]["compared"]
    assert compared == {
        "pool": "all",
        "apart_wins": True,
        "together_nodes": 10,
        "prefill_nodes": 6,
        "decode_nodes": 2,
    }
    assert found["pools"]["all"]["phases"]["prefill_nodes"] == 6
    without = json.loads(sluice(*PHASED, "--json").stdout)
    assert without["phases"] == {"mode": "never", "transfer_bytes_per_s": None, "compared": []}
    assert without["pools"]["all"]["phases"] is None


def test_phases_without_a_link_are_refused() -> None:
    result = sluice(*PHASED, "--phases", "always")
    assert result.exit_code == 2
    assert "--transfer-gb-per-s" in result.stderr


def replica(first_s: float, stride: int, records: int, *hours: list[int]) -> dict[str, Any]:
    """What a gateway tells of its demand: prompts of as many tokens as `records` counts down."""
    kept = [
        decision(
            time_unix_s=first_s + n, model="m", prompt_tokens=1000 * stride, completion_tokens=10
        )
        for n in range(records)
    ]
    last_s = hours[-1][0] + 1800.0
    told = {"first_unix_s": first_s, "last_unix_s": last_s, "stride": stride, "hours": hours}
    return {**told, "records": json.loads(msgspec.json.encode(kept))}


def engines(count: int) -> list[dict[str, str]]:
    return [{"id": f"10.0.0.1:{8000 + n}#{rank}"} for n in range(count) for rank in range(2)]


@respx.mock
def test_replicas_demand_is_summed_and_their_samples_are_thinned_alike() -> None:
    at = 3600 * 500_000
    first = replica(at + 600.0, 1, 400, [at, 30_000, 0], [at + 3600, 90_000, 9_000])
    second = replica(at + 3600.0, 2, 200, [at + 3600, 90_000, 0])
    pools = [
        {"name": n, "phase": None, "b_short": b, "max_model_len": w, "workers": engines(c)}
        for n, b, w, c in (("s", 4096, 8192, 3), ("l", None, 65_536, 1))
    ]
    row = {"model": "m", "gamma": None, "pools": pools}
    respx.get("http://gw/admin/pools").respond(json=[row])
    respx.get("http://gw/admin/demand", params={"model": "m"}).respond(
        json={"data": [first, second]}
    )
    found = plan_json("--live", "http://gw", "--slo-ttft-ms", "5000")
    # Half an hour of the second hour was seen: 90,000 in 1,800 s by each.
    assert found["rate_per_s"] == pytest.approx(100.0)
    assert found["rate_said"].startswith("the busiest hour of 2")
    assert "5.0 % of it was not served" in found["rate_said"]
    live = found["live"]
    assert live["nodes"] == {"s": 3, "l": 1}
    assert live["saves_nodes"] == 4 - found["total_nodes"]
    human = run("plan", "--live", "http://gw", "--slo-ttft-ms", "5000").output
    assert "1500 tokens of prompt" in human.replace(",", "")
    assert "nothing was changed" in human
