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
    bucket_name,
    bucket_of,
    numbers,
)
from tests.unit.predictor.made import x_of


def test_all_regimes_have_a_bucket_and_a_name_of_their_own() -> None:
    found = {
        bucket_of(x_of(prompt, int(prompt * hit), backlog))
        for prompt in (100, 3000, 20_000)
        for hit in (0.0, 0.3, 0.9)
        for backlog in (0, 100, 9000)
    }
    assert found == set(range(BUCKETS))
    assert len({bucket_name(bucket) for bucket in found}) == BUCKETS


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


def test_buckets_learn_apart() -> None:
    random, calibration = Random(2), Bucketed(0.95)
    within: dict[int, list[bool]] = {0: [], 26: []}
    for _ in range(3000):
        for bucket, sigma in ((0, 0.1), (26, 0.8)):
            actual_s, quantile_s = random.lognormvariate(0.0, sigma), calibration.factor(bucket)
            within[bucket].append(actual_s <= quantile_s)
            calibration.observe(bucket, quantile_s, actual_s)
    for seen in within.values():
        assert sum(seen[1000:]) / 2000 == pytest.approx(0.95, abs=0.015)


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


def test_endless_misses_end_at_the_clamp() -> None:
    calibration = Bucketed(0.95)
    for _ in range(1000):
        calibration.observe(1, 1.0, 2.0)
    assert calibration.factor(1) == pytest.approx(math.exp(2 * LIMIT))
    assert calibration.factor(2) == pytest.approx(math.exp(LIMIT))


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


def test_a_newcomer_takes_over_what_others_know() -> None:
    known, newcomer = Bucketed(0.95), Bucketed(0.95)
    for _ in range(50):
        known.observe(7, 1.0, 2.0)
    newcomer.merge({"a": known.state()})
    assert newcomer.factor(7) == pytest.approx(known.factor(7))
    newcomer.merge({"a": known.state()})
    assert newcomer.factor(7) == pytest.approx(known.factor(7))


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


def test_misses_are_counted_over_the_window() -> None:
    assert Misses().coverage is None
    misses = Misses()
    for _ in range(10):
        misses.add(missed=True)
    assert misses.coverage == 0
    for _ in range(WINDOW):
        misses.add(missed=False)
    assert misses.coverage == 1


@given(st.lists(st.booleans(), max_size=1000))
def test_the_window_holds_its_last(seen: list[bool]) -> None:
    misses = Misses()
    for missed in seen:
        misses.add(missed=missed)
    last = seen[-WINDOW:]
    assert misses.coverage == (1 - sum(last) / len(last) if last else None)


def test_only_lists_of_finite_numbers_are_numbers() -> None:
    assert numbers([1, 2.5], 2) == [1.0, 2.5]
    assert numbers((1,), 1) == [1.0]
    for value in ([1], [1, "2"], [1, math.inf], [1, None], "12", 12, None):
        assert numbers(value, 2) is None
