"""The barrier-synchronised group: its clock, its books, and the figures the paper gives."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.barrier.group import Policy, simulate_group
from simulator.barrier.lookahead import Oracle
from simulator.barrier.policies import BfIo, Fcfs, Jsq, LeastKv, PowerOfD, RoundRobinPolicy
from simulator.barrier.records import BarrierSpec, BarrierWork, History, Pairs
from simulator.barrier.state import BarrierGroup
from simulator.barrier.summary import longest_service, summarise
from simulator.barrier.work import DRIFTS, like_burst, of_lengths

SMALL = BarrierSpec(workers=2, slots=2, overhead_s=1.0, seconds_per_token=0.01, reveal=4)


def work(*pairs: tuple[int, int]) -> BarrierWork:
    prompts, outputs = zip(*pairs, strict=True)
    return of_lengths(np.array(prompts, float), np.array(outputs))


def all_policies() -> list[Policy]:
    ahead = BfIo(5, ahead=Oracle())
    return [Fcfs(), Jsq(), RoundRobinPolicy(), PowerOfD(2), LeastKv(), BfIo(maxage=20), ahead]


# -- the clock (eq. 6)


def test_a_step_lasts_as_long_as_the_fullest_worker_needs() -> None:
    run = simulate_group(SMALL, work((100, 3), (10, 2), (20, 1)), Fcfs(), drain=True)
    # 0 and 2 on the first worker, 1 on the second; one token each step.
    assert run.worker.tolist() == [0, 1, 0]
    assert run.load.tolist() == [[120, 10], [101, 11], [102, 0]]
    assert run.active.tolist() == [3, 2, 1]
    assert run.dt_s.tolist() == pytest.approx([2.2, 2.01, 2.02])
    assert run.at_s.tolist() == pytest.approx([0, 2.2, 4.21])
    assert run.start_step.tolist() == [0, 0, 0]
    assert run.end_step.tolist() == [3, 2, 1]


def test_without_drain_it_ends_when_nothing_is_undiscovered() -> None:
    spec = BarrierSpec(workers=1, slots=1, reveal=1)
    run = simulate_group(spec, work((5, 2), (7, 9), (1, 9)), Fcfs())
    # The third is revealed once the second was bound, in step 2.
    assert len(run.dt_s) == 3
    assert run.end_step.tolist() == [2, -1, -1]
    assert run.revealed_step.tolist() == [0, 1, 3]


def test_the_router_sees_no_more_than_is_revealed() -> None:
    seen = []

    class Watch:
        def choose(self, group: BarrierGroup, pool: Sequence[int]) -> Pairs:
            seen.append(len(pool))
            return Fcfs().choose(group, pool)

    simulate_group(SMALL, work(*[(5, 3)] * 40), Watch())
    assert max(seen) == SMALL.reveal


@pytest.mark.parametrize("drift", DRIFTS.values(), ids=DRIFTS)
def test_workloads_grow_by_the_step_s_drift(drift: tuple[float, ...]) -> None:
    spec = BarrierSpec(workers=1, slots=1, drift=drift)
    run = simulate_group(spec, work((100, 6)), Fcfs(), drain=True)
    grown = np.cumsum([0.0, *(drift[k % len(drift)] for k in range(5))])
    assert run.load[:, 0].tolist() == (100 + grown).tolist()


def test_nobody_is_served_before_it_arrives_and_idle_time_passes_at_once() -> None:
    asked = work((10, 1), (10, 1))
    asked = BarrierWork(
        prompt_tokens=asked.prompt_tokens,
        output_tokens=asked.output_tokens,
        arrival_s=np.array([5.0, 60.0]),
    )
    run = simulate_group(SMALL, asked, Fcfs(), drain=True)
    assert run.at_s.tolist() == [5.0, 60.0]


class Wrong:
    """Gives what it is told to give."""

    def __init__(self, *pairs: tuple[int, int]) -> None:
        self._pairs = pairs

    def choose(self, group: BarrierGroup, pool: Sequence[int]) -> Pairs:
        return self._pairs


def test_a_policy_that_overfills_a_worker_or_sends_twice_is_refused() -> None:
    asked = work(*[(5, 3)] * 4)
    with pytest.raises(ValueError, match="no room"):
        simulate_group(SMALL, asked, Wrong((0, 0), (1, 0), (2, 0)))
    with pytest.raises(ValueError, match="twice"):
        simulate_group(SMALL, asked, Wrong((0, 0), (0, 1)))


# -- the books, whatever the policy


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 12)), min_size=1, max_size=40),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from((0, 2, None)),
    st.integers(0, 6),
)
def test_every_request_is_served_once_wholly_and_within_the_slots(
    pairs: list[tuple[int, int]], workers: int, slots: int, depth: int | None, which: int
) -> None:
    spec = BarrierSpec(workers=workers, slots=slots, reveal=6, depth=depth)
    asked = work(*pairs)
    run = simulate_group(spec, asked, all_policies()[which], drain=True)
    assert (run.end_step - run.start_step == asked.output_tokens).all()
    assert (run.revealed_step <= run.bound_step).all()
    assert (run.bound_step <= run.start_step).all()
    assert int(run.active.sum()) == int(asked.output_tokens.sum())
    assert run.load.tolist() == naive_loads(run, asked, spec).tolist()


def naive_loads(
    run: History, asked: BarrierWork, spec: BarrierSpec
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Loads by definition (eq. 1); also holds each worker to its slots."""
    loads = np.zeros((len(run.dt_s), spec.workers))
    held = np.zeros_like(loads)
    for request, worker in enumerate(run.worker):
        for step in range(run.start_step[request], run.end_step[request]):
            loads[step, worker] += asked.prompt_tokens[request] + step - run.start_step[request]
            held[step, worker] += 1
    assert (held <= spec.slots).all()
    return loads


# -- what it finds


def group_of(policy: Policy) -> History:
    spec = BarrierSpec(workers=8, slots=32)
    return simulate_group(spec, like_burst(4000, np.random.default_rng(0)), policy)


def test_balancing_cuts_imbalance_several_times_and_raises_throughput() -> None:
    plain, ours = (summarise(group_of(policy), 500) for policy in (Fcfs(), BfIo()))
    assert plain.imbalance / ours.imbalance > 4
    assert ours.throughput / plain.throughput > 1.05
    assert ours.tpot_s < plain.tpot_s
    assert ours.idle_share < plain.idle_share / 4


def test_the_age_guard_bounds_the_longest_wait_where_none_lets_requests_starve() -> None:
    free, guarded = group_of(BfIo()), group_of(BfIo(maxage=100))
    assert summarise(guarded).longest_wait_steps <= 100 + longest_service(guarded)
    assert summarise(guarded).longest_wait_steps < summarise(free).longest_wait_steps / 3


def test_queues_at_the_workers_cost_balance() -> None:
    asked = like_burst(4000, np.random.default_rng(0))
    found = [
        summarise(
            simulate_group(BarrierSpec(workers=8, slots=32, depth=depth), asked, BfIo(maxage=500)),
            500,
        ).imbalance
        for depth in (0, 4, 16)
    ]
    assert found == sorted(found)
    assert found[2] > 2 * found[0]


# -- workloads
