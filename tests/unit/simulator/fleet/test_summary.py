"""Figures of a run whose times are known by heart."""

import numpy as np
import pytest

from simulator.fleet.fleet import FleetSpec, Outage, PoolSpec, simulate
from simulator.fleet.summary import series, summarise
from tests.unit.simulator.fleets import one_pool, requests, second


def test_a_run_by_heart() -> None:
    # One slot, one second a token: services [0, 4], [10, 14], [14, 18]; window [2, 10].
    spec = one_pool(second())
    outcome = simulate(spec, requests((0.0, 10, 4), (10.0, 10, 4), (10.0, 30, 4)))
    found = summarise(spec, outcome)
    assert outcome.wait_s.tolist() == [0.0, 0.0, 4.0]
    assert outcome.ttft_s.tolist() == [1.0, 1.0, 5.0]
    assert outcome.tpot_s.tolist() == [1.0, 1.0, 1.0]
    assert found.duration_s == 10.0
    assert found.whole.requests == 2
    assert found.whole.utilisation == pytest.approx(2 / 8)
    assert found.whole.requests_per_s == pytest.approx(1 / 8)
    assert found.whole.tokens_per_s == pytest.approx(14 / 8)
    assert found.whole.kv_utilisation == pytest.approx(2 * 14 / 8 / (1 << 21))
    assert (found.whole.wait.mean_s, found.whole.ttft.p50_s) == (2.0, 3.0)
    assert found.whole.short_run
    assert found.pools[0].name == "only"


def test_each_pool_and_the_whole() -> None:
    pools = (
        PoolSpec(name="short", instances=1, profile=second(max_model_len=100), boundary_tokens=100),
        PoolSpec(name="long", instances=2, profile=second(max_num_seqs=2)),
    )
    spec = FleetSpec(pools=pools, gamma=1.5)
    traffic = requests((0.0, 120, 10), (5.0, 10, 10), (20.0, 500, 2), (40.0, 1, 1))
    found = summarise(spec, simulate(spec, traffic))
    short, long = found.pools
    assert (found.compressed, found.served, found.refused_length, found.spilled) == (1, 4, 0, 0)
    assert (short.requests, long.requests, found.whole.requests) == (1, 1, 2)
    assert (short.slots, long.slots, found.whole.slots) == (1, 2, 0)
    # Services within [8, 40]: 0-10 and 10-20 short, 20-22 long.
    assert short.utilisation == pytest.approx(12 / 32)
    assert long.utilisation == pytest.approx(2 / (4 * 32))
    assert found.whole.utilisation == pytest.approx(14 / (5 * 32))
    assert short.queue == pytest.approx(2 / 32)


def test_refusals_and_failures_are_counted() -> None:
    spec = one_pool(second(max_model_len=50))
    traffic = requests((0.0, 10, 10), (1.0, 100, 10), (2.0, 10, 10), (20.0, 10, 10))
    away = Outage(pool=0, worker=0, down_s=5.0, up_s=15.0)
    found = summarise(spec, simulate(spec, traffic, failures=[away]))
    # The first had tokens and breaks, the third has nowhere to go.
    assert (found.broken, found.unavailable, found.refused_length, found.served) == (1, 1, 1, 1)
    assert found.requests == 4


def test_series_follow_the_run() -> None:
    spec = one_pool(second())
    outcome = simulate(spec, requests((0.0, 10, 4), (1.0, 10, 4), (10.0, 10, 4)))
    (found,) = series(spec, outcome, steps=5)
    assert found.at_s.tolist() == [2.0, 4.0, 6.0, 8.0, 10.0]
    # Services [0, 4], [4, 8], [10, 14].
    assert found.utilisation.tolist() == [1.0, 1.0, 1.0, 0.0, 1.0]
    assert found.waiting.tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert found.ttft_p50_s[0] == 2.5  # of 1 s and 4 s
    assert np.isnan(found.ttft_p50_s[1])
