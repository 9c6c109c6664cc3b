"""The ten stages, in order. Every request walks them; nothing else decides about requests.

 1 authenticate   2 estimate   3 plan   4 admit   5 compress   6 adjust lease
 7 bind worker    8 queue      9 dispatch, forward             10 settle (always)

Stages 7-9 repeat while an attempt fails before the client saw a byte (`dispatcher`). The request
keeps its one lease through all of it, and stage 10 settles it exactly once: on success, failure,
disconnect or cancellation.
"""

import asyncio
from collections.abc import Callable, Generator, Mapping
from math import inf
from types import coroutine

import msgspec

from gateway.errors import RateLimited, Refusal
from gateway.metrics import Metrics
from gateway.pipeline.dispatcher import Exchange, answer_lines
from gateway.pipeline.settlement import TOGETHER_S, Settling
from gateway.pipeline.walk import Walk, found
from gateway.policy.model_runtime import ServedModel
from gateway.policy.pools.routing import band_plan
from gateway.policy.pools.routing_table import Band
from gateway.policy.request.members import by_name
from gateway.ports import BodyReads, ClientReply, CompressRunner, LeaseStore, RecordSink, Upstream
from gateway.records.attempt import Outcome
from gateway.records.request import OPEN, BodyFacts, Incoming, Principal, Prompt
from gateway.stages import adjust as stage_adjust
from gateway.stages import admit as stage_admit
from gateway.stages import authenticate as stage_authenticate
from gateway.stages import compress as stage_compress
from gateway.stages import estimate as stage_estimate
from gateway.stages import plan as stage_plan


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
        reader: BodyReads | None = None,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        log_prompts: bool = False,
    ) -> None:
        """`models` by name and by alias; `clock` monotonic, `wall_clock` Unix time, in seconds."""
        self._models = models
        self._keyring = keyring
        self._store = store
        self._compressor = compressor
        self._reader = reader
        self._clock = clock
        self._wall_clock = wall_clock
        self._settling = Settling(
            store=store,
            metrics=metrics,
            records=records,
            clock=clock,
            wall_clock=wall_clock,
            log_prompts=log_prompts,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._newest_s = -inf
        """When the newest request came."""
        self._held: dict[str, Walk] = {}
        """Requests that hold a managed lease, by its id."""
        self._exchange = Exchange(
            store=store, upstream=upstream, metrics=metrics, clock=clock, wall_clock=wall_clock
        )
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
            # 10 settle: without an await, so no cancellation can come between.
            if walk.task is not None:
                self._held.pop(incoming.lease_id, None)
            self._settling.settle(incoming, walk)

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
            prompts = min(walk.estimate.input_tokens_total, lease.cost_tokens)
            used = prompts + relay.emitted()
            if used > walk.reserved_tokens:
                walk.reserved_tokens = used + _EXTENSION_TOKENS
                walk.lease_changes.append((self._wall_clock(), "resize", walk.reserved_tokens))
                self._store.resize(
                    lease, walk.reserved_tokens, walk.reserved_tokens * served.kv_bytes_per_token
                )

    def tick(self) -> None:
        """Have the schedulers look after dead and stalled workers; a few times a second."""
        # A model stands under its aliases too.
        self._exchange.tick({id(model): model for model in self._models.values()}.values())

    def frozen(self, served: ServedModel, pool: int, worker: int) -> None:
        """An engine was found frozen; see `Exchange.frozen`."""
        self._exchange.frozen(served, pool, worker)

    def know(self, key_digest: bytes | None) -> Principal:
        """Stage 1 alone, for a body that is large enough to ask first. Raises Refusal."""
        return stage_authenticate.authenticate(self._keyring, key_digest, self._wall_clock())

    async def _walk(self, incoming: Incoming, reply: ClientReply, walk: Walk) -> None:
        endpoint = incoming.endpoint
        crowded = incoming.received_s - self._newest_s < TOGETHER_S
        self._newest_s = incoming.received_s
        # 1 authenticate
        walk.principal = principal = stage_authenticate.authenticate(
            self._keyring, incoming.head.key_digest, incoming.received_unix_s
        )
        # 2 classify, estimate
        if self._reader is not None and stage_estimate.is_heavy(endpoint, incoming.body):
            types = stage_estimate.content_types(endpoint, incoming.head)
            facts = await self._reader.read(endpoint, incoming.body, principal.entitlement, types)
        else:
            facts = stage_estimate.read(endpoint, incoming.body, incoming.head)
        walk.facts = facts
        walk.served = served = stage_estimate.find_model(self._models, facts.model)
        stage_authenticate.permit_model(principal, served.name)
        if facts.previous_response_id is not None:
            if principal is not OPEN:
                await stage_estimate.heard_of(served, facts)
            walk.facts = facts = stage_estimate.continued(served, facts, principal)
        walk.estimate = estimate = stage_estimate.estimate(
            served, endpoint, facts, principal, incoming.head.category
        )
        # 3 plan
        walk.prefix = prefix = stage_plan.look_up(
            served, endpoint, principal, facts, facts.members, estimate.input_tokens_total
        )
        walk.planned = planned = stage_plan.plan(served, endpoint, estimate, prefix)
        band = stage_plan.band(
            served, endpoint, principal, incoming, facts, estimate, planned, prefix
        )
        compresses = isinstance(band, Band) and self._compressor is not None
        if isinstance(band, Band) and compresses and not served.routing.observe:
            walk.plan = plan = band_plan(planned, band)
        else:
            walk.plan = plan = stage_plan.applied(served, estimate, planned)
        # 4 admit
        walk.lease = await stage_admit.admit(
            self._store, served, principal, incoming.lease_id, estimate, plan
        )
        walk.admitted = (plan, walk.lease)
        if walk.lease.limits is not None:
            walk.reserved_tokens = walk.lease.cost_tokens
            # The loop is asked for once: it costs a call of the system.
            self._loop = self._loop or asyncio.get_running_loop()
            walk.task = asyncio.current_task(self._loop)
            self._held[walk.lease.id] = walk
        # Requests that come together go on together: each half of the way, walked by one after
        # the other, stays in the processor's caches; the whole way is too long for them. Where
        # admission had to wait for a store they do so anyway.
        if crowded and self._newest_s == incoming.received_s:
            await _next_turn()
        # 5 compress, 6 adjust the lease
        if isinstance(band, Band) and plan.compress and walk.lease.pool == band.pool:
            await self._compress(incoming, walk, served, facts, band)
        else:
            why = ("observed" if served.routing.observe else "spilled") if compresses else str(band)
            walk.prompt = Prompt(body=incoming.body, not_compressed=why)
        # 7 bind, 8 queue, 9 dispatch and forward
        walk.outcome = await self._exchange.run(incoming, reply, walk, served, facts)

    async def _compress(
        self, incoming: Incoming, walk: Walk, served: ServedModel, facts: BodyFacts, band: Band
    ) -> None:
        """Stages 5 and 6: the prompt, its estimate and its lease; the plan if it went wrong."""
        runner, planned = found(self._compressor), found(walk.planned)
        started_s = self._clock()
        whole = found(walk.estimate)
        walk.prompt, walk.estimate = await stage_compress.compress(
            runner, served, incoming, facts, whole, band
        )
        walk.compress_s = self._clock() - started_s
        if walk.prompt.only_pool is not None:
            walk.prefix = stage_plan.look_up(
                served,
                incoming.endpoint,
                found(walk.principal),
                facts,
                by_name(walk.prompt.body),
                walk.estimate.input_tokens_total,
            )
        if walk.prompt.only_pool is None:
            walk.plan = planned
        else:
            walk.whole = whole
        held = found(walk.lease)
        walk.lease = await stage_adjust.adjust(
            self._store, served, held, planned, walk.prompt, walk.estimate
        )
        now_s = self._wall_clock()
        if walk.lease.pool != held.pool:
            walk.lease_changes.append((now_s, "transfer", walk.lease.pool))
        elif walk.prompt.only_pool is not None:
            walk.reserved_tokens = walk.lease.cost_tokens
            walk.lease_changes.append((now_s, "resize", walk.lease.cost_tokens))

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

    async def _refuse(
        self, incoming: Incoming, reply: ClientReply, walk: Walk, refusal: Refusal
    ) -> None:
        if reply.started:
            await reply.break_off(refusal)
        else:
            await reply.refuse(refusal, answer_lines(incoming, walk))


@coroutine
def _next_turn() -> Generator[None, None, None]:
    """Let all go first that can, once."""
    yield


_EXTENSION_TOKENS = 256
"""How far ahead a stream reserves that has run past its reserve."""
_EVICTED_WAIT_S = 5.0
