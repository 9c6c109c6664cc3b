"""The figures of a run, against sums by hand."""

import numpy as np
import pytest

from simulator.barrier.group import simulate_group
from simulator.barrier.policies import Fcfs
from simulator.barrier.records import BarrierSpec, History
from simulator.barrier.summary import ENERGY_TOKENS, longest_wait, summarise
from simulator.barrier.work import of_lengths

SPEC = BarrierSpec(workers=2, slots=1, overhead_s=1.0, seconds_per_token=0.01, reveal=3)


def run() -> History:
    """Loads [[100, 20], [101, 50], [0, 51]], so dt is 2, 2.01 and 1.51 s."""
    asked = of_lengths(np.array([100.0, 20.0, 50.0]), np.array([2, 1, 2]))
    return simulate_group(SPEC, asked, Fcfs(), drain=True)


def test_imbalance_throughput_and_time_per_token() -> None:
    found = summarise(run(), 0)
    span_s = 2 + 2.01 + 1.51
    assert found.steps == 3
    assert found.imbalance == pytest.approx((80 + 51 + 51) / 3)
    assert found.throughput == pytest.approx(5 / span_s)
    assert found.tpot_s == pytest.approx((4.01 / 2 + 2 + 3.52 / 2) / 3)
    assert found.mean_active == pytest.approx(5 / 3)
    assert found.idle_share == pytest.approx(0.01 * (80 + 51 + 51) / 2 / span_s)
    assert found.completed == 3


def test_energy_is_told_for_a_fixed_number_of_tokens() -> None:
    shares = np.array([[1, 0.2], [1, 50 / 101], [0, 1]])
    power = (100 + 300 * shares**0.7).sum(axis=1)
    joules = power @ np.array([2, 2.01, 1.51])
    assert summarise(run(), 0).energy_j == pytest.approx(joules * ENERGY_TOKENS / 5)


def test_the_warm_up_s_steps_and_requests_are_left_out() -> None:
    found = summarise(run(), 1)
    assert found.steps == 2
    assert found.completed == 1
    assert found.tpot_s == pytest.approx(3.52 / 2)
    assert found.wait_p99_s == pytest.approx(2.0)
    assert found.latency_s == pytest.approx(5.52)


def test_who_still_waits_at_the_end_counts() -> None:
    asked = of_lengths(np.full(4, 10.0), np.array([50, 50, 50, 50]))
    spec = BarrierSpec(workers=1, slots=1, reveal=2)
    found = simulate_group(spec, asked, Fcfs())
    assert found.bound_step[-1] == -1
    assert longest_wait(found) == 50
