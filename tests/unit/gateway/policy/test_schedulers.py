from typing import Any

import pytest

from gateway.policy import fleet
from gateway.policy.binding import bind_least_loaded
from gateway.policy.fleet import PoolState
from gateway.policy.immediate import LeastLoaded, RoundRobin, Sticky, TwoChoices
from gateway.policy.quartz_profile import PROFILES
from gateway.policy.scheduling import Job
from gateway.policy.token_fair import TokenFair
from tests.unit.gateway.policy.scheduled import job_of, pool_of, submit_all


def served(scheduler: Any, pool: PoolState, count: int, **more: Any) -> list[int]:
    """Workers of so many jobs, none of which ends."""
    found = []
    for _ in range(count):
        job = job_of(kv_tokens=1000, **more)
        assert scheduler.submit(job, 0.0) == (job,)
        fleet.start(pool, job.worker, 1, job.kv_tokens)
        found.append(job.worker)
    return found


def test_least_loaded_chooses_as_binding_does() -> None:
    one, other = pool_of(5), pool_of(5)
    scheduler = LeastLoaded(one)
    for i in range(200):
        job = job_of(kv_tokens=137 * (i % 7) + 1)
        scheduler.submit(job, 0.0)
        fleet.start(one, job.worker, 1, job.kv_tokens)
        bound = bind_least_loaded(0, other, 0.0)
        assert bound is not None
        fleet.start(other, bound.worker, 1, job.kv_tokens)
        assert (job.worker, job.score) == (bound.worker, bound.score)


def test_round_robin_takes_turns() -> None:
    pool = pool_of(3)
    assert served(RoundRobin(pool), pool, 7) == [0, 1, 2, 0, 1, 2, 0]


def test_two_choices_keeps_load_closer_than_chance() -> None:
    pool = pool_of(10)
    served(TwoChoices(pool, seed=5), pool, 1000)
    assert max(pool.active) - min(pool.active) <= 12


def test_sticky_follows_the_prefix_until_that_worker_is_crowded() -> None:
    pool = pool_of(4)
    workers = served(Sticky(pool), pool, 20, match=((500, 0b0100),))
    assert workers[:5] == [2] * 5
    assert set(workers) != {2}


@pytest.mark.parametrize("make", [LeastLoaded, RoundRobin, TwoChoices, Sticky])
def test_immediate_schedulers_keep_homes_and_avoid_the_excluded(make: Any) -> None:
    pool = pool_of(3)
    scheduler = make(pool)
    job = job_of(home=1)
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


def in_order(scheduler: Any, jobs: list[Job]) -> list[Job]:
    """All jobs as they are sent, each answered in turn."""
    order = submit_all(scheduler, jobs)
    for job in order:
        order += scheduler.first_token(job, 1.0)
    return order


def test_token_fair_gives_equal_tokens_to_clients_of_unequal_requests() -> None:
    scheduler = TokenFair(pool_of(1), PROFILES["default"])
    jobs = [job_of(8000, client="long") for _ in range(20)]
    jobs += [job_of(2000, client="short") for _ in range(80)]
    tokens = {"long": 0, "short": 0}
    for job in in_order(scheduler, jobs)[:50]:
        tokens[job.client] += job.prompt_tokens
    assert abs(tokens["long"] - tokens["short"]) <= 16_000


def test_token_fair_gives_more_to_a_larger_share() -> None:
    scheduler = TokenFair(pool_of(1), PROFILES["default"])
    jobs = [job_of(3000, client="a", share=3.0) for _ in range(60)]
    jobs += [job_of(3000, client="b", share=1.0) for _ in range(60)]
    first = [job.client for job in in_order(scheduler, jobs)[:40]]
    assert 27 <= first.count("a") <= 33
