"""What `sluice replay` sends, and what it says of the answers."""

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.errors import PlanError
from planner.workload.library import SHIPPED
from simulator.mock_server import tokenizer
from sluice.replay.client import Answered
from sluice.replay.command import _tenant_keys
from sluice.replay.load import ReplayRequest, from_recording, from_workload
from sluice.replay.report import ReplayReport, report, report_json
from sluice.replay.run import Replayed
from sluice.replay.texts import KINDS, Texts
from sluice.simulated.recorded import RecordedTraffic, read_recorded
from tests.running import sluice


def recording(*times: float) -> RecordedTraffic:
    count = len(times)
    return RecordedTraffic(
        at_s=np.array(times),
        prompts=np.arange(100, 100 + count),
        answers=np.arange(1, 1 + count),
        categories=("prose",) * count,
    )


def asked(found: RecordedTraffic, **given: Any) -> list[ReplayRequest]:
    options: dict[str, Any] = {
        "arrivals": "recorded",
        "rate_per_s": None,
        "speed": 1.0,
        "duration_s": None,
        "seed": 0,
    }
    return from_recording(found, **{**options, **given})


def test_a_recording_is_replayed_at_its_own_times_and_lengths() -> None:
    asks = asked(recording(0.0, 1.0, 4.0))
    assert [(a.at_s, a.prompt_tokens, a.output_tokens) for a in asks] == [
        (0.0, 100, 1),
        (1.0, 101, 2),
        (4.0, 102, 3),
    ]


def test_a_rate_or_a_speed_stretches_it() -> None:
    assert [a.at_s for a in asked(recording(0.0, 1.0, 4.0), speed=2.0)] == [0.0, 0.5, 2.0]
    assert [a.at_s for a in asked(recording(0.0, 1.0, 4.0), rate_per_s=2.0)] == [0.0, 0.25, 1.0]


def test_a_short_recording_is_repeated_and_a_long_one_ends() -> None:
    asks = asked(recording(0.0, 1.0, 2.0), duration_s=6.0)
    assert [(a.at_s, a.prompt_tokens) for a in asks] == [
        (0.0, 100), (1.0, 101), (2.0, 102), (3.0, 100), (4.0, 101), (5.0, 102),
    ]  # fmt: skip
    assert len(asked(recording(0.0, 1.0, 2.0), duration_s=2.0)) == 2


def test_poisson_arrivals_keep_the_lengths_and_the_rate() -> None:
    found = recording(*(0.1 * n for n in range(100)))
    asks = asked(found, arrivals="poisson", rate_per_s=50.0, duration_s=40.0)
    assert len(asks) == pytest.approx(2000, rel=0.08)
    assert [a.prompt_tokens for a in asks[:100]] == list(range(100, 200))
    again = asked(found, arrivals="poisson", rate_per_s=50.0, duration_s=40.0)
    assert asks == again


def test_a_workload_comes_poisson_at_its_rate() -> None:
    asks = from_workload(SHIPPED["azure"].workload, rate_per_s=20.0, duration_s=100.0, seed=1)
    assert len(asks) == pytest.approx(2000, rel=0.08)
    assert max(a.at_s for a in asks) <= 100.0
    assert min(a.output_tokens for a in asks) >= 1


@pytest.mark.parametrize(
    "given",
    [{"rate_per_s": 0.0}, {"speed": -1.0}, {"duration_s": 1e9}],
)
def test_impossible_loads_say_what_to_change(given: dict[str, Any]) -> None:
    with pytest.raises(PlanError):
        asked(recording(0.0, 1.0), **given)
    with pytest.raises(PlanError, match="one time"):
        asked(recording(0.0))
    with pytest.raises(PlanError, match="no times"):
        from_workload(SHIPPED["azure"].workload, rate_per_s=None, duration_s=1.0, seed=0)


def test_a_log_tells_categories_and_its_events_are_no_requests(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"schema": 2, "event": "terms", "model": "m", "unix_s": 1.0},
        {"schema": 2, "time_unix_s": 9.0, "outcome": "ok", "estimate": {"category": "code"},
         "usage": {"prompt_tokens": 50, "completion_tokens": 0}},
        {"schema": 2, "time_unix_s": 8.5, "outcome": "refused"},
        {"schema": 2, "time_unix_s": 8.0, "outcome": "ok", "estimate": {"category": "cjk"},
         "usage": {"prompt_tokens": 70, "completion_tokens": 7}},
    ]  # fmt: skip
    file = tmp_path / "requests.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    found = read_recorded(file)
    assert found.at_s.tolist() == [0.0, 1.0]
    assert found.prompts.tolist() == [70, 50]
    assert found.answers.tolist() == [7, 1]
    assert found.categories == ("cjk", "code")


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("tokens", [120, 3000])
def test_prompts_have_the_tokens_asked_for(kind: str, tokens: int) -> None:
    async def count(text: str) -> int | None:
        return tokenizer.count(text) + tokenizer.PROMPT_TOKENS

    texts = Texts(seed=3)
    asyncio.run(texts.learn({kind}, count))
    found = [tokenizer.count(texts.prompt(kind, tokens)) + 1 for _ in range(20)]
    assert sum(found) / len(found) == pytest.approx(tokens, rel=0.04)
    assert all(abs(n - tokens) < 0.25 * tokens for n in found)


def answered(ttft_s: float | None, due_s: float = 0.0, **fields: Any) -> Answered:
    first = None if ttft_s is None else due_s + ttft_s
    given = {"pool": "short", "prompt_tokens": 100, "output_tokens": 10, "tpot_s": 0.02}
    if ttft_s is None:
        given = {"error": "503 busy"}
    return Answered(due_s=due_s, sent_s=due_s, first_s=first, **{**given, **fields})


def judged(answers: list[Answered], **given: Any) -> ReplayReport:
    asks = tuple(ReplayRequest(at_s=a.due_s, prompt_tokens=100, output_tokens=10) for a in answers)
    done = Replayed(
        asks=asks, answers=tuple(answers), started_s=0.0, ended_s=9.0, stopped=False, most_open=3
    )
    options: dict[str, Any] = {"slo_ttft_s": 0.5, "slo_tpot_s": None, "warm_up": 0.0}
    return report(done, url="u", model="m", **{**options, **given})


def spread(count: int, ttft_s: float, **fields: Any) -> list[Answered]:
    return [answered(ttft_s, 0.01 * n, **fields) for n in range(count)]


def test_the_slo_holds_while_the_p99_is_within_it() -> None:
    assert judged([*spread(198, 0.1), *spread(2, 5.0)]).holds
    assert not judged([*spread(197, 0.1), *spread(3, 5.0)]).holds


def test_failed_requests_never_ended() -> None:
    found = judged([*spread(97, 0.1), *(answered(None, 0.5) for _ in range(3))])
    assert not found.holds
    assert found.failed == 3
    assert found.whole.ttft_s[2] == math.inf
    assert report_json(found)["all"]["ttft_s"]["p99"] is None
    assert report_json(found)["errors"] == [{"error": "503 busy", "count": 3}]


def test_each_pool_with_enough_requests_is_judged() -> None:
    short = spread(20_000, 0.1)
    assert judged([*short, *spread(50, 5.0, pool="long")]).holds
    found = judged([*short, *spread(150, 5.0, pool="long")])
    assert not found.holds
    assert [p.name for p in found.pools if p.faults] == ["long"]


def test_the_warm_up_is_left_out() -> None:
    slow_start = [*(answered(5.0, 0.0) for _ in range(20)), *spread(1000, 0.1)]
    assert not judged(slow_start).holds
    found = judged(slow_start, warm_up=0.1)
    assert found.holds
    assert found.judged == 900


def test_what_weakens_the_figures_is_said() -> None:
    late = [answered(0.1, 0.0, prompt_tokens=130) for _ in range(10)]
    late = [Answered(**{**_fields(a), "sent_s": 0.05}) for a in late]
    notes = judged(late).notes
    assert len(notes) == 3
    assert "late" in notes[0]
    assert "1.30 times" in notes[1]


def _fields(record: Answered) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__struct_fields__}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--url", "http://127.0.0.1:1"],
        ["--url", "http://127.0.0.1:1", "--log", "none.jsonl"],
        ["--url", "http://127.0.0.1:1", "--workload", "azure"],
        ["--url", "http://127.0.0.1:1", "--workload", "azure", "--rate", "0"],
        ["--url", "no-url", "--workload", "azure", "--rate", "1"],
        ["--url", "http://127.0.0.1:1", "--workload", "azure", "--rate", "1"],
        ["--url", "http://127.0.0.1:1", "--workload", "azure", "--rate", "1", "--duration", "0"],
        ["--url", "http://h:1", "--workload", "azure", "--rate", "1", "--api-key-env", "NO_SUCH"],
    ],
    ids=str,
)
def test_bad_input_exits_2_with_what_to_change(arguments: list[str]) -> None:
    done = sluice("replay", "--json", *arguments)
    assert done.exit_code == 2
    told = json.loads(done.stdout)
    assert told["problem"]
    assert told["fix"]


def test_tenants_of_a_log_are_judged_apart_and_refusals_are_no_failures() -> None:
    names = ("gold", "spot")
    asks = [
        ReplayRequest(at_s=float(i), prompt_tokens=9, output_tokens=2, entitlement=names[i % 2])
        for i in range(40)
    ]
    answers = []
    for i in range(40):
        given: dict[str, Any] = {"due_s": float(i), "sent_s": float(i)}
        if i % 4 == 1:
            answers.append(Answered(status=429, error="429 busy", **given))
        elif i == 3:
            answers.append(Answered(status=502, error="502 broken", **given))
        else:
            answers.append(Answered(status=200, first_s=i + 0.1, last_s=i + 0.2, **given))
    done = Replayed(
        asks=tuple(asks),
        answers=tuple(answers),
        started_s=0.0,
        ended_s=41.0,
        stopped=False,
        most_open=1,
    )
    found = report(done, url="http://x", model="m", slo_ttft_s=0.5, slo_tpot_s=None, warm_up=0.0)
    gold, spot = found.tenants
    assert (gold.name, gold.requests, gold.refused, gold.failed) == ("gold", 20, 0, 0)
    assert gold.attainment == 1.0
    assert gold.ttft_p99_s == pytest.approx(0.1)
    assert (spot.requests, spot.refused, spot.failed) == (20, 10, 1)
    assert report_json(found)["tenants"]["spot"]["refused"] == 10


def test_tenant_keys_are_read_from_variables_and_never_from_the_command_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GOLD_KEY", "sk-gold")
    assert _tenant_keys(["gold=GOLD_KEY"]) == {"gold": "sk-gold"}
    for bad in ("gold", "=GOLD_KEY", "gold=NOT_THERE"):
        with pytest.raises(PlanError):
            _tenant_keys([bad])
