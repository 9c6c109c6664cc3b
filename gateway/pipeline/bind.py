"""Stage 7, bind: pool and load -> worker; at once, or by the pool's scheduler."""

from collections.abc import Collection, Sequence

from gateway.errors import Unavailable
from gateway.fleet import fleet
from gateway.fleet.binding import bind_least_loaded
from gateway.fleet.model_runtime import ModelFleet, ModelRuntime
from gateway.records.attempt import Binding
from gateway.records.estimate import LengthEstimate
from gateway.records.lease import Lease
from gateway.records.request import BodyFacts, Principal
from gateway.scheduling.scheduler import NOBODY, PRIORITY_CLASS, Job, Prefix


def bind(
    served: ModelRuntime,
    pools: Collection[int],
    tried: Collection[tuple[int, int]],
    now_s: float,
    preferred: tuple[int, int] | None = None,
    adapter: str = "",
) -> Binding:
    """The least loaded worker of the first pool that has one left to try.

    `tried`: (pool, worker) pairs that failed this request; they come again only when
    nothing else is left; `preferred`: the worker that holds the conversation's stored response;
    `adapter`: the LoRA adapter that the worker must have.
    Raises Unavailable when there is no worker to try.
    """
    if preferred is not None and preferred not in tried:
        pool, worker = preferred
        if worker in fleet.available(served.fleet.pools[pool], now_s):
            return Binding(pool=pool, worker=worker, score=0.0)
    for again in (False, True):
        for pool in pools:
            exclude: Collection[int] = () if again else [w for p, w in tried if p == pool]
            if adapter:
                exclude = served.adapters.barred(adapter, pool).union(exclude)
            binding = bind_least_loaded(pool, served.fleet.pools[pool], now_s, exclude)
            if binding is not None:
                return binding
    return _last_resort(served, pools, tried, adapter)


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
            known = fleet.last_resort(state, refused=refused)
            barred = served.adapters.barred(adapter, pool) if adapter else NOBODY
            left = [w for w in known if (pool, w) not in tried and w not in barred]
            if left:
                return Binding(pool=pool, worker=min(left, key=state.active.__getitem__), score=0.0)
    having = f" that has the LoRA adapter '{adapter[:256]}'" if adapter else ""
    raise Unavailable(
        f"No engine of the model '{served.name}'{having} is ready. Try again shortly.",
        reason="no_worker_ready",
        code="no_worker_ready",
        retry_after_s=2.0,
    )


def job_of(
    served: ModelRuntime,
    principal: Principal,
    facts: BodyFacts,
    estimate: LengthEstimate,
    lease: Lease,
    now_s: float,
) -> Job:
    """The request as a scheduler sees it. Spilled work ranks as backfill."""
    return Job(
        None,
        estimate.input_tokens_total,
        estimate.output_tokens,
        now_s,
        principal.entitlement,
        2 if lease.spilled else PRIORITY_CLASS[principal.service_class],
        served.admission.rates.share(principal.tokens_per_s),
        estimate.cap_tokens,
        lease.cost_tokens,
        lease.sequences,
        stream=facts.stream,
        tenant=principal.tenant,
        slo_s=principal.slo_ms / 1000,
    )


def place(
    served: ModelRuntime,
    pools: Collection[int],
    tried: Collection[tuple[int, int]],
    now_s: float,
    preferred: tuple[int, int] | None,
    job: Job,
    prefix: Prefix,
    adapter: str = "",
) -> Binding | tuple[int, Sequence[Job]]:
    """Hand the job to the scheduler of the first pool that takes it, as `bind` chooses pools.

    The pool and the jobs to send now, or the binding where the pool has no scheduler or no
    worker in the rotation. Raises Unavailable when there is no worker to try.
    """
    if preferred is not None and preferred not in tried:
        if preferred[1] in fleet.available(served.fleet.pools[preferred[0]], now_s):
            pools = (preferred[0],)
        else:
            preferred = None
    # Nearly every request: nobody to look for or to leave out.
    if (
        preferred is None
        and not tried
        and not adapter
        and (placed := _submitted(served, pools, now_s, job, prefix))
    ):
        return placed
    for again in (False, True):
        for pool in pools:
            known = fleet.available(served.fleet.pools[pool], now_s)
            exclude = [w for p, w in tried if p == pool]
            if adapter:
                job.barred = served.adapters.barred(adapter, pool)
                known = [w for w in known if w not in job.barred]
            if not known or (not again and all(w in exclude for w in known)):
                continue
            scheduler = served.scheduling.schedulers[pool]
            if scheduler is None:
                return bind(served, (pool,), tried, now_s, preferred, adapter)
            job.excluded = exclude
            job.preferred = preferred[1] if preferred is not None and preferred[0] == pool else -1
            if prefix.points:
                job.match = prefix.match(pool)
            ready = scheduler.submit(job, now_s)
            if job.state != "nowhere":
                return pool, ready
    return _last_resort(served, pools, tried, adapter)


def warm_worker(
    served: ModelRuntime, adapter: str, pools: Collection[int], tried: object, now_s: float
) -> tuple[int, int] | None:
    """The worker of the first pool that runs a LoRA adapter already, for a first attempt."""
    for pool in () if tried else pools:
        worker = served.adapters.warm(adapter, pool, served.fleet.pools[pool], now_s)
        return None if worker < 0 else (pool, worker)
    return None


def _submitted(
    served: ModelRuntime, pools: Collection[int], now_s: float, job: Job, prefix: Prefix
) -> tuple[int, Sequence[Job]] | None:
    """The first pool whose scheduler takes the job; None at one that has no scheduler."""
    for pool in pools:
        scheduler = served.scheduling.schedulers[pool]
        if scheduler is None:
            return None
        if prefix.points:
            job.match = prefix.match(pool)
        ready = scheduler.submit(job, now_s)
        if job.state != "nowhere":
            return pool, ready
    return None


def binding_of(model_fleet: ModelFleet, pool: int, job: Job) -> Binding:
    """What the scheduler decided."""
    names = model_fleet.pools[pool].workers
    return Binding(
        pool=pool,
        worker=job.worker,
        score=job.score,
        candidates=tuple([(names[worker], score) for worker, score in job.candidates]),
    )
