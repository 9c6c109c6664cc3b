from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.speeds import Speeds


def serve(
    speeds: Speeds, requests: int, true: list[float], seed: int = 1, sigma: float = 0.3
) -> None:
    """Requests in turn; what is predicted includes the factor so far."""
    random = Random(seed)
    for number in range(requests):
        worker = number % len(true)
        work_s = random.lognormvariate(-1.5, 0.8)
        actual_s = work_s * true[worker] * random.lognormvariate(-sigma * sigma / 2, sigma)
        speeds.observe(worker, work_s * speeds.factors[worker], actual_s)


@pytest.mark.parametrize("seed", range(5))
def test_a_worker_at_half_speed_is_known_within_200_requests_of_four_workers(seed: int) -> None:
    speeds = Speeds(4)
    serve(speeds, 2000, [1.0] * 4, seed)
    serve(speeds, 200, [1.0, 1.0, 2.0, 1.0], seed)
    slow, others = speeds.factors[2], [speeds.factors[w] for w in (0, 1, 3)]
    assert 1.6 < slow < 2.6
    assert all(0.85 < factor < 1.25 for factor in others)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.floats(1e-4, 1e6), st.floats(1e-4, 1e6)), max_size=200)
)
def test_factors_stay_finite_and_bounded(seen: list[tuple[int, float, float]]) -> None:
    speeds = Speeds(3)
    for worker, predicted_s, actual_s in seen:
        speeds.observe(worker, predicted_s, actual_s)
    assert all(1 / 20.001 < factor < 20.001 for factor in speeds.factors)


def test_processes_learn_of_a_slow_worker_from_one_another() -> None:
    apart, told = Speeds(4), Speeds(4)
    serve(told, 100, [1.0] * 4)
    told.merge({"a": apart.state()})
    for step in range(40):
        serve(apart, 20, [1.0, 1.0, 2.0, 1.0], seed=step)
        told.merge({"a": apart.state()})
    assert apart.factors[2] == pytest.approx(2.0, rel=0.25)
    assert told.factors[2] == pytest.approx(apart.factors[2], rel=0.15)


@pytest.mark.parametrize(
    "state", [{}, {"own": [0.0], "log": [0.0], "seen": [1]}, {"own": 1, "log": 2, "seen": 3}]
)
def test_states_that_are_none_are_ignored(state: dict[str, Any]) -> None:
    speeds = Speeds(2)
    speeds.merge({"a": state})
    assert speeds.factors == [1.0, 1.0]
