from typing import Any

import pytest

from gateway.fleet import fleet
from gateway.fleet.fleet import PoolState
from gateway.scheduling.baselines import LeastLoaded, RoundRobin, Sticky
from tests.unit.gateway.scheduling.scheduled import job_of, pool_of


def served(scheduler: Any, pool: PoolState, count: int, **more: Any) -> list[int]:
    """Workers of so many jobs, none of which ends."""
    found = []
    for _ in range(count):
        job = job_of(kv_tokens=1000, **more)
        assert scheduler.submit(job, 0.0) == (job,)
        fleet.start(pool, job.worker, 1, job.kv_tokens)
        found.append(job.worker)
    return found


def test_round_robin_takes_turns() -> None:
    pool = pool_of(3)
    assert served(RoundRobin(pool), pool, 7) == [0, 1, 2, 0, 1, 2, 0]


def test_sticky_follows_the_prefix_until_that_worker_is_crowded() -> None:
    pool = pool_of(4)
    workers = served(Sticky(pool), pool, 20, match=((500, 0b0100),))
    assert workers[:5] == [2] * 5
    assert set(workers) != {2}


@pytest.mark.parametrize("make", [LeastLoaded, RoundRobin, Sticky])
def test_immediate_schedulers_keep_their_workers_and_avoid_the_excluded(make: Any) -> None:
    pool = pool_of(3)
    scheduler = make(pool)
    job = job_of(preferred=1)
    scheduler.submit(job, 0.0)
    assert job.worker == 1
    job = job_of(excluded=[0, 2])
    scheduler.submit(job, 0.0)
    assert job.worker == 1
    job = job_of(excluded=[0, 1, 2])
    assert scheduler.submit(job, 0.0) == (job,)
    for worker in range(3):
        fleet.unreachable(pool, worker)
    job = job_of()
    assert not scheduler.submit(job, 0.0)
    assert job.state == "nowhere"
