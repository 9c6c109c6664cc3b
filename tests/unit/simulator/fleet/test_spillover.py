"""Spillover as the gateway's unmanaged store does it."""

from simulator.fleet.fleet import FleetSpec, PoolSpec, simulate
from simulator.fleet.summary import summarise
from tests.unit.simulator.fleets import requests, second


def two_pools(spill_queue: int | None) -> FleetSpec:
    short = second(max_model_len=100, kv_blocks=100)
    long = second(max_model_len=1000, kv_blocks=100)
    pools = (
        PoolSpec(name="short", instances=1, profile=short, boundary_tokens=100),
        PoolSpec(name="long", instances=1, profile=long),
    )
    return FleetSpec(pools=pools, spill_queue=spill_queue)


def test_a_full_pool_spills_over_and_only_when_asked_to() -> None:
    traffic = requests(*[(float(i) / 10, 10, 20) for i in range(4)])
    held, spilled, queued = (simulate(two_pools(queue), traffic) for queue in (None, 0, 1))
    assert held.pool.tolist() == [0, 0, 0, 0]
    # One slot each: the second one spills, then both are full and the plan holds.
    assert spilled.pool.tolist() == [0, 1, 0, 0]
    assert queued.pool.tolist() == [0, 0, 1, 1]
    assert summarise(two_pools(0), spilled).spilled == 1
