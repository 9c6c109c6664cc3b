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
