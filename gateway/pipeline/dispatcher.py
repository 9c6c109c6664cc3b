"""Stages 7 to 9: bind, queue, dispatch and forward, repeated while an attempt may be repeated.

An attempt that fails before the client saw a byte is tried on another worker, in an alternate
pool, or, after a context overflow, in the next larger window. The request keeps its one lease.

A pool with a scheduler hands its requests to that (`gateway.scheduling.scheduler`): it may
keep a job waiting, and whatever call frees room names the jobs to send. Those are woken here.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from gateway.errors import ContextLengthExceeded, Refusal, Unavailable, told
from gateway.fleet import fleet
from gateway.fleet.fleet import PoolState
from gateway.fleet.model_runtime import ModelRuntime
from gateway.fleet.progress import Pending, allowed_s
from gateway.metrics import Metrics
from gateway.pipeline import bind as stage_bind
from gateway.pipeline import dispatch as stage_dispatch
from gateway.pipeline import forward as stage_forward
from gateway.pipeline import plan as stage_plan
from gateway.pipeline import queue as stage_queue
from gateway.pipeline.assumed_tokens import AssumedTokens
from gateway.pipeline.request_progress import Admitted, Attempts, answer_lines
from gateway.ports import ClientReply, LeaseStore, Upstream, UpstreamCall
from gateway.records.attempt import Attempt, Binding, Outcome
from gateway.records.lease import Lease
from gateway.records.request import BodyFacts, Incoming, Prompt
from gateway.routing.conversations import ResponseLocation
from gateway.routing.engine_refusal import engine_refusal, suspected
from gateway.routing.overflow import engine_message
from gateway.routing.retry import Fault, next_step
from gateway.routing.routing import larger_pools
from gateway.routing.suspects import Suspects, harm_of
from gateway.scheduling.scheduler import NO_PREFIX, Job, Scheduler

_T = TypeVar("_T")


class Dispatcher:
    """Serves requests that hold a lease. One instance serves every request of a process."""

    def __init__(
        self,
        *,
        store: LeaseStore,
        upstream: Upstream,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._upstream = upstream
        self._metrics = metrics
        self._clock = clock
        self._reclaims: set[asyncio.Task[None]] = set()
        self._suspects = Suspects()
        self._assumed = AssumedTokens(clock, self._assume_first)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, incoming: Incoming, reply: ClientReply, attempts: Attempts) -> Outcome:
        """The answer, from whatever worker gave it. Raises Refusal before a byte was sent."""
        admitted = attempts.admitted
        served, lease = admitted.served, admitted.lease
        tried: list[tuple[int, int]] = []
        sent = 0
        last: Fault | None = None
        known = served.fleet.response_affinity.find(admitted.facts.previous_response_id)
        preferred = None if known is None else (known.pool, known.worker)
        try:
            while True:
                attempts.timer.begin()
                try:
                    placed = self._bind(attempts, admitted, tried, last, preferred)
                except Unavailable:
                    adapter = admitted.facts.adapter
                    pools = [served.fleet.pools[pool] for pool in _pools(attempts)]
                    if not stage_queue.awaits_workers(pools, adapter, self._clock()):
                        raise
                    await self._wait_for_workers(incoming, attempts, served, pools)
                    attempts.timer.end("queue")
                    continue
                attempts.timer.end("bind")
                while not isinstance(placed, Binding):  # nearly always it is at once
                    bound = await self._wait(incoming, attempts, served, placed)
                    attempts.timer.end("queue")
                    placed = bound or self._bind(attempts, admitted, tried, last, preferred)
                binding = placed
                if binding.pool != lease.current.pool:
                    await lease.transfer(binding.pool)
                    self._uncut(incoming, attempts, binding.pool)
                attempts.binding = binding
                result = await self._attempt(incoming, reply, attempts, admitted, binding)
                if isinstance(result, Outcome):
                    if result.response_id is not None:
                        _remember(attempts, binding, result, result.response_id)
                    return result
                last = result
                tried.append((binding.pool, binding.worker))
                sent += attempts.relay is not None and attempts.relay.sent
                larger = larger_pools(served.routing, binding.pool)
                step = next_step(
                    result,
                    sent=sent,
                    max_attempts=served.fleet.max_attempts,
                    repeatable=stage_dispatch.repeatable(admitted.facts),
                    larger_pool=bool(larger),
                    guilty=bool(attempts.guilty),
                )
                if step == "give_up" or len(tried) > _MAX_TRIED:
                    return await self._give_up(incoming, reply, attempts, result)
                if step == "rescue":
                    await self._rescue(incoming, attempts, tuple(larger))
                else:
                    self._metrics.retries.add(result.kind)
        finally:
            attempts.over = None  # it holds the request, which holds the attempts
            if attempts.scheduler is not None:
                self._release(attempts)

    def refuse_suspect(self, tenant: str, body: bytes) -> None:
        """Raise the refusal of a body on which two engines failed a moment ago."""
        known = self._suspects
        if (tenant, len(body)) not in known.sizes:
            return
        if harm := known.verdict(tenant, body, self._clock()):
            raise suspected(harm)

    def tick(self, models: Iterable[ModelRuntime]) -> None:
        """Have the schedulers look after dead and stalled workers; a few times a second."""
        now_s = self._clock()
        for served in models:
            for scheduler in served.scheduling.schedulers:
                if scheduler is not None:
                    wake(scheduler.tick(now_s))
            if served.scheduling.waiting_for_workers:
                stage_queue.wake_for_workers(served, now_s)

    def frozen(self, served: ModelRuntime, pool: int, worker: int) -> None:
        """An engine gives no token to anybody: prefer others, and take there who waits for it."""
        state, now_s = served.fleet.pools[pool], self._clock()
        if state.ejected_until_s[worker] <= now_s:
            fleet.eject(state, worker, served.fleet.health, now_s, "it gives no token to anybody")
            self._metrics.ejections.add(state.name, state.workers[worker])
        for pending in state.progress.waiting(worker):
            attempts: Attempts = pending.owner
            sent = attempts.relay is not None and attempts.relay.opened
            if attempts.sender is None or attempts.moved or sent:
                continue
            if _may_move(attempts, now_s):
                attempts.moved = pending.moving = True
                attempts.sender.cancel()

    def _release(self, attempts: Attempts, *, answered: bool = False) -> None:
        """Give the scheduler its job back, waiting or sent; idempotent."""
        job, scheduler = attempts.job, attempts.scheduler
        attempts.scheduler = None
        if job is not None and scheduler is not None:
            if attempts.assumed_turn:
                self._assumed.forget(attempts.assumed_turn, job)
                attempts.assumed_turn = 0
            now_s = self._clock()
            if job.state == "waiting":
                wake(scheduler.cancel(job, now_s))
                if attempts.entry is not None:
                    attempts.entry.withdraw()
            else:
                wake(scheduler.finished(job, now_s, answered=answered))

    def _bind(
        self,
        attempts: Attempts,
        admitted: Admitted,
        tried: list[tuple[int, int]],
        last: Fault | None,
        preferred: tuple[int, int] | None,
    ) -> Binding | int:
        """Stage 7: the worker, or the pool whose scheduler keeps the request waiting."""
        served, pools = admitted.served, _pools(attempts)
        try:
            adapter = admitted.facts.adapter
            if adapter and preferred is None:
                preferred = stage_bind.warm_worker(served, adapter, pools, tried, self._clock())
            if not served.scheduling.schedulers:
                return stage_bind.bind(served, pools, tried, self._clock(), preferred, adapter)
            return self._submit(attempts, admitted, pools, tried, preferred, adapter)
        except Unavailable:
            if last is not None and last.kind in ("busy", "server_error") and last.body:
                raise engine_refusal(last) from None
            raise

    def _submit(
        self,
        attempts: Attempts,
        admitted: Admitted,
        pools: Sequence[int],
        tried: list[tuple[int, int]],
        preferred: tuple[int, int] | None,
        adapter: str,
    ) -> Binding | int:
        """The same where a scheduler chooses the worker, and when."""
        now_s, served, sending = self._clock(), admitted.served, attempts.sending
        attempts.scheduler = None
        attempts.job = job = stage_bind.job_of(
            served,
            admitted.principal,
            admitted.facts,
            sending.estimate,
            admitted.lease.current,
            now_s,
        )
        placed = stage_bind.place(
            served, pools, tried, now_s, preferred, job, sending.prefix, adapter
        )
        if isinstance(placed, Binding):
            attempts.job = None
            return placed
        pool, ready = placed
        attempts.scheduler = served.scheduling.schedulers[pool]
        if attempts.entry is not None:
            attempts.entry.enter(pool, job)
        if job.state == "waiting":
            wake(ready)
            return pool
        if len(ready) > 1:
            wake(ready)
        return stage_bind.binding_of(served.fleet, pool, job)

    async def _wait(
        self, incoming: Incoming, attempts: Attempts, served: ModelRuntime, pool: int
    ) -> Binding | None:
        """Stage 8; None when its worker died meanwhile and no other is left in the pool."""
        job, scheduler = require(attempts.job), require(attempts.scheduler)
        stage_queue.admit(served, job, scheduler)
        try:
            await stage_queue.wait(served, job, scheduler, incoming, self._clock, attempts.queue_s)
        finally:
            attempts.queue_s += self._clock() - job.arrived_s
        entry = attempts.entry
        if job.state == "nowhere":
            attempts.job = attempts.scheduler = None
            if entry is not None:
                entry.withdraw()
            return None
        if entry is not None:  # its worker may be another than before
            entry.enter(pool, job)
        return stage_bind.binding_of(served.fleet, pool, job)

    async def _wait_for_workers(
        self,
        incoming: Incoming,
        attempts: Attempts,
        served: ModelRuntime,
        pools: Sequence[PoolState],
    ) -> None:
        """Stage 8 where there is no worker yet to bind to."""
        began_s = self._clock()
        try:
            await stage_queue.wait_for_workers(
                served, pools, incoming, self._clock, attempts.queue_s
            )
        finally:
            attempts.queue_s += self._clock() - began_s

    async def _attempt(
        self,
        incoming: Incoming,
        reply: ClientReply,
        attempts: Attempts,
        admitted: Admitted,
        binding: Binding,
    ) -> Outcome | Fault:
        """Stage 9 on one worker, with its load and health kept right whatever happens."""
        served, lease = admitted.served, admitted.lease.current
        pool = served.fleet.pools[binding.pool]
        worker = served.fleet.workers[binding.pool][binding.worker]
        call = _call(incoming, attempts, admitted, binding)
        attempts.relay = relay = stage_forward.Relay(
            incoming,
            admitted.facts,
            reply,
            self._clock,
            strip_usage=stage_dispatch.injects_usage(served, incoming.endpoint, admitted.facts),
            strip_running=stage_dispatch.asks_running_usage(
                served, incoming.endpoint, admitted.facts, lease, binding
            ),
            bytes_per_token=attempts.sending.estimate.ratio,
            window_tokens=served.routing.pools[binding.pool].window_tokens,
            timer=attempts.timer,
        )
        started_s = self._clock()
        if attempts.sent_s is None:
            attempts.sent_s = started_s
        slot_time = _SlotTime(attempts, pool, binding.worker, started_s)
        relay.on_end = partial(self._ends, attempts, slot_time)
        fleet.start(pool, binding.worker, lease.sequences, lease.cost_tokens)
        pending = self._pending(attempts, relay)
        if self._loop is None:  # asked for once: it costs a call of the system
            self._loop = asyncio.get_running_loop()
        attempts.sender = asyncio.current_task(self._loop)
        pool.progress.begin(binding.worker, pending)
        result = "cancelled"
        waiting = self._watch_wait(relay, served, lease)
        try:
            if attempts.scheduler is not None and attempts.job is not None:
                self._expect_first(attempts, relay, attempts.scheduler, attempts.job)
            lines = answer_lines(incoming, attempts)
            attempts.timer.end("dispatch")
            answer = await relay.run(self._upstream, worker, call, lines)
            attempts.told = None if relay.broke is None else told(relay.broke)
            result = answer.label if isinstance(answer, Outcome) else answer.result
        except asyncio.CancelledError:
            task, attempts.sender = attempts.sender, None
            if task is None or not pending.moving or task.uncancel():
                raise
            answer = Fault(kind="frozen", message="it gave no token to anybody")
            result = answer.kind
        finally:
            attempts.sender = relay.on_end = None
            if waiting is not None:
                waiting.cancel()
            ended_s = self._clock()
            slot_time.count(ended_s)
            fleet.finish(pool, binding.worker, lease.sequences, lease.cost_tokens)
            computed = result == "ok" and incoming.endpoint.computes
            pool.progress.end(binding.worker, pending, answered=computed)
            if attempts.scheduler is not None:
                self._release(attempts, answered=result == "ok")
            if relay.first_s is None and result != "cancelled" and attempts.entry is not None:
                attempts.entry.withdraw()
            attempts.done.append(
                Attempt(
                    pool=pool.name,
                    worker=worker.id,
                    result=result,
                    start_ms=(started_s - incoming.received_s) * 1000,
                    duration_ms=(ended_s - started_s) * 1000,
                )
            )
        self._note_health(incoming, attempts, binding, answer)
        return answer

    async def _ends(self, attempts: Attempts, slot_time: "_SlotTime", outcome: Outcome) -> None:
        """The client is about to see the answer's end."""
        slot_time.count(self._clock())
        if attempts.over is not None:
            await attempts.over(outcome)

    def _pending(self, attempts: Attempts, relay: stage_forward.Relay) -> Pending:
        """What is watched of an attempt while it is under way."""
        estimate = attempts.sending.estimate
        output_tokens = 0 if attempts.admitted.facts.stream else estimate.output_tokens
        predicted_s = 0.0 if attempts.job is None else attempts.job.quantile_s
        most_s = allowed_s(estimate.input_tokens_total, output_tokens, predicted_s)
        return Pending(attempts, self._clock(), most_s, relay.emitted)

    def _expect_first(
        self, attempts: Attempts, relay: stage_forward.Relay, scheduler: Scheduler, job: Job
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
            attempts.assumed_turn = self._assumed.expect(scheduler, job)

    def _first_token(self, scheduler: Scheduler, job: Job, now_s: float) -> None:
        wake(scheduler.first_token(job, now_s))

    def _assume_first(self, scheduler: Scheduler, job: Job, now_s: float) -> None:
        wake(scheduler.first_token(job, now_s, assumed=True))

    def _watch_wait(
        self, relay: stage_forward.Relay, served: ModelRuntime, lease: Lease
    ) -> asyncio.TimerHandle | None:
        """Have others give way when a protected request entered a full pool and waits there."""
        if not (lease.protected and lease.contended):
            return None

        def waited() -> None:
            if not relay.emitted():
                task = asyncio.ensure_future(self._store.reclaim(lease))
                self._reclaims.add(task)
                task.add_done_callback(self._reclaims.discard)

        return asyncio.get_running_loop().call_later(served.admission.reclaim_s, waited)

    @staticmethod
    def _not_served(served: ModelRuntime, binding: Binding, facts: BodyFacts) -> None:
        """A worker says that it lacks what it was sent: the probes' next look may return it."""
        pool = served.fleet.pools[binding.pool]
        if not facts.adapter:
            worker = served.fleet.workers[binding.pool][binding.worker]
            name = worker.served_model or served.name
            fleet.unfit(pool, binding.worker, f"it answered that it does not serve '{name}'")
            return
        for rank in pool.siblings[binding.worker]:
            served.adapters.lost(binding.pool, rank, facts.adapter)

    def _note_health(
        self, incoming: Incoming, attempts: Attempts, binding: Binding, answer: Outcome | Fault
    ) -> None:
        """Note what an attempt says of its engine, and of the request."""
        served = attempts.admitted.served
        pool, worker = served.fleet.pools[binding.pool], binding.worker
        tenant, body = attempts.admitted.principal.tenant, incoming.body
        if isinstance(answer, Outcome) and answer.label == "ok":
            if (tenant, len(body)) in self._suspects.sizes:
                self._suspects.served(tenant, body)
            fleet.succeeded(pool, worker)
            return
        now_s = self._clock()
        if harm := harm_of(answer):
            url = served.fleet.workers[binding.pool][worker].url
            attempts.guilty = self._suspects.note(tenant, body, url, harm, now_s)
        if isinstance(answer, Outcome):
            broke, why = bool(harm), "a stream of it broke"
        elif answer.kind == "connect":
            fleet.unreachable(pool, worker)
            return
        elif answer.kind in ("local", "frozen"):  # not its fault, or told already
            return
        elif answer.kind == "not_served":
            self._not_served(served, binding, attempts.admitted.facts)
            return
        else:
            broke, why = answer.hurts_health, answer.message
            if answer.kind == "busy" and answer.retry_after_s:
                fleet.rest(pool, worker, now_s + answer.retry_after_s)
        if broke:
            self._blame(attempts, pool, worker, why, now_s)
        elif not pool.progress.silent_s(worker):  # a frozen engine still refuses what is malformed
            fleet.succeeded(pool, worker)

    def _blame(
        self, attempts: Attempts, pool: PoolState, worker: int, why: str, now_s: float
    ) -> None:
        """Count a failure: in full, unless the request is to blame."""
        guilty = bool(attempts.guilty)
        for earlier in attempts.blamed if guilty else ():
            fleet.acquit(*earlier)
        attempts.blamed = (*attempts.blamed, (pool, worker))
        rules = attempts.admitted.served.fleet.health
        if fleet.failed(pool, worker, rules, now_s, why, blameless=guilty):
            self._metrics.ejections.add(pool.name, pool.workers[worker])

    async def _rescue(
        self, incoming: Incoming, attempts: Attempts, larger: tuple[int, ...]
    ) -> None:
        """Overflow rescue: the original goes to the next larger window before a byte was sent."""
        self._metrics.misroutes.add("overflow")
        attempts.rescued = True
        pool = larger[0]
        await attempts.admitted.lease.transfer(pool)
        plan = msgspec.structs.replace(attempts.sending.plan, pool=pool, alternates=larger[1:])
        attempts.sending = attempts.sending._replace(plan=plan)
        self._uncut(incoming, attempts, pool)

    def _uncut(self, incoming: Incoming, attempts: Attempts, pool: int) -> None:
        """What was cut was cut for one pool; any other gets the client's own, at its whole cost."""
        only, admitted = attempts.sending.prompt.only_pool, attempts.admitted
        if only is None or only == pool:
            return
        if attempts.entry is not None:
            attempts.entry.withdraw()
            attempts.entry = None
        whole = admitted.whole
        attempts.sending = attempts.sending._replace(
            prompt=Prompt(body=incoming.body, not_compressed="other_pool"),
            estimate=whole,
            prefix=NO_PREFIX,
        )
        kv_bytes = whole.cost_tokens * admitted.served.admission.kv_bytes_per_token
        admitted.lease.resize(whole.cost_tokens, kv_bytes)

    async def _give_up(
        self, incoming: Incoming, reply: ClientReply, attempts: Attempts, fault: Fault
    ) -> Outcome:
        """Tell the client what the last attempt came to."""
        refusal: Refusal
        if fault.kind == "overflow":  # the engine's own count: the request is too long
            refusal = ContextLengthExceeded(
                engine_message(fault.body),
                prompt_tokens=fault.prompt_tokens,
                window_tokens=fault.window_tokens,
                param=stage_plan.overflow_param(incoming.endpoint),
            )
        else:
            refusal = engine_refusal(fault)
            if attempts.guilty:
                refusal = suspected(attempts.guilty, refusal)
        attempts.told = told(refusal)
        falls = fault.kind != "overflow" and attempts.guilty != "ended"
        if attempts.admitted.served.fallbacks and falls:
            raise refusal  # another model may answer
        label = "error" if fault.kind == "overflow" else "upstream_error"
        outcome = Outcome(label=label, status=refusal.status)
        if attempts.over is not None:
            await attempts.over(outcome)
        await reply.refuse(refusal, answer_lines(incoming, attempts))
        return outcome


def _pools(attempts: Attempts) -> tuple[int, ...]:
    """The pools that may serve a request: first the one that its lease is in."""
    plan, held_in = attempts.sending.plan, attempts.admitted.lease.current.pool
    pools = (plan.pool, *plan.alternates)
    if held_in == plan.pool:
        return pools
    return (held_in, *(pool for pool in pools if pool != held_in))


class _SlotTime:
    """What one attempt owes for its time at a worker; nothing where that has no price by the hour.

    `count` may be called again, as long as the attempt lasts.
    """

    __slots__ = ("_attempts", "_before_nano", "_begun_nano", "_pool", "_worker")

    def __init__(self, attempts: Attempts, pool: PoolState, worker: int, now_s: float) -> None:
        self._attempts = attempts
        self._pool = pool
        self._worker = worker
        self._before_nano = attempts.slot_nano
        self._begun_nano = self._read(now_s)

    def count(self, now_s: float) -> None:
        """Have the request owe for all its attempts up to now."""
        sequences = self._attempts.admitted.lease.current.sequences
        owed_nano = sequences * (self._read(now_s) - self._begun_nano)
        self._attempts.slot_nano = self._before_nano + owed_nano

    def _read(self, now_s: float) -> float:
        pool, worker = self._pool, self._worker
        if pool.slot_clock is None:
            return 0.0
        return pool.slot_clock.read(worker, pool.active[worker], pool.slots_per_worker, now_s)


def require(value: _T | None) -> _T:
    """What must be there by now."""
    if value is None:
        raise RuntimeError("a stage ran before the one it stands on")
    return value


def _call(
    incoming: Incoming, attempts: Attempts, admitted: Admitted, binding: Binding
) -> UpstreamCall:
    """What the engine is sent."""
    sending = attempts.sending
    return stage_dispatch.upstream_call(
        served=admitted.served,
        incoming=incoming,
        facts=admitted.facts,
        principal=admitted.principal,
        estimate=sending.estimate,
        lease=admitted.lease.current,
        prompt=sending.prompt,
        binding=binding,
        attempt=len(attempts.done) + 1,
    )


def _remember(attempts: Attempts, binding: Binding, outcome: Outcome, response_id: str) -> None:
    """Note a stored response, its owner, and the tokens that its next turn begins with."""
    usage, admitted = outcome.usage, attempts.admitted
    tokens = 0 if usage is None else usage.completion_tokens
    if usage is not None and usage.source == "engine":
        tokens += usage.prompt_tokens
    else:
        tokens += attempts.sending.estimate.input_tokens_total
    location = ResponseLocation(binding.pool, binding.worker, admitted.principal.tenant, tokens)
    admitted.served.fleet.response_affinity.remember(response_id, location)


def _may_move(attempts: Attempts, now_s: float) -> bool:
    """Whether a request can be sent again, and to a worker that nothing is wrong with."""
    admitted, plan, binding = attempts.admitted, attempts.sending.plan, require(attempts.binding)
    if not stage_dispatch.repeatable(admitted.facts):
        return False
    tried = {(attempt.pool, attempt.worker) for attempt in attempts.done}
    for index in {binding.pool, plan.pool, *plan.alternates}:
        pool = admitted.served.fleet.pools[index]
        for worker in fleet.available(pool, now_s):
            here = index == binding.pool and worker == binding.worker
            known = (pool.name, admitted.served.fleet.workers[index][worker].id) in tried
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
