"""Workloads and figures of bench quartz."""

import math

import pytest

from bench.quartz.lab import PEERS, POLICIES, figures, make, run
from bench.quartz.peers import CacheAware
from bench.quartz.workloads import MIXED, REQUESTS, mixed, workloads
from gateway.fleet.fleet import PoolState
from gateway.scheduling.scheduler import Job
from simulator.experiments.scheduling import BLOCK_TOKENS, WORKER


@pytest.mark.parametrize("name", list(workloads()))
def test_a_workload_is_servable_repeats_by_seed_and_differs_between_seeds(name: str) -> None:
    make_it = workloads()[name]
    demands = make_it(1)
    assert len(demands) == REQUESTS
    assert demands == make_it(1)
    assert demands != make_it(2)
    times = [d.arrival_s for d in demands]
    assert times == sorted(times)
    for d in demands:
        assert len(d.blocks) == d.prompt_tokens // BLOCK_TOKENS
        assert 1 <= d.prompt_tokens < WORKER.max_model_len
        assert d.output_tokens >= 1


@pytest.mark.parametrize("policy", [*POLICIES, *PEERS])
def test_every_policy_serves_a_short_stream(policy: str) -> None:
    demands = mixed(3, MIXED, 120)
    found = figures(demands, run(demands, [make(policy)], seed=3))
    assert found.lost == 0
    assert 0 < found.p95_s <= found.p99_s
    assert 0 <= found.violations <= 1
    assert 0 < found.jain <= 1
    assert math.isnan(found.coverage)  # counted after the first 1,000


def test_the_cache_aware_model_follows_matches_trees_and_balance() -> None:
    pool = PoolState("pool", ("a", "b", "c"), 256)
    router = CacheAware(pool)

    def sent(hit: int, mask: int) -> int:
        match = ((hit, mask),) if hit else ()
        job = Job(owner=None, prompt_tokens=1000, output_tokens=1, arrived_s=0.0, match=match)
        router.submit(job, 0.0)
        return job.worker

    assert sent(600, 0b100) == 2
    assert sent(400, 0b100) == 0  # below the threshold: the smallest tree
    assert sent(0, 0) == 1
    assert sent(0, 0) == 2  # 400 tokens there, 1,000 at the others
    pool.active[:] = [3, 40, 5]
    assert sent(900, 0b010) == 0


def test_gateways_hear_of_one_another_through_the_shipped_notes() -> None:
    demands = mixed(0, MIXED)[:600]
    hits = {}
    for told in (True, False):
        gateways = [make("QUARTZ") for _ in range(4)]
        served = run(demands, gateways, tell_prefixes=told)
        assert served.lost == 0
        assert all(gateway.scheduler.replicas == 4 for gateway in gateways)
        assert all(gateway.prefix_gossip.has_listeners for gateway in gateways)
        hits[told] = served.cached_tokens.sum()
    assert hits[True] > 1.1 * hits[False]
