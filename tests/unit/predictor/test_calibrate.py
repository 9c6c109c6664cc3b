import math
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.calibrate import (
    BUCKETS,
    LIMIT,
    WINDOW,
    AdaptiveConformal,
    Bucketed,
    Misses,
)


def test_a_miss_and_a_hit_move_it_as_specified() -> None:
    calibration = Bucketed(0.95)
    calibration.observe(3, 1.0, 2.0)
    assert calibration.factor(3) == pytest.approx(math.exp(0.05 * 0.95 + 0.02 * 0.95))
    assert calibration.factor(4) == pytest.approx(math.exp(0.02 * 0.95))
    calibration.observe(3, 1.0, 0.5)
    assert calibration.factor(3) == pytest.approx(math.exp(0.07 * 0.9))


@pytest.mark.parametrize("kind", [Bucketed, AdaptiveConformal])
@pytest.mark.parametrize("off", [0.2, 1.0, 5.0])
def test_coverage_comes_to_alpha_however_wrong_the_quantile_is(
    kind: type[Bucketed] | type[AdaptiveConformal], off: float
) -> None:
    random, calibration, within = Random(1), kind(0.95), []
    for number in range(4000):
        bucket = number % 5
        # Regimes differ in scatter; the true quantile is at exp(1.645 sigma).
        actual_s = random.lognormvariate(0.0, 0.2 + 0.1 * bucket)
        raw_s = off
        quantile_s = raw_s * calibration.factor(bucket)
        within.append(actual_s <= quantile_s)
        if isinstance(calibration, Bucketed):
            calibration.observe(bucket, quantile_s, actual_s)
        else:
            calibration.observe(bucket, quantile_s, actual_s, raw_s)
    assert 0.93 <= sum(within[1000:]) / 3000 <= 0.965


seen = st.lists(
    st.tuples(st.integers(0, BUCKETS - 1), st.floats(1e-4, 1e6), st.floats(1e-4, 1e6)),
    max_size=300,
)


@given(seen)
def test_factors_stay_finite_and_clamped(observed: list[tuple[int, float, float]]) -> None:
    bucketed, adaptive = Bucketed(0.95), AdaptiveConformal(0.95)
    for bucket, quantile_s, actual_s in observed:
        bucketed.observe(bucket, quantile_s, actual_s)
        adaptive.observe(bucket, quantile_s, actual_s, quantile_s)
    for bucket in range(BUCKETS):
        assert math.exp(-2 * LIMIT) <= bucketed.factor(bucket) <= math.exp(2 * LIMIT)
        assert math.exp(-LIMIT) <= adaptive.factor(bucket) <= math.exp(LIMIT)


def test_processes_that_merge_learn_as_one_that_sees_all() -> None:
    random = Random(3)
    observed = [(random.randrange(BUCKETS), random.random() < 0.4) for _ in range(4000)]
    one, four = Bucketed(0.95), [Bucketed(0.95) for _ in range(4)]
    for number, (bucket, missed) in enumerate(observed):
        actual_s = 2.0 if missed else 0.5
        one.observe(bucket, 1.0, actual_s)
        four[number % 4].observe(bucket, 1.0, actual_s)
        if number % 40 == 0:
            states = {str(i): c.state() for i, c in enumerate(four)}
            for i, calibration in enumerate(four):
                calibration.merge({n: s for n, s in states.items() if n != str(i)})
    for bucket in range(BUCKETS):
        for calibration in four:
            assert math.log(calibration.factor(bucket)) == pytest.approx(
                math.log(one.factor(bucket)), abs=0.25
            )


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"c": None, "own": None},
        {"c": [0.0] * 3, "own": [0.0] * 3},
        {"c": [math.nan] * 28, "own": [0.0] * 28},
        {"c": ["x"] * 28, "own": [0.0] * 28},
    ],
)
def test_states_that_are_none_are_ignored(state: dict[str, Any]) -> None:
    calibration = Bucketed(0.95)
    calibration.observe(0, 1.0, 2.0)
    before = calibration.state()
    calibration.merge({"a": state})
    assert calibration.state() == before


@given(st.lists(st.booleans(), max_size=1000))
def test_the_window_holds_its_last(seen: list[bool]) -> None:
    misses = Misses()
    for missed in seen:
        misses.add(missed=missed)
    last = seen[-WINDOW:]
    assert misses.coverage == (1 - sum(last) / len(last) if last else None)
