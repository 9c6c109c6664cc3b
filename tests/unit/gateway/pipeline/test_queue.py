"""A full queue displaces the newest request of its largest holder; who wakes waiting requests."""

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from gateway.errors import RateLimited
from gateway.fleet import model_workers
from gateway.fleet.model_runtime import ModelRuntime, QueueRules
from gateway.pipeline import queue
from gateway.scheduling.scheduler import Job, Scheduler
from tests.builders import SHORT, address, changed, incoming, served_model


def crowded(waiting: int) -> Scheduler:
    """A scheduler in which that many wait."""
    return cast("Scheduler", SimpleNamespace(waiting=(0, waiting, 0)))


async def crowd(served: ModelRuntime, scheduler: Scheduler, jobs: list[Job]) -> None:
    for job in jobs:
        job.owner = asyncio.get_running_loop().create_future()
        served.scheduling.queued[job] = scheduler


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
    served = changed(served_model(), queue=QueueRules(limit=3, timeout_s=9.0))
    scheduler = crowded(4)
    await crowd(served, scheduler, held)
    if displaced == len(held):
        with pytest.raises(RateLimited):
            queue.admit(served, asking, scheduler)
        assert not any(other.owner.done() for other in held)
        return
    queue.admit(served, asking, scheduler)
    assert [other.owner.done() for other in held] == [n == displaced for n in range(3)]
    refusal = held[displaced].owner.exception()
    assert isinstance(refusal, RateLimited)
    assert refusal.reason == "queue_full"


async def test_after_a_reload_only_a_worker_of_its_own_pool_wakes_a_request() -> None:
    old = served_model(workers=(0, 1))
    new = changed(served_model(workers=(1, 1)), scheduling=old.scheduling)
    waiting = asyncio.create_task(
        queue.wait_for_workers(old, old.fleet.pools[:1], incoming(b""), lambda: 0.0, 0.0)
    )
    await asyncio.sleep(0)
    queue.wake_for_workers(new, 0.0)
    (waiter,) = new.scheduling.waiting_for_workers
    assert not waiter.done()
    model_workers.join(old, SHORT, (address("late"),), 0.0, up=True)
    queue.wake_for_workers(new, 0.0)
    await waiting
