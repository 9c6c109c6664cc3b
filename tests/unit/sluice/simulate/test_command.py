"""`sluice simulate`: its verdict is its exit code, and bad input says what to change."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import Result

from gateway.settings import parse
from planner.errors import PlanError
from planner.profile import PAPER_A100
from sluice.simulated.fleet import fleet_of_model
from sluice.simulated.recorded import read_recorded
from tests.builders import decision
from tests.running import sluice

COMMANDS = Path(__file__).parents[4] / "docs/start/commands.md"
SMALL = ("--workload", "azure", "--rate", "20", "--requests", "3000")
FILE = """\
version: 1
models:
  - name: m
    kv_bytes_per_token: 327680
    boundary: {b_short: 4096, gamma: 1.5}
    compression: {enabled: true}
    spill_queue: 3
    pools:
      long: {max_model_len: 32768, max_num_seqs: 16, workers: ["http://127.0.0.1:3"]}
      short:
        max_model_len: 8192
        max_num_seqs: 64
        kv_cache_gib: 40
        workers: ["http://127.0.0.1:1", "http://127.0.0.1:2"]
"""


def run(*args: str) -> Result:
    return sluice("simulate", *args)


def answer(*args: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*args, "--json").stdout)
    return found


def test_a_fleet_that_holds_exits_0_and_shows_its_pools() -> None:
    result = run(*SMALL, "--fleet", "3+1", "--b-short", "4096")
    assert result.exit_code == 0, result.output
    for word in ("short", "long", "TTFT P99", "yes", "3,000 requests"):
        assert word in result.stdout


def test_a_fleet_that_is_too_small_exits_1_and_says_why() -> None:
    args = (*SMALL, "--fleet", "1", "--counting", "slots", "--rate", "200")
    result = run(*args)
    assert result.exit_code == 1
    assert "all: overloaded" in result.stdout
    found = answer(*args)
    assert found["ok"] is False
    assert found["faults"]["all"][0].startswith("overloaded")


def test_the_answer_for_machines_is_the_same_for_the_same_seed() -> None:
    args = (*SMALL, "--fleet", "3", "--arrivals", "bursty", "--mtbf-h", "0.05", "--dispatch", "p2c")
    found = [answer(*args, "--seed", seed) for seed in ("1", "1", "2")]
    for each in found:
        each.pop("elapsed_s")
    assert found[0] == found[1]
    assert found[0]["summary"] != found[2]["summary"]
    (pool,) = found[0]["summary"]["pools"]
    assert pool["instances"] == 3
    assert found[0]["summary"]["requests"] == 3000


def test_the_number_of_requests_that_it_advises_can_be_pasted() -> None:
    found = answer("--workload", "azure", "--rate", "100", "--requests", "2000", "--fleet", "9")
    advised = [word for note in found["notes"] for word in re.findall(r"--requests (.*)", note)]
    assert advised
    assert all(int(word) >= 10_000 and word.isdigit() for word in advised)


def test_the_line_in_the_readme_runs() -> None:
    (line,) = re.findall(r"`sluice simulate (.*?)`", COMMANDS.read_text("utf-8"))
    args = (
        re.sub(r" \[[^]]*\]", "", line).replace("SOURCE", "azure").replace("--rate R", "--rate 20")
    )
    result = run(*args.split(), "--requests", "300")
    assert result.exit_code in (0, 1), result.output
    assert "300 requests" in result.stdout


def test_a_fleet_comes_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "sluice.yaml"
    path.write_text(FILE, encoding="utf-8")
    found = answer(*SMALL, "-c", str(path), "--pc", "1")
    pools = found["fleet"]["pools"]
    assert [(p["name"], p["instances"]) for p in pools] == [("short", 2), ("long", 1)]
    assert found["summary"]["compressed"] > 0


def test_what_a_file_says_of_an_engine_wins() -> None:
    model = parse(FILE, "sluice.yaml", {}).models[0]
    spec = fleet_of_model(model, PAPER_A100, counting="paged")
    short, long = (pool.profile for pool in spec.pools)
    assert (short.max_model_len, short.max_num_seqs) == (8192, 64)
    assert short.kv_blocks == 40 * 2**30 // 327_680 // 16
    assert long.kv_blocks == PAPER_A100.kv_tokens // 16
    assert spec.pools[0].boundary_tokens == 4096
    assert (spec.gamma, spec.spill_queue) == (1.5, 3)


def test_plots_are_written(tmp_path: Path) -> None:
    result = run(*SMALL, "--fleet", "3+1", "--b-short", "4096", "--plot", str(tmp_path / "p"))
    assert result.exit_code == 0, result.output
    files = sorted(path.name for path in (tmp_path / "p").iterdir())
    assert files == ["simulate-ttft.png", "simulate-utilisation.png"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "give --fleet with --b-short"),
        (("--fleet", "0"), "whole numbers of at least 1"),
        (("--fleet", "x+2"), "whole numbers of at least 1"),
        (("--fleet", "3+2"), "one boundary fewer than pools"),
        (("--fleet", "3", "--rate", "0"), "give --rate above 0"),
        (("--fleet", "3", "--gamma", "0.5"), "gamma is at least 1"),
        (("--fleet", "3", "--duration", "5"), "not both"),
        (("--fleet", "3", "--gpu", "abacus"), "abacus"),
        (("--fleet", "3", "--max-model-len", "4000000"), "smaller window"),
        (("--fleet", "3", "--mtbf-h", "0"), "times above 0"),
        (("--fleet", "3", "--arrivals", "bursty", "--peak", "9"), "peak"),
        (("--fleet", "3+2", "--b-short", "9000", "--max-model-len", "8192"), "ordered by window"),
    ],
)
def test_bad_input_exits_2_and_says_what_to_change(args: tuple[str, ...], words: str) -> None:
    result = run(*SMALL, *args)
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert "Traceback" not in result.output


AZURE_LINES = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:50.9951690,300,10
2023-11-16 18:15:46.9951690,100,20
2023-11-16 18:15:48.9951690,200,
2023-11-16 18:15:54.9951690,400,30
"""


def test_a_recording_comes_as_it_happened(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE_LINES, encoding="utf-8")
    args = ("--workload", str(path), "--fleet", "1", "--arrivals", "recorded")
    found = answer(*args)
    assert found["summary"]["requests"] == 3
    assert found["summary"]["duration_s"] == 8.0
    faster = answer(*args, "--rate", "2")["summary"]
    assert (faster["requests"], faster["duration_s"]) == (3, 1.0)
    assert answer(*args, "--requests", "2")["summary"]["requests"] == 2


def test_recordings_of_other_formats(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 3000, "input_length": 5, "output_length": 7, "hash_ids": []}\n'
        '{"timestamp": 1000, "input_length": 0, "output_length": 1}\n',
        encoding="utf-8",
    )
    found = read_recorded(path)
    assert found.at_s.tolist() == [0.0, 2.0]
    assert (found.prompts.tolist(), found.answers.tolist()) == ([1, 5], [1, 7])
    path.write_text("at,in,out\n1,2,3\n5,6,7\n", encoding="utf-8")
    own = read_recorded(path, fields="prompt=in,answer=out,time=at")
    assert (own.prompts + own.answers).tolist() == [5, 13]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("a,b\n1,2\n", "no known trace"),
        ("{broken\n", "line 1 is not a JSON object"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nsoon,1,2\n", "no requests"),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(PlanError) as caught:
        read_recorded(path)
    assert words in f"{caught.value.problem} {caught.value.fix}"
    with pytest.raises(PlanError):
        read_recorded(tmp_path / "absent")


def test_a_file_with_other_models_asks_which(tmp_path: Path) -> None:
    path = tmp_path / "sluice.yaml"
    path.write_text(FILE, encoding="utf-8")
    result = run(*SMALL, "-c", str(path), "--serves", "other")
    assert result.exit_code == 2
    assert "has no model other" in result.stderr
    assert "give --serves with one of: m" in result.stderr


def test_a_file_is_simulated_with_its_policies_and_tenants(tmp_path: Path) -> None:
    path = tmp_path / "sluice.yaml"
    tenants = (
        "entitlements:\n"
        "  - {name: gold, tenant: a, model: m, service_class: guaranteed, concurrency: 2}\n"
        "  - {name: spot, tenant: b, model: m, service_class: spot}\n"
    )
    path.write_text(FILE + tenants, encoding="utf-8")
    found = answer(*SMALL, "-c", str(path))
    assert [t["name"] for t in found["tenants"]] == ["gold", "spot"]
    assert found["tenants"][0]["refused"].keys() == {"concurrency"}
    assert found["policies"][1] == "admission: by token pool"
    assert found["tenants_said"] == "equal"
    shown = run(*SMALL, "-c", str(path)).stdout
    assert "entitlement" in shown
    assert "scheduling: short quartz, long quartz" in shown


def test_a_policy_beside_a_file_is_refused_with_the_fix(tmp_path: Path) -> None:
    path = tmp_path / "sluice.yaml"
    path.write_text(FILE, encoding="utf-8")
    result = run(*SMALL, "-c", str(path), "--dispatch", "jsq")
    assert result.exit_code == 2
    assert "state scheduling.policy in the file" in result.output


def test_a_log_s_own_tenants_and_bodies_are_replayed_in_virtual_time(tmp_path: Path) -> None:
    path, log = tmp_path / "sluice.yaml", tmp_path / "requests.jsonl"
    tenants = "".join(
        f"  - {{name: {name}, tenant: {name}, model: m, service_class: elastic}}\n"
        for name in ("gold", "team")
    )
    path.write_text(FILE + "entitlements:\n" + tenants, encoding="utf-8")
    records = [
        decision(
            f"r{i}",
            time_unix_s=1000.0 + i,
            prompt_tokens=200,
            completion_tokens=20,
            text_bytes=800,
            entitlement="gold" if i % 4 else "team",
        )
        for i in range(200)
    ]
    log.write_bytes(b"\n".join(msgspec.json.encode(record) for record in records))
    args = ("--workload", str(log), "--arrivals", "recorded", "-c", str(path))
    found = answer(*args)
    assert found["tenants_said"] == "as the log has them"
    assert [t["requests"] for t in found["tenants"]] == [120, 40]  # a fifth is warm-up
