"""The ratio's average: bias, spread, outliers and changes."""

import random

import pytest

from gateway.estimate.input_lengths import Ratio


def fresh(prior: float = 4.0) -> Ratio:
    return Ratio(prior, beta=0.95, gamma=1.0, corrected=True)


def warmed(true: float = 4.5, count: int = 200, seed: int = 1) -> Ratio:
    ratio, rng = fresh(), random.Random(seed)
    for _ in range(count):
        ratio.add(true * rng.lognormvariate(0, 0.04), 1000)
    return ratio


def test_the_first_observation_replaces_the_prior() -> None:
    ratio = fresh()
    assert ratio.mean == 4.0
    ratio.add(2.0, 1000)
    assert ratio.mean == pytest.approx(2.0)


def test_the_papers_average_starts_at_its_prior() -> None:
    ratio = Ratio(4.0, beta=0.95, gamma=1.0, corrected=False)
    for _ in range(50):
        ratio.add(2.0, 1000)
    assert ratio.mean == pytest.approx(2 + 2 * 0.95**50)


def test_cold_estimates_are_conservative_and_refuse_nothing_plausible() -> None:
    ratio = fresh(4.8)
    assert ratio.conservative == pytest.approx(0.9 * 4.8)
    assert ratio.plausible == 8.0
    for _ in range(19):
        ratio.add(4.8, 1000)
        assert ratio.plausible == 8.0
        assert ratio.conservative <= 4.8 + 1e-9
    ratio.add(4.8, 1000)
    assert ratio.plausible == pytest.approx(1.3 * 4.8), "alike so far is no proof of the next"


def test_the_spread_is_a_standard_deviation() -> None:
    ratio = warmed(count=2000)
    assert 0.02 * 4.5 < ratio.spread < 0.05 * 4.5
    assert ratio.conservative == pytest.approx(ratio.mean - ratio.spread)
    assert ratio.plausible == pytest.approx(1.3 * ratio.mean)


def test_a_wide_spread_widens_what_is_plausible() -> None:
    ratio = fresh()
    for i in range(2000):
        ratio.add(3.0 if i % 2 else 5.0, 1000)
    assert ratio.spread > 0.1 * ratio.mean
    assert ratio.plausible == pytest.approx(ratio.mean + 3 * ratio.spread)


def test_the_conservative_ratio_never_falls_to_nothing() -> None:
    ratio = fresh()
    for i in range(100):
        ratio.add(0.5 if i % 2 else 2.5, 1000)
    assert ratio.conservative >= 0.5


@pytest.mark.parametrize("lie", [0.5, 1.0, 2.0, 9.0, 16.0])
def test_one_lie_moves_a_warm_ratio_by_less_than_one_percent(lie: float) -> None:
    ratio = warmed()
    before, spread = ratio.mean, ratio.spread
    ratio.add(lie, 1000)
    assert abs(ratio.mean / before - 1) < 0.01
    assert ratio.spread == pytest.approx(spread)


@pytest.mark.parametrize("lie", [0.6, 2.2, 9.0, 15.0])
@pytest.mark.parametrize("share", [0.1, 0.2])
def test_a_lying_worker_among_honest_ones_moves_a_ratio_by_one_percent_at_most(
    lie: float, share: float
) -> None:
    rng = random.Random(3)
    ratio, honest = warmed(), warmed()
    worst = 0.0
    for _ in range(3000):
        if rng.random() < share:
            ratio.add(lie, 1000)
        else:
            observed = 4.5 * rng.lognormvariate(0, 0.04)
            ratio.add(observed, 1000)
            honest.add(observed, 1000)
        worst = max(worst, abs(ratio.mean / honest.mean - 1))
    # The two averages forget at different speeds, which alone is worth about 1 %.
    assert abs(ratio.mean / 4.5 - 1) < 0.025
    assert worst < 0.03


@pytest.mark.parametrize("after", [2.0, 3.0, 6.5])
def test_a_true_change_is_followed_within_fifty_observations(after: float) -> None:
    ratio, rng = warmed(), random.Random(4)
    for _ in range(50):
        ratio.add(after * rng.lognormvariate(0, 0.04), 1000)
    assert ratio.mean == pytest.approx(after, rel=0.03)


def test_a_drift_is_followed() -> None:
    ratio, rng = warmed(), random.Random(5)
    for i in range(400):
        true = 4.5 - 1.5 * i / 400
        ratio.add(true * rng.lognormvariate(0, 0.04), 1000)
    assert ratio.mean == pytest.approx(3.0, rel=0.06)


def test_the_state_is_plain_numbers() -> None:
    assert all(isinstance(value, int | float) for value in warmed().state().values())


def test_long_prompts_weigh_more() -> None:
    ratio = fresh()
    for _ in range(100):
        ratio.add(4.0, 9000)
        ratio.add(4.4, 111)
    assert ratio.mean == pytest.approx(4.04, abs=0.01)


def test_a_lie_about_length_weighs_no_more_than_the_truth() -> None:
    ratio, rng = fresh(), random.Random(6)
    for _ in range(200):
        ratio.add(4.5 * rng.lognormvariate(0, 0.04), 150)
    before = ratio.mean
    ratio.add(2.0, 1e6)
    assert abs(ratio.mean / before - 1) < 0.002
