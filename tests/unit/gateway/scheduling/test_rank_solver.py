"""The BF-IO solver: what it never does, what it always does, and how near the best it comes."""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.bfio.solver import least_objective, objective, small_instance, tight_instance
from gateway.scheduling.rank_solver import Floats, assign, fcfs

Instance = tuple[Floats, list[int], list[float], list[float]]


@st.composite
def instances(draw: st.DrawFn, most_items: int = 14) -> Instance:
    """Loads (G, H+1), free slots, sizes, waits."""
    workers = draw(st.integers(1, 6))
    steps = draw(st.sampled_from((1, 1, 2, 5)))
    tokens = st.integers(0, 3000)
    rows = st.lists(tokens, min_size=steps, max_size=steps)
    load = draw(st.lists(rows, min_size=workers, max_size=workers))
    cap = draw(st.lists(st.integers(0, 4), min_size=workers, max_size=workers))
    sizes = draw(st.lists(st.integers(1, 2000), max_size=most_items))
    ages = st.integers(0, 20)
    waits = draw(st.lists(ages, min_size=len(sizes), max_size=len(sizes)))
    return np.array(load, float), cap, list(map(float, sizes)), list(map(float, waits))


def fifo(cap: Sequence[int], items: int) -> list[tuple[int, int]]:
    return list(enumerate(fcfs(cap, items)))


# -- what holds of every answer


@given(instances(), st.sampled_from((None, 0.0, 10.0)), st.sampled_from((None, 0, 2)))
def test_slots_are_filled_and_nothing_is_assigned_twice(
    instance: Instance, maxage: float | None, passes: int | None
) -> None:
    load, cap, sizes, waits = instance
    pairs = assign(load, cap, sizes, waits, maxage=maxage, passes=passes)
    items = [item for item, _ in pairs]
    assert len(items) == len(set(items)) == min(len(sizes), sum(cap))
    used = Counter(worker for _, worker in pairs)
    assert all(used[worker] <= cap[worker] for worker in used)


@given(instances(), st.integers(0, 20))
def test_who_waited_too_long_goes_first_and_the_oldest_of_them_first(
    instance: Instance, maxage: int
) -> None:
    load, cap, sizes, waits = instance
    pairs = assign(load, cap, sizes, waits, maxage=maxage)
    old = sorted((w for w in waits if w >= maxage), reverse=True)
    first = [waits[item] for item, _ in pairs[: len(old)]]
    assert sorted(first, reverse=True) == old[: len(pairs)]


@given(instances())
def test_it_is_never_worse_than_fcfs(instance: Instance) -> None:
    load, cap, sizes, waits = instance
    pairs = assign(load, cap, sizes, waits, maxage=None)
    plain = fifo(cap, len(sizes))
    assert objective(load, sizes, pairs) <= objective(load, sizes, plain) + 1e-6


@given(instances())
def test_an_improving_pass_never_makes_it_worse(instance: Instance) -> None:
    load, cap, sizes, waits = instance
    found = [
        objective(load, sizes, assign(load, cap, sizes, waits, maxage=None, passes=passes))
        for passes in (0, 1, 3)
    ]
    assert found[2] <= found[1] + 1e-6
    assert found[1] <= found[0] + 1e-6


@given(instances())
def test_the_same_question_has_the_same_answer_and_is_left_as_it_was(instance: Instance) -> None:
    load, cap, sizes, waits = instance
    before = load.copy(), list(cap), list(sizes)
    first = assign(load, cap, sizes, waits, maxage=5.0)
    assert assign(load, cap, sizes, waits, maxage=5.0) == first
    assert np.array_equal(load, before[0])
    assert (cap, sizes) == (before[1], before[2])


@given(instances(), st.integers(1, 2000))
def test_one_request_and_no_look_ahead_is_least_kv(instance: Instance, size: int) -> None:
    load, cap, _, _ = instance
    now = load[:, 0]
    pairs = assign(now, cap, [float(size)], [0.0], maxage=None)
    open_to = [worker for worker, free in enumerate(cap) if free]
    wanted = [(0, min(open_to, key=lambda worker: now[worker]))] if open_to else []
    assert pairs == wanted


# -- how good it is


Make = Callable[[int, int], tuple[Floats, list[int], list[float]]]


def against_exact(make: Make, horizon: int) -> tuple[Floats, Floats]:
    """J found and the least J, of fifty instances."""
    both = []
    for seed in range(50):
        load, cap, sizes = make(seed, horizon)
        pairs = assign(load, cap, sizes, [0.0] * len(sizes), maxage=None)
        both.append((objective(load, sizes, pairs), least_objective(load, cap, sizes)))
    found, best = np.array(both).T
    assert (found >= best - 1e-3).all()
    return found, best


@pytest.mark.parametrize("horizon", [0, 4])
def test_the_mean_gap_to_the_exact_optimum_is_at_most_a_tenth(horizon: int) -> None:
    found, best = against_exact(small_instance, horizon)
    assert (found / best - 1).mean() <= 0.1


@pytest.mark.parametrize("horizon", [0, 4])
def test_where_the_optimum_may_be_nothing_all_gaps_together_are_at_most_a_tenth(
    horizon: int,
) -> None:
    found, best = against_exact(tight_instance, horizon)
    assert found.sum() / best.sum() - 1 <= 0.1


def test_with_one_slot_the_request_that_fills_the_gap_is_taken() -> None:
    load = [1000.0, 400.0, 900.0]
    sizes = [100.0, 590.0, 650.0, 2000.0]
    assert assign(load, [0, 1, 0], sizes, [0.0] * 4, maxage=None) == [(1, 1)]


def test_with_slots_left_the_request_nearest_to_an_even_part_of_the_gap_is_taken() -> None:
    # 600 of room and two slots: 300 each, which the pair 290 and 310 fills exactly.
    pairs = assign([1000.0, 400.0], [0, 2], [590.0, 290.0, 310.0], [0.0] * 3, maxage=None)
    assert sorted(pairs) == [(1, 1), (2, 1)]


def test_looking_ahead_the_worker_that_will_be_empty_is_preferred() -> None:
    load = [[1000.0, 1000.0, 1000.0], [900.0, 900.0, 900.0], [950.0, 300.0, 300.0]]
    assert assign(load, [0, 1, 1], [40.0], [0.0], maxage=None) == [(0, 2)]
    assert assign([row[0] for row in load], [0, 1, 1], [40.0], [0.0], maxage=None) == [(0, 1)]


def test_more_slots_than_requests_need_no_more_time() -> None:
    pairs = assign([5.0, 6.0], [10**9, 10**9], [3.0], [0.0], maxage=None)
    assert pairs == [(0, 0)]


# -- the age guard


def longest_wait(maxage: float | None, steps: int = 600) -> int:
    """One slot a step, ten wait: nine fill the gap ever again, the tenth never does."""
    random = np.random.default_rng(0)
    pool = [(1500.0, 0), *((100.0, 0) for _ in range(9))]
    longest = 0
    for step in range(steps):
        load = [1000.0, 900.0 + random.integers(0, 3)]
        waits = [float(step - since) for _, since in pool]
        [(item, worker)] = assign(load, [0, 1], [size for size, _ in pool], waits, maxage=maxage)
        assert worker == 1
        longest = max(longest, step - pool[item][1])
        pool[item] = (100.0, step + 1)
    return max(longest, steps - min(since for _, since in pool))


def test_the_guard_bounds_every_wait() -> None:
    # Ten that came at once are all old at once: one a step goes.
    assert longest_wait(50) <= 50 + 10


# -- FCFS, and the objective


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(0, 20))
def test_fcfs_is_algorithm_2(cap: list[int], items: int) -> None:
    left = list(cap)
    wanted = []
    for _ in range(min(items, sum(cap))):
        worker = left.index(max(left))
        left[worker] -= 1
        wanted.append(worker)
    assert fcfs(cap, items) == wanted


def test_the_objective_is_the_idle_work_summed_over_the_window() -> None:
    load = np.array([[10.0, 10.0], [4.0, 2.0]])
    assert objective(load, [3.0], []) == 6 + 8
    # 4 + 3 = 7 now, 2 + 3 + 1 = 6 in a step.
    assert objective(load, [3.0], [(0, 1)]) == 3 + 4
