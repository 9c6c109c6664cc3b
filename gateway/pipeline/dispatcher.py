"""Stages 7 to 9: bind, queue, dispatch and forward, repeated while an attempt may be repeated.

An attempt that fails before the client saw a byte is tried on another worker, in an alternate
pool, or, after a context overflow, in the next larger window. The request keeps its one lease.
"""

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

import msgspec

from gateway.errors import ContextLengthExceeded, Refusal, Unavailable, told
from gateway.fleet import fleet
from gateway.fleet.fleet import PoolState
from gateway.fleet.model_runtime import NO_PREFIX, ModelRuntime, Pool
from gateway.fleet.progress import Pending, allowed_s
from gateway.metrics import Metrics
from gateway.pipeline.bind import Binder
from gateway.pipeline.dispatch import asks_usage, upstream_call
from gateway.pipeline.forward import Relay
from gateway.pipeline.plan import overflow_param
from gateway.pipeline.request_progress import Attempts, answer_lines, require
from gateway.ports import ClientReply, LeaseStore, Upstream
from gateway.records.attempt import Attempt, Binding, Outcome
from gateway.records.request import Prompt
from gateway.routing.conversations import ResponseLocation
from gateway.routing.overflow import engine_message, engine_refusal, suspected
from gateway.routing.retry import Fault, Suspects, harm_of, next_step
from gateway.routing.routing import larger_pools

_MAX_TRIED: Final = 64
"""Attempts, refused connections included, after which a request gives up."""


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
        self._binder = Binder(clock)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, reply: ClientReply, attempts: Attempts) -> Outcome:
        """The answer, from whatever worker gave it. Raises Refusal before a byte was sent."""
        served, lease, facts = attempts.served, attempts.lease, attempts.facts
        tried: list[tuple[int, int]] = []
        sent = 0
        last: Fault | None = None
        preferred = None
        if facts.previous_response_id is not None:
            preferred = served.fleet.stored_at(facts.previous_response_id)
        try:
            while True:
                binding = await self._bind(attempts, tried, preferred, last)
                if binding.pool != lease.current.pool:
                    await lease.transfer(binding.pool)
                    self._uncut(attempts, binding.pool)
                attempts.binding = binding
                result = await self._attempt(reply, attempts, binding)
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
                    # What continues nobody's state is safe to send to a second engine.
                    repeatable=facts.previous_response_id is None,
                    larger_pool=bool(larger),
                    guilty=bool(attempts.guilty),
                )
                if step == "give_up" or len(tried) > _MAX_TRIED:
                    return await self._give_up(reply, attempts, result)
                if step == "rescue":
                    await self._rescue(attempts, tuple(larger))
                else:
                    self._metrics.retries.add(result.kind)
        finally:
            attempts.over = None  # it holds the request, which holds the attempts
            if attempts.scheduler is not None:
                self._binder.release(attempts)

    async def _bind(
        self,
        attempts: Attempts,
        tried: list[tuple[int, int]],
        preferred: tuple[int, int] | None,
        last: Fault | None,
    ) -> Binding:
        """Stages 7 and 8: the worker, nearly always at once. Raises Refusal."""
        timer = attempts.timer
        timer.begin()
        while True:
            try:
                placed = self._binder.bind(attempts, tried, preferred)
            except Unavailable:
                if last is not None and last.kind in ("busy", "server_error") and last.body:
                    raise engine_refusal(last) from None
                if not await self._binder.wait_for_workers(attempts):
                    raise
                timer.end("queue")
                continue
            timer.end("bind")
            if isinstance(placed, Binding):
                return placed
            bound = await self._binder.wait(attempts, placed)
            timer.end("queue")
            if bound is not None:
                return bound

    def refuse_suspect(self, tenant: str, body: bytes) -> None:
        """Raise the refusal of a body on which two engines failed a moment ago."""
        known = self._suspects
        if (tenant, len(body)) not in known.sizes:
            return
        if harm := known.verdict(tenant, body, self._clock()):
            raise suspected(harm)

    def tick(self, models: Iterable[ModelRuntime]) -> None:
        """Have the schedulers look after dead and stalled workers; a few times a second."""
        self._binder.tick(models)

    def frozen(self, served: ModelRuntime, pool: Pool, worker: int) -> None:
        """An engine gives no token to anybody: prefer others, and take there who waits for it."""
        engine, now_s = pool.engine_of[worker], self._clock()
        if engine.ejected_until_s <= now_s:
            fleet.eject(pool, worker, served.fleet.health, now_s, "it gives no token to anybody")
            self._metrics.ejections.add(pool.name, pool.workers[worker])
        for pending in engine.progress.waiting():
            attempts: Attempts = pending.owner
            sent = attempts.relay is not None and attempts.relay.opened
            if attempts.sender is None or attempts.moved or sent:
                continue
            if _may_move(attempts, now_s):
                attempts.moved = pending.moving = True
                attempts.sender.cancel()

    async def _attempt(
        self, reply: ClientReply, attempts: Attempts, binding: Binding
    ) -> Outcome | Fault:
        """Stage 9 on one worker, with its load and health kept right whatever happens."""
        served, lease, incoming = attempts.served, attempts.lease.current, attempts.incoming
        pool = served.fleet.pools[binding.pool]
        worker = pool.addresses[binding.worker]
        usage, running = asks_usage(attempts, binding)
        call = upstream_call(attempts, binding, usage=usage, running=running)
        attempts.relay = relay = Relay(
            incoming,
            attempts.facts,
            reply,
            self._clock,
            call,
            answer_lines(attempts),
            strip_usage=usage,
            strip_running=running,
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
        pool.engine_of[binding.worker].progress.begin(pending)
        result = "cancelled"
        waiting = self._watch_wait(attempts, relay)
        try:
            self._binder.expect_first(attempts, relay)
            attempts.timer.end("dispatch")
            answer = await relay.run(self._upstream, worker)
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
            pool.engine_of[binding.worker].progress.end(pending, answered=computed)
            if attempts.scheduler is not None:
                self._binder.release(attempts, answered=result == "ok")
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
        self._note_health(attempts, binding, answer)
        return answer

    async def _ends(self, attempts: Attempts, slot_time: "_SlotTime", outcome: Outcome) -> None:
        """The client is about to see the answer's end."""
        slot_time.count(self._clock())
        if attempts.over is not None:
            await attempts.over(outcome)

    def _pending(self, attempts: Attempts, relay: Relay) -> Pending:
        """What is watched of an attempt while it is under way."""
        estimate = attempts.sending.estimate
        output_tokens = 0 if attempts.facts.stream else estimate.output_tokens
        predicted_s = 0.0 if attempts.job is None else attempts.job.quantile_s
        most_s = allowed_s(estimate.input_tokens_total, output_tokens, predicted_s)
        return Pending(attempts, self._clock(), most_s, relay.emitted)

    def _watch_wait(self, attempts: Attempts, relay: Relay) -> asyncio.TimerHandle | None:
        """Have others give way when a protected request entered a full pool and waits there."""
        lease = attempts.lease.current
        if not (lease.protected and lease.contended):
            return None

        def waited() -> None:
            if not relay.emitted():
                task = asyncio.ensure_future(self._store.reclaim(lease))
                self._reclaims.add(task)
                task.add_done_callback(self._reclaims.discard)

        reclaim_s = attempts.served.admission.reclaim_s
        return asyncio.get_running_loop().call_later(reclaim_s, waited)

    def _note_health(self, attempts: Attempts, binding: Binding, answer: Outcome | Fault) -> None:
        """Note what an attempt says of its engine, and of the request."""
        served = attempts.served
        pool, worker = served.fleet.pools[binding.pool], binding.worker
        tenant, body = attempts.principal.tenant, attempts.incoming.body
        if isinstance(answer, Outcome) and answer.label == "ok":
            if (tenant, len(body)) in self._suspects.sizes:
                self._suspects.served(tenant, body)
            fleet.succeeded(pool, worker)
            return
        now_s = self._clock()
        if harm := harm_of(answer):
            url = served.fleet.pools[binding.pool].addresses[worker].url
            attempts.guilty = self._suspects.note(tenant, body, url, harm, now_s)
        if isinstance(answer, Outcome):
            broke, why = bool(harm), "a stream of it broke"
        elif answer.kind == "connect":
            fleet.unreachable(pool, worker)
            return
        elif answer.kind in ("local", "frozen"):  # not its fault, or told already
            return
        elif answer.kind == "not_served":
            _not_served(attempts, binding)
            return
        else:
            broke, why = answer.hurts_health, answer.message
            if answer.kind == "busy" and answer.retry_after_s:
                fleet.rest(pool, worker, now_s + answer.retry_after_s)
        if broke:
            self._blame(attempts, pool, worker, why, now_s)
        elif not pool.engine_of[worker].progress.silent_s:
            # A frozen engine still refuses what is malformed.
            fleet.succeeded(pool, worker)

    def _blame(
        self, attempts: Attempts, pool: PoolState, worker: int, why: str, now_s: float
    ) -> None:
        """Count a failure: in full, unless the request is to blame."""
        guilty = bool(attempts.guilty)
        for earlier in attempts.blamed if guilty else ():
            fleet.acquit(*earlier)
        attempts.blamed = (*attempts.blamed, (pool, worker))
        rules = attempts.served.fleet.health
        if fleet.failed(pool, worker, rules, now_s, why, blameless=guilty):
            self._metrics.ejections.add(pool.name, pool.workers[worker])

    async def _rescue(self, attempts: Attempts, larger: tuple[int, ...]) -> None:
        """Overflow rescue: the original goes to the next larger window before a byte was sent."""
        self._metrics.misroutes.add("overflow")
        attempts.rescued = True
        pool = larger[0]
        await attempts.lease.transfer(pool)
        plan = msgspec.structs.replace(attempts.sending.plan, pool=pool, alternates=larger[1:])
        attempts.sending = attempts.sending._replace(plan=plan)
        self._uncut(attempts, pool)

    def _uncut(self, attempts: Attempts, pool: int) -> None:
        """What was cut was cut for one pool; any other gets the client's own, at its whole cost."""
        only = attempts.sending.prompt.only_pool
        if only is None or only == pool:
            return
        if attempts.entry is not None:
            attempts.entry.withdraw()
            attempts.entry = None
        whole = attempts.whole
        attempts.sending = attempts.sending._replace(
            prompt=Prompt(body=attempts.incoming.body, not_compressed="other_pool"),
            estimate=whole,
            prefix=NO_PREFIX,
        )
        kv_bytes = whole.cost_tokens * attempts.served.admission.kv_bytes_per_token
        attempts.lease.resize(whole.cost_tokens, kv_bytes)

    async def _give_up(self, reply: ClientReply, attempts: Attempts, fault: Fault) -> Outcome:
        """Tell the client what the last attempt came to."""
        refusal: Refusal
        if fault.kind == "overflow":  # the engine's own count: the request is too long
            refusal = ContextLengthExceeded(
                engine_message(fault.body),
                prompt_tokens=fault.prompt_tokens,
                window_tokens=fault.window_tokens,
                param=overflow_param(attempts.incoming.endpoint),
            )
        else:
            refusal = engine_refusal(fault)
            if attempts.guilty:
                refusal = suspected(attempts.guilty, refusal)
        attempts.told = told(refusal)
        falls = fault.kind != "overflow" and attempts.guilty != "ended"
        if attempts.served.fallbacks and falls:
            raise refusal  # another model may answer
        label = "error" if fault.kind == "overflow" else "upstream_error"
        outcome = Outcome(label=label, status=refusal.status)
        if attempts.over is not None:
            await attempts.over(outcome)
        await reply.refuse(refusal, answer_lines(attempts))
        return outcome


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
        sequences = self._attempts.lease.current.sequences
        owed_nano = sequences * (self._read(now_s) - self._begun_nano)
        self._attempts.slot_nano = self._before_nano + owed_nano

    def _read(self, now_s: float) -> float:
        pool, worker = self._pool, self._worker
        if pool.slot_clock is None:
            return 0.0
        return pool.slot_clock.read(worker, pool.active[worker], pool.slots_per_worker, now_s)


def _not_served(attempts: Attempts, binding: Binding) -> None:
    """A worker says that it lacks what it was sent: the probes' next look may return it."""
    served, pool = attempts.served, attempts.served.fleet.pools[binding.pool]
    if adapter := attempts.facts.adapter:
        for rank in pool.engine_of[binding.worker].ranks:
            served.adapters.lost(pool, rank, adapter)
        return
    worker = served.fleet.pools[binding.pool].addresses[binding.worker]
    name = worker.served_model or served.name
    fleet.unfit(pool, binding.worker, f"it answered that it does not serve '{name}'")


def _remember(attempts: Attempts, binding: Binding, outcome: Outcome, response_id: str) -> None:
    """Note a stored response, its owner, and the tokens that its next turn begins with."""
    usage = outcome.usage
    tokens = 0 if usage is None else usage.completion_tokens
    if usage is not None and usage.source == "engine":
        tokens += usage.prompt_tokens
    else:
        tokens += attempts.sending.estimate.input_tokens_total
    pool = attempts.served.fleet.pools[binding.pool].name
    location = ResponseLocation(pool, binding.worker, attempts.principal.tenant, tokens)
    attempts.served.fleet.response_affinity.remember(response_id, location)


def _may_move(attempts: Attempts, now_s: float) -> bool:
    """Whether a request can be sent again, and to a worker that nothing is wrong with."""
    plan, binding = attempts.sending.plan, require(attempts.binding)
    if attempts.facts.previous_response_id is not None:
        return False
    tried = {(attempt.pool, attempt.worker) for attempt in attempts.done}
    for index in {binding.pool, plan.pool, *plan.alternates}:
        pool = attempts.served.fleet.pools[index]
        for worker in fleet.available(pool, now_s):
            here = index == binding.pool and worker == binding.worker
            known = (pool.name, attempts.served.fleet.pools[index].addresses[worker].id) in tried
            if not here and not known and pool.engine_of[worker].ejected_until_s <= now_s:
                return True
    return False
