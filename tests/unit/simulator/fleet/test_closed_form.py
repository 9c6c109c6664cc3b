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
from tests.unit.simulator.fleets import closed_profiles, requests, second, traffics

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


def test_a_sequence_alone_takes_its_iterations() -> None:
    profile = second(w_s=0.5)
    times = Times(1)
    needs = Needs(profile, np.array([1025]), np.array([4]))
    drive(ClosedInstance(profile, needs, times), requests((2.0, 1025, 4)))
    # Three chunks of 512, then three more tokens.
    assert (times.start[0], times.first[0], times.end[0]) == (2.0, 3.5, 5.0)


def test_an_arrival_joins_at_the_next_boundary_and_slows_everybody() -> None:
    profile = second(h_s=1.0, max_num_seqs=2)
    times = Times(2)
    traffic = requests((0.0, 1, 3), (0.5, 1, 1))
    needs = Needs(profile, traffic.prompt_tokens, traffic.output_tokens)
    drive(ClosedInstance(profile, needs, times), traffic)
    # Iterations end at 2, then at 5 with both, then at 7 with one.
    assert list(times.start) == [0.0, 2.0]
    assert list(times.first) == [2.0, 5.0]
    assert list(times.end) == [7.0, 5.0]


def test_the_closed_form_counts_what_it_holds() -> None:
    profile = second(max_num_seqs=2)
    times = Times(3)
    needs = Needs(profile, np.array([16, 16, 16]), np.array([16, 16, 16]))
    instance = ClosedInstance(profile, needs, times)
    for index in range(3):
        instance.submit(index, 0.0)
    held = (instance.running, instance.waiting, instance.used_blocks, instance.preemptions)
    assert held == (2, 1, 4 * 32 // profile.block_tokens // 2, 0)
    assert instance.fail(0.5) == [0, 1, 2]
    assert (instance.running, instance.waiting, instance.used_blocks) == (0, 0, 0)


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
