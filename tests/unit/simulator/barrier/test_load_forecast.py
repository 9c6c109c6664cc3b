"""The histogram of the ranks' load, and what it says of the steps to come."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.barrier.load_forecast import AGE_EDGES, LoadHistogram, middle_ages
from simulator.barrier.survival_forecast import still_alive, survival_of

Request = tuple[int, int, int, int]
"""Worker, class, prompt, age."""

requests = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(1, 500), st.integers(0, 100)),
    max_size=20,
)


def filled(given_requests: list[Request], edges: tuple[int, ...] = AGE_EDGES) -> LoadHistogram:
    found = LoadHistogram(3, 2, edges)
    for worker, kind, prompt, age in given_requests:
        found.add(worker, kind, prompt + age, age)
    return found


@given(requests)
def test_load_and_requests_of_each_worker_are_the_sums_over_its_own(given_: list[Request]) -> None:
    found = filled(given_)
    for worker in range(3):
        own = [r for r in given_ if r[0] == worker]
        assert found.load[worker] == sum(prompt + age for _, _, prompt, age in own)
        assert found.active[worker] == len(own)


@given(requests, st.integers(1, 300))
def test_growing_is_leaving_and_coming_back_longer(given_: list[Request], more: int) -> None:
    grown = filled(given_)
    for worker, kind, prompt, age in given_:
        grown.grow(worker, kind, prompt + age, age, more)
    later = filled([(w, k, prompt, age + more) for w, k, prompt, age in given_])
    alive = still_alive([survival_of([1.0, 0.5, 0.25]), survival_of([1.0])], 3)
    assert np.allclose(grown.ahead(alive), later.ahead(alive))
    for worker, kind, prompt, age in given_:
        grown.remove(worker, kind, prompt + age + more, age + more)
    assert not grown.load.any()
    assert not grown.active.any()


@given(requests, st.integers(0, 6))
def test_one_product_is_the_sum_over_the_requests(given_: list[Request], horizon: int) -> None:
    edges = tuple(range(101))
    survivals = [
        survival_of((0.9 ** np.arange(120)).tolist()),
        survival_of(1 - np.arange(120) / 120),
    ]
    alive = still_alive(survivals, horizon, middle_ages(edges))
    wanted = np.zeros((3, horizon + 1))
    for worker, kind, prompt, age in given_:
        for h in range(horizon + 1):
            at = survivals[kind](np.array([age, age + h], float))
            wanted[worker, h] += (prompt + age + h) * at[1] / at[0]
    assert np.allclose(filled(given_, edges).ahead(alive), wanted)


def test_age_buckets_follow_one_another_and_are_few() -> None:
    assert AGE_EDGES[:6] == (0, 1, 2, 3, 4, 5)
    assert list(AGE_EDGES) == sorted(set(AGE_EDGES))
    assert 65_536 in AGE_EDGES
    assert len(AGE_EDGES) < 80
    widths = np.diff(AGE_EDGES)
    assert (widths[8:] <= np.array(AGE_EDGES[8:-1]) / 4).all()


def test_the_middle_of_a_bucket_stands_for_it() -> None:
    assert middle_ages((0, 1, 4, 10)).tolist() == [0.0, 2.0, 6.5, 10.0]


@pytest.mark.parametrize(("workers", "classes"), [(0, 1), (1, 0)])
def test_a_histogram_of_nothing_is_refused(workers: int, classes: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        LoadHistogram(workers, classes)
