"""The closed form is the engine: same starts, first tokens and ends on any workload."""

from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.engine.engine import PROFILES
from simulator.fleet.closed_form import ClosedInstance, applies
from simulator.fleet.instance import EngineInstance, Instance, make_instance
from simulator.fleet.jobs import Needs, Times
from simulator.fleet.traffic import Traffic
from tests.unit.simulator.fleets import closed_profiles, second, traffics

EXAMPLES = settings(max_examples=200, deadline=None)


def drive(
    instance: Instance, traffic: Traffic, fail_s: float = inf
) -> tuple[list[list[int]], list[int]]:
    """Whole batches of completions in order, and what a failure lost."""
    done, lost, failed = [], [], False

    def run_until(now_s: float) -> None:
        while instance.due_s <= now_s and instance.due_s < inf:
            done.append(sorted(instance.advance(instance.due_s)))

    for index, at_s in enumerate(traffic.arrival_s.tolist()):
        if not failed and fail_s <= at_s:
            run_until(fail_s)
            lost, failed = instance.fail(fail_s), True
        run_until(at_s)
        instance.submit(index, at_s)
    run_until(inf)
    return [batch for batch in done if batch], lost


@EXAMPLES
@given(st.data())
def test_the_closed_form_gives_what_the_engine_gives_to_the_last_bit(data: st.DataObject) -> None:
    profile = data.draw(closed_profiles())
    traffic = data.draw(traffics(unit_s=profile.w_s))
    fail_s = data.draw(st.sampled_from([inf, 3 * profile.w_s, 40 * profile.w_s]))
    needs = Needs(profile, traffic.prompt_tokens, traffic.output_tokens)
    fast, exact = Times(len(traffic)), Times(len(traffic))

    found = drive(ClosedInstance(profile, needs, fast), traffic, fail_s)
    expected = drive(EngineInstance(profile, needs, exact), traffic, fail_s)

    assert found == expected
    lost = np.isnan(exact.first)
    assert np.array_equal(fast.first, exact.first, equal_nan=True)
    assert np.array_equal(fast.end, exact.end, equal_nan=True)
    assert np.array_equal(np.asarray(fast.start)[~lost], np.asarray(exact.start)[~lost])


@pytest.mark.parametrize("timing", ["slots", "kv"])
def test_on_a_long_run_with_the_published_constants_times_differ_by_rounding_only(
    timing: str,
) -> None:
    random = np.random.default_rng(5)
    profile = second(w_s=0.008, h_s=0.00065, timing=timing, max_num_seqs=16, kv_blocks=1 << 16)
    count = 3000
    traffic = Traffic(
        arrival_s=np.cumsum(random.exponential(0.25, count)),
        prompt_tokens=random.integers(1, 8000, count),
        output_tokens=random.integers(1, 400, count),
    )
    needs = Needs(profile, traffic.prompt_tokens, traffic.output_tokens)
    fast, exact = Times(count), Times(count)
    drive(ClosedInstance(profile, needs, fast), traffic)
    drive(EngineInstance(profile, needs, exact), traffic)
    for name in ("start", "first", "end"):
        assert getattr(fast, name) == pytest.approx(getattr(exact, name), abs=1e-6), name


def test_engines_that_decide_anew_each_iteration_have_no_closed_form() -> None:
    papers = PROFILES["llama-3-70b-a100-reserved"]
    needs = Needs(papers, np.array([1]), np.array([1]))
    assert applies(papers)
    assert isinstance(make_instance(papers, needs, Times(1)), ClosedInstance)
    exact = make_instance(papers, needs, Times(1), block_exact=True)
    assert isinstance(exact, EngineInstance)
    for changes in (
        {"load": "growing"},
        {"prefill": "packed"},
        {"prefill": "shared"},
        {"prefix_cache_tokens": None},
        {"prefill_s_per_token": 1e-6},
        {"attention_s_per_pair": 1e-9},
        {"scheduling": "priority"},
    ):
        other = second(max_num_seqs=4, **changes)
        assert not applies(other), changes
        assert isinstance(make_instance(other, needs, Times(1)), EngineInstance)
        with pytest.raises(ValueError, match="no closed form"):
            ClosedInstance(other, needs, Times(1))
