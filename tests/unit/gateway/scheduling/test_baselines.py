from collections.abc import Iterator
from typing import Any

import pytest

from gateway.fleet import fleet
from gateway.fleet.fleet import PoolState
from gateway.records.attempt import HealthRules
from gateway.scheduling.baselines import (
    COMPARED,
    RETAINED_CANDIDATES,
    LeastLoaded,
    RoundRobin,
    Sticky,
)
from gateway.scheduling.scheduler import Job
from sluice.build import compiled
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


# -- least loaded: (kv + queued_kv)/sum + (active + queued)/sum, ties in turn


def bound(state: PoolState, *, excluded: tuple[int, ...] = ()) -> Job:
    job = job_of(excluded=excluded)
    assert LeastLoaded(state).submit(job, 0.0) == (job,)
    return job


def test_the_score_is_the_share_of_kv_plus_the_share_of_sequences() -> None:
    state = pool_of(2)
    fleet.start(state, 0, 1, 900)
    fleet.start(state, 1, 3, 100)
    binding = bound(state)
    assert dict(binding.candidates) == pytest.approx({0: 0.9 + 0.25, 1: 0.1 + 0.75})
    assert binding.worker == 1
    assert binding.score == pytest.approx(0.85)


def test_ties_go_round_only_among_the_best() -> None:
    state = pool_of(3)
    assert [bound(state).worker for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    fleet.start(state, 1, 1, 10)
    assert {bound(state).worker for _ in range(6)} == {0, 2}


def test_a_busy_sound_worker_beats_an_idle_ejected_one() -> None:
    state = pool_of(2)
    fleet.start(state, 0, 5, 5000)
    fleet.failed(state, 1, HealthRules(eject_after=1, eject_s=10.0), 0.0)
    assert bound(state).worker == 0


def test_of_many_workers_a_part_is_compared_and_all_are_loaded_alike() -> None:
    for count in (COMPARED + 1, 2 * COMPARED, 500):
        state = pool_of(count)
        for _ in range(10 * count):
            fleet.start(state, bound(state).worker, 1, 100)
        assert max(state.active) - min(state.active) <= 2


def test_a_decision_explains_a_bounded_number_of_candidates() -> None:
    assert len(bound(pool_of(40)).candidates) == RETAINED_CANDIDATES


class Looked(list[int]):
    """Loads that are counted when they are looked at, one by one or all at once."""

    times = 0

    def __getitem__(self, index: Any) -> Any:
        self.times += 1
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[int]:
        self.times += len(self)
        return super().__iter__()


@pytest.mark.skipif(compiled(), reason="compiled code does not ask a list's methods")
@pytest.mark.parametrize("workers", [100, 2000])
def test_of_many_workers_as_many_are_looked_at_whatever_the_fleet(workers: int) -> None:
    state = pool_of(workers)
    for number in range(50):
        fleet.start(state, number, 1, 100)
    state.active, state.tokens = Looked(state.active), Looked(state.tokens)
    bound(state)
    assert (state.active.times, state.tokens.times) == (COMPARED + 1, COMPARED)
