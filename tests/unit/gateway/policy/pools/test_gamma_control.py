from typing import Any

import pytest

from gateway.policy.pools.compression_watch import BINS, CompressionWatch, bin_of
from gateway.policy.pools.gamma_control import (
    MAX_GAMMA,
    MIN_GAMMA,
    GammaControl,
    GammaMove,
    GammaRules,
    GammaSample,
    GammaSampler,
)

MINUTE_S = 60.0


def sample(gamma: float, fit: float, *, tried: int = 100, seconds: float = 0.5) -> GammaSample:
    """A minute in which so many were tried at the outermost step and the share `fit` fitted."""
    at, done = bin_of(gamma), int(tried * fit)
    by_depth: dict[str, Any] = {
        "tried_at": tuple(tried * (i == at) for i in range(BINS)),
        "fitted": tuple(done * (i == at) for i in range(BINS)),
    }
    return GammaSample(tried=tried, compressed=done, seconds=seconds, **by_depth)


def drive(control: GammaControl, minutes: int, fit: float, **more: Any) -> list[GammaMove]:
    """The moves of so many minutes, each with the evidence at the gamma of that minute."""
    moves = []
    for minute in range(minutes):
        found = control.step(minute * MINUTE_S, sample(control.gamma, fit, **more))
        if found is not None:
            moves.append(found)
    return moves


def test_gamma_falls_where_the_deepest_cuts_fail() -> None:
    control = GammaControl(1.5)
    (move,) = drive(control, 5, 0.3)
    assert (move.before, move.after, control.gamma) == (1.5, 1.4, 1.4)
    assert "30% of 500 prompts fit" in move.reason


def test_gamma_rises_where_they_succeed_and_are_cheap() -> None:
    control = GammaControl(1.5)
    (move,) = drive(control, 5, 0.95)
    assert move.after == control.gamma == 1.6


@pytest.mark.parametrize("fit", [0.6, 0.7, 0.8])
def test_gamma_stays_between_the_thresholds(fit: float) -> None:
    assert drive(GammaControl(1.5), 60, fit) == []


def test_gamma_stays_within_the_planner_s_bounds() -> None:
    low, high = GammaControl(1.5), GammaControl(1.5)
    drive(low, 200, 0.0)
    drive(high, 200, 1.0)
    assert (low.gamma, high.gamma) == (MIN_GAMMA, MAX_GAMMA)


def test_a_configured_gamma_below_the_bounds_is_the_least() -> None:
    control = GammaControl(1.05)
    assert drive(control, 60, 0.0) == []


def test_a_costly_compression_tightens_whatever_its_success() -> None:
    control = GammaControl(1.5)
    (move,) = drive(control, 5, 0.9, seconds=20.0)
    assert move.after == 1.4
    assert "222 ms" in move.reason


def test_prompts_that_are_refused_for_their_task_cost_and_do_not_count_by_depth() -> None:
    control = GammaControl(1.5)
    for minute in range(5):
        tasks = GammaSample(tried=1000, compressed=10, seconds=2.5)
        move = control.step(minute * MINUTE_S, tasks)
    assert move is not None
    assert move.after == 1.4
    cheap = GammaControl(1.5)
    for minute in range(30):
        assert cheap.step(minute, GammaSample(tried=100, compressed=50, seconds=0.5)) is None


def test_few_prompts_move_nothing() -> None:
    assert drive(GammaControl(1.5), 10, 0.0, tried=2) == []


def test_a_gamma_that_proved_too_wide_is_not_tried_again_for_an_hour() -> None:
    control, rules = GammaControl(1.6), GammaRules()
    now_s, moves = 0.0, []
    while now_s < 4 * rules.ceiling_s:
        fit = 0.95 if control.gamma < 1.55 else 0.1
        now_s += MINUTE_S
        if (move := control.step(now_s, sample(control.gamma, fit))) is not None:
            moves.append((now_s, move.after))
    tries = [at for at, after in moves if after == 1.6]
    assert len(tries) == 2, moves
    assert tries[0] >= rules.ceiling_s
    assert tries[1] - tries[0] >= 2 * rules.ceiling_s


def test_an_observed_move_is_reported_and_not_made() -> None:
    control = GammaControl(1.5, observe=True)
    moves = drive(control, 10, 0.1)
    assert [move.after for move in moves] == [1.4, 1.4]
    assert control.gamma == 1.5


def test_a_sampler_gives_what_came_since_the_last_look() -> None:
    watch = CompressionWatch()
    watch.noted("", 1.2, 0.1)
    sampler = GammaSampler(watch)
    watch.noted("too_coarse", 1.2, 0.5)
    first, second = sampler.sample(), sampler.sample()
    assert (first.tried, first.compressed) == (1, 0)
    assert first.seconds == pytest.approx(0.5)
    assert (first.tried_at[1], first.fitted[1]) == (1, 0)
    assert second == GammaSample()
