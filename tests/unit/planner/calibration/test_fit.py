"""Fitting an engine's constants to synthetic measurements."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.calibration.check import compare, modelled
from planner.calibration.fit import Timing, Window, fit_windows
from planner.calibration.limits import Overhead
from planner.calibration.profile import (
    EngineLimits,
    StatedValues,
    engine_profile,
    node_profile,
    profile_document,
)
from planner.calibration.traces import StreamTrace
from planner.errors import PlanError
from planner.profile import profile_from_json
from simulator.engine.engine import EngineProfile

TOLD = StatedValues(name="m-measured", model="m", window_tokens=4096, kv_tokens=64_000)


def windows(
    w_s: float, load_s: float, prefill_s: float, *, timing: Timing = "slots", seed: int = 1
) -> list[Window]:
    """Windows of an engine with these constants, as a client sees them: 0.3 ms of noise."""
    draw = random.Random(seed)
    found = []
    for count in (1, 2, 4, 8, 16, 32):
        for prompt, prefill in ((32, 0), (1500, 0), (32, 900 * count)):
            iterations = 60
            resident = count * (prompt + draw.randint(20, 60))
            load = count if timing == "slots" else resident
            exact_s = iterations * (w_s + load_s * load) + prefill_s * prefill
            found.append(
                Window(
                    duration_s=exact_s + draw.gauss(0, 0.0003),
                    iterations=iterations,
                    sequences=iterations * count,
                    resident_tokens=iterations * resident,
                    prefill_tokens=prefill,
                )
            )
    return found


@settings(max_examples=40)
@given(
    w_s=st.floats(0.004, 0.05),
    h_s=st.floats(0.0002, 0.002),
    prefill_s=st.floats(1e-5, 1e-4),
    seed=st.integers(0, 999),
)
def test_sequences_that_cost_are_recovered(
    w_s: float, h_s: float, prefill_s: float, seed: int
) -> None:
    fit = fit_windows(windows(w_s, h_s, prefill_s, seed=seed))
    assert fit.timing == "slots"
    assert (fit.w_s, fit.h_s) == pytest.approx((w_s, h_s), rel=0.05)
    assert fit.prefill_s_per_token == pytest.approx(prefill_s, rel=0.05)
    assert fit.h_s_per_token == 0


def test_resident_tokens_that_cost_are_recovered() -> None:
    fit = fit_windows(windows(0.009, 3e-7, 4e-5, timing="kv"))
    assert fit.timing == "kv"
    assert fit.w_s == pytest.approx(0.009, rel=0.02)
    assert fit.h_s_per_token == pytest.approx(3e-7, rel=0.02)
    assert fit.h_s == 0
    assert fit.other_residual > 2 * fit.median_residual


def test_disturbed_windows_do_not_carry_the_fit_away() -> None:
    found = windows(0.0137, 0.00041, 2.3e-5)
    for index in (3, 10):
        longer_s = 1.5 * found[index].duration_s
        found[index] = Window(
            duration_s=longer_s,
            iterations=found[index].iterations,
            sequences=found[index].sequences,
            resident_tokens=found[index].resident_tokens,
            prefill_tokens=found[index].prefill_tokens,
        )
    fit = fit_windows(found)
    assert (fit.w_s, fit.h_s) == pytest.approx((0.0137, 0.00041), rel=0.05)
    assert fit.residuals[3] == pytest.approx(1 / 1.5 - 1, abs=0.03)


@pytest.mark.parametrize("found", [windows(0.01, 0.001, 0)[:5], windows(0.01, 0.001, 0)[:1] * 6])
def test_too_little_is_refused(found: list[Window]) -> None:
    with pytest.raises(PlanError):
        fit_windows(found)


# The files


def test_the_file_is_read_by_the_planner_and_by_the_mock() -> None:
    fit = fit_windows(windows(0.0137, 0.00041, 2.3e-5))
    limits = EngineLimits(slots=24, chunk_tokens=1024, longest_prompt_tokens=3000)
    node = node_profile(
        fit, TOLD, limits, tokens_per_sequence=400, verified=False, source="measured"
    )
    engine = engine_profile(fit, TOLD, limits)
    document = profile_document(node, engine, fit, [], {"date": "2026-01-02"})
    assert profile_from_json(document) == node
    assert EngineProfile(**document["engine"]) == engine
    assert node.verified is False
    assert node.h_s_per_token * 400 == pytest.approx(fit.h_s)
    assert (engine.max_num_seqs, engine.max_num_batched_tokens) == (24, 1024)
    assert document["provenance"]["standard_errors"]["h_s"] == fit.errors[1]


# The held-out load


def load(count: int = 12) -> list[StreamTrace]:
    return [
        StreamTrace(
            submit_s=100 + 0.1 * index,
            times_s=(0.0, 1.0),
            tokens=(1, 20 + index),
            prompt_tokens=100 + 50 * index,
        )
        for index in range(count)
    ]


def engine(w_s: float = 0.01) -> EngineProfile:
    return EngineProfile(name="e", w_s=w_s, h_s=0.001, prefill_s_per_token=2e-5)


def test_a_single_request_takes_what_the_formula_says() -> None:
    (one,) = modelled(engine(), load(1), Overhead(fixed_s=0.004, per_token_s=1e-5))
    assert one.ttft_s == pytest.approx(0.011 + 100 * 2e-5 + 0.004 + 100 * 1e-5)
    assert one.tpot_s == pytest.approx(0.011)
    assert one.output_tokens == 20


def test_the_right_engine_holds_and_a_slower_one_does_not() -> None:
    real = modelled(engine(), load(), Overhead())
    assert all(check.off == 0 for check in compare(real, modelled(engine(), load(), Overhead())))
    wrong = compare(real, modelled(engine(0.014), load(), Overhead()))
    assert {check.name for check in wrong if not check.holds} >= {"TTFT p50 (s)", "TPOT p50 (s)"}
