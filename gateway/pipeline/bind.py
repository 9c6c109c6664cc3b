"""Stages 7 and 8: a worker for a request, at once or when the scheduler of its pool says so.

Every pool has a scheduler (`gateway.scheduling.scheduler`): it may keep a job waiting, and
whatever call frees room names the jobs to send. Those are woken here. The wait is bounded three
ways: by the queue's length, by its time limit, and by the time after which the client itself will
have given up (its read time-out). Each ends in a 429 with a full refund.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Final

from gateway.errors import RateLimited, Unavailable
from gateway.fleet import fleet
from gateway.fleet.model_runtime import ModelFleet, ModelRuntime, Pool
from gateway.pipeline.forward import Relay
from gateway.pipeline.plan import Asked
from gateway.pipeline.request_progress import Attempts, require
from gateway.records.attempt import Binding
from gateway.records.estimate import LengthEstimate
from gateway.records.lease import Lease
from gateway.scheduling.fairness import newest_of_largest
from gateway.scheduling.outlook import Forecast
from gateway.scheduling.scheduler import NOBODY, PRIORITY_CLASS, Job, Scheduler

_RETRY_S: Final = 2.0
TELL_EVERY_S: Final = 1.0
"""How often a client is told of its wait."""
_MIN_WAIT_S: Final = 0.01


class Binder:
    """Binds requests that hold a lease. One instance serves every request of a process."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` is the schedulers'."""
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None

    def bind(
        self,
        attempts: Attempts,
        tried: Collection[tuple[int, int]],
        preferred: tuple[int, int] | None = None,
    ) -> Binding | int:
        """The worker, or the pool whose scheduler keeps the request waiting.

        The job goes to the scheduler of the first pool that takes it. `tried`: (pool, worker)
        pairs that failed this request; they come again only when nothing else is left;
        `preferred`: the worker that holds the conversation's stored response.
        Raises Unavailable when there is no worker to try.
        """
        served, prefix, now_s = attempts.served, attempts.sending.prefix, self._clock()
        pools, states = pools_of(attempts), served.fleet.pools
        adapter, adapters = attempts.facts.adapter, served.adapters
        if adapter and preferred is None and not tried:  # one that runs the adapter already
            worker = adapters.warm(adapter, states[pools[0]], now_s)
            preferred = None if worker < 0 else (pools[0], worker)
        attempts.scheduler = None
        attempts.job = job = job_of(
            attempts.asked, attempts.sending.estimate, attempts.lease.current, now_s
        )
        if attempts.pools:  # a prefill's answer comes with its first token
            job.kv_tokens, job.stream, job.after_s = attempts.held_tokens, True, attempts.after_s
        if preferred is not None and preferred not in tried:
            pool, worker = preferred
            if worker in fleet.available(states[pool], now_s):
                pools, job.preferred = (pool,), worker
        for again in (False, True) if tried else (False,):
            for pool in pools:
                if (tried or adapter) and not _leave_out(
                    served, job, pool, tried, adapter, now_s, again=again
                ):
                    continue
                job.match = prefix.match(pool) if prefix.points else ()
                scheduler = states[pool].scheduler
                if attempts.sampled is None and (
                    states[pool].outlook.samples(now_s) or attempts.tell is not None
                ):
                    _sample(attempts, job, states[pool], now_s)
                ready = scheduler.submit(job, now_s)
                if job.state == "nowhere":
                    continue
                attempts.scheduler = scheduler
                if attempts.entry is not None:
                    attempts.entry.enter(states[pool], job)
                if job.state == "waiting" or len(ready) > 1:
                    wake(ready)
                return pool if job.state == "waiting" else binding_of(served.fleet, pool, job)
        attempts.job = None
        return _last_resort(served, pools, tried, adapter)

    async def wait(self, attempts: Attempts, pool: int) -> Binding | None:
        """Wait until the job is sent; None when it has no worker left in the pool.

        Raises RateLimited when it waits too long, or was displaced. The job stays the scheduler's:
        whoever called gives it back, however this ends.
        """
        served, job, scheduler = attempts.served, require(attempts.job), require(attempts.scheduler)
        make_room(served, pool, job, scheduler)
        queued, began_s = served.fleet.pools[pool].queued, job.arrived_s
        queued[job] = scheduler
        wait_s: list[float] = []
        try:
            while True:
                job.owner = waiter = asyncio.get_running_loop().create_future()
                late = await self._until_woken(attempts, waiter, began_s)
                if late is not None or job.state != "waiting" or attempts.tell is None:
                    break
                began_s = self._clock()
                wait_s = wait_s or _wait_s(attempts)
                left_s = next((w - attempts.queue_s for w in wait_s if w > attempts.queue_s), None)
                await attempts.tell(place_of(job, queued), left_s)
                if require(attempts.job).state != "waiting":  # it was sent meanwhile
                    break
        finally:
            job.owner = None
            del queued[job]
        if late is not None and job.state == "waiting":
            raise late
        entry = attempts.entry
        if job.state == "nowhere":
            attempts.job = attempts.scheduler = None
            if entry is not None:
                entry.withdraw()
            return None
        if entry is not None:  # its worker may be another than before
            entry.enter(served.fleet.pools[pool], job)
        return binding_of(served.fleet, pool, job)

    async def wait_for_workers(self, attempts: Attempts) -> bool:
        """Wait while no pool of the request has a worker, within the queue's bounds.

        False where none may come: only of pools whose workers come and go at run time, and not
        where there are workers, of which none has the LoRA adapter that the request needs.
        Raises RateLimited when too many wait, or for too long.
        """
        served, began_s = attempts.served, self._clock()
        pools = [served.fleet.pools[pool] for pool in pools_of(attempts)]
        if not any(pool.may_be_empty for pool in pools):
            return False
        if attempts.facts.adapter and any(fleet.available(pool, began_s) for pool in pools):
            return False
        waiting = served.scheduling.waiting_for_workers
        if len(waiting) >= served.scheduling.queue_limit:
            raise _full(served)
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        waiting[waiter] = pools
        try:
            late = await self._until_woken(attempts, waiter, began_s)
        finally:
            del waiting[waiter]
        if late is not None:
            raise late
        return True

    async def _until_woken(
        self, attempts: Attempts, waiter: "asyncio.Future[bool]", began_s: float
    ) -> RateLimited | None:
        """Wait for what is left of the queue's time limit, or of the client's own if less.

        The refusal of a request that waited too long; None where it was woken, or is to be told of
        its wait.
        """
        served, client_s = attempts.served, attempts.incoming.head.read_timeout_s
        limit_s = served.scheduling.queue_timeout_s - attempts.queue_s
        if client_s is not None:
            limit_s = min(limit_s, attempts.incoming.received_s + client_s - self._clock())
        whole_s, pause_s = attempts.queue_s + limit_s, limit_s
        if attempts.tell is not None:
            pause_s = min(limit_s, TELL_EVERY_S)
        loop = asyncio.get_running_loop()
        timer = loop.call_later(max(pause_s, _MIN_WAIT_S), _expire, waiter)
        try:
            if await waiter or pause_s < limit_s:
                return None
        finally:
            timer.cancel()
            attempts.queue_s += self._clock() - began_s
        return RateLimited(
            f"No worker of '{served.name}' had room within {whole_s:.0f} s. "
            "Please try again later.",
            reason="queue_timeout",
            retry_after_s=_RETRY_S,
            should_retry=True,
        )

    def expect_first(self, attempts: Attempts, relay: Relay) -> None:
        """Have the scheduler told of the first token of a job that is sent now.

        Of an answer that is not streamed it is not seen: it is assumed after its predicted mean.
        (No quantile: what is asked is how much prefill is on its way in the sum.)
        """
        job, scheduler = attempts.job, attempts.scheduler
        if job is None or scheduler is None:
            return
        if job.stream:
            if not scheduler.gates:
                job.emitted = relay.emitted
            if scheduler.gates or attempts.sampled is not None:
                relay.on_first = partial(_first_token, attempts, scheduler, job)
        elif scheduler.gates:
            # The loop is asked for once: it costs a call of the system.
            loop = self._loop = self._loop or asyncio.get_running_loop()
            attempts.assumed = loop.call_later(job.expected_s, self._assume, scheduler, job)

    def _assume(self, scheduler: Scheduler, job: Job) -> None:
        if job.state == "sent":
            wake(scheduler.first_token(job, self._clock(), assumed=True))

    def release(self, attempts: Attempts, *, answered: bool = False) -> None:
        """Give the scheduler its job back, waiting or sent; idempotent."""
        job, scheduler = attempts.job, attempts.scheduler
        attempts.scheduler = None
        if job is None or scheduler is None:
            return
        if attempts.assumed is not None:
            attempts.assumed.cancel()
            attempts.assumed = None
        now_s = self._clock()
        if job.state == "waiting":
            wake(scheduler.cancel(job, now_s))
            if attempts.entry is not None:
                attempts.entry.withdraw()
        else:
            wake(scheduler.finished(job, now_s, answered=answered))

    def tick(self, models: Iterable[ModelRuntime]) -> None:
        """Have the schedulers look after dead and stalled workers; a few times a second."""
        now_s = self._clock()
        for served in models:
            for pool in served.fleet.pools:
                wake(pool.scheduler.tick(now_s))
            # Requests go on one of whose pools has a worker now. A reload shares them among the
            # model's objects, whose pools may have other indices.
            for waiter, pools in list(served.scheduling.waiting_for_workers.items()):
                if not waiter.done() and any(fleet.available(pool, now_s) for pool in pools):
                    waiter.set_result(True)


def pools_of(attempts: Attempts) -> tuple[int, ...]:
    """The pools that may serve a request: first the one that its lease is in."""
    if attempts.pools:
        return attempts.pools
    plan, held_in = attempts.sending.plan, attempts.lease.current.pool
    pools = (plan.pool, *plan.alternates)
    if held_in == plan.pool:
        return pools
    return (held_in, *(pool for pool in pools if pool != held_in))


def _leave_out(
    served: ModelRuntime,
    job: Job,
    pool: int,
    tried: Collection[tuple[int, int]],
    adapter: str,
    now_s: float,
    *,
    again: bool,
) -> bool:
    """Name the workers that failed the job or lack its adapter; whether any other is left."""
    state = served.fleet.pools[pool]
    workers = fleet.available(state, now_s)
    if adapter:
        job.barred = served.adapters.barred(adapter, state)
        workers = [w for w in workers if w not in job.barred]
    job.excluded = excluded = [w for p, w in tried if p == pool]
    return bool(workers) and (again or any(w not in excluded for w in workers))


def job_of(asked: Asked, estimate: LengthEstimate, lease: Lease, now_s: float) -> Job:
    """The request as a scheduler sees it. Spilled work ranks as backfill."""
    principal = asked.principal
    return Job(
        None,
        estimate.input_tokens_total,
        estimate.output_tokens,
        now_s,
        principal.entitlement,
        2 if lease.spilled else PRIORITY_CLASS[principal.service_class],
        asked.served.admission.rates.share(principal.tokens_per_s),
        estimate.cap_tokens,
        lease.cost_tokens,
        lease.sequences,
        stream=asked.facts.stream,
        tenant=principal.tenant,
        slo_s=principal.slo_ms / 1000,
    )


def binding_of(model_fleet: ModelFleet, pool: int, job: Job) -> Binding:
    """What the scheduler decided."""
    names = model_fleet.pools[pool].workers
    return Binding(
        pool=pool,
        worker=job.worker,
        score=job.score,
        candidates=tuple([(names[worker], score) for worker, score in job.candidates]),
    )


def _last_resort(
    served: ModelRuntime,
    pools: Collection[int],
    tried: Collection[tuple[int, int]],
    adapter: str,
) -> Binding:
    """A worker that is out of the rotation, where none is in it: it may be well by now.

    One that refused connections is tried for a request that was not sent anywhere yet: that
    costs nothing, and else each request would ask all of a dead fleet. Raises Unavailable.
    """
    for refused in (False, True) if not tried else (False,):
        for pool in pools:
            state = served.fleet.pools[pool]
            barred = served.adapters.barred(adapter, state) if adapter else NOBODY
            workers = fleet.last_resort(state, refused=refused)
            left = [w for w in workers if (pool, w) not in tried and w not in barred]
            if left:
                return Binding(pool=pool, worker=min(left, key=state.active.__getitem__), score=0.0)
    raise no_worker(served, adapter)


def no_worker(served: ModelRuntime, adapter: str) -> Unavailable:
    """The refusal where no engine can be tried."""
    having = f" that has the LoRA adapter '{adapter[:256]}'" if adapter else ""
    return Unavailable(
        f"No engine of the model '{served.name}'{having} is ready. Try again shortly.",
        reason="no_worker_ready",
        retry_after_s=2.0,
    )


def _first_token(attempts: Attempts, scheduler: Scheduler, job: Job, now_s: float) -> None:
    """Tell the pool's outlook and the scheduler of it."""
    if attempts.sampled is not None:
        (outlook, forecast), attempts.sampled = attempts.sampled, None
        outlook.note(forecast, attempts.queue_s, now_s - attempts.incoming.received_s)
    if scheduler.gates:
        wake(scheduler.first_token(job, now_s))


def _sample(attempts: Attempts, job: Job, pool: Pool, now_s: float) -> None:
    """Forecast a request's first wait, for the pool's outlook, or because its client asked."""
    forecast = Forecast(job.priority_class, *pool.scheduler.forecast(job, now_s))
    attempts.sampled = pool.outlook, forecast


def place_of(job: Job, queued: Iterable[Job]) -> int:
    """Which a waiting job is, from 1, of those that wait for the same worker."""
    mine = (job.priority_class, job.key, job.order)
    ahead = [
        other
        for other in queued
        if other.state == "waiting"
        and other.worker == job.worker
        and (other.priority_class, other.key, other.order) < mine
    ]
    return len(ahead) + 1


def _wait_s(attempts: Attempts) -> list[float]:
    """The quantiles of a request's expected wait that are known, ascending."""
    outlook, forecast = require(attempts.sampled)
    wait, _ = outlook.expect(forecast)
    return [each for each in wait if each is not None]


def make_room(served: ModelRuntime, pool: int, job: Job, scheduler: Scheduler) -> None:
    """Keep the queue within its limit (the job that asks is counted).

    A full queue displaces: of the lowest class and there of the tenant that holds most for its
    share, the newest request of its entitlement that does.
    Raises RateLimited when that is the job that asks; else the displaced one's `wait` does.
    """
    limit = served.scheduling.queue_limit
    if sum(scheduler.waiting) <= limit:
        return
    others = [
        other
        for other, where in served.fleet.pools[pool].queued.items()
        if where is scheduler and other.owner is not None and not other.owner.done()
    ]
    if len(others) < limit:
        return  # those that were displaced are about to leave
    displaced = newest_of_largest([*others, job])
    if displaced is job:
        raise _full(served)
    displaced.owner.set_exception(_full(served))


def _full(served: ModelRuntime) -> RateLimited:
    return RateLimited(
        f"{served.scheduling.queue_limit} requests wait for a worker of '{served.name}' already. "
        "Please try again later.",
        reason="queue_full",
        retry_after_s=_RETRY_S,
        should_retry=True,
    )


def _expire(waiter: "asyncio.Future[bool]") -> None:
    if not waiter.done():
        waiter.set_result(False)


def wake(ready: Sequence[Job]) -> None:
    """Send jobs: whoever waits for one goes on."""
    for job in ready:
        waiter = job.owner
        if waiter is not None and not waiter.done():
            waiter.set_result(True)
