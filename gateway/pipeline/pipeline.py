"""The ten stages, in order. Every request walks them; nothing else decides about requests.

 1 authenticate   2 estimate   3 plan   4 admit   5 compress   6 adjust lease
 7 bind worker    8 queue      9 dispatch, forward             10 settle (always)

Stages 7-9 repeat while an attempt fails before the client saw a byte (`dispatcher`). The request
keeps its one lease through all of it, and stage 10 settles it exactly once: on success, failure,
disconnect or cancellation.
"""

import asyncio
import contextlib
from collections.abc import Callable, Generator, Iterable, Mapping
from functools import partial
from math import inf
from types import coroutine
from typing import Final, NamedTuple

import msgspec

from gateway.errors import KeysAwaited, RateLimited, Refusal, told
from gateway.fleet.model_runtime import ModelRuntime, Pool
from gateway.metrics import SAMPLED_ONE_IN, UNTIMED, Metrics, StageTimer
from gateway.payload.body import LOOP_US, TakesLong
from gateway.payload.members import by_name
from gateway.pipeline import plan as stage_plan
from gateway.pipeline.dispatcher import Dispatcher
from gateway.pipeline.request_progress import (
    Attempts,
    RequestLease,
    RequestProgress,
    Sending,
    known_lines,
    require,
)
from gateway.pipeline.settlement import TOGETHER_S, Settler
from gateway.ports import (
    ClientReply,
    CompressTask,
    LeaseStore,
    RecordSink,
    Upstream,
)
from gateway.records.attempt import Outcome
from gateway.records.estimate import LengthEstimate
from gateway.records.request import OPEN, BodyFacts, Incoming, Principal, Prompt, RequestHead
from gateway.routing.routing import (
    CompressionRules,
    CompressionWindow,
    fixed_tokens,
    lowered,
    window_plan,
)
from gateway.routing.split_alias import SplitAlias
from gateway.tenancy import keyring as stage_authenticate
from gateway.workers.pool import BodyReader, CompressWorkers


class Instead(NamedTuple):
    """A request that other models may answer, the first of `models` next."""

    facts: BodyFacts
    models: tuple[str, ...]
    turn: int
    """Which fallback this is, from 1."""


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
        compressor: CompressWorkers | None = None,
        reader: BodyReader | None = None,
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

        `instead`: the asked model could not, and others may. Each model's try has a lease and a
        decision record of its own.
        """
        progress = RequestProgress(incoming, self._timer())
        following: Instead | None = None
        try:
            progress.outcome = await self._run(progress, reply, instead)
            progress.told = progress.attempts.told if progress.attempts else None
        except Refusal as refusal:
            progress.told = told(refusal)
            if not reply.started:
                following = _following(progress, refusal, instead)
            attempts, label = progress.attempts, "refused" if following is None else "fell_back"
            if following is None and attempts is not None and attempts.told == progress.told:
                label = "upstream_error"
            progress.outcome = Outcome(label=label, status=refusal.status)
            await self._over(progress, progress.outcome)
            if following is None:
                await reply.refuse(refusal, known_lines(progress))
        except asyncio.CancelledError:
            relay = None if progress.attempts is None else progress.attempts.relay
            if relay is None:
                progress.outcome = Outcome(label="disconnected", status=499)
            else:
                progress.outcome = relay.cut_short()
            held = self._held.get(incoming.lease_id)
            if held is None or not held.progress.evicted or held.task.uncancel():
                raise
            # 429, in-band once bytes were sent.
            gave_way = RateLimited(
                "This request gave way to one with a reserved place. Please try again later.",
                reason="evicted",
                retry_after_s=_EVICTED_WAIT_S,
                should_retry=True,
            )
            progress.told = told(gave_way)
            progress.outcome = msgspec.structs.replace(
                progress.outcome, label="evicted", status=gave_way.status
            )
            await self._over(progress, progress.outcome)
            await reply.refuse(gave_way, known_lines(progress))
        finally:
            # 10 settle: without an await, so no cancellation can come between.
            self._held.pop(incoming.lease_id, None)
            self._settler.settle(progress)
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
        if held is None or held.progress.evicted or held.progress.settled_unix_s is not None:
            return
        held.progress.evicted = True
        held.task.cancel()

    def extend(self) -> None:
        """Have the leases of streams that run past their reserve reserve more.

        Called now and then, off the request path: nothing is cut, the bucket pays.
        """
        for held in self._held.values():
            attempts = held.progress.attempts
            if (
                attempts is None
                or attempts.relay is None
                or held.progress.settled_unix_s is not None
            ):
                continue
            lease, served = attempts.lease, attempts.served
            expected = attempts.sending.estimate.input_tokens_total
            used = min(expected, lease.current.cost_tokens) + attempts.relay.emitted()
            if used > lease.reserved_tokens:
                tokens = used + _EXTENSION_TOKENS
                lease.extend(tokens, tokens * served.admission.kv_bytes_per_token)

    def tick(self, retiring: Iterable[ModelRuntime] = ()) -> None:
        """Have the schedulers look after dead and stalled workers; a few times a second.

        `retiring`: models that a reload removed, while requests of theirs are under way.
        """
        # A model stands under its aliases too.
        models = (*self._models.values(), *retiring)
        self._dispatcher.tick({id(model): model for model in models}.values())

    def frozen(self, served: ModelRuntime, pool: Pool, worker: int) -> None:
        """An engine was found frozen; see `Dispatcher.frozen`."""
        self._dispatcher.frozen(served, pool, worker)

    def know(self, head: RequestHead) -> Principal:
        """Stage 1 alone, for a body that is large enough to ask first. Raises Refusal."""
        return stage_authenticate.authenticate(
            self._keyring, head.key_digest, self._wall_clock(), head.token
        )

    async def _read(
        self, progress: RequestProgress, instead: Instead | None
    ) -> tuple[Principal, BodyFacts, ModelRuntime, LengthEstimate]:
        """Stages 1 and 2: who asks, for what of which model, and how long it should be."""
        incoming = progress.incoming
        endpoint, head, now_unix_s = incoming.endpoint, incoming.head, incoming.received_unix_s
        try:
            principal = stage_authenticate.authenticate(
                self._keyring, head.key_digest, now_unix_s, head.token
            )
        except KeysAwaited:
            principal = await stage_authenticate.authenticate_head(self._keyring, head, now_unix_s)
        progress.key = progress.principal = principal
        progress.timer.end("authenticate")
        if instead is None:
            progress.facts = facts = await self._read_body(incoming, principal)
            served = stage_plan.model_of(self._models, self._splits, facts, principal)
            progress.served = served
            if (served.adapters.any or facts.lora) and (
                adapter := stage_plan.adapter_of(served, facts)
            ):
                progress.facts = facts = msgspec.structs.replace(facts, adapter=adapter)
        else:
            progress.facts = facts = instead.facts
            progress.served = served = self._models[instead.models[0]]
        progress.principal = principal = stage_authenticate.entitled(
            principal,
            served.name,
            now_unix_s,
            head.entitlement if instead is None else None,
            facts.members,
            facts.adapter,
        )
        if facts.previous_response_id is not None:
            if principal is not OPEN:
                await stage_plan.await_response_location(served, facts)
            progress.facts = facts = stage_plan.continued(served, facts, principal)
        progress.estimate = estimate = stage_plan.estimate(
            served, endpoint, facts, principal, head.category
        )
        progress.timer.end("estimate")
        return principal, facts, served, estimate

    async def _read_body(self, incoming: Incoming, principal: Principal) -> BodyFacts:
        """The body's facts, read here if that takes a moment only."""
        endpoint, head, body = incoming.endpoint, incoming.head, incoming.body
        if self._reader is None:
            return stage_plan.read(endpoint, body, head)
        try:
            return stage_plan.read(endpoint, body, head, LOOP_US)
        except TakesLong:
            types = stage_plan.content_types(endpoint, head)
            return await self._reader.read(endpoint, body, principal.tenant, types)

    async def _run(
        self, progress: RequestProgress, reply: ClientReply, instead: Instead | None
    ) -> Outcome:
        incoming = progress.incoming
        crowded = incoming.received_s - self._newest_s < TOGETHER_S
        self._newest_s = incoming.received_s
        # 1 authenticate, 2 classify and estimate
        principal, facts, served, estimate = await self._read(progress, instead)
        if instead is None:
            self._dispatcher.refuse_suspect(principal.tenant, incoming.body)
        # 3 plan
        endpoint, tokens = incoming.endpoint, estimate.input_tokens_total
        prefix = stage_plan.look_up(served, endpoint, principal, facts, facts.members, tokens)
        progress.planned = planned = stage_plan.plan(served, endpoint, estimate, prefix)
        window = stage_plan.compression_window(
            served, incoming, principal, facts, estimate, planned, prefix
        )
        decided = planned if isinstance(window, str) else window_plan(planned, window)
        progress.plan = plan = stage_plan.applied(served, estimate, decided)
        progress.timer.end("plan")
        # 4 admit
        taken = await stage_plan.admit(
            self._store, served, principal, incoming.lease_id, estimate, plan
        )
        progress.lease = lease = RequestLease(self._store, self._wall_clock, plan, taken)
        if taken.limits is not None:
            # Who may have to give way, or to reserve more. The loop is asked for once: it costs a
            # call of the system.
            self._loop = self._loop or asyncio.get_running_loop()
            task = asyncio.current_task(self._loop)
            if task is not None:
                self._held[taken.id] = _Held(progress, task)
        progress.timer.end("admit")
        # Requests that come together go on together: each half of the way, walked by one after
        # the other, stays in the processor's caches; the whole way is too long for them. Where
        # admission had to wait for a store they do so anyway.
        if crowded and self._newest_s == incoming.received_s:
            await _next_turn()
            progress.timer.begin()
        # 5 compress, 6 adjust the lease
        whole = Prompt(body=incoming.body)
        if isinstance(window, str):
            whole = Prompt(body=incoming.body, not_compressed=window)
            sending = progress.sending = Sending(whole, estimate, plan, prefix)
        elif plan.compress and taken.pool == window.pool:
            sending = await self._compress(
                progress,
                principal,
                facts,
                served,
                window,
                Sending(whole, estimate, planned, prefix),
            )
        else:
            why = "spilled"
            if served.routing.observe:
                cut, _ = await self._cut(progress, facts, served, window, estimate)
                why = cut.not_compressed if cut.only_pool is None else "observed"
            whole = Prompt(body=incoming.body, not_compressed=why)
            sending = progress.sending = Sending(whole, estimate, plan, prefix)
        # 7 bind, 8 queue, 9 dispatch and forward
        progress.attempts = attempts = Attempts(
            incoming, principal, facts, served, lease, estimate, sending, progress.timer
        )
        attempts.over = partial(self._over, progress)
        return await self._dispatcher.run(reply, attempts)

    async def _over(self, progress: RequestProgress, outcome: Outcome) -> None:
        """Settle a request whose client is about to see its end, or that another model takes."""
        arrival = self._settler.release(progress, outcome, heard=True)
        if arrival is not None:
            await arrival

    async def _cut(
        self,
        progress: RequestProgress,
        facts: BodyFacts,
        served: ModelRuntime,
        window: CompressionWindow,
        estimate: LengthEstimate,
    ) -> tuple[Prompt, LengthEstimate]:
        """Stage 5: a prompt that fits the smaller pool, T_c = B - L_out, and its estimate.

        Only after admission, so that rejected traffic costs no work; off the event loop, within a
        time limit. Whatever goes wrong, it is the client's own, with the reason.
        """
        started_s = self._clock()
        incoming = progress.incoming
        rules = CompressionRules() if served.compression is None else served.compression.rules
        result = await require(self._compressor).compress(
            CompressTask(
                endpoint=incoming.endpoint.name,
                body=incoming.body,
                budget_tokens=window.budget_tokens,
                bytes_per_token=estimate.ratio,
                fixed_tokens=fixed_tokens(facts, estimate),
                category=estimate.category,
                max_cut=rules.max_cut,
                tokenizer=rules.tokenizer,
                when="asked" if rules.when == "asked" else "any",
                mark=rules.mark,
            )
        )
        progress.compress_s = self._clock() - started_s
        before, after = result.text_bytes_before, result.text_bytes_after
        if result.body is None:
            return Prompt(body=incoming.body, not_compressed=result.reason), estimate
        shorter = lowered(estimate, facts, after, result.tokens_after, window.budget_tokens)
        prompt = Prompt(
            body=result.body,
            compressed=f"{estimate.input_tokens}->{shorter.input_tokens}",
            only_pool=window.pool,
            kept_share=after / max(1, before),
        )
        return prompt, shorter

    async def _compress(
        self,
        progress: RequestProgress,
        principal: Principal,
        facts: BodyFacts,
        served: ModelRuntime,
        window: CompressionWindow,
        whole: Sending,
    ) -> Sending:
        """Stages 5 and 6: what is sent, and its lease lowered to what that costs.

        A prompt that could not be compressed takes its lease along to the pool that holds it, if
        it may enter there; else it is refused, and what it had reserved is refunded.
        """
        lease = require(progress.lease)
        prompt, estimate = await self._cut(progress, facts, served, window, whole.estimate)
        progress.timer.begin()
        if prompt.only_pool is None:
            progress.sending = sending = whole._replace(prompt=prompt)
            await lease.transfer(whole.plan.pool, force=False)
        else:
            members, tokens = by_name(prompt.body), estimate.input_tokens_total
            endpoint = progress.incoming.endpoint
            prefix = stage_plan.look_up(served, endpoint, principal, facts, members, tokens)
            progress.sending = sending = Sending(prompt, estimate, lease.asked, prefix)
            cost_tokens = estimate.cost_tokens
            lease.resize(cost_tokens, cost_tokens * served.admission.kv_bytes_per_token)
        progress.timer.end("adjust")
        return sending


class _Held:
    """A request with a managed lease: it may have to give way, or to reserve more."""

    __slots__ = ("progress", "task")

    def __init__(self, progress: RequestProgress, task: asyncio.Task[object]) -> None:
        self.progress = progress
        self.task = task
        """The task that serves it."""


def _following(progress: RequestProgress, refusal: Refusal, now: Instead | None) -> Instead | None:
    """The models to ask after a refusal; None to tell the client. Those closed to its key are left.

    Never for a limit of the tenant's own: who is over it shall wait, not move. A stored response
    is continued by its own model only, and no other model stands in for a LoRA adapter.
    """
    served, facts, key = progress.served, progress.facts, progress.key
    if served is None or facts is None or key is None or refusal.reason not in FALLING:
        return None
    if facts.previous_response_id is not None or facts.adapter:
        return None
    usable = []
    for name in served.fallbacks if now is None else now.models[1:]:
        with contextlib.suppress(Refusal):
            stage_authenticate.entitled(key, name, progress.incoming.received_unix_s)
            usable.append(name)
    return Instead(facts, tuple(usable), 1 if now is None else now.turn + 1) if usable else None


@coroutine
def _next_turn() -> Generator[None, None, None]:
    """Let all go first that can, once."""
    yield


FALLING: Final = frozenset(
    {
        *("no_worker_ready", "queue_timeout", "priority", "engine_busy"),
        *("engine_error", "engine_connection_broken", "engine_timeout"),
    }
)
"""Reasons of refusals after which another model is asked."""
_EXTENSION_TOKENS = 256
"""How far ahead a stream reserves that has run past its reserve."""
_EVICTED_WAIT_S = 5.0
