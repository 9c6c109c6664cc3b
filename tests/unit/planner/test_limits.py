"""A plan does not go beyond what its node was measured on without saying so."""

import msgspec
import numpy as np
import pytest

from planner.errors import PlanError
from planner.goals import Goals
from planner.plan import make_plan
from planner.profile import MeasuredRange, NodeProfile, profile_from_json
from planner.records import PlanResult, Question
from planner.workload.workload import from_lengths

NODE = NodeProfile(
    name="measured",
    gpu="cpu",
    model="m",
    gpus=1,
    w_s=0.01,
    h_s_per_token=1e-7,
    prefill_s_per_token=5e-5,
    chunk_tokens=2048,
    kv_tokens=2**18,
    measured=MeasuredRange(longest_prompt_tokens=737, most_sequences=32),
)


def planned(longest: int, *, extrapolate: bool = False, node: NodeProfile = NODE) -> PlanResult:
    prompts = np.linspace(50, longest, 500)
    return make_plan(
        Question(
            workload=from_lengths(prompts, np.full(500, 20.0)),
            goals=Goals(rate_per_s=20.0, ttft_s=30.0),
            nodes=(node,),
            window_tokens=16_384,
            b_short=(),
            extrapolate=extrapolate,
        )
    )


def test_longer_prompts_than_measured_are_refused_with_the_fix() -> None:
    with pytest.raises(PlanError) as caught:
        planned(8192)
    assert "was measured on prompts up to 737 tokens" in caught.value.problem
    assert "calibrate --max-prompt 81" in caught.value.fix


def test_planning_on_request_beyond_the_measurement_gives_an_interval() -> None:
    found = planned(8192, extrapolate=True)
    (note,) = [n for n in found.notes if "measured up to 737" in n]
    pool = found.chosen.pools[-1]
    low, high = (float(part) for part in note.split("between ")[1].split(" ms")[0].split(" and "))
    assert low == pytest.approx(1000 * pool.ttft_p99_s, abs=1)
    # Eleven times the measured length costs up to eleven times the straight line's price.
    assert high - low == pytest.approx(1000 * 5e-5 * 8100 * 10, rel=0.05)


def test_a_profile_that_knows_what_attention_costs_needs_no_interval() -> None:
    node = msgspec.structs.replace(NODE, attention_s_per_pair=1e-8)
    notes = [n for n in planned(8192, extrapolate=True, node=node).notes if "up to 737" in n]
    assert notes
    assert all("P99 TTFT is extrapolated" in note for note in notes)


def test_more_sequences_at_once_than_measured_are_flagged_with_the_fix() -> None:
    few = msgspec.structs.replace(
        NODE, measured=MeasuredRange(longest_prompt_tokens=737, most_sequences=1)
    )
    (note,) = [n for n in planned(700, node=few).notes if "sequences a node" in n]
    assert "calibrate --most-concurrency" in note


def test_the_range_is_read_from_a_profile_s_file() -> None:
    document = msgspec.to_builtins(NODE)
    assert profile_from_json(document) == NODE
    del document["measured"]
    assert profile_from_json(document).measured is None
