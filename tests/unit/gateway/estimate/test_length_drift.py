"""Live lengths beside the planned ones."""

import random

import pytest

from gateway.estimate.length_drift import ALARM, TRUSTED, LengthDrift
from planner.gateway_file import bucket_edges, plan_points


def points_of(lengths: list[int]) -> list[tuple[int, float]]:
    shares = [
        (edge, sum(length <= edge for length in lengths) / len(lengths)) for edge in bucket_edges()
    ]
    return plan_points(shares)


def lognormal(median: float, count: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [max(1, round(median * draw.lognormvariate(0, 1))) for _ in range(count)]


def fed(drift: LengthDrift, lengths: list[int]) -> LengthDrift:
    for length in lengths:
        drift.add(length)
    return drift


def test_traffic_as_planned_is_near_its_plan() -> None:
    drift = fed(LengthDrift(points_of(lognormal(1500, 5000))), lognormal(1500, 5000, seed=1))
    assert drift.distance is not None
    assert drift.distance < 0.05
    assert not drift.alarm


def test_twice_as_long_is_told() -> None:
    drift = fed(LengthDrift(points_of(lognormal(1500, 5000))), lognormal(3000, 5000))
    assert drift.distance is not None
    # Of log-normal lengths with sigma 1, a shift by ln 2 makes 2 Phi(ln 2 / 2) - 1 = 0.271.
    assert drift.distance == pytest.approx(0.271, abs=0.04)
    assert drift.alarm


def test_nothing_is_said_of_a_few_requests() -> None:
    drift = fed(LengthDrift([(1000, 0.5), (2000, 1.0)]), [5000] * (TRUSTED - 1))
    assert drift.distance is None
    assert not drift.alarm
    drift.add(5000)
    assert drift.distance == 1.0


def test_an_alarm_holds_until_the_distance_is_clearly_smaller() -> None:
    drift = LengthDrift([(1000, 0.5), (2000, 1.0)])

    def until(most: float) -> bool:
        while (drift.distance or 1.0) > most:
            drift.add(1500)
        return drift.alarm

    fed(drift, [500] * 1000)
    assert until(ALARM + 0.01)
    assert until(ALARM - 0.01)
    assert not until(0.07)


def test_old_requests_fade() -> None:
    drift = fed(LengthDrift(points_of(lognormal(1500, 5000))), lognormal(6000, 5000))
    fed(drift, lognormal(1500, 12_000, seed=2))
    assert not drift.alarm


def test_memory_does_not_grow_and_weights_stay_finite() -> None:
    drift = LengthDrift(points_of(lognormal(1500, 5000)))
    size = len(drift._counts)
    fed(drift, [10, 1 << 30, 0] * 40_000)
    assert len(drift._counts) == size <= 50
    assert 0.0 <= (drift.distance or -1.0) <= 1.0
