"""The fleet's rules: what is refused, what is reported, and that a seed is a run."""

import msgspec
import numpy as np
import pytest

from simulator.engine.profiles import PROFILES
from simulator.fleet import arrivals
from simulator.fleet.fleet import FleetSpec, Outage, PoolSpec, outages, simulate
from simulator.fleet.outcome import DONE, UNAVAILABLE, FleetOutcome
from simulator.fleet.traffic import CdfLengths, traffic
from tests.unit.simulator.fleets import one_pool, requests, second


def two_pools(**changes: object) -> FleetSpec:
    base = PROFILES["llama-3-70b-a100-reserved"]
    pools = (
        PoolSpec(
            name="short",
            instances=3,
            profile=msgspec.structs.replace(base, max_model_len=1024, max_num_seqs=24),
            boundary_tokens=1024,
        ),
        PoolSpec(
            name="long",
            instances=2,
            profile=msgspec.structs.replace(base, max_model_len=8192, max_num_seqs=8),
        ),
    )
    return msgspec.structs.replace(FleetSpec(pools=pools, gamma=1.5, compressible=0.5), **changes)


def columns(outcome: FleetOutcome) -> bytes:
    names = ("start_s", "first_s", "end_s", "pool", "worker", "status", "prompt_tokens")
    return b"".join(getattr(outcome, name).tobytes() for name in names)


@pytest.mark.parametrize("dispatch", ["jsq", "least-loaded", "p2c"])
def test_a_seed_is_a_run_to_the_last_bit(dispatch: str) -> None:
    def run(seed: int) -> bytes:
        random = np.random.default_rng(seed)
        lengths = CdfLengths([(512, 0.5), (2048, 0.9), (8000, 1.0)])
        asked = traffic(lengths, arrivals.gamma(12.0, 2.0, 3000, random), random)
        spec = two_pools(dispatch=dispatch)
        failures = outages(spec, 200.0, mtbf_s=100.0, repair_s=10.0, random=random)
        return columns(simulate(spec, asked, seed=seed, failures=failures))

    assert run(1) == run(1) != run(2)


def test_a_fleet_that_is_away_serves_nobody_until_it_is_back() -> None:
    spec = one_pool(second())
    away = Outage(pool=0, worker=0, down_s=5.0, up_s=10.0)
    outcome = simulate(spec, requests((5.0, 1, 1), (9.0, 1, 1), (10.0, 1, 1)), failures=[away])
    # A change comes before the arrivals of its time.
    assert outcome.status.tolist() == [UNAVAILABLE, UNAVAILABLE, DONE]


def test_a_pool_that_is_away_leaves_its_work_to_another_that_can_do_it() -> None:
    spec = two_pools()
    away = [Outage(pool=0, worker=w, down_s=1.0) for w in range(3)]
    outcome = simulate(spec, requests((0.0, 500, 200), (2.0, 500, 20)), failures=away)
    assert outcome.pool.tolist() == [0, 1]


def test_a_request_is_tried_three_times() -> None:
    # A prompt of ten chunks: no token before 10 s, and a failure each 2 s.
    spec = one_pool(second(), instances=5)
    away = [Outage(pool=0, worker=w, down_s=2.0 * (w + 1)) for w in range(5)]
    outcome = simulate(spec, requests((0.0, 5000, 5)), failures=away)
    assert outcome.retried == 2
    # Ties go round: 0 fails under it at 2 s, then 2 at 6 s, then 3 at 8 s.
    assert outcome.worker.tolist() == [3]
    assert outcome.end_s.tolist() == [8.0]
