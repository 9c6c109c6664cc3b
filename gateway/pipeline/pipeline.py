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
from gateway.pipeline.plan import Asked
from gateway.pipeline.request_progress import (
    Attempts,
    RequestLease,
    RequestProgress,
    Sending,
    known_lines,
    require,
)
from gateway.pipeline.settlement import TOGETHER_S, Settler
from gateway.ports import ClientReply, CompressTask, LeaseStore, RecordSink, Upstream
from gateway.records.attempt import Outcome
from gateway.records.estimate import Plan
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
        digest_key: bytes = b"",
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
            digest_key=digest_key,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._newest_s = -inf
        """When the newest request came."""
        self._held: dict[str, RequestProgress] = {}
        """Requests that hold a managed lease, by its id: they may have to give way, or to reserve
        more."""
        self._dispatcher = Dispatcher(store=store, upstream=upstream, metrics=metrics, clock=clock)
        store.on_evict(self.evict)

    async def serve(
        self, incoming: Incoming, reply: ClientReply, instead: Instead | None = None
    ) -> None:
        """Answer one request. Raises only CancelledError, after settling.

        `instead`: the asked model could not, and others may. Each model's try has a lease and a
        decision record of its own.
        """
        timer = UNTIMED
        self._until_sample -= 1
        if not self._until_sample:
            self._until_sample = SAMPLED_ONE_IN
            timer = StageTimer(self._metrics.overhead, self._clock)
        progress = RequestProgress(incoming, timer)
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
            progress.outcome = Outcome(label="disconnected", status=499)
            attempts = progress.attempts
            if attempts is not None and attempts.relay is not None:
                progress.outcome = attempts.relay.cut_short()
            task = None if attempts is None or not progress.evicted else attempts.task
            if task is None or task.uncancel():
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

    def evict(self, lease_id: str) -> None:
        """End a request whose place somebody else is entitled to; it settles as ever."""
        progress = self._held.get(lease_id)
        if progress is None or progress.evicted or progress.settled_unix_s is not None:
            return
        attempts = progress.attempts
        if attempts is not None and attempts.task is not None:
            progress.evicted = True
            attempts.task.cancel()

    def worker_of(self, lease_id: str) -> int | None:
        """The worker in its pool that a request is bound to which could be evicted."""
        progress = self._held.get(lease_id)
        attempts = None if progress is None or progress.evicted else progress.attempts
        binding = None if attempts is None else attempts.binding
        return None if binding is None else binding.worker

    def extend(self) -> None:
        """Have the leases of streams that run past their reserve reserve more.

        Called now and then, off the request path: nothing is cut, the bucket pays.
        """
        for progress in self._held.values():
            attempts = progress.attempts
            if attempts is None or attempts.relay is None or progress.settled_unix_s is not None:
                continue
            lease, expected = attempts.lease, attempts.sending.estimate.input_tokens_total
            used = min(expected, lease.current.cost_tokens) + attempts.relay.emitted()
            if used > lease.reserved_tokens:
                tokens = used + _EXTENSION_TOKENS
                lease.extend(tokens, tokens * attempts.served.admission.kv_bytes_per_token)

    def tick(self, retiring: Iterable[ModelRuntime] = ()) -> None:
        """Have the schedulers look after dead and stalled workers; a few times a second.

        `retiring`: models that a reload removed, while requests of theirs are under way.
        """
        # A model stands under its aliases too.
        models = (*self._models.values(), *retiring)
        self._dispatcher.binder.tick({id(model): model for model in models}.values())

    def frozen(self, served: ModelRuntime, pool: Pool, worker: int) -> None:
        """An engine was found frozen; see `Dispatcher.frozen`."""
        self._dispatcher.frozen(served, pool, worker)

    def know(self, head: RequestHead) -> Principal:
        """Stage 1 alone, for a body that is large enough to ask first. Raises Refusal."""
        return stage_authenticate.authenticate(
            self._keyring, head.key_digest, self._wall_clock(), head.token
        )

    async def ask(self, incoming: Incoming, facts: BodyFacts | None) -> Asked:
        """Stages 1 and 2 alone, for a quote; `facts` where the body is no request's."""
        progress = RequestProgress(incoming)
        progress.facts = facts
        return await self._read(progress, None)

    async def _read(self, progress: RequestProgress, instead: Instead | None) -> Asked:
        """Stages 1 and 2: who asks, for what of which model, and how long it should be."""
        incoming = progress.incoming
        endpoint, head, now_unix_s = incoming.endpoint, incoming.head, incoming.received_unix_s
        principal = incoming.principal
        if principal is None:
            try:
                principal = stage_authenticate.authenticate(
                    self._keyring, head.key_digest, now_unix_s, head.token
                )
            except KeysAwaited:
                principal = await stage_authenticate.authenticate_head(
                    self._keyring, head, now_unix_s
                )
        progress.key = progress.principal = principal
        progress.timer.end("authenticate")
        if instead is None:
            facts = progress.facts
            if facts is None:
                try:  # here if that takes a moment only
                    limit_us = None if self._reader is None else LOOP_US
                    facts = stage_plan.read(endpoint, incoming.body, head, limit_us)
                except TakesLong:
                    types, reader = stage_plan.content_types(endpoint, head), require(self._reader)
                    facts = await reader.read(endpoint, incoming.body, principal.tenant, types)
                progress.facts = facts
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
        return Asked(incoming, principal, facts, served, estimate)

    async def _run(
        self, progress: RequestProgress, reply: ClientReply, instead: Instead | None
    ) -> Outcome:
        incoming = progress.incoming
        crowded = incoming.received_s - self._newest_s < TOGETHER_S
        self._newest_s = incoming.received_s
        # 1 authenticate, 2 classify and estimate
        asked = await self._read(progress, instead)
        _, principal, facts, served, estimate = asked
        if instead is None:
            self._dispatcher.refuse_suspect(principal.tenant, incoming.body)
        # 3 plan
        prefix = stage_plan.look_up(asked, facts.members, estimate.input_tokens_total)
        progress.planned = planned = stage_plan.plan(served, incoming.endpoint, estimate, prefix)
        window = stage_plan.compression_window(asked, planned, prefix)
        decided = planned if isinstance(window, str) else window_plan(planned, window)
        progress.plan = plan = stage_plan.applied(served, estimate, decided)
        progress.timer.end("plan")
        # 4 admit
        item, lease_id = incoming.batch, incoming.lease_id
        taken = await stage_plan.admit(
            self._store,
            served,
            principal,
            lease_id,
            estimate,
            plan,
            demoted=item is not None and not item.urgent,
        )
        lease = RequestLease(self._store, self._wall_clock, plan, taken)
        why = window if isinstance(window, str) else ""
        sending = Sending(Prompt(body=incoming.body, not_compressed=why), estimate, plan, prefix)
        progress.attempts = attempts = Attempts(asked, lease, sending, progress.timer)
        # The loop is asked for once: it costs a call of the system.
        self._loop = self._loop or asyncio.get_running_loop()
        attempts.task = asyncio.current_task(self._loop)
        if taken.limits is not None:
            self._held[taken.id] = progress
        progress.timer.end("admit")
        # Requests that come together go on together: each half of the way, walked by one after
        # the other, stays in the processor's caches; the whole way is too long for them. Where
        # admission had to wait for a store they do so anyway.
        if crowded and self._newest_s == incoming.received_s:
            await _next_turn()
            progress.timer.begin()
        # 5 compress, 6 adjust the lease
        if not isinstance(window, str):
            await self._compress(attempts, window, planned)
        # 7 bind, 8 queue, 9 dispatch and forward
        attempts.over = partial(self._over, progress)
        return await self._dispatcher.run(reply, attempts)

    async def _over(self, progress: RequestProgress, outcome: Outcome) -> None:
        """Settle a request whose client is about to see its end, or that another model takes."""
        arrival = self._settler.release(progress, outcome, heard=True)
        if arrival is not None:
            await arrival

    async def _compress(self, attempts: Attempts, window: CompressionWindow, planned: Plan) -> None:
        """Stages 5 and 6: a prompt that fits the smaller pool, T_c = B - L_out, and its lease.

        Only after admission, so that rejected traffic costs no work; off the event loop, within a
        time limit. Whatever goes wrong, the client's own prompt is sent, with the reason. It takes
        its lease along to the pool that holds it, if it may enter there; else it is refused, and
        what it had reserved is refunded. In observe mode the prompt is cut, and not sent.
        """
        served, facts, whole = attempts.served, attempts.facts, attempts.whole
        incoming, lease, sending = attempts.incoming, attempts.lease, attempts.sending
        applies = sending.plan.compress and lease.taken.pool == window.pool
        if not applies and not served.routing.observe:
            prompt = Prompt(body=incoming.body, not_compressed="spilled")
            attempts.sending = sending._replace(prompt=prompt)
            return
        started_s = self._clock()
        rules = CompressionRules() if served.compression is None else served.compression.rules
        result = await require(self._compressor).compress(
            CompressTask(
                endpoint=incoming.endpoint.name,
                body=incoming.body,
                budget_tokens=window.budget_tokens,
                bytes_per_token=whole.ratio,
                fixed_tokens=fixed_tokens(facts, whole),
                category=whole.category,
                max_cut=rules.max_cut,
                tokenizer=rules.tokenizer,
                when="asked" if rules.when == "asked" else "any",
                mark=rules.mark,
            )
        )
        attempts.compress_s = self._clock() - started_s
        attempts.timer.begin()
        before, after = result.text_bytes_before, result.text_bytes_after
        if result.body is None or not applies:
            why = "observed" if result.body is not None else result.reason
            prompt = Prompt(body=incoming.body, not_compressed=why)
            attempts.sending = sending._replace(
                prompt=prompt, plan=planned if applies else sending.plan
            )
            if applies:
                await lease.transfer(planned.pool, force=False)
        else:
            shorter = lowered(whole, facts, after, result.tokens_after, window.budget_tokens)
            prompt = Prompt(
                body=result.body,
                compressed=f"{whole.input_tokens}->{shorter.input_tokens}",
                only_pool=window.pool,
                kept_share=after / max(1, before),
            )
            members, tokens = by_name(prompt.body), shorter.input_tokens_total
            prefix = stage_plan.look_up(attempts.asked, members, tokens)
            attempts.prepare(Sending(prompt, shorter, sending.plan, prefix))
            cost_tokens = shorter.cost_tokens
            lease.resize(cost_tokens, cost_tokens * served.admission.kv_bytes_per_token)
        if applies:
            attempts.timer.end("adjust")


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
