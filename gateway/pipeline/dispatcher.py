"""Stages 7 to 9: bind, queue, dispatch and forward, repeated while an attempt may be repeated.

A pool in phases has its prompts computed by other engines first (`gateway.pipeline.phases`).
An attempt that fails before the client saw a byte is tried on another worker, in an alternate
pool, or, after a context overflow, in the next larger window. The request keeps its one lease.

The call that a worker receives is byte for byte the client's but for splices: the model's name
where the worker knows another (never to the base's where the client named a LoRA adapter), the
adapter's name in SGLang's field, a defaulted output limit, `stream_options` so that every stream
is metered, and fields that steer an engine, which are removed; the class's own `priority` where
the engines have such a field, and the data-parallel rank where the worker is one (a header, or a
field for older SGLang). Of the headers only those listed in `gateway.payload.head` travel: client
keys never do. Each attempt has an id of its own at the engine. In observe mode the engines receive
what a bare relay would send: only names are rewritten and steering fields removed.
"""

import asyncio
import hashlib
import secrets
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec
import orjson

from gateway.errors import ContextLengthExceeded, Refusal, Unavailable, told
from gateway.fleet import fleet
from gateway.fleet.fleet import Pending, PoolState, allowed_s
from gateway.fleet.model_runtime import NO_PREFIX, ModelRuntime, Pool
from gateway.metrics import Metrics
from gateway.payload.answers import stream_shape
from gateway.payload.head import lines_of, lines_to_engine, pairs_of
from gateway.payload.members import (
    ADAPTER_FIELD,
    RUNNING_USAGE,
    Pieces,
    edits,
    with_usage,
)
from gateway.payload.multipart import written
from gateway.pipeline.bind import Binder, pools_of
from gateway.pipeline.forward import Relay
from gateway.pipeline.phases import (
    PREFILLED_BYTES,
    PhaseRunner,
    in_phase,
    judged,
    new_engine_id,
)
from gateway.pipeline.plan import overflow_param
from gateway.pipeline.request_progress import Attempts, Sending, answer_lines, require
from gateway.ports import ClientReply, LeaseStore, Upstream, UpstreamCall
from gateway.records.attempt import Attempt, Binding, Outcome
from gateway.records.request import Prompt
from gateway.routing.overflow import engine_message, engine_refusal, suspected
from gateway.routing.retry import Fault, Suspects, harm_of, next_step
from gateway.routing.routing import ResponseLocation, defaulted_cap, larger_pools

_MAX_TRIED: Final = 64
"""Attempts, refused connections included, after which a request gives up."""
_RANKS: Final = {"dedicated": 0, "guaranteed": 0, "elastic": 1, "spot": 2, "preemptible": 3}
_JOINED_BYTES: Final = 256 * 1024
"""Of a body that is sent in one piece."""
_REPORTED: Final = b'{"kv_cache_report_mode":"full","session_id":"%b"}'
_CAP_FIELDS: Final = {"responses": "max_output_tokens"}


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
        self.binder = Binder(clock)
        self._phases = PhaseRunner(
            attempt=self._attempt,
            bind=self._bind,
            unbind=self.binder.release,
            upstream=upstream,
            clock=clock,
        )

    async def run(self, reply: ClientReply, attempts: Attempts) -> Outcome:
        """The answer, from whatever worker gave it. Raises Refusal before a byte was sent."""
        served, lease, facts = attempts.served, attempts.lease, attempts.facts
        asked = attempts.incoming.head.queue_status
        if facts.stream and (attempts.principal.queue_status if asked is None else asked):
            attempts.tell = partial(_tell, reply, attempts)
        tried: list[tuple[int, int]] = []
        sent = 0
        last: Fault | None = None
        phases, response_id = served.fleet.phases, facts.previous_response_id
        preferred = None if response_id is None else served.fleet.stored_at(response_id)
        try:
            while True:
                result = await self._phases.prefill(reply, attempts) if phases else None
                if result is None:
                    binding = await self._bind(attempts, tried, preferred, last)
                    if binding.pool != lease.current.pool:
                        await lease.transfer(binding.pool)
                        _uncut(attempts, binding.pool)
                        if phases:  # the prompt is computed for the pool that decodes
                            self.binder.release(attempts)
                            continue
                    attempts.binding = binding
                    result = await (
                        self._attempt(reply, attempts, binding)
                        if attempts.prefill is None
                        else self._phases.decode(reply, attempts, binding)
                    )
                if isinstance(result, Outcome):
                    return result if result.response_id is None else _remembered(attempts, result)
                last = result
                if result.kind == "handover":
                    # Whether the hand-over failed or this engine: it is asked once more, without.
                    preferred = binding.pool, binding.worker
                elif not result.at_prefill:
                    tried.append((binding.pool, binding.worker))
                    sent += attempts.relay is not None and attempts.relay.sent
                given_up = await self._go_on(reply, attempts, result, sent, len(tried))
                if given_up is not None:
                    return given_up
        finally:
            attempts.over = attempts.tell = None  # it holds the request, which holds the attempts
            if phases:
                self._phases.ended(attempts)
            if attempts.scheduler is not None:
                self.binder.release(attempts)

    async def _go_on(
        self, reply: ClientReply, attempts: Attempts, fault: Fault, sent: int, tried: int
    ) -> Outcome | None:
        """After a failed attempt: what the client was told, or None where another one follows.

        `sent`, `tried`: attempts so far, of two phases at decode; those that reached an engine,
        and all.
        """
        served, lease, facts = attempts.served, attempts.lease, attempts.facts
        if (first := attempts.prefill) is not None:
            sent, tried = sent + first.sent, tried + len(first.tried)
        larger = larger_pools(served.routing, lease.current.pool)
        step = next_step(
            fault,
            sent=sent,
            max_attempts=served.fleet.max_attempts,
            # What continues nobody's state is safe to send to a second engine.
            repeatable=facts.previous_response_id is None,
            larger_pool=bool(larger),
            guilty=bool(attempts.guilty),
        )
        if step == "give_up" or tried > _MAX_TRIED:
            return await self._give_up(reply, attempts, fault)
        if step != "rescue":
            self._metrics.retries.add(fault.kind)
            return None
        # The original goes to the next larger window before a byte was sent.
        self._metrics.misroutes.add("overflow")
        attempts.rescued = True
        await lease.transfer(larger[0])
        plan, alternates = attempts.sending.plan, tuple(larger[1:])
        plan = msgspec.structs.replace(plan, pool=larger[0], alternates=alternates)
        attempts.sending = attempts.sending._replace(plan=plan)
        _uncut(attempts, larger[0])
        return None

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
                placed = self.binder.bind(attempts, tried, preferred)
            except Unavailable:
                if attempts.pools:
                    raise
                if last is not None and last.kind in ("busy", "server_error") and last.body:
                    raise engine_refusal(last) from None
                if not await self.binder.wait_for_workers(attempts):
                    raise
                timer.end("queue")
                continue
            timer.end("bind")
            if isinstance(placed, Binding):
                return placed
            bound = await self.binder.wait(attempts, placed)
            timer.end("queue")
            if bound is not None:
                return bound

    def refuse_suspect(self, tenant: str, body: bytes) -> None:
        """Raise the refusal of a body on which two engines failed a moment ago."""
        suspects = self._suspects
        if (tenant, len(body)) not in suspects.sizes:
            return
        if harm := suspects.verdict(tenant, body, self._clock()):
            raise suspected(harm)

    def frozen(self, served: ModelRuntime, pool: Pool, worker: int) -> None:
        """An engine gives no token to anybody: prefer others, and take there who waits for it."""
        engine, now_s = pool.engine_of[worker], self._clock()
        if engine.ejected_until_s <= now_s:
            fleet.eject(pool, worker, served.fleet.health, now_s, "it gives no token to anybody")
            self._metrics.ejections.add(pool.name, pool.workers[worker])
        for pending in engine.progress.waiting():
            attempts: Attempts = pending.owner
            sent = attempts.relay is not None and attempts.relay.opened
            if attempts.task is None or not attempts.awaits or attempts.moved or sent:
                continue
            if _may_move(attempts, now_s):
                attempts.moved = True
                attempts.stopped = Fault(kind="frozen", message="it gave no token to anybody")
                attempts.task.cancel()

    async def _attempt(
        self, reply: ClientReply, attempts: Attempts, binding: Binding
    ) -> Outcome | Fault:
        """Stage 9 on one worker, with its load and health kept right whatever happens."""
        served, lease, incoming = attempts.served, attempts.lease.current, attempts.incoming
        pool = served.fleet.pools[binding.pool]
        worker = pool.addresses[binding.worker]
        attempts.relay = relay = self._relay(reply, attempts, binding)
        started_s = self._clock()
        if attempts.sent_s is None:
            attempts.sent_s, attempts.waited_s = started_s, attempts.queue_s
        relay.on_end = attempts.over
        if served.by_hour:
            _count_slot(attempts, started_s, begins=True)
            relay.on_end = partial(self._ends, attempts)
        held_tokens = attempts.held_tokens if attempts.pools else lease.cost_tokens
        fleet.start(pool, binding.worker, lease.sequences, held_tokens)
        # What is watched of an attempt while it is under way.
        pending = Pending(attempts, started_s, _allowed_s(attempts), relay.emitted)
        attempts.awaits = True
        pool.engine_of[binding.worker].progress.begin(pending)
        result = "cancelled"
        waiting = self._watch_wait(attempts, relay)
        try:
            self.binder.expect_first(attempts, relay)
            attempts.timer.end("dispatch")
            answer = await relay.run(self._upstream, worker)
            if attempts.handover is not None:
                answer = judged(attempts, answer)
            attempts.told = None if relay.broke is None else told(relay.broke)
            result = answer.label if isinstance(answer, Outcome) else answer.result
        except asyncio.CancelledError:
            task, stopped, attempts.stopped = attempts.task, attempts.stopped, None
            if task is None or stopped is None or task.uncancel():
                raise
            answer, result = stopped, stopped.kind
        finally:
            attempts.awaits = False
            relay.on_first = relay.on_end = None  # they hold the attempts, which hold it
            if waiting is not None:
                waiting.cancel()
            ended_s = self._clock()
            if served.by_hour:
                _count_slot(attempts, ended_s)
            fleet.finish(pool, binding.worker, lease.sequences, held_tokens)
            computed = result == "ok" and incoming.endpoint.computes
            pool.engine_of[binding.worker].progress.end(pending, answered=computed)
            if attempts.scheduler is not None:
                self.binder.release(attempts, answered=result == "ok")
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

    def _relay(self, reply: ClientReply, attempts: Attempts, binding: Binding) -> Relay:
        """One call to the bound worker, and its answer's way."""
        usage, running = asks_usage(attempts, binding)
        call = upstream_call(attempts, binding, usage=usage, running=running)
        served, pool = attempts.served, attempts.lease.current.pool
        relay = Relay(
            attempts.incoming,
            attempts.facts,
            reply,
            self._clock,
            call,
            answer_lines(attempts),
            strip_usage=usage,
            strip_running=running,
            bytes_per_token=attempts.sending.estimate.ratio,
            window_tokens=served.routing.pools[pool].window_tokens,
            timer=attempts.timer,
        )
        if attempts.pools:
            relay.held_bytes = PREFILLED_BYTES
        return relay

    async def _ends(self, attempts: Attempts, outcome: Outcome) -> None:
        """The client is about to see the answer's end: until then the request owes for slots."""
        now_s = self._clock()
        _count_slot(attempts, now_s)
        for side in () if attempts.prefill is None else attempts.prefill.sides:
            if side.awaits:
                _count_slot(side, now_s)
        if attempts.over is not None:
            await attempts.over(outcome)

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
            # A prompt that was computed may still be what ends the engines that answer it.
            if not attempts.pools and (tenant, len(body)) in self._suspects.sizes:
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
        elif answer.kind in ("local", "frozen", "handover"):  # not its fault, or told already
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


async def _tell(reply: ClientReply, attempts: Attempts, place: int, eta_s: float | None) -> None:
    """Tell a client, in a comment of its stream, that its request waits.

    The head goes before the first, so what fails from then on is told in the stream.
    """
    if not reply.started:
        kind = b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
        await reply.start(200, kind + answer_lines(attempts))
    eta = "" if eta_s is None else f" eta={eta_s:.1f}s"
    reply.write_now(f": sluice queued position={place}{eta}\n\n".encode())


def _uncut(attempts: Attempts, pool: int) -> None:
    """A compressed prompt is for one pool; any other pool gets the original, at its whole cost."""
    only = attempts.sending.prompt.only_pool
    if only is None or only == pool:
        return
    if attempts.entry is not None:
        attempts.entry.withdraw()
    whole, prompt = attempts.whole, Prompt(body=attempts.incoming.body, not_compressed="other_pool")
    attempts.prepare(Sending(prompt, whole, attempts.sending.plan, NO_PREFIX))
    kv_bytes = whole.cost_tokens * attempts.served.admission.kv_bytes_per_token
    attempts.lease.resize(whole.cost_tokens, kv_bytes)


def _count_slot(attempts: Attempts, now_s: float, *, begins: bool = False) -> None:
    """Have the request owe for its time at its worker since it began, or was last counted."""
    binding = require(attempts.binding)
    pool, worker = attempts.served.fleet.pools[binding.pool], binding.worker
    if pool.slot_clock is None:  # its time has no price by the hour
        return
    nano = pool.slot_clock.read(worker, pool.active[worker], pool.slots_per_worker, now_s)
    if not begins:
        attempts.slot_nano += attempts.lease.current.sequences * (nano - attempts.slot_read_nano)
    attempts.slot_read_nano = nano


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


def _allowed_s(attempts: Attempts) -> float:
    """How long an attempt may take to its first byte before its engine is called silent."""
    estimate = attempts.sending.estimate
    output_tokens = 0 if attempts.facts.stream else estimate.output_tokens
    predicted_s = 0.0 if attempts.job is None else attempts.job.quantile_s
    most_s = allowed_s(estimate.input_tokens_total, output_tokens, predicted_s)
    if attempts.handover is not None and not attempts.pools:
        most_s *= 2  # decode may wait for its prefill; of the two that is to be found first
    return most_s


def _remembered(attempts: Attempts, outcome: Outcome) -> Outcome:
    """Note a stored response, its owner, and the tokens that its next turn begins with."""
    binding, usage, response_id = require(attempts.binding), outcome.usage, outcome.response_id
    tokens = 0 if usage is None else usage.completion_tokens
    if usage is not None and usage.source == "engine":
        tokens += usage.prompt_tokens
    else:
        tokens += attempts.sending.estimate.input_tokens_total
    pool = attempts.served.fleet.pools[binding.pool].name
    location = ResponseLocation(pool, binding.worker, attempts.principal.tenant, tokens)
    attempts.served.fleet.response_affinity.remember(require(response_id), location)
    return outcome


def _may_move(attempts: Attempts, now_s: float) -> bool:
    """Whether a request can be sent again, and to a worker that nothing is wrong with."""
    binding = require(attempts.binding)
    if attempts.handover is not None and attempts.handover.prefills:
        return True  # decode computes the prompt, too
    if attempts.facts.previous_response_id is not None:
        return False
    tried = {(attempt.pool, attempt.worker) for attempt in attempts.done}
    for index in {binding.pool, *pools_of(attempts)}:
        pool = attempts.served.fleet.pools[index]
        for worker in fleet.available(pool, now_s):
            here = index == binding.pool and worker == binding.worker
            failed = (pool.name, attempts.served.fleet.pools[index].addresses[worker].id) in tried
            if not here and not failed and pool.engine_of[worker].ejected_until_s <= now_s:
                return True
    return False


def _flow_lines(attempts: Attempts) -> bytes:
    """What an inference gateway before the engines shares by (tenant) and ranks by (class)."""
    tenant, objective = attempts.principal.tenant, attempts.principal.service_class
    if attempts.lease.current.spilled:
        objective = "spot"
    # The llm-d router's names, and those of the Gateway API Inference Extension before it.
    return b"".join(
        b"x-%b-inference-fairness-id: %b\r\nx-%b-inference-objective: %b\r\n"
        % (who, tenant.encode(), who, objective.encode())
        for who in (b"llm-d", b"gateway")
    )


def upstream_call(
    attempts: Attempts, binding: Binding, *, usage: bool, running: bool
) -> UpstreamCall:
    """The request that the bound worker receives; `usage`, `running`: as `asks_usage` says."""
    served, incoming, facts = attempts.served, attempts.incoming, attempts.facts
    endpoint, body = incoming.endpoint, attempts.sending.prompt.body
    worker = served.fleet.pools[binding.pool].addresses[binding.worker]
    lines = incoming.head.forwarded
    if incoming.trace.trace_id:
        # The attempt's span is the parent of the engine's.
        lines = lines_to_engine(lines, incoming.trace, len(attempts.done) + 1)
    handover, routed = attempts.handover, attempts.lease.current.pool
    engine_id = new_engine_id(attempts) if handover is None else handover.engine_id
    lines = b"%bx-request-id: %b\r\n" % (lines, engine_id.encode())
    if not served.routing.observe and served.routing.pools[routed].tells_flow:
        lines += _flow_lines(attempts)
    if worker.rank is not None and (worker.rank_by != "body" or endpoint.multipart):
        lines += b"x-data-parallel-rank: %d\r\n" % worker.rank
    name = facts.adapter or worker.served_model or served.name
    if endpoint.multipart:
        # A form is written anew, and so is the header that says how to read it.
        boundary = secrets.token_hex(16).encode()
        pairs = [pair for pair in pairs_of(lines) if pair[0] != b"content-type"]
        pairs.append((b"content-type", b"multipart/form-data; boundary=" + boundary))
        form = written(body, facts.parts, name, boundary)
        return _call(attempts, lines_of(pairs), form)
    replace: dict[str, bytes] = {}
    insert: dict[str, bytes] = {}
    if name != facts.model:
        replace["model"] = orjson.dumps(name)
    if facts.adapter:
        # SGLang takes no adapter's name as the model, and would have the base answer.
        insert[ADAPTER_FIELD] = orjson.dumps(facts.adapter)
    if worker.rank is not None and worker.rank_by == "body":
        insert["data_parallel_rank"] = b"%d" % worker.rank
    if not served.routing.observe:
        _add(attempts, replace, insert)
    if usage or running:
        options = with_usage(facts.members.get("stream_options"), running=running)
        (replace if facts.has_stream_options else insert)["stream_options"] = options
    remove = facts.steering_fields
    if handover is not None:
        remove = in_phase(handover, facts, insert, remove)
    if attempts.entry is not None and attempts.entry.session:
        # Its engine names it by this in the events of its cache, and tells all of its blocks.
        session = attempts.entry.session.encode()
        insert["vllm_xargs"] = _REPORTED % session
    # A compressed body is another one. What is inserted steers: a client's own is removed.
    places = facts.places if body is incoming.body else ()
    edited = edits(body, replace=replace, insert=insert, remove=remove, places=places)
    return _call(attempts, lines, [body] if edited is None else edited)


def _add(attempts: Attempts, replace: dict[str, bytes], insert: dict[str, bytes]) -> None:
    """What the gateway itself wants of the engine: an output limit, a priority, a cache's salt."""
    served, facts, lease = attempts.served, attempts.facts, attempts.lease.current
    endpoint, scheduling = attempts.incoming.endpoint, served.scheduling
    cap = None
    if endpoint.generates:
        cap = defaulted_cap(served.routing, attempts.sending.estimate, lease.pool)
    if cap is not None:
        field = _CAP_FIELDS.get(endpoint.name, "max_tokens")
        # The client's own may be there, and null: of two the engine would take the last.
        (replace if field in facts.members else insert)[field] = b"%d" % cap
    # vLLM serves lower numbers first, SGLang higher ones. Spilled work ranks as spot. What only
    # counts tokens is not scheduled, and engines need not know the field there.
    kind = scheduling.engine_priority
    if kind != "none" and lease.limits is not None and endpoint.computes:
        rank = _RANKS[attempts.principal.service_class]
        if lease.spilled:
            rank = max(rank, _RANKS["spot"])
        insert["priority"] = b"%d" % (rank if kind == "vllm" else _RANKS["preemptible"] - rank)
    if scheduling.salted and endpoint.generates:  # keeps a tenant's prefix cache apart
        salt = hashlib.sha256(b"sluice:" + attempts.principal.tenant.encode()).hexdigest()
        insert["cache_salt"] = b'"%b"' % salt[:32].encode()


def asks_usage(attempts: Attempts, binding: Binding) -> tuple[bool, bool]:
    """Whether the gateway asks for a usage chunk unasked, and for usage in every chunk.

    The latter, so that a stream that is cut counts right; only where limits apply, of engines that
    are known to have the option, and of one choice: they count each choice by itself.
    """
    served, facts, lease = attempts.served, attempts.facts, attempts.lease.current
    if (
        not facts.stream
        or served.routing.observe
        or not stream_shape(attempts.incoming.endpoint).in_chunks
    ):
        return False, False
    running = False
    if lease.limits is not None and lease.sequences == 1:
        options = facts.members.get("stream_options")
        sample = served.fleet.pools[binding.pool].view.samples.get(binding.worker)
        if sample is not None and sample.engine == "vllm":
            running = options is None or RUNNING_USAGE.encode() not in bytes(options)
    return not facts.include_usage, running


def _call(attempts: Attempts, lines: bytes, pieces: Pieces) -> UpstreamCall:
    """The call with a body in pieces, which are joined unless they are large."""
    large = sum(map(len, pieces)) > _JOINED_BYTES
    body = b"" if large else bytes(pieces[0]) if len(pieces) == 1 else b"".join(pieces)
    return UpstreamCall(
        method="POST",
        path=attempts.incoming.endpoint.path,
        lines=lines,
        body=body,
        rest=tuple(pieces) if large else (),
        timeouts=attempts.served.fleet.timeouts,
    )
