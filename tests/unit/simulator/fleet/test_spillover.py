"""Spillover as the gateway's unmanaged store does it."""

import msgspec
import numpy as np

from simulator.fleet.fleet import FleetSpec, PoolSpec, simulate
from simulator.fleet.summary import summarise
from tests.unit.simulator.fleets import one_pool, requests, second


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


def test_what_ended_makes_room_again() -> None:
    traffic = requests((0.0, 10, 5), (100.0, 10, 5))
    assert simulate(two_pools(0), traffic).pool.tolist() == [0, 0]


def test_the_same_seed_gives_the_same_bytes_with_every_dispatcher() -> None:
    random = np.random.default_rng(4)
    rows = [(float(t), 10, int(n)) for t, n in enumerate(random.integers(1, 60, 200))]
    for dispatch in ("jsq", "least-loaded", "p2c", "random", "round-robin"):
        spec = msgspec.structs.replace(one_pool(second(), 5), dispatch=dispatch)
        found = [simulate(spec, requests(*rows), seed=s).worker.tobytes() for s in (1, 1)]
        assert found[0] == found[1]
