"""Batch means, Student's t, and the eye for runs that have not settled."""

import numpy as np
import pytest

from simulator.fleet.statistics import (
    batch_means,
    drifts,
    quantile_bounds,
    student_t,
)


@pytest.mark.parametrize(
    ("confidence", "freedom", "table"),
    [(0.95, 5, 2.571), (0.95, 19, 2.093), (0.99, 19, 2.861), (0.95, 1000, 1.962)],
)
def test_students_t_is_the_tables(confidence: float, freedom: int, table: float) -> None:
    assert student_t(confidence, freedom) == pytest.approx(table, abs=0.004)


def test_intervals_of_independent_values_hold_the_truth_as_often_as_they_say() -> None:
    random = np.random.default_rng(0)
    held = [batch_means(random.exponential(3.0, 2000)).holds(3.0) for _ in range(400)]
    assert np.mean(held) == pytest.approx(0.95, abs=0.03)


def test_a_line_drifts_and_noise_does_not() -> None:
    random = np.random.default_rng(3)
    noise = random.exponential(1.0, 10_000)
    line = np.linspace(0.0, 20.0, 10_000)
    assert drifts(line + noise)
    assert drifts(noise + line[::-1])
    assert not any(drifts(random.exponential(1.0, 10_000)) for _ in range(200))


def test_a_trend_too_small_to_matter_is_none() -> None:
    line = np.linspace(0.0, 1.0, 10_000)
    assert not drifts(10.0 + line)  # a tenth of the mean
    assert not drifts(0.04 * line)  # milliseconds
    assert not drifts(line[:30])  # too few to say


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_order_statistics_hold_the_truth_as_often_as_they_say(share: float) -> None:
    random = np.random.default_rng(3)
    truth = -np.log(1 - share)
    held = 0
    for _ in range(1000):
        low, high = quantile_bounds(random.exponential(1.0, 96).tolist(), share)
        held += low <= truth <= high
    assert 0.94 <= held / 1000 <= 0.985
