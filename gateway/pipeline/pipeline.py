"""The ten stages, in order. Every request walks them; nothing else decides about requests.

 1 authenticate   2 estimate   3 plan   4 admit   5 compress   6 adjust lease
 7 bind worker    8 queue      9 dispatch, forward             10 settle (always)

Stages 7-9 repeat while an attempt fails before the client saw a byte (`dispatcher`). The request
keeps its one lease through all of it, and stage 10 settles it exactly once: on success, failure,
disconnect or cancellation.
"""

import asyncio
from collections.abc import Callable, Generator, Iterable, Mapping
from functools import partial
from math import inf
from types import coroutine

import msgspec

from gateway.errors import KeysAwaited, RateLimited, Refusal, Told, told
from gateway.fleet.model_runtime import ModelRuntime
from gateway.metrics import SAMPLED_ONE_IN, UNTIMED, Metrics, StageTimer
from gateway.payload.body import LOOP_US, TakesLong
from gateway.payload.members import by_name
from gateway.pipeline import adjust as stage_adjust
from gateway.pipeline import admit as stage_admit
from gateway.pipeline import authenticate as stage_authenticate
from gateway.pipeline import compress as stage_compress
from gateway.pipeline import estimate as stage_estimate
from gateway.pipeline import plan as stage_plan
from gateway.pipeline.dispatcher import Dispatcher, require
from gateway.pipeline.fallbacks import Instead, model_of
from gateway.pipeline.fallbacks import following as following_of
from gateway.pipeline.request_progress import (
    Admitted,
    Attempts,
    RequestEnding,
    RequestLease,
    RequestProgress,
    Sending,
    known_lines,
)
from gateway.pipeline.settlement import TOGETHER_S, Settler
from gateway.ports import (
    BodyReads,
    ClientReply,
    CompressRunner,
    LeaseStore,
    RecordSink,
    Upstream,
)
from gateway.records.attempt import Outcome
from gateway.records.estimate import LengthEstimate
from gateway.records.request import OPEN, BodyFacts, Incoming, Principal, Prompt, RequestHead
from gateway.routing.routing import window_plan
from gateway.routing.routing_table import CompressionWindow
from gateway.routing.split_alias import SplitAlias


class Pipeline:
    """The request path. One instance serves every request of a process."""

    def __init__(
        self,
        *,
        models: Mapping[str, ModelRuntime],
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
        splits: Mapping[str, SplitAlias] | None = None,
    ) -> None:
        """`models` by name and by alias, `splits` by name.

        `clock` monotonic, `wall_clock` Unix time, in seconds.
        """
        self._models = models
        self._splits = {} if splits is None else splits
        self._keyring = keyring
        self._store = store
        self._compressor = compressor
        self._reader = reader
        self._clock = clock
        self._metrics = metrics
        self._until_sample = 1
        """Requests until the next one whose stages are measured."""
        self._wall_clock = wall_clock
        self._settler = Settler(
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
        self._held: dict[str, _Held] = {}
        """Requests that hold a managed lease, by its id."""
        self._dispatcher = Dispatcher(store=store, upstream=upstream, metrics=metrics, clock=clock)
        store.on_evict(self.evict)

    async def serve(
        self, incoming: Incoming, reply: ClientReply, instead: Instead | None = None
    ) -> None:
        """Answer one request. Raises only CancelledError, after settling.

        `instead`: the asked model could not, and others may (`gateway.pipeline.fallbacks`). Each
        model's try has a lease and a decision record of its own.
        """
        progress = RequestProgress(self._timer())
        outcome = Outcome(label="internal_error", status=500)
        heard: Told | None = None
        following: Instead | None = None
        try:
            outcome = await self._run(incoming, reply, progress, instead)
            heard = progress.attempts.told if progress.attempts else None
        except Refusal as refusal:
            heard = told(refusal)
            if not reply.started:
                following = following_of(progress, refusal, instead, self._wall_clock())
            outcome = _refused(progress, refusal, following)
            await self._over(incoming, progress, outcome)
            if following is None:
                await reply.refuse(refusal, known_lines(incoming, progress))
        except asyncio.CancelledError:
            relay = None if progress.attempts is None else progress.attempts.relay
            outcome = Outcome(label="disconnected", status=499)
            outcome = outcome if relay is None else relay.cut_short()
            held = self._held.get(incoming.lease_id)
            if held is None or not held.evicted or held.task.uncancel():
                raise
            # 429, in-band once bytes were sent.
            gave_way = RateLimited(
                "This request gave way to one with a reserved place. Please try again later.",
                reason="evicted",
                retry_after_s=_EVICTED_WAIT_S,
                should_retry=True,
            )
            heard = told(gave_way)
            outcome = msgspec.structs.replace(outcome, label="evicted", status=gave_way.status)
            await self._over(incoming, progress, outcome)
            await reply.refuse(gave_way, known_lines(incoming, progress))
        finally:
            # 10 settle: without an await, so no cancellation can come between.
            held = self._held.pop(incoming.lease_id, None)
            evicted = held is not None and held.evicted
            ending = RequestEnding(outcome, heard, evicted)
            self._settler.settle(incoming, progress, ending)
        if following is not None:
            lease_id = f"{incoming.lease_id}.{following.turn}"
            again = msgspec.structs.replace(incoming, lease_id=lease_id)
            await self.serve(again, reply, following)

    def _timer(self) -> StageTimer:
        self._until_sample -= 1
        if self._until_sample:
            return UNTIMED
        self._until_sample = SAMPLED_ONE_IN
        return StageTimer(self._metrics.overhead, self._clock)

    def evict(self, lease_id: str) -> None:
        """End a request whose place somebody else is entitled to; it settles as ever."""
        held = self._held.get(lease_id)
        if held is not None and not held.evicted and held.progress.released is None:
            held.evicted = True
            held.task.cancel()

    def extend(self) -> None:
        """Have the leases of streams that run past their reserve reserve more.

        Called now and then, off the request path: nothing is cut, the bucket pays.
        """
        for held in self._held.values():
            attempts = held.progress.attempts
            if attempts is None or attempts.relay is None or held.progress.released is not None:
                continue
            admitted, lease = attempts.admitted, attempts.admitted.lease
            expected = attempts.sending.estimate.input_tokens_total
            used = min(expected, lease.current.cost_tokens) + attempts.relay.emitted()
            if used > lease.reserved_tokens:
                tokens = used + _EXTENSION_TOKENS
                lease.extend(tokens, tokens * admitted.served.admission.kv_bytes_per_token)

    def tick(self, retiring: Iterable[ModelRuntime] = ()) -> None:
        """Have the schedulers look after dead and stalled workers; a few times a second.

        `retiring`: models that a reload removed, while requests of theirs are under way.
        """
        # A model stands under its aliases too.
        models = (*self._models.values(), *retiring)
        self._dispatcher.tick({id(model): model for model in models}.values())

    def frozen(self, served: ModelRuntime, pool: int, worker: int) -> None:
        """An engine was found frozen; see `Dispatcher.frozen`."""
        self._dispatcher.frozen(served, pool, worker)

    def know(self, head: RequestHead) -> Principal:
        """Stage 1 alone, for a body that is large enough to ask first. Raises Refusal."""
        return stage_authenticate.authenticate(
            self._keyring, head.key_digest, self._wall_clock(), head.token
        )

    async def _read(
        self, incoming: Incoming, progress: RequestProgress, instead: Instead | None
    ) -> tuple[Principal, BodyFacts, ModelRuntime, LengthEstimate]:
        """Stages 1 and 2: who asks, for what of which model, and how long it should be."""
        endpoint = incoming.endpoint
        head, now_unix_s = incoming.head, incoming.received_unix_s
        try:
            principal = stage_authenticate.authenticate(
                self._keyring, head.key_digest, now_unix_s, head.token
            )
        except KeysAwaited:
            principal = await stage_authenticate.authenticate_head(self._keyring, head, now_unix_s)
        progress.key = progress.principal = principal
        progress.timer.end("authenticate")
        if instead is not None:
            facts = instead.facts
        else:
            facts = await self._read_body(incoming, principal)
        progress.facts = facts
        if instead is not None:
            served = self._models[instead.models[0]]
        elif self._splits:
            served = model_of(self._models, self._splits, facts, principal)
        else:
            served = stage_estimate.find_model(self._models, facts.model)
        progress.served = served
        if (
            instead is None
            and (served.adapters.any or facts.lora)
            and (adapter := stage_estimate.adapter_of(served, facts))
        ):
            progress.facts = facts = msgspec.structs.replace(facts, adapter=adapter)
        progress.principal = principal = stage_authenticate.entitled(
            principal,
            served.name,
            incoming.received_unix_s,
            incoming.head.entitlement if instead is None else None,
            facts.members,
            facts.adapter,
        )
        if facts.previous_response_id is not None:
            if principal is not OPEN:
                await stage_estimate.await_response_location(served, facts)
            progress.facts = facts = stage_estimate.continued(served, facts, principal)
        progress.estimate = estimate = stage_estimate.estimate(
            served, endpoint, facts, principal, incoming.head.category
        )
        progress.timer.end("estimate")
        return principal, facts, served, estimate

    async def _read_body(self, incoming: Incoming, principal: Principal) -> BodyFacts:
        """The body's facts, read here if that takes a moment only."""
        endpoint, head, body = incoming.endpoint, incoming.head, incoming.body
        if self._reader is None:
            return stage_estimate.read(endpoint, body, head)
        try:
            return stage_estimate.read(endpoint, body, head, LOOP_US)
        except TakesLong:
            types = stage_estimate.content_types(endpoint, head)
            return await self._reader.read(endpoint, body, principal.tenant, types)

    async def _run(
        self,
        incoming: Incoming,
        reply: ClientReply,
        progress: RequestProgress,
        instead: Instead | None,
    ) -> Outcome:
        crowded = incoming.received_s - self._newest_s < TOGETHER_S
        self._newest_s = incoming.received_s
        # 1 authenticate, 2 classify and estimate
        principal, facts, served, estimate = await self._read(incoming, progress, instead)
        if instead is None:
            self._dispatcher.refuse_suspect(principal.tenant, incoming.body)
        # 3 plan
        prefix = stage_plan.look_up(
            served.scheduling,
            incoming.endpoint,
            principal,
            facts,
            facts.members,
            estimate.input_tokens_total,
            facts.adapter,
        )
        progress.planned = planned = stage_plan.plan(served, incoming.endpoint, estimate, prefix)
        window = stage_plan.compression_window(
            served, incoming.endpoint, principal, incoming, facts, estimate, planned, prefix
        )
        compresses = isinstance(window, CompressionWindow) and self._compressor is not None
        if isinstance(window, CompressionWindow) and compresses and not served.routing.observe:
            plan = window_plan(planned, window)
        else:
            plan = stage_plan.applied(served, estimate, planned)
        progress.plan = plan
        progress.timer.end("plan")
        # 4 admit
        taken = await stage_admit.admit(
            self._store, served, principal, incoming.lease_id, estimate, plan
        )
        progress.lease = lease = RequestLease(self._store, self._wall_clock, plan, taken)
        if taken.limits is not None:
            self._hold(progress, taken.id)
        progress.timer.end("admit")
        # Requests that come together go on together: each half of the way, walked by one after
        # the other, stays in the processor's caches; the whole way is too long for them. Where
        # admission had to wait for a store they do so anyway.
        if crowded and self._newest_s == incoming.received_s:
            await _next_turn()
            progress.timer.begin()
        # 5 compress, 6 adjust the lease
        if isinstance(window, CompressionWindow) and plan.compress and taken.pool == window.pool:
            whole = Sending(Prompt(body=incoming.body), estimate, planned, prefix)
            sending = await self._compress(
                incoming, progress, principal, facts, served, window, whole
            )
        else:
            why = "spilled" if compresses else str(window)
            if isinstance(window, CompressionWindow) and compresses and served.routing.observe:
                cut, _ = await self._cut(incoming, progress, facts, served, window, estimate)
                why = cut.not_compressed if cut.only_pool is None else "observed"
            prompt = Prompt(body=incoming.body, not_compressed=why)
            sending = progress.sending = Sending(prompt, estimate, plan, prefix)
        # 7 bind, 8 queue, 9 dispatch and forward
        progress.attempts = attempts = Attempts(
            Admitted(principal, facts, served, lease, estimate, sending), progress.timer
        )
        attempts.over = partial(self._over, incoming, progress)
        return await self._dispatcher.run(incoming, reply, attempts)

    async def _over(self, incoming: Incoming, progress: RequestProgress, outcome: Outcome) -> None:
        """Settle a request whose client is about to see its end, or that another model takes."""
        arrival = self._settler.release(incoming, progress, outcome, heard=True)
        if arrival is not None:
            await arrival

    def _hold(self, progress: RequestProgress, lease_id: str) -> None:
        """Note who may have to give way, or to reserve more."""
        # The loop is asked for once: it costs a call of the system.
        self._loop = self._loop or asyncio.get_running_loop()
        task = asyncio.current_task(self._loop)
        if task is not None:
            self._held[lease_id] = _Held(progress, task)

    async def _cut(
        self,
        incoming: Incoming,
        progress: RequestProgress,
        facts: BodyFacts,
        served: ModelRuntime,
        window: CompressionWindow,
        whole: LengthEstimate,
    ) -> tuple[Prompt, LengthEstimate]:
        """Run the compressor, and note how long it took."""
        started_s = self._clock()
        prompt, estimate = await stage_compress.compress(
            require(self._compressor), served, incoming, facts, whole, window
        )
        progress.compress_s = self._clock() - started_s
        return prompt, estimate

    async def _compress(
        self,
        incoming: Incoming,
        progress: RequestProgress,
        principal: Principal,
        facts: BodyFacts,
        served: ModelRuntime,
        window: CompressionWindow,
        whole: Sending,
    ) -> Sending:
        """Stages 5 and 6: what is sent, and its lease; the boundary's plan if it went wrong."""
        lease = require(progress.lease)
        prompt, estimate = await self._cut(
            incoming, progress, facts, served, window, whole.estimate
        )
        progress.timer.begin()
        if prompt.only_pool is None:
            sending = whole._replace(prompt=prompt, estimate=estimate)
        else:
            prefix = stage_plan.look_up(
                served.scheduling,
                incoming.endpoint,
                principal,
                facts,
                by_name(prompt.body),
                estimate.input_tokens_total,
                facts.adapter,
            )
            sending = Sending(prompt, estimate, lease.asked, prefix)
        progress.sending = sending
        lease.adjusted(
            await stage_adjust.adjust(
                self._store, served.admission, lease.current, whole.plan, prompt, estimate
            )
        )
        progress.timer.end("adjust")
        return sending


class _Held:
    """A request with a managed lease: it may have to give way, or to reserve more."""

    __slots__ = ("evicted", "progress", "task")

    def __init__(self, progress: RequestProgress, task: asyncio.Task[object]) -> None:
        self.progress = progress
        self.task = task
        """The task that serves it."""
        self.evicted = False


def _refused(progress: RequestProgress, refusal: Refusal, following: Instead | None) -> Outcome:
    """How a refused try ended: here, at its engines, or with another model's turn."""
    label = "refused" if following is None else "fell_back"
    attempts = progress.attempts
    if following is None and attempts is not None and attempts.told == told(refusal):
        label = "upstream_error"
    return Outcome(label=label, status=refusal.status)


@coroutine
def _next_turn() -> Generator[None, None, None]:
    """Let all go first that can, once."""
    yield


_EXTENSION_TOKENS = 256
"""How far ahead a stream reserves that has run past its reserve."""
_EVICTED_WAIT_S = 5.0
