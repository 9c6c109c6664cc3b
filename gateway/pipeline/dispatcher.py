"""Stages 7 to 9: bind, queue, dispatch and forward, repeated while an attempt may be repeated.

An attempt that fails before the client saw a byte is tried on another worker, in an alternate
pool, or, after a context overflow, in the next larger window. The request keeps its one lease.

A pool with a scheduler hands its requests to that (`gateway.policy.scheduling.scheduler`): it may
keep a job waiting, and whatever call frees room names the jobs to send. Those are woken here.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import msgspec

from gateway.errors import ContextLengthExceeded, Refusal, Unavailable
from gateway.metrics import Metrics
from gateway.pipeline import prefix_entry
from gateway.pipeline.assumed_tokens import AssumedTokens
from gateway.pipeline.walk import Walk, found, too_early
from gateway.policy.fleet import fleet
from gateway.policy.fleet.progress import Pending, allowed_s
from gateway.policy.model_runtime import ServedModel
from gateway.policy.pools.conversations import Home
from gateway.policy.pools.retry import Fault, hurts_health, next_step
from gateway.policy.pools.routing import larger_pools
from gateway.policy.response.engine_refusal import engine_refusal
from gateway.policy.response.overflow import engine_message
from gateway.policy.scheduling.scheduler import NO_PREFIX, Job, Scheduler
from gateway.ports import ClientReply, LeaseStore, Lines, Upstream
from gateway.records.attempt import Attempt, Binding, Outcome
from gateway.records.estimate import LengthEstimate
from gateway.records.lease import Lease
from gateway.records.request import BodyFacts, Incoming, Prompt
from gateway.stages import bind as stage_bind
from gateway.stages import dispatch as stage_dispatch
from gateway.stages import forward as stage_forward
from gateway.stages import plan as stage_plan
from gateway.stages import queue as stage_queue
from gateway.stages import response_headers


class Exchange:
    """Serves requests that hold a lease. One instance serves every request of a process."""

    def __init__(
        self,
        *,
        store: LeaseStore,
        upstream: Upstream,
        metrics: Metrics,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._upstream = upstream
        self._metrics = metrics
        self._clock = clock
        self._wall_clock = wall_clock
        self._reclaims: set[asyncio.Task[None]] = set()
        self._assumed = AssumedTokens(clock, self._assume_first)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(
        self,
        incoming: Incoming,
        reply: ClientReply,
        walk: Walk,
        served: ServedModel,
        facts: BodyFacts,
    ) -> Outcome:
        """The answer, from whatever worker gave it. Raises Refusal before a byte was sent."""
        tried: list[tuple[int, int]] = []
        sent = 0
        last: Fault | None = None
        known = served.homes.find(facts.previous_response_id)
        home = None if known is None else (known.pool, known.worker)
        try:
            while True:
                placed = self._bind(walk, served, facts, tried, last, home)
                while not isinstance(placed, Binding):  # nearly always it is at once
                    bound = await self._wait(incoming, walk, served, placed)
                    placed = bound or self._bind(walk, served, facts, tried, last, home)
                binding = placed
                if binding.pool != found(walk.lease).pool:
                    walk.lease = await self._transfer(walk, binding.pool)
                    self._uncut(incoming, walk, binding.pool)
                walk.binding = binding
                result = await self._attempt(incoming, reply, walk, served, facts, binding)
                if isinstance(result, Outcome):
                    if result.response_id is not None:
                        _remember(served, walk, binding, result, result.response_id)
                    return result
                last = result
                tried.append((binding.pool, binding.worker))
                sent += walk.relay is not None and walk.relay.sent
                larger = larger_pools(served.routing, binding.pool)
                step = next_step(
                    result,
                    sent=sent,
                    max_attempts=served.max_attempts,
                    repeatable=stage_dispatch.repeatable(facts),
                    larger_pool=bool(larger),
                )
                if step == "give_up" or len(tried) > _MAX_TRIED:
                    return await self._give_up(incoming, reply, walk, result)
                if step == "rescue":
                    await self._rescue(incoming, walk, tuple(larger))
                else:
                    self._metrics.retries.add(result.kind)
        finally:
            if walk.scheduler is not None:
                self._release(walk)

    def tick(self, models: Iterable[ServedModel]) -> None:
        """Have the schedulers look after dead and stalled workers; a few times a second."""
        now_s = self._clock()
        for served in models:
            for scheduler in served.schedulers:
                if scheduler is not None:
                    wake(scheduler.tick(now_s))

    def frozen(self, served: ServedModel, pool: int, worker: int) -> None:
        """An engine gives no token to anybody: prefer others, and take there who waits for it."""
        state, now_s = served.pools[pool], self._clock()
        if state.ejected_until_s[worker] <= now_s:
            fleet.eject(state, worker, served.health, now_s)
            self._metrics.ejections.add(state.name, state.workers[worker])
        for pending in state.progress.waiting(worker):
            walk: Walk = pending.owner
            if walk.sender is not None and not walk.moved and _may_move(walk, served, now_s):
                walk.moved = pending.moving = True
                walk.sender.cancel()

    def _release(self, walk: Walk, *, answered: bool = False) -> None:
        """Give the scheduler its job back, waiting or sent; idempotent."""
        job, scheduler = walk.job, walk.scheduler
        walk.scheduler = None
        if job is not None and scheduler is not None:
            if walk.assumed_turn:
                self._assumed.forget(walk.assumed_turn, job)
                walk.assumed_turn = 0
            now_s = self._clock()
            if job.state == "waiting":
                wake(scheduler.cancel(job, now_s))
                prefix_entry.withdraw(walk, found(walk.served))
            else:
                wake(scheduler.finished(job, now_s, answered=answered))

    def _bind(
        self,
        walk: Walk,
        served: ServedModel,
        facts: BodyFacts,
        tried: list[tuple[int, int]],
        last: Fault | None,
        home: tuple[int, int] | None,
    ) -> Binding | int:
        """Stage 7: the worker, or the pool whose scheduler keeps the request waiting."""
        lease, plan, estimate = walk.lease, walk.plan, walk.estimate
        if lease is None or plan is None or estimate is None:
            raise too_early()
        pools: tuple[int, ...] = (plan.pool, *plan.alternates)
        if lease.pool != plan.pool:
            pools = (lease.pool, *(p for p in pools if p != lease.pool))
        try:
            if not served.schedulers:
                return stage_bind.bind(served, pools, tried, self._clock(), home)
            return self._submit(walk, served, facts, estimate, lease, pools, tried, home)
        except Unavailable:
            if last is not None and last.kind in ("busy", "server_error") and last.body:
                raise engine_refusal(last) from None
            raise

    def _submit(
        self,
        walk: Walk,
        served: ServedModel,
        facts: BodyFacts,
        estimate: LengthEstimate,
        lease: Lease,
        pools: Sequence[int],
        tried: list[tuple[int, int]],
        home: tuple[int, int] | None,
    ) -> Binding | int:
        """The same where a scheduler chooses the worker, and when."""
        now_s = self._clock()
        walk.scheduler = None
        walk.job = job = stage_bind.job_of(
            served, found(walk.principal), facts, estimate, lease, now_s
        )
        placed = stage_bind.place(served, pools, tried, now_s, home, job, walk.prefix)
        if isinstance(placed, Binding):
            walk.job = None
            return placed
        pool, ready = placed
        walk.scheduler = served.schedulers[pool]
        prefix_entry.enter(walk, served, pool)
        if job.state == "waiting":
            wake(ready)
            return pool
        if len(ready) > 1:
            wake(ready)
        return stage_bind.binding_of(served, pool, job)

    async def _wait(
        self, incoming: Incoming, walk: Walk, served: ServedModel, pool: int
    ) -> Binding | None:
        """Stage 8; None when its worker died meanwhile and no other is left in the pool."""
        job, scheduler = found(walk.job), found(walk.scheduler)
        stage_queue.admit(served, job, scheduler)
        await stage_queue.wait(served, job, scheduler, incoming, self._clock)
        walk.queue_s += self._clock() - job.arrived_s
        if job.state == "nowhere":
            prefix_entry.withdraw(walk, served)
            return None
        prefix_entry.enter(walk, served, pool)  # its worker may be another than before
        return stage_bind.binding_of(served, pool, job)

    async def _attempt(
        self,
        incoming: Incoming,
        reply: ClientReply,
        walk: Walk,
        served: ServedModel,
        facts: BodyFacts,
        binding: Binding,
    ) -> Outcome | Fault:
        """Stage 9 on one worker, with its load and health kept right whatever happens."""
        pool = served.pools[binding.pool]
        worker = served.workers[binding.pool][binding.worker]
        lease, estimate, prompt, principal = walk.lease, walk.estimate, walk.prompt, walk.principal
        if lease is None or estimate is None or prompt is None or principal is None:
            raise too_early()
        priority = stage_dispatch.engine_priority(served, principal, lease, incoming.endpoint)
        salt = stage_dispatch.cache_salt(served, principal, incoming.endpoint)
        call = stage_dispatch.upstream_call(
            served, incoming, facts, estimate, prompt, binding, priority, salt
        )
        walk.relay = relay = stage_forward.Relay(
            incoming.endpoint,
            facts,
            reply,
            self._clock,
            started_s=incoming.received_s,
            strip_usage=stage_dispatch.injects_usage(served, incoming.endpoint, facts),
        )
        if walk.sent_s is None:
            walk.sent_s = self._clock()
        walk.dispatched = True
        fleet.start(pool, binding.worker, lease.sequences, lease.cost_tokens)
        pending = self._pending(walk, facts, relay)
        if self._loop is None:  # asked for once: it costs a call of the system
            self._loop = asyncio.get_running_loop()
        walk.sender = asyncio.current_task(self._loop)
        pool.progress.begin(binding.worker, pending)
        result = "cancelled"
        waiting = self._watch_wait(walk, served, lease)
        try:
            if walk.scheduler is not None and walk.job is not None:
                self._expect_first(walk, relay, walk.scheduler, walk.job)
            answer = await relay.run(self._upstream, worker, call, answer_lines(incoming, walk))
            result = answer.label if isinstance(answer, Outcome) else answer.kind
        except asyncio.CancelledError:
            task, walk.sender = walk.sender, None
            if task is None or not pending.moving or task.uncancel():
                raise
            answer = Fault(kind="frozen", message="it gave no token to anybody")
            result = answer.kind
        finally:
            walk.sender = None
            if waiting is not None:
                waiting.cancel()
            fleet.finish(pool, binding.worker, lease.sequences, lease.cost_tokens)
            computed = result == "ok" and incoming.endpoint.computes
            pool.progress.end(binding.worker, pending, answered=computed)
            if walk.scheduler is not None:
                self._release(walk, answered=result == "ok")
            if relay.first_s is None and result != "cancelled":
                prefix_entry.withdraw(walk, served)
            walk.attempts.append(Attempt(pool=pool.name, worker=worker.id, result=result))
        self._note_health(served, binding, answer)
        return answer

    def _pending(self, walk: Walk, facts: BodyFacts, relay: stage_forward.Relay) -> Pending:
        """What is watched of an attempt while it is under way."""
        estimate = found(walk.estimate)
        output_tokens = 0 if facts.stream else estimate.output_tokens
        predicted_s = 0.0 if walk.job is None else walk.job.quantile_s
        most_s = allowed_s(estimate.input_tokens_total, output_tokens, predicted_s)
        return Pending(walk, self._clock(), most_s, relay.emitted)

    def _expect_first(
        self, walk: Walk, relay: stage_forward.Relay, scheduler: Scheduler, job: Job
    ) -> None:
        """Have the scheduler told of the first token.

        Of an answer that is not streamed it is not seen: it is assumed in time.
        """
        if not scheduler.gates:
            if job.stream:
                job.emitted = relay.emitted
        elif job.stream:
            relay.on_first = partial(self._first_token, scheduler, job)
        else:
            walk.assumed_turn = self._assumed.expect(scheduler, job)

    def _first_token(self, scheduler: Scheduler, job: Job, now_s: float) -> None:
        wake(scheduler.first_token(job, now_s))

    def _assume_first(self, scheduler: Scheduler, job: Job, now_s: float) -> None:
        wake(scheduler.first_token(job, now_s, assumed=True))

    def _watch_wait(
        self, walk: Walk, served: ServedModel, lease: Lease
    ) -> asyncio.TimerHandle | None:
        """Have others give way when a protected request entered a full pool and waits there."""
        if not (lease.protected and lease.contended):
            return None

        def waited() -> None:
            if walk.relay is None or not walk.relay.emitted():
                task = asyncio.ensure_future(self._store.reclaim(lease))
                self._reclaims.add(task)
                task.add_done_callback(self._reclaims.discard)

        return asyncio.get_running_loop().call_later(served.reclaim_s, waited)

    def _note_health(self, served: ServedModel, binding: Binding, answer: Outcome | Fault) -> None:
        pool = served.pools[binding.pool]
        served_it = False
        if isinstance(answer, Outcome):
            broke = answer.label == "upstream_error"
            served_it = answer.label == "ok"
        elif answer.kind == "connect":
            fleet.unreachable(pool, binding.worker)
            return
        elif answer.kind in ("local", "frozen"):  # not its fault, or told already
            return
        else:
            broke = hurts_health(answer)
        if not broke:
            # A frozen engine still refuses what is malformed.
            if served_it or not pool.progress.silent_s(binding.worker):
                fleet.succeeded(pool, binding.worker)
        elif fleet.failed(pool, binding.worker, served.health, self._clock()):
            self._metrics.ejections.add(pool.name, pool.workers[binding.worker])

    async def _rescue(self, incoming: Incoming, walk: Walk, larger: tuple[int, ...]) -> None:
        """Overflow rescue: the original goes to the next larger window before a byte was sent."""
        self._metrics.misroutes.add("overflow")
        walk.rescued = True
        pool = larger[0]
        walk.lease = await self._transfer(walk, pool)
        walk.plan = msgspec.structs.replace(found(walk.plan), pool=pool, alternates=larger[1:])
        self._uncut(incoming, walk, pool)

    async def _transfer(self, walk: Walk, pool: int) -> Lease:
        """Take the lease along to another pool."""
        walk.lease_changes.append((self._wall_clock(), "transfer", pool))
        return await self._store.transfer(found(walk.lease), pool)

    def _uncut(self, incoming: Incoming, walk: Walk, pool: int) -> None:
        """What was cut was cut for one pool; any other gets the client's own, at its whole cost."""
        only = found(walk.prompt).only_pool
        if only is None or only == pool:
            return
        prefix_entry.withdraw(walk, found(walk.served))
        walk.prompt = Prompt(body=incoming.body, not_compressed="other_pool")
        walk.prefix = NO_PREFIX
        walk.estimate = whole = found(walk.whole)
        walk.reserved_tokens = whole.cost_tokens
        kv_bytes = whole.cost_tokens * found(walk.served).kv_bytes_per_token
        lease = found(walk.lease)
        walk.lease_changes.append((self._wall_clock(), "resize", whole.cost_tokens))
        self._store.resize(lease, whole.cost_tokens, kv_bytes)
        walk.lease = msgspec.structs.replace(
            lease, cost_tokens=whole.cost_tokens, kv_bytes=kv_bytes
        )

    async def _give_up(
        self, incoming: Incoming, reply: ClientReply, walk: Walk, fault: Fault
    ) -> Outcome:
        """Tell the client what the last attempt came to."""
        refusal: Refusal
        if fault.kind == "overflow":  # the engine's own count: the request is too long
            refusal = ContextLengthExceeded(
                engine_message(fault.body),
                param=stage_plan.overflow_param(incoming.endpoint),
            )
        else:
            refusal = engine_refusal(fault)
        walk.refusal = refusal
        await reply.refuse(refusal, answer_lines(incoming, walk))
        label = "error" if fault.kind == "overflow" else "upstream_error"
        return Outcome(label=label, status=refusal.status)


def answer_lines(incoming: Incoming, walk: Walk) -> Lines:
    """The x-sluice-* headers known so far."""
    return response_headers.response_lines(
        incoming.request_id,
        walk.served,
        walk.estimate,
        walk.lease,
        walk.binding,
        walk.prompt,
        walk.queue_s,
    )


def _remember(
    served: ServedModel, walk: Walk, binding: Binding, outcome: Outcome, response_id: str
) -> None:
    """Note a stored response, its owner, and the tokens that its next turn begins with."""
    usage = outcome.usage
    tokens = 0 if usage is None else usage.completion_tokens
    if usage is not None and usage.source == "engine":
        tokens += usage.prompt_tokens
    else:
        tokens += found(walk.estimate).input_tokens_total
    tenant = found(walk.principal).tenant
    served.homes.remember(response_id, Home(binding.pool, binding.worker, tenant, tokens))


def _may_move(walk: Walk, served: ServedModel, now_s: float) -> bool:
    """Whether a request can be sent again, and to a worker that nothing is wrong with."""
    facts, plan, binding = found(walk.facts), found(walk.plan), found(walk.binding)
    if not stage_dispatch.repeatable(facts):
        return False
    tried = {(attempt.pool, attempt.worker) for attempt in walk.attempts}
    for index in {binding.pool, plan.pool, *plan.alternates}:
        pool = served.pools[index]
        for worker in fleet.available(pool, now_s):
            here = index == binding.pool and worker == binding.worker
            known = (pool.name, served.workers[index][worker].id) in tried
            if not here and not known and pool.ejected_until_s[worker] <= now_s:
                return True
    return False


def wake(ready: Sequence[Job]) -> None:
    """Send jobs: whoever waits for one goes on."""
    for job in ready:
        waiter = job.owner
        if waiter is not None and not waiter.done():
            waiter.set_result(True)


_MAX_TRIED = 64
"""Attempts, refused connections included, after which a request gives up."""
