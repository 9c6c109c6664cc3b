"""The ten stages, in order. Every request walks them; nothing else decides about requests.

 1 authenticate   2 estimate   3 plan   4 admit   5 compress   6 adjust lease
 7 bind worker    8 queue      9 dispatch, forward             10 settle (always)

Stages 7-9 repeat while an attempt fails before the client saw a byte: on another worker, in
an alternate pool, or, after a context overflow, in the next larger window. The request keeps
its one lease through all of it, and stage 10 settles it exactly once: on success, failure,
disconnect or cancellation.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from gateway.domain import (
    Attempt,
    Binding,
    BodyFacts,
    Incoming,
    Lease,
    LengthEstimate,
    Outcome,
    Plan,
    Principal,
    Prompt,
)
from gateway.errors import ContextLengthExceeded, RateLimited, Refusal, Unavailable
from gateway.policy import fleet
from gateway.policy.band import Band, band_plan
from gateway.policy.overflow import engine_message
from gateway.policy.pools import larger_pools
from gateway.policy.retry import Fault, hurts_health, next_step
from gateway.policy.served import ServedModel
from gateway.ports import (
    ClientReply,
    CompressRunner,
    Headers,
    LeaseStore,
    RecordSink,
    Upstream,
)
from gateway.stages import adjust as stage_adjust
from gateway.stages import admit as stage_admit
from gateway.stages import authenticate as stage_authenticate
from gateway.stages import bind as stage_bind
from gateway.stages import compress as stage_compress
from gateway.stages import dispatch as stage_dispatch
from gateway.stages import estimate as stage_estimate
from gateway.stages import explain as stage_explain
from gateway.stages import forward as stage_forward
from gateway.stages import plan as stage_plan
from gateway.stages import queue as stage_queue
from gateway.stages import settle as stage_settle
from gateway.telemetry import Metrics


class Walk:
    """What the stages have found so far about one request; the settle stage reads it.

    Each field is one stage's frozen record, set once (lease and plan may be replaced by a
    rescue or a spill); None where the request did not get that far.
    """

    __slots__ = (
        "attempts",
        "binding",
        "compress_s",
        "dispatched",
        "estimate",
        "evicted",
        "facts",
        "lease",
        "lease_changes",
        "outcome",
        "plan",
        "planned",
        "principal",
        "prompt",
        "queue_s",
        "refusal",
        "relay",
        "rescued",
        "reserved_tokens",
        "sent_s",
        "served",
        "task",
    )

    def __init__(self) -> None:
        self.principal: Principal | None = None
        self.facts: BodyFacts | None = None
        self.served: ServedModel | None = None
        self.estimate: LengthEstimate | None = None
        self.planned: Plan | None = None
        self.plan: Plan | None = None
        self.lease: Lease | None = None
        self.prompt: Prompt | None = None
        self.compress_s: float | None = None
        self.binding: Binding | None = None
        self.relay: stage_forward.Relay | None = None
        self.queue_s = 0.0
        self.sent_s: float | None = None
        self.attempts: list[Attempt] = []
        self.dispatched = False
        self.rescued = False
        self.refusal: Refusal | None = None
        self.outcome: Outcome | None = None
        self.task: asyncio.Task[object] | None = None
        """Who walks, once it holds a managed lease."""
        self.evicted = False
        self.lease_changes: list[tuple[float, str, int]] = []
        self.reserved_tokens = 0
        """What the lease has reserved, extensions included."""


class Pipeline:
    """The request path. One instance serves every request of a process."""

    def __init__(
        self,
        *,
        models: Mapping[str, ServedModel],
        keyring: stage_authenticate.Keyring,
        store: LeaseStore,
        upstream: Upstream,
        metrics: Metrics,
        records: RecordSink,
        compressor: CompressRunner | None = None,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        log_prompts: bool = False,
    ) -> None:
        """`models` by name and by alias; `clock` monotonic, `wall_clock` Unix time, in seconds."""
        self._models = models
        self._keyring = keyring
        self._store = store
        self._upstream = upstream
        self._metrics = metrics
        self._records = records
        self._compressor = compressor
        self._clock = clock
        self._wall_clock = wall_clock
        self._log_prompts = log_prompts
        self._held: dict[str, Walk] = {}
        """Requests that hold a managed lease, by its id."""
        self._reclaims: set[asyncio.Task[None]] = set()
        store.on_evict(self.evict)

    async def serve(self, incoming: Incoming, reply: ClientReply) -> None:
        """Answer one request. Raises only CancelledError, after settling."""
        walk = Walk()
        try:
            await self._walk(incoming, reply, walk)
        except Refusal as refusal:
            walk.refusal = refusal
            walk.outcome = Outcome(label="refused", status=refusal.status)
            await self._refuse(incoming, reply, walk, refusal)
        except asyncio.CancelledError:
            walk.outcome = (
                walk.relay.cut_short()
                if walk.relay is not None
                else Outcome(label="disconnected", status=499)
            )
            if not walk.evicted or walk.task is None or walk.task.uncancel():
                raise
            await self._give_way(incoming, reply, walk, walk.outcome)
        finally:
            self._settle(incoming, walk)

    def evict(self, lease_id: str) -> None:
        """End a request whose place somebody else is entitled to; it settles as ever."""
        walk = self._held.get(lease_id)
        if walk is not None and walk.task is not None and not walk.evicted:
            walk.evicted = True
            walk.task.cancel()

    def extend(self) -> None:
        """Have the leases of streams that run past their reserve reserve more.

        Called now and then, off the request path: nothing is cut, the bucket pays.
        """
        for walk in self._held.values():
            lease, served, relay = walk.lease, walk.served, walk.relay
            if lease is None or served is None or relay is None or walk.estimate is None:
                continue
            used = walk.estimate.input_tokens_total + relay.emitted
            if used > walk.reserved_tokens:
                walk.reserved_tokens = used + _EXTENSION_TOKENS
                walk.lease_changes.append((self._wall_clock(), "resize", walk.reserved_tokens))
                self._store.resize(
                    lease, walk.reserved_tokens, walk.reserved_tokens * served.kv_bytes_per_token
                )

    def know(self, key: bytes | None) -> Principal:
        """Stage 1 alone, for a body that is large enough to ask first. Raises Refusal."""
        return stage_authenticate.authenticate(self._keyring, key, self._wall_clock())

    async def _walk(self, incoming: Incoming, reply: ClientReply, walk: Walk) -> None:
        endpoint = incoming.endpoint
        # 1 authenticate
        walk.principal = principal = stage_authenticate.authenticate(
            self._keyring, incoming.head.api_key, incoming.received_unix_s
        )
        # 2 classify, estimate
        walk.facts = facts = stage_estimate.read(endpoint, incoming.body, incoming.head.category)
        walk.served = served = stage_estimate.find_model(self._models, facts.model)
        stage_authenticate.permit_model(principal, served.name)
        walk.estimate = estimate = stage_estimate.estimate(served, endpoint, facts, principal)
        # 3 plan
        walk.planned = planned = stage_plan.plan(served, endpoint, estimate)
        band = stage_plan.band(served, endpoint, principal, incoming, facts, estimate, planned)
        compresses = isinstance(band, Band) and self._compressor is not None
        if isinstance(band, Band) and compresses and not served.observe:
            walk.plan = plan = band_plan(planned, band)
        else:
            walk.plan = plan = stage_plan.applied(served, estimate, planned)
        # 4 admit
        walk.lease = await stage_admit.admit(
            self._store, served, principal, incoming.lease_id, estimate, plan
        )
        if walk.lease.limits is not None:
            walk.reserved_tokens = walk.lease.cost_tokens
            walk.task = asyncio.current_task()
            self._held[walk.lease.id] = walk
        # 5 compress, 6 adjust the lease
        if isinstance(band, Band) and plan.compress and walk.lease.pool == band.pool:
            await self._compress(incoming, walk, served, facts, band)
        else:
            why = ("observed" if served.observe else "spilled") if compresses else str(band)
            walk.prompt = Prompt(body=incoming.body, not_compressed=why)
        prompt = _found(walk.prompt)
        # 7 bind, 8 queue, 9 dispatch and forward
        walk.outcome = await self._serve_leased(incoming, reply, walk, served, facts, prompt)

    async def _compress(
        self, incoming: Incoming, walk: Walk, served: ServedModel, facts: BodyFacts, band: Band
    ) -> None:
        """Stages 5 and 6: the prompt, its estimate and its lease; the plan if it went wrong."""
        runner, planned = _found(self._compressor), _found(walk.planned)
        started_s = self._clock()
        walk.prompt, walk.estimate = await stage_compress.compress(
            runner, served, incoming, facts, _found(walk.estimate), band
        )
        walk.compress_s = self._clock() - started_s
        if walk.prompt.only_pool is None:
            walk.plan = planned
        held = _found(walk.lease)
        walk.lease = await stage_adjust.adjust(
            self._store, served, held, planned, walk.prompt, walk.estimate
        )
        now_s = self._wall_clock()
        if walk.lease.pool != held.pool:
            walk.lease_changes.append((now_s, "transfer", walk.lease.pool))
        elif walk.prompt.only_pool is not None:
            walk.reserved_tokens = walk.lease.cost_tokens
            walk.lease_changes.append((now_s, "resize", walk.lease.cost_tokens))

    async def _serve_leased(
        self,
        incoming: Incoming,
        reply: ClientReply,
        walk: Walk,
        served: ServedModel,
        facts: BodyFacts,
        prompt: Prompt,
    ) -> Outcome:
        """Stages 7-9, repeated while attempts fail before the client saw a byte."""
        tried: list[tuple[int, int]] = []
        sent = 0
        last: Fault | None = None
        home = served.homes.find(facts.previous_response_id)
        while True:
            binding = await self._bind(walk, served, tried, last, home)
            walk.queue_s += await stage_queue.queue()
            found = await self._attempt(incoming, reply, walk, served, facts, prompt, binding)
            if isinstance(found, Outcome):
                if found.response_id is not None:
                    served.homes.remember(found.response_id, binding.pool, binding.worker)
                return found
            last = found
            tried.append((binding.pool, binding.worker))
            sent += walk.relay is not None and walk.relay.sent
            larger = larger_pools(served.routing, binding.pool)
            step = next_step(
                found,
                sent=sent,
                max_attempts=served.max_attempts,
                repeatable=stage_dispatch.repeatable(facts),
                larger_pool=bool(larger),
            )
            if step == "give_up" or len(tried) > _MAX_TRIED:
                return await self._give_up(incoming, reply, walk, found)
            if step == "rescue":
                await self._rescue(walk, tuple(larger))
            else:
                self._metrics.retries.add(found.kind)

    async def _bind(
        self,
        walk: Walk,
        served: ServedModel,
        tried: list[tuple[int, int]],
        last: Fault | None,
        home: tuple[int, int] | None,
    ) -> Binding:
        """Stage 7; a worker of another pool takes the lease along."""
        lease, plan = _found(walk.lease), _found(walk.plan)
        pools = (lease.pool, *(p for p in (plan.pool, *plan.alternates) if p != lease.pool))
        now_s = self._clock()
        try:
            binding = stage_bind.bind(served, pools, tried, now_s, home)
        except Unavailable:
            if last is not None and last.kind in ("busy", "server_error") and last.body:
                raise stage_explain.engine_refusal(last) from None
            raise
        if binding.pool != lease.pool:
            walk.lease = await self._transfer(walk, binding.pool)
        walk.binding = binding
        return binding

    async def _attempt(
        self,
        incoming: Incoming,
        reply: ClientReply,
        walk: Walk,
        served: ServedModel,
        facts: BodyFacts,
        prompt: Prompt,
        binding: Binding,
    ) -> Outcome | Fault:
        """Stage 9 on one worker, with its load and health kept right whatever happens."""
        pool = served.pools[binding.pool]
        worker = served.workers[binding.pool][binding.worker]
        lease, estimate = _found(walk.lease), _found(walk.estimate)
        if prompt.only_pool is not None and prompt.only_pool != binding.pool:
            # What was cut was cut for one pool; any other gets the client's own.
            walk.prompt = prompt = Prompt(body=incoming.body, not_compressed="other_pool")
        priority = stage_dispatch.engine_priority(served, _found(walk.principal), lease)
        call = stage_dispatch.upstream_call(
            served, incoming, facts, estimate, prompt, binding, priority
        )
        walk.relay = relay = stage_forward.Relay(
            incoming.endpoint,
            reply,
            self._clock,
            started_s=incoming.received_s,
            strip_usage=stage_dispatch.injects_usage(served, incoming.endpoint, facts),
        )
        if walk.sent_s is None:
            walk.sent_s = self._clock()
        walk.dispatched = True
        fleet.start(pool, binding.worker, lease.sequences, lease.cost_tokens)
        result = "cancelled"
        waiting = self._watch_wait(walk, served, lease)
        try:
            found = await relay.run(self._upstream, worker, call, self._headers(incoming, walk))
            result = found.label if isinstance(found, Outcome) else found.kind
        finally:
            if waiting is not None:
                waiting.cancel()
            fleet.finish(pool, binding.worker, lease.sequences, lease.cost_tokens)
            walk.attempts.append(Attempt(pool=pool.name, worker=worker.id, result=result))
        self._note_health(served, binding, found)
        return found

    def _watch_wait(
        self, walk: Walk, served: ServedModel, lease: Lease
    ) -> asyncio.TimerHandle | None:
        """Have others give way when a protected request entered a full pool and waits there."""
        if not (lease.protected and lease.contended):
            return None

        def waited() -> None:
            if walk.relay is None or not walk.relay.emitted:
                task = asyncio.ensure_future(self._store.reclaim(lease))
                self._reclaims.add(task)
                task.add_done_callback(self._reclaims.discard)

        return asyncio.get_running_loop().call_later(served.reclaim_s, waited)

    async def _give_way(
        self, incoming: Incoming, reply: ClientReply, walk: Walk, outcome: Outcome
    ) -> None:
        """Tell the client of an evicted request: 429, or an in-band error once bytes were sent."""
        walk.outcome = msgspec.structs.replace(outcome, label="evicted", status=429)
        walk.refusal = refusal = RateLimited(
            "This request gave way to one with a reserved place. Please try again later.",
            reason="evicted",
            code="evicted",
            retry_after_s=_EVICTED_WAIT_S,
            should_retry=True,
        )
        await self._refuse(incoming, reply, walk, refusal)

    def _note_health(self, served: ServedModel, binding: Binding, found: Outcome | Fault) -> None:
        pool = served.pools[binding.pool]
        if isinstance(found, Outcome):
            broke = found.label == "upstream_error"
        elif found.kind == "connect":
            fleet.unreachable(pool, binding.worker)
            return
        else:
            broke = hurts_health(found)
        if not broke:
            fleet.succeeded(pool, binding.worker)
        elif fleet.failed(pool, binding.worker, served.health, self._clock()):
            self._metrics.ejections.add(pool.name, pool.workers[binding.worker])

    async def _rescue(self, walk: Walk, larger: tuple[int, ...]) -> None:
        """Overflow rescue: the original goes to the next larger window before a byte was sent."""
        self._metrics.misroutes.add("overflow")
        walk.rescued = True
        pool = larger[0]
        walk.lease = await self._transfer(walk, pool)
        walk.plan = msgspec.structs.replace(_found(walk.plan), pool=pool, alternates=larger[1:])

    async def _transfer(self, walk: Walk, pool: int) -> Lease:
        """Take the lease along to another pool."""
        walk.lease_changes.append((self._wall_clock(), "transfer", pool))
        return await self._store.transfer(_found(walk.lease), pool)

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
            refusal = stage_explain.engine_refusal(fault)
        walk.refusal = refusal
        await reply.refuse(refusal, self._headers(incoming, walk))
        label = "error" if fault.kind == "overflow" else "upstream_error"
        return Outcome(label=label, status=refusal.status)

    async def _refuse(
        self, incoming: Incoming, reply: ClientReply, walk: Walk, refusal: Refusal
    ) -> None:
        if reply.started:
            await reply.break_off(refusal)
        else:
            await reply.refuse(refusal, self._headers(incoming, walk))

    def _headers(self, incoming: Incoming, walk: Walk) -> Headers:
        return stage_explain.response_headers(
            incoming.request_id,
            walk.served,
            walk.estimate,
            walk.lease,
            walk.binding,
            walk.prompt,
            walk.queue_s,
        )

    def _settle(self, incoming: Incoming, walk: Walk) -> None:
        """Stage 10. Without an await, so no cancellation can come between."""
        outcome = walk.outcome or Outcome(label="internal_error", status=500)
        lease, served, estimate = walk.lease, walk.served, walk.estimate
        if walk.task is not None:
            self._held.pop(incoming.lease_id, None)
        charged = None
        now_unix_s = self._wall_clock()
        if lease is not None and estimate is not None and served is not None:
            charged = stage_settle.settle(
                self._store,
                served,
                lease,
                outcome,
                estimate,
                dispatched=walk.dispatched,
                unix_s=now_unix_s,
            )
            if walk.facts and walk.principal and walk.prompt:
                stage_settle.learn(
                    served,
                    incoming.endpoint,
                    walk.principal,
                    walk.facts,
                    estimate,
                    walk.prompt,
                    outcome,
                )
                stage_settle.remember(served, walk.principal, walk.prompt, outcome)
        record = stage_explain.decision_record(
            incoming,
            outcome,
            charged,
            principal=walk.principal,
            facts=walk.facts,
            served=served,
            estimate=estimate,
            planned=walk.planned,
            plan=walk.plan,
            lease=lease,
            prompt=walk.prompt,
            binding=walk.binding,
            attempts=tuple(walk.attempts),
            refusal=walk.refusal,
            rescued=walk.rescued,
            queue_s=walk.queue_s,
            sent_s=walk.sent_s,
            now_s=self._clock(),
            settled_unix_s=now_unix_s,
            lease_changes=tuple(walk.lease_changes),
            evicted=walk.evicted,
            compress_s=walk.compress_s,
            prompts=self._log_prompts,
        )
        stage_explain.count(self._metrics, record, estimate, served, lease)
        self._records.append(record)


_T = TypeVar("_T")


def _found(record: _T | None) -> _T:
    """A record that an earlier stage has set."""
    if record is None:
        raise RuntimeError("a stage ran before the one it stands on")
    return record


_EXTENSION_TOKENS = 256
"""How far ahead a stream reserves that has run past its reserve."""
_EVICTED_WAIT_S = 5.0
_MAX_TRIED = 64
"""Attempts, refused connections included, after which a request gives up."""
