"""`sluice prove`: what a change breaks, and for whom, before it is made."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from typer.testing import Result

from gateway.records.proof import Proof
from planner.profile import NodeProfile
from sluice.demo.config import managed
from sluice.simulated.recorded import read_recorded
from tests.builders import decision
from tests.running import sluice

FILE = """\
version: 1
models:
  - name: m
    boundary: {b_short: 2000}
    pools:
      short:
        max_model_len: 4096
        max_num_seqs: 4
        workers: ["http://127.0.0.1:1", "http://127.0.0.1:2"]
      long: {max_model_len: 16384, max_num_seqs: 8, workers: ["http://127.0.0.1:3"]}
entitlements:
  - {name: gold, tenant: a, model: m, concurrency: 8, max_concurrency: 8, slo_target_ms: 300}
  - {name: deep, tenant: b, model: m, concurrency: 8, slo_target_ms: 2000}
"""
NODE = NodeProfile(
    name="small",
    gpu="cpu",
    model="m",
    gpus=1,
    w_s=0.01,
    h_s_per_token=1e-7,
    prefill_s_per_token=1e-5,
    kv_tokens=2**17,
)
SPAN_S = 125.0


def requests(rate_per_s: float, prompts: tuple[int, int], **more: Any) -> list[dict[str, Any]]:
    """Served requests of the log, at nearly even times."""
    random = np.random.default_rng(len(more))
    count = int(rate_per_s * SPAN_S)
    at_s = np.sort((np.arange(count) + random.random(count)) / rate_per_s)
    lengths = random.integers(*prompts, count)
    return [
        {"time_unix_s": float(t), "prompt_tokens": int(n), "completion_tokens": 40} | more
        for t, n in zip(at_s, lengths, strict=True)
    ]


GOLD = requests(8, (50, 800), entitlement="gold", model="m")
DEEP = requests(4, (3000, 8000), entitlement="deep", model="m")
FEW = (GOLD + DEEP)[::8]
"""Too few for a verdict, and enough for what is told without one."""


def run(
    folder: Path,
    file: str = FILE,
    log: list[dict[str, Any]] = GOLD + DEEP,
    *more: str,
    profile: NodeProfile | None = NODE,
) -> Result:
    config, lines, node = folder / "new.yaml", folder / "log.jsonl", folder / "node.json"
    config.write_text(file, "utf-8")
    lines.write_bytes(b"\n".join(msgspec.json.encode(decision(**each)) for each in log))
    node.write_bytes(msgspec.json.encode(profile))
    given = () if profile is None else ("--profile", node)
    return sluice("prove", "-c", config, "--log", lines, *given, *more)


def words_of(result: Result) -> str:
    """What it prints, without line breaks."""
    return " ".join(result.stdout.split())


def findings(result: Result) -> dict[str, dict[str, Any]]:
    proof = json.loads(result.stdout)
    return {f"{one['kind']} {one['name']}": one for one in proof["findings"]}


def test_a_configuration_that_holds_exits_0_and_says_so_of_everybody(tmp_path: Path) -> None:
    same = tmp_path / "old.yaml"
    same.write_text(FILE, "utf-8")
    result = run(tmp_path, FILE, GOLD + DEEP, "--against", str(same), "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["changes"] == []
    found = findings(result)
    assert list(found) == ["entitlement gold", "entitlement deep", "pool short", "pool long"]
    assert {one["verdict"] for one in found.values()} == {"holds"}
    gold = found["entitlement gold"]
    assert gold["kept"]["low"] >= 0.99
    assert gold["requests"] == pytest.approx(800, abs=20)


def test_more_traffic_may_break(tmp_path: Path) -> None:
    result = run(tmp_path, FILE, GOLD + DEEP, "--rate", "2.5x", "--markdown")
    assert result.exit_code == 1
    assert "| entitlement gold | breaks |" in result.stdout


CHANGES = {
    "capacity cut": (
        *("max_num_seqs: 4", "max_num_seqs: 1", "gold"),
        "were refused (priority); short has 2 slots for",
    ),
    "entitlement resized": (
        *("concurrency: 8, max_concurrency: 8", "max_concurrency: 4", "gold"),
        "were refused by its own limits (max_concurrency 4)",
    ),
    "class changed": ("concurrency: 8, max", "service_class: spot, max", "gold", ""),
    "boundary moved": ("b_short: 2000", "b_short: 200", "long", ""),
    "engine fewer": (', "http://127.0.0.1:2"', "", "gold", "slots for"),
    "pool removed": (
        '      long: {max_model_len: 16384, max_num_seqs: 8, workers: ["http://127.0.0.1:3"]}\n',
        "",
        "deep",
        "refused",
    ),
}
"""What is replaced by what, whom it hurts, and words of why it breaks, if that is judged."""


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_and_whom_it_hurts_is_named(change: str, tmp_path: Path) -> None:
    before, after, name, reason = CHANGES[change]
    changed = FILE.replace(before, after)
    assert changed != FILE
    if change == "pool removed":
        changed = changed.replace("    boundary: {b_short: 2000}\n", "")
    in_force, log = FILE, GOLD + DEEP if reason else FEW
    if name == "deep" or change == "entitlement resized":  # it is in nobody's way
        log = DEEP if name == "deep" else GOLD
    if change == "class changed":  # more than all slots are wanted, so that a class counts
        rival = "  - {name: rival, tenant: c, model: m, max_concurrency: 8}\n"
        in_force, changed = in_force + rival, changed + rival
        rivals = requests(12, (50, 800), entitlement="rival", model="m")
        log = [each for each in GOLD + rivals if each["time_unix_s"] < SPAN_S / 3]
    old = tmp_path / "old.yaml"
    old.write_text(in_force, "utf-8")
    result = run(tmp_path, changed, log, "--against", str(old), "--json")
    assert result.exit_code in ({1} if reason else {0, 1, 3}), result.output
    proof = json.loads(result.stdout)
    (seen,) = (one for one in proof["changes"] if one["name"] == name)
    assert seen["direction"] == "worse"
    if reason:
        (found,) = (one for one in proof["findings"] if one["name"] == name)
        assert found["verdict"] == "breaks"
        assert reason in found["reason"]
        assert found["kept"]["high"] < 0.99


def test_the_reason_is_in_words(tmp_path: Path) -> None:
    slow = run(tmp_path, FILE.replace("ms: 300", "ms: 300, slo_tpot_ms: 9"), GOLD)
    words = "gold breaks: first token in 0.3 s, further ones in 9 ms each for 0.0 %"
    assert words in words_of(slow)
    assert slow.stdout.rstrip().endswith("breaks")


def test_a_proof_names_its_file_and_is_the_same_again(tmp_path: Path) -> None:
    out = tmp_path / "proof.json"
    made = []
    for file in (FILE, FILE, FILE + "# another\n"):
        assert run(tmp_path, file, FEW, "--out", str(out)).exit_code == 3
        made.append(msgspec.json.decode(out.read_bytes(), type=Proof))
    assert made[0] == made[1]
    assert made[0].config_sha256 == sha256(FILE.encode()).hexdigest()
    assert made[2].id != made[0].id
    gold = next(one for one in made[0].findings if one.name == "gold")
    assert gold.slo_ms == 300
    assert gold.requests_per_s == pytest.approx(1, rel=0.1)
    unattached = run(tmp_path, FILE, FEW, "--review", str(out))
    assert unattached.exit_code == 2
    assert "does not say since when" in unattached.stderr


def test_an_entitlement_that_went_breaks_for_its_requests(tmp_path: Path) -> None:
    result = run(tmp_path, FILE.replace("name: deep", "name: renamed"), GOLD + DEEP, "--json")
    assert result.exit_code == 1
    found = findings(result)
    assert found["entitlement deep"]["verdict"] == "breaks"
    assert "500 requests of the log are refused" in found["entitlement deep"]["reason"]
    assert found["entitlement renamed"]["verdict"] == "cannot tell"


TENANT = """\
tenants:
  - name: a
    keys: [{name: app, sha256: "%s"}]
""" % ("1" * 64)


def test_keys_that_the_file_suspends_are_refused_and_those_it_lacks_are_not_known(
    tmp_path: Path,
) -> None:
    log = [each | {"key": "app"} for each in GOLD] + DEEP

    def gold(tenant: str) -> dict[str, Any]:
        result = run(tmp_path, FILE + tenant, log, "--json")
        return findings(result)["entitlement gold"]

    assert gold(TENANT)["verdict"] == "holds"
    for suspended in (
        TENANT.replace("{name: app,", "{name: app, suspended: true,"),
        TENANT.replace("name: a\n", "name: a\n    suspended: true\n"),
    ):
        assert gold(suspended)["verdict"] == "breaks"
        assert "1,000 of 1,000 requests are refused" in gold(suspended)["reason"]
    lacking = gold(TENANT.replace("name: app", "name: other"))
    assert lacking["verdict"] == "cannot tell"
    assert "does not have key app" in lacking["reason"]


SECOND = """\
  - name: other
    pools: {all: {max_model_len: 4096, max_num_seqs: 4, workers: ["http://127.0.0.1:4"]}}
entitlements:
"""
DOOR = {
    "models: [other]": ("breaks", "which does not open model m"),
    "entitlements: [second]": ("breaks", "which does not list entitlement gold"),
    'expires_at: "2001-01-01T00:00:00Z"': ("breaks", "which expires at 2001-01-01"),
    'expires_at: "2040-01-01T00:00:00Z"': ("cannot tell", "which expires at 2040-01-01"),
    "suspended: false": ("holds", "for 100.0 %"),
}
"""What the file says of gold's key; the verdict on gold, and why."""


@pytest.mark.parametrize("terms", DOOR)
def test_a_key_that_does_not_open_the_entitlement_breaks_it(terms: str, tmp_path: Path) -> None:
    since = {"key": "app", "time_unix_s": 1.5e9}
    log = [each | since | {"time_unix_s": 1.5e9 + each["time_unix_s"]} for each in GOLD]
    second = "  - {name: second, tenant: a, model: other}\n"
    file = FILE.replace("entitlements:\n", SECOND) + second + TENANT
    file = file.replace("{name: app,", f"{{name: app, {terms},")
    found = findings(run(tmp_path, file, log, "--json"))["entitlement gold"]
    verdict, reason = DOOR[terms]
    assert found["verdict"] == verdict
    assert reason in found["reason"]


def test_bodies_that_are_too_large_and_names_that_went_are_refused(tmp_path: Path) -> None:
    log = [
        each
        | {"body_bytes": 3000 + 2000 * (place % 50 == 0)}
        | {"asked_model": "old-name" if place % 200 == 0 else "m"}
        for place, each in enumerate(GOLD)
    ]
    for more, verdict, reason in (
        ("max_body_bytes: 4000", "breaks", "larger than server.max_body_bytes (4,000): 25 of"),
        ("max_body_bytes: 5000", "cannot tell", "asked for model old-name, which the file does"),
    ):
        file = f"{FILE}server: {{{more}}}\n"
        found = findings(run(tmp_path, file, log, "--json"))["entitlement gold"]
        assert found["verdict"] == verdict
        assert reason in found["reason"]
    aliased = FILE.replace("name: m\n", 'name: m\n    aliases: ["old-*"]\n')
    assert findings(run(tmp_path, aliased, log, "--json"))["entitlement gold"]["verdict"] == "holds"


def test_answers_that_may_outlast_a_time_out_are_not_known(tmp_path: Path) -> None:
    for limit_s, verdict in ((0.3, "cannot tell"), (5, "holds")):
        file = f"{FILE}timeouts: {{first_byte_s: {limit_s}}}\n"
        found = findings(run(tmp_path, file, GOLD, "--json"))["entitlement gold"]
        assert found["verdict"] == verdict
        assert ("perhaps cut off" in found["reason"]) == (verdict == "cannot tell")


def test_a_setting_that_no_proof_covers_is_said_not_to_be_covered(tmp_path: Path) -> None:
    old = tmp_path / "old.yaml"
    old.write_text(FILE, "utf-8")
    changed = FILE.replace("name: m\n", "name: m\n    engine_priority: vllm\n")
    alone = run(tmp_path, changed, FEW)
    assert "taken to be as when the log was written: models.engine_priority" in words_of(alone)
    beside = findings(run(tmp_path, changed, FEW, "--against", str(old), "--json"))
    assert beside["setting models[m].engine_priority"]["verdict"] == "cannot tell"


def test_what_may_change_by_itself_or_end_is_not_known(tmp_path: Path) -> None:
    expires = FILE.replace("target_ms: 300", 'target_ms: 300, expires_at: "2030-01-01T00:00:00Z"')
    found = findings(run(tmp_path, expires, GOLD + DEEP, "--json"))
    assert [one["verdict"] for one in found.values()].count("cannot tell") == 1
    moves = run(tmp_path, FILE.replace("b_short: 2000", "b_short: 2000, auto: true"), FEW)
    assert moves.exit_code == 3
    assert "boundaries move by themselves" in words_of(moves)


def without(key: str) -> list[dict[str, Any]]:
    return [{k: v for k, v in each.items() if k != key} for each in FEW]


UNKNOWN = {
    f"which model {len(FEW)} requests are for": (
        FILE.replace("entitlements:\n", SECOND),
        without("model"),
        NODE,
    ),
    "not whose requests": (FILE, without("entitlement"), NODE),
    "--profile": (FILE, FEW, None),
    "not verified": (FILE, FEW, msgspec.structs.replace(NODE, verified=False)),
    "measured on prompts up to 512": (
        FILE,
        FEW,
        msgspec.convert(
            msgspec.structs.asdict(NODE)
            | {"measured": {"longest_prompt_tokens": 512, "most_sequences": 64}},
            NodeProfile,
        ),
    ),
    "no requests with lengths and times": (FILE, without("completion_tokens")[:50], NODE),
    "hours, and the window 744": (
        FILE.replace("target_ms: 300", "target_ms: 300, budgets: [{tokens: 900000000}]"),
        FEW,
        NODE,
    ),
    "compression is on": (
        FILE.replace(
            "b_short: 2000}", "b_short: 2000, gamma: 2}\n    compression: {enabled: true}"
        ),
        requests(8, (50, 4000), entitlement="gold", model="m") + DEEP,
        NODE,
    ),
}


@pytest.mark.parametrize("reason", UNKNOWN)
def test_what_is_not_known_is_not_guessed(reason: str, tmp_path: Path) -> None:
    file, log, profile = UNKNOWN[reason]
    words = "does not say whose requests" if reason == "not whose requests" else reason
    result = run(tmp_path, file, log, profile=profile)
    assert result.exit_code == 3, result.output
    assert words in words_of(result)
    assert "breaks" not in result.stdout


def test_what_a_log_says_of_cut_prompts_counts_for_their_lengths_alone(tmp_path: Path) -> None:
    cut = [
        each | {"prompt_tokens": int(0.7 * each["prompt_tokens"]), "kept_share": 0.7}
        for each in requests(4, (2000, 2900), entitlement="deep", model="m")
    ]
    there = FILE.replace(
        "b_short: 2000}", "b_short: 2000}\n    compression: {enabled: true, only_when_busy: false}"
    )
    known = run(tmp_path, there, GOLD + cut, "--json")
    assert findings(known)["entitlement deep"]["verdict"] == "holds"
    moved = run(tmp_path, there.replace("b_short: 2000", "b_short: 600"), GOLD[::4] + cut, "--json")
    assert "share of such prompts can be cut" in findings(moved)["entitlement deep"]["reason"]


BUDGETS = {
    "{tokens: 400000, window: hour}": "breaks",
    "{tokens: 500000, window: hour}": "holds",
    "{tokens: 466000, window: hour}": "cannot tell",  # requests in flight reserve more
    "{money: 0.6, window: hour}": "breaks",
    "{money: 3, window: hour}": "holds",
    "{money: 1.2, window: hour}": "cannot tell",  # it depends on which prompts were cached
    "{tokens: 500000, window: day}": "cannot tell",
    "{tokens: 400000, window: 2d}": "breaks",
}


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_budget_is_counted_against_the_log(budget: str, tmp_path: Path) -> None:
    """Gold wants some 465,000 tokens: 1.5 units of money uncached, .75 if all prompts were."""
    log = [each | {"time_unix_s": 3600.0 + 30 * each["time_unix_s"]} for each in GOLD + DEEP]
    file = FILE.replace(
        "    pools:\n", "    price: {input: 3, cached_input: 1, output: 5}\n    pools:\n", 1
    )
    priced = file.replace("target_ms: 300", f"target_ms: 300, budgets: [{budget}]")
    found = findings(run(tmp_path, priced, log, "--json", profile=None))
    assert found["budget gold"]["verdict"] == BUDGETS[budget]


def test_a_lowered_budget_shows_as_a_change_and_more_traffic_needs_a_larger_one(
    tmp_path: Path,
) -> None:
    lower, in_force = (
        FILE.replace("name: gold, tenant", f"name: gold, budgets: [{budget}], tenant")
        for budget in ("{tokens: 400000, window: hour}", "{tokens: 600000, window: hour}")
    )
    log = [each | {"time_unix_s": 3600.0 + 29 * each["time_unix_s"]} for each in GOLD]
    old = tmp_path / "old.yaml"
    old.write_text(in_force, "utf-8")
    changed = run(tmp_path, lower, log, "--against", str(old), "--json", profile=None)
    assert json.loads(changed.stdout)["changes"][0]["words"].startswith("holds -> breaks")
    more = findings(run(tmp_path, in_force, log, "--rate", "1.5x", "--json", profile=None))
    assert more["budget gold"]["verdict"] == "breaks"


def test_bad_input_exits_2_and_says_what_to_do(tmp_path: Path) -> None:
    result = run(tmp_path, FILE, GOLD, "--rate", "fast")
    assert result.exit_code == 2
    assert "1.2x" in result.stderr


def test_refusals_of_the_log_are_demand_and_those_by_own_limits_are_excused(tmp_path: Path) -> None:
    flood = [
        each
        | {"outcome": "refused", "status": 429, "reason": "concurrency"}
        | {"input_tokens": each["prompt_tokens"], "output_tokens": 40}
        for each in GOLD[1::2]
    ]
    log = GOLD[::2] + flood
    served = findings(run(tmp_path, FILE, log, "--json"))["entitlement gold"]
    assert served["verdict"] == "holds"
    assert served["requests"] == pytest.approx(800, abs=20)
    limited = FILE.replace("concurrency: 8, max_concurrency: 8", "max_concurrency: 3")
    found = findings(run(tmp_path, limited, log, "--json"))["entitlement gold"]
    assert "that its limits refuse already" in found["reason"]
    assert found["verdict"] == "cannot tell"
    in_force = tmp_path / "in-force.yaml"
    in_force.write_text(limited, "utf-8")
    beside = run(tmp_path, limited, log, "--against", str(in_force), "--json")
    assert findings(beside)["entitlement gold"]["verdict"] == "holds"


@pytest.mark.parametrize("patient", [True, False])
def test_clients_of_a_log_that_come_back_do_so_in_the_proof_and_count_once(
    patient: bool, tmp_path: Path
) -> None:
    """Half of gold's requests were refused at first, by its own limits."""
    patience = FILE.replace(", slo_target_ms: 300", "").replace(
        "concurrency: 8, max_concurrency: 8", "max_concurrency: 2"
    )
    log = []
    for number, each in enumerate(GOLD[::2]):
        seen = each | {"body_digest": number, "body_bytes": 400}
        first = {"outcome": "refused", "status": 429, "reason": "kv", "retry_after_s": 2.0}
        lengths = {"input_tokens": each["prompt_tokens"], "output_tokens": 40}
        log.append(seen | first | lengths)
        if patient:
            log.append(seen | {"time_unix_s": each["time_unix_s"] + 2.5})
    log += GOLD[1::4]
    found = findings(run(tmp_path, patience, log + DEEP, "--json"))["entitlement gold"]
    assert read_recorded(tmp_path / "log.jsonl").comes_back == patient
    assert found["requests"] == pytest.approx(600, abs=20)  # no retry counts twice
    assert "that its limits refuse already" in found["reason"]


def test_the_demo_with_half_an_entitlement_breaks_for_that_tenant(tmp_path: Path) -> None:
    first, second, long, prefill, decode = (f"http://127.0.0.1:{port}" for port in range(1, 6))
    apart = {"prefill": prefill, "decode": decode}
    demo = managed(8080, [first, second], long, apart, tmp_path)
    model = {"model": "demo-model"}
    flood = requests(12, (200, 400), entitlement="demo-guaranteed", **model)
    halved = demo.replace(
        "concurrency: 32, max_concurrency: 32", "concurrency: 4, max_concurrency: 4"
    )
    assert run(tmp_path, demo, flood[::8], "--json").exit_code == 3  # two tenants sent nothing
    result = run(tmp_path, halved, flood)
    assert result.exit_code == 1
    assert "demo-guaranteed breaks" in words_of(result)


PHASES = """\
version: 1
models:
  - name: m
    kv_bytes_per_token: 131072
    pools:
      all:
        max_model_len: 16384
        prefill: {max_num_seqs: 4, workers: ["http://127.0.0.1:1", "http://127.0.0.1:2"]}
        decode: {max_num_seqs: 16, workers: ["http://127.0.0.1:3"]}
        transfer: {kind: vllm, bytes_per_second: 20e9}
entitlements:
  - {name: deep, tenant: b, model: m, slo_target_ms: 1000}
"""
APART = requests(8, (3000, 8000), entitlement="deep", model="m")
SIDES = {
    "prefill engines too few": (', "http://127.0.0.1:2"]', "]", "pool all/prefill"),
    "decode slots too few": ("max_num_seqs: 16", "max_num_seqs: 2", "pool all"),
}


@pytest.mark.parametrize("change", SIDES)
def test_a_pool_in_phases_gets_a_verdict_for_each_side(change: str, tmp_path: Path) -> None:
    slow = msgspec.structs.replace(NODE, prefill_s_per_token=2e-5)
    good = findings(run(tmp_path, PHASES, APART, "--json", profile=slow))
    assert list(good) == ["entitlement deep", "pool all", "pool all/prefill"]
    assert {one["verdict"] for one in good.values()} == {"holds"}
    before, after, subject = SIDES[change]
    found = findings(run(tmp_path, PHASES.replace(before, after), APART, "--json", profile=slow))
    assert {name: found[name]["verdict"] for name in good} == {
        name: "breaks" if name in {subject, "entitlement deep"} else "holds" for name in good
    }
    assert f"{subject.removeprefix('pool ')} has" in found["entitlement deep"]["reason"]


def test_a_link_is_as_fast_as_the_file_says_or_else_the_log(tmp_path: Path) -> None:
    silent = PHASES.replace("bytes_per_second: 20e9", "skip_below_tokens: 0")
    unknown = run(tmp_path, silent, APART)
    assert unknown.exit_code == 3
    assert "how fast KV is handed over" in words_of(unknown)
    for seconds_per_token, verdict in ((1e-5, "holds"), (4e-4, "breaks")):
        log = [each | {"transfer_s": seconds_per_token * each["prompt_tokens"]} for each in APART]
        found = findings(run(tmp_path, silent, log, "--json"))
        assert found["entitlement deep"]["verdict"] == verdict


def test_each_side_may_have_a_profile_of_its_own(tmp_path: Path) -> None:
    profiles = tmp_path / "profiles"
    (profiles / "all").mkdir(parents=True)
    slow = msgspec.structs.replace(NODE, prefill_s_per_token=1e-3)
    for name, node in (("all", slow), ("all/prefill", NODE)):
        (profiles / f"{name}.json").write_bytes(msgspec.json.encode(node))
    apart = run(tmp_path, PHASES, APART, "--json", "--profile", str(profiles), profile=None)
    assert findings(apart)["entitlement deep"]["verdict"] == "holds"
    (profiles / "all" / "prefill.json").unlink()
    alike = run(tmp_path, PHASES, APART, "--json", "--profile", str(profiles), profile=None)
    assert findings(alike)["entitlement deep"]["verdict"] == "breaks"


def test_ranks_are_workers_behind_one_barrier(tmp_path: Path) -> None:
    ranked = FILE.replace(
        'workers: ["http://127.0.0.1:1", "http://127.0.0.1:2"]',
        'workers: [{url: "http://127.0.0.1:1", ranks: 2}]\n        scheduling: {policy: bfio}',
    )
    found = findings(run(tmp_path, ranked, GOLD + DEEP, "--json"))
    assert {one["verdict"] for one in found.values()} == {"holds"}
    assert "8 slots" in found["pool short"]["reason"]
    fewer = findings(
        run(tmp_path, ranked.replace("max_num_seqs: 4", "max_num_seqs: 1"), GOLD + DEEP, "--json")
    )
    assert fewer["entitlement gold"]["verdict"] == "breaks"


def test_items_of_batches_get_what_others_leave_and_have_no_verdict(tmp_path: Path) -> None:
    item = {"batch": {"batch": "batch_1", "custom_id": "a", "index": 0}}
    flood = requests(60, (50, 800), entitlement="deep", model="m")
    urgent = [line | {"batch": item["batch"] | {"urgent": True}} for line in flood]
    leftovers = [line | item for line in flood]
    for more, exit_code, counted in ((flood, 1, 6400), (urgent, 1, 400), (leftovers, 0, 400)):
        result = run(tmp_path, FILE, GOLD + DEEP + more, "--json")
        assert result.exit_code == exit_code, result.output
        deep = findings(result)["entitlement deep"]
        assert deep["requests"] == pytest.approx(counted, rel=0.05)
        assert deep["requests_per_s"] == pytest.approx(counted / 100, rel=0.05)
