"""Stage 8, queue: the order in which bound requests reach their worker.

The scheduler holds the job and names it when it may go; here its request waits. The wait is
bounded three ways: by the queue's length, by its time limit, and by the time after which the
client itself will have given up (its read time-out). Each ends in a 429 with a full refund.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from gateway.errors import RateLimited
from gateway.fleet import fleet
from gateway.fleet.fleet import PoolState
from gateway.fleet.model_runtime import ModelRuntime
from gateway.records.request import Incoming
from gateway.scheduling.fairness import newest_of_largest
from gateway.scheduling.scheduler import Job, Scheduler

_RETRY_S = 2.0
_MIN_WAIT_S = 0.01


def admit(served: ModelRuntime, job: Job, scheduler: Scheduler) -> None:
    """Keep the queue within its limit (the job that asks is counted).

    A full queue displaces: of the lowest class and there of the tenant that holds most for its
    share, the newest request of its entitlement that does.
    Raises RateLimited when that is the job that asks; else the displaced one's `wait` does.
    """
    if sum(scheduler.waiting) <= served.scheduling.queue.limit:
        return
    others = [
        other
        for other, where in served.scheduling.queued.items()
        if where is scheduler and other.owner is not None and not other.owner.done()
    ]
    if len(others) < served.scheduling.queue.limit:
        return  # those that were displaced are about to leave
    displaced = newest_of_largest([*others, job])
    if displaced is job:
        raise _full(served)
    displaced.owner.set_exception(_full(served))


def _full(served: ModelRuntime) -> RateLimited:
    return RateLimited(
        f"{served.scheduling.queue.limit} requests wait for a worker of '{served.name}' already. "
        "Please try again later.",
        reason="queue_full",
        code="rate_limit_exceeded",
        retry_after_s=_RETRY_S,
        should_retry=True,
    )


def awaits_workers(pools: Iterable[PoolState], adapter: str, now_s: float) -> bool:
    """Whether workers of a request's pools come and go at run time, so that a first one may come.

    Not where there are workers, of which none has the LoRA adapter that the request needs.
    """
    if adapter and any(fleet.available(pool, now_s) for pool in pools):
        return False
    return any(pool.may_be_empty for pool in pools)


def wake_for_workers(served: ModelRuntime, now_s: float) -> None:
    """Let the requests go on one of whose pools has a worker now."""
    # A reload shares them among the model's objects, whose pools may have other indices.
    for waiter, pools in list(served.scheduling.waiting_for_workers.items()):
        if not waiter.done() and any(fleet.available(pool, now_s) for pool in pools):
            waiter.set_result(True)


async def wait_for_workers(
    served: ModelRuntime,
    pools: Sequence[PoolState],
    incoming: Incoming,
    clock: Callable[[], float],
    queued_s: float,
) -> None:
    """Wait while no pool of the request has a worker, within the queue's bounds.

    `queued_s`: how long the request has waited before.
    Raises RateLimited when too many wait, or for too long.
    """
    waiting = served.scheduling.waiting_for_workers
    if len(waiting) >= served.scheduling.queue.limit:
        raise _full(served)
    limit_s = _limit_s(served, incoming, clock, queued_s)
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[bool] = loop.create_future()
    waiting[waiter] = pools
    timer = loop.call_later(max(limit_s, _MIN_WAIT_S), _expire, waiter)
    try:
        if not await waiter:
            raise _late(served, queued_s + limit_s)
    finally:
        timer.cancel()
        del waiting[waiter]


async def wait(
    served: ModelRuntime,
    job: Job,
    scheduler: Scheduler,
    incoming: Incoming,
    clock: Callable[[], float],
    queued_s: float,
) -> None:
    """Wait until the job is sent or has no worker left.

    `queued_s`: how long the request has waited before. Raises RateLimited when it waits too long,
    or was displaced.

    The job stays the scheduler's: whoever called gives it back, however this ends.
    """
    limit_s = _limit_s(served, incoming, clock, queued_s)
    loop = asyncio.get_running_loop()
    job.owner = waiter = loop.create_future()
    served.scheduling.queued[job] = scheduler
    timer = loop.call_later(max(limit_s, _MIN_WAIT_S), _expire, waiter)
    try:
        in_time = await waiter
    finally:
        timer.cancel()
        job.owner = None
        del served.scheduling.queued[job]
    if not in_time and job.state == "waiting":
        raise _late(served, queued_s + limit_s)


def _limit_s(
    served: ModelRuntime, incoming: Incoming, clock: Callable[[], float], queued_s: float
) -> float:
    """What is left of the queue's time limit, or of the client's own if that is less."""
    limit_s = served.scheduling.queue.timeout_s - queued_s
    client_s = incoming.head.read_timeout_s
    if client_s is None:
        return limit_s
    return min(limit_s, incoming.received_s + client_s - clock())


def _late(served: ModelRuntime, limit_s: float) -> RateLimited:
    return RateLimited(
        f"No worker of '{served.name}' had room within {limit_s:.0f} s. Please try again later.",
        reason="queue_timeout",
        code="rate_limit_exceeded",
        retry_after_s=_RETRY_S,
        should_retry=True,
    )


def _expire(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(False)
