"""A full queue, requests that wait for a first worker, and first tokens that nobody sees."""

import asyncio
import time
from typing import Any, cast

import pytest

from gateway.errors import RateLimited
from gateway.fleet.model_runtime import ModelRuntime
from gateway.pipeline.bind import Binder, make_room
from gateway.scheduling.baselines import LeastLoaded
from gateway.scheduling.scheduler import Job, Scheduler
from sluice.build import compiled
from tests.builders import (
    SHORT,
    address,
    attempts_of,
    changed,
    chat_body,
    incoming,
    length_estimate,
    served_model,
)


def crowded(waiting: int) -> Scheduler:
    """A scheduler in which that many wait."""
    scheduler = LeastLoaded(served_model().fleet.pools[SHORT])
    scheduler.waiting = [0, waiting, 0]
    return scheduler


async def crowd(served: ModelRuntime, scheduler: Scheduler, jobs: list[Job]) -> None:
    for job in jobs:
        job.owner = asyncio.get_running_loop().create_future()
        served.fleet.pools[SHORT].queued[job] = scheduler


def job(client: str, priority_class: int = 1, share: float = 1.0, tenant: str = "") -> Job:
    return Job(None, 1, 1, 0.0, client, priority_class, share, tenant=tenant or client)


@pytest.mark.parametrize(
    ("held", "asking", "displaced"),
    [
        ([job("a"), job("a"), job("a")], job("b"), 2),
        ([job("a"), job("a"), job("b")], job("a"), 3),
        ([job("a", share=9.0), job("a", share=9.0), job("b")], job("c"), 3),
        ([job("a"), job("s", 2), job("a")], job("a"), 1),
        ([job("g", 0), job("g", 0), job("g", 0)], job("s", 2), 3),
        ([job(f"a{n}", tenant="a") for n in range(3)], job("b"), 2),
        ([job("a1", tenant="a"), job("a1", tenant="a"), job("b")], job("a2", tenant="a"), 1),
    ],
)
async def test_a_full_queue_displaces_the_newest_of_the_largest_holder(
    held: list[Job], asking: Job, displaced: int
) -> None:
    served = changed(served_model(), queue_limit=3, queue_timeout_s=9.0)
    scheduler = crowded(4)
    await crowd(served, scheduler, held)
    if displaced == len(held):
        with pytest.raises(RateLimited):
            make_room(served, SHORT, asking, scheduler)
        assert not any(other.owner.done() for other in held)
        return
    make_room(served, SHORT, asking, scheduler)
    assert [other.owner.done() for other in held] == [n == displaced for n in range(3)]
    refusal = held[displaced].owner.exception()
    assert isinstance(refusal, RateLimited)
    assert refusal.reason == "queue_full"


async def test_after_a_reload_only_a_worker_of_its_own_pool_wakes_a_request() -> None:
    old = served_model(workers=(0, 1))
    old.fleet.pools[0].may_be_empty = True
    new = changed(served_model(workers=(1, 1)), scheduling=old.scheduling)
    binder = Binder(lambda: 0.0)
    asked = attempts_of(old, incoming(chat_body()), estimate=length_estimate())
    waiting = asyncio.create_task(binder.wait_for_workers(asked))
    await asyncio.sleep(0)
    binder.tick([new])
    (waiter,) = new.scheduling.waiting_for_workers
    assert not waiter.done()
    old.fleet.pools[SHORT].join((address("late"),), 0.0, up=True)
    binder.tick([new])
    assert await waiting


class Told:
    """A scheduler that is told of first tokens."""

    gates = True

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.times: list[float] = []

    def first_token(self, job: Job, now_s: float, *, assumed: bool) -> tuple[Job, ...]:
        assert assumed
        self.jobs.append(job)
        self.times.append(now_s)
        return ()

    def finished(self, job: Job, now_s: float, *, answered: bool) -> tuple[Job, ...]:
        job.state = "gone"
        return ()


@pytest.mark.skipif(compiled(), reason="compiled code takes no scheduler of a test's own")
async def test_first_tokens_are_assumed_when_they_are_due_unless_the_answer_came() -> None:
    told, binder, began_s = Told(), Binder(time.monotonic), time.monotonic()
    jobs = []
    for expected_s in (0.05, 0.01, 0.01):
        found = job("a")
        found.state, found.expected_s, found.stream = "sent", expected_s, False
        attempts = attempts_of(served_model(), incoming(chat_body()), estimate=length_estimate())
        attempts.job, attempts.scheduler = found, cast("Scheduler", told)
        binder.expect_first(attempts, cast("Any", None))
        jobs.append(found)
    binder.release(attempts, answered=True)
    await asyncio.sleep(0.15)
    assert told.jobs == [jobs[1], jobs[0]]
    assert told.times[0] - began_s >= 0.01
    assert told.times[1] - began_s >= 0.05
