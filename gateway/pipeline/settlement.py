"""Stage 10, settle: however a request ended, its lease once, then what is learned and recorded.

The lease is settled before the client sees the end, so that no limit counts it against what the
client asks next, wherever that is admitted. What is learned, counted and recorded waits until all
have ended that do so in this turn of the event loop: nobody waits for it, and done for one after
the other it finds its code and data in the processor's caches. Where requests end one at a time
nothing waits. Of those of one kind that end in one turn, one teaches the estimator: so many a
second tell it nothing more.

Only what the engine itself reported teaches the ratio; what the gateway counted is charged, and
teaches at most the length of an answer. An answer that was cut (client left, stream broke, limit
reached) is a lower bound of its length, never an observation of it.

The decision record holds no prompt text, keys or header values, but for the prompt itself where
the configuration asks for it. A stage that the request did not reach has its section's empty
instance. The counters take a finished request's figures from its record.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from math import inf
from typing import Final, get_args

import msgspec
from xxhash import xxh3_64_intdigest

from gateway.admission.admission import believed, beyond_window, charge_tokens
from gateway.admission.terms import DenialReason
from gateway.fleet.model_runtime import PRIORITY_FLAGS, ModelRuntime
from gateway.metrics import Metrics
from gateway.pipeline.plan import points
from gateway.pipeline.request_progress import Attempts, PrefillPhase, RequestProgress
from gateway.ports import LeaseStore, RecordSink, Settlement
from gateway.records.attempt import Binding, Outcome, Usage
from gateway.records.decision import (
    DECISION_SCHEMA,
    NO_COMPRESSION,
    NO_ESTIMATE,
    NO_PLAN,
    NO_PREFILL,
    NO_SCHEDULING,
    NO_USAGE,
    AdmissionSection,
    CompressionSection,
    DecisionRecord,
    EstimateSection,
    PlanSection,
    PrefillSection,
    RequestSection,
    SchedulingSection,
    TimingSection,
    UsageSection,
)
from gateway.records.entitlement import key_name, slo_result, tpot_result
from gateway.records.estimate import LengthEstimate, Observation
from gateway.records.lease import Lease
from gateway.records.request import Measure
from gateway.records.usage import cost_nano
from gateway.routing.routing import can_serve
from gateway.scheduling.outlook import Forecast, Outlook
from gateway.scheduling.prefix_index import keyed_digests, seed

TOGETHER_S: Final = 0.001
"""Requests that begin, or end, within so long of one another do so together."""
DIGESTED_BYTES: Final = 65_536
"""End of a body that its digest covers; a conversation's turns differ there."""
_UNREAD: Final = Measure(text_bytes=0, longest_text_bytes=0)
_CUT: Final = frozenset({"length", "max_tokens", "incomplete"})
_UNTAUGHT: Final = frozenset({"refused", "fell_back", "error", "evicted"})
_DENIALS: Final = frozenset(get_args(DenialReason))

_log = logging.getLogger("sluice.settling")

Lesson = tuple[str, str, str, str, str]
"""Model, endpoint, tenant, category, how it ended."""


class Settler:
    """Of all requests of a process."""

    def __init__(
        self,
        *,
        store: LeaseStore,
        metrics: Metrics,
        records: RecordSink,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        log_prompts: bool,
        digest_key: bytes = b"",
    ) -> None:
        """`digest_key`: of prompts' digests in the records; empty for none."""
        self._store = store
        self._metrics = metrics
        self._records = records
        self._clock = clock
        self._wall_clock = wall_clock
        self._log_prompts = log_prompts
        self._digest_key = digest_key
        self._ended: list[RequestProgress] = []
        """Settled, and not noted yet; in order."""
        self._newest_s = -inf
        """When the last one was settled."""
        self._priorities_told: set[str] = set()
        """Models of which it was told that an engine refuses priorities."""

    def release(
        self, progress: RequestProgress, outcome: Outcome, *, heard: bool = False
    ) -> Awaitable[None] | None:
        """Settle the lease, if there is one, once; see LeaseStore for `heard` and the result."""
        if progress.settled_unix_s is not None:
            return None
        progress.timer.begin()
        progress.settled_unix_s = unix_s = self._wall_clock()
        progress.usage = outcome.usage
        attempts, arrival = progress.attempts, None
        if attempts is not None:
            served, lease, phase = attempts.served, attempts.lease.current, attempts.prefill
            kind, told = served.scheduling.engine_priority, self._priorities_told
            refused = attempts.relay is not None and attempts.relay.priority_refused
            if refused and kind != "none" and served.name not in told:
                told.add(served.name)
                _log.warning(
                    "model %s: an engine refused a request because its priority scheduling is off: "
                    "start every engine with %s, or set engine_priority: none",
                    served.name,
                    PRIORITY_FLAGS[kind],
                )
            if outcome.usage is not None:
                reported = outcome.usage
                if phase is not None:
                    reported = cached_at_prefill(phase, reported)
                progress.usage = self._believed(attempts, reported)
            dispatched = attempts.sent
            if dispatched and progress.incoming.endpoint.computes:
                progress.charged = charged = charged_of(
                    outcome, progress.usage, attempts.sending.estimate
                )
                if charged is not None:
                    owed = attempts.slot_nano
                    if phase is not None:
                        owed += sum([side.slot_nano for side in phase.sides])
                    progress.cost_nano = cost_of(served, charged, owed)
            settlement = Settlement(
                usage=progress.charged,
                dispatched=dispatched and outcome.label != "fell_back",
                unix_s=unix_s,
                money=money_of(lease, progress.cost_nano),
            )
            arrival = self._store.settle(lease, settlement, heard=heard)
        progress.timer.end("settle")
        return arrival

    def settle(self, progress: RequestProgress) -> None:
        """Settle what is not settled yet, and note it. Raises nothing that a client could cause."""
        self.release(progress, progress.outcome)
        if progress.usage is not progress.outcome.usage:
            progress.outcome = msgspec.structs.replace(progress.outcome, usage=progress.usage)
        progress.ended_s = now_s = self._clock()
        if self._ended:
            self._ended.append(progress)
        elif now_s - self._newest_s < TOGETHER_S:
            self._ended.append(progress)
            asyncio.get_running_loop().call_soon(self._note_all)
        else:
            self._note(progress, set())
        self._newest_s = now_s

    def _believed(self, attempts: Attempts, reported: Usage) -> Usage:
        """Usage that can be true; a window that is configured wrong is told."""
        served, estimate = attempts.served, attempts.sending.estimate
        index = attempts.lease.current.pool
        pool, state = served.routing.pools[index], served.fleet.pools[index]
        usage = believed(reported, estimate, pool.window_tokens)
        if usage is not reported:
            self._metrics.usage_rejected.add(pool.name)
        elif beyond_window(usage, estimate.sequences, pool.window_tokens):
            used = usage.prompt_tokens + usage.completion_tokens
            if not state.beyond_window_tokens:
                _log.warning(
                    "model %s, pool %s: an engine served %d tokens, more than max_model_len (%d) "
                    "in the configuration; set max_model_len to the engine's own",
                    served.name,
                    pool.name,
                    used,
                    pool.window_tokens,
                )
            state.beyond_window_tokens = max(state.beyond_window_tokens, used)
        return usage

    def _note_all(self) -> None:
        ended, self._ended = self._ended, []
        taught: set[Lesson] = set()
        for progress in ended:
            try:
                self._note(progress, taught)
            except Exception:  # noqa: BLE001 - a bug must not take the others' records along
                request_id = progress.incoming.request_id
                _log.exception("request %s was settled, not recorded", request_id)

    def _note(self, progress: RequestProgress, taught: set[Lesson]) -> None:
        """Learn from a settled request, count and record it."""
        progress.timer.begin()
        attempts, lease, principal = progress.attempts, None, progress.principal
        if attempts is not None:
            lease = attempts.lease.current
            learn(attempts, progress.outcome, taught)
        record = record_of(progress, prompts=self._log_prompts, digest_key=self._digest_key)
        count(self._metrics, record, progress.sent_estimate, progress.served, lease)
        if principal is not None and principal.slo_ms:
            met = slo_result(record, principal.slo_ms, admitted=lease is not None)
            if met is not None:
                self._metrics.slo_requests.add(principal.entitlement, met)
        if principal is not None and principal.slo_tpot_ms:
            met = tpot_result(record, principal.slo_tpot_ms)
            if met is not None:
                self._metrics.slo_tpot_requests.add(principal.entitlement, met)
        self._records(record)
        progress.timer.end("record")


# -- what is charged


def charged_of(outcome: Outcome, usage: Usage | None, estimate: LengthEstimate) -> Usage | None:
    """What the request used: the engine's report, else prompt as estimated + tokens emitted.

    `usage`: the part of the outcome's that is believed (`gateway.admission.admission`). None, a
    full refund, when the client got an error instead of an answer.
    """
    if usage is not None and usage.source == "engine":
        return usage
    if usage is None and outcome.label != "disconnected" and not outcome.completed:
        return None
    completion = 0 if usage is None else usage.completion_tokens
    if estimate.cap_tokens is not None:
        completion = min(completion, estimate.cap_tokens * estimate.sequences)
    return Usage(
        prompt_tokens=estimate.input_tokens_total, completion_tokens=completion, source="counted"
    )


def cost_of(served: ModelRuntime, usage: Usage, slot_nano: float = 0.0) -> int | None:
    """The cost of a charged request, in nano-units; None where its model has no prices.

    `slot_nano` is what its time at workers costs, where they have a price by the hour.
    """
    if served.price is not None:
        return cost_nano(
            served.price, usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens
        )
    return int(slot_nano + 0.5) if served.by_hour else None


def money_of(lease: Lease, cost: int | None) -> int:
    """What budgets in money count of a request, in nano-units; 0 where it has none."""
    return cost if cost and any(limit.unit == "money" for limit in lease.asked) else 0


# -- what is learned


def learn(attempts: Attempts, outcome: Outcome, taught: set[Lesson]) -> None:
    """Teach what was sent."""
    facts, principal, served = attempts.facts, attempts.principal, attempts.served
    endpoint, usage, sending = attempts.incoming.endpoint, outcome.usage, attempts.sending
    if attempts.sampled is not None:
        _note_wait(attempts, attempts.sampled, outcome)
    reported = usage if usage is not None and usage.source == "engine" else None
    lesson = (served.name, endpoint.name, principal.tenant, facts.measure.category, outcome.label)
    told = outcome.completed or usage is not None
    if told and outcome.label not in _UNTAUGHT and lesson not in taught:
        taught.add(lesson)
        served.estimator.learn(
            Observation(
                endpoint=endpoint.name,
                tenant=principal.tenant,
                measure=facts.measure,
                prompt_tokens=None if reported is None else reported.prompt_tokens,
                completion_tokens=None if usage is None else usage.completion_tokens,
                sequences=sending.estimate.sequences,
                output_censored=not outcome.completed or outcome.finish_reason in _CUT,
                learn_ratio=sending.prompt.compressed == "none",
            )
        )
    if not outcome.completed:
        return
    entry, binding = attempts.entry, attempts.binding
    if entry is not None and binding is not None and attempts.prefill is None:
        entry.correct(served.fleet.pools[binding.pool], binding.worker, reported)
    # A conversation that an engine holds as it came: its next turn is not compressed.
    if served.compression is not None and sending.prompt.only_pool is None:
        begins = sending.prefix.points or points(attempts.asked, facts.members)
        served.compression.conversations.remember(principal.tenant, begins)


def _note_wait(attempts: Attempts, sampled: tuple[Outlook, Forecast], outcome: Outcome) -> None:
    """Have its pool know of a sampled request's wait, if it saw no first token."""
    outlook, forecast = sampled
    if attempts.sent_s is not None and not attempts.facts.stream:
        outlook.note(forecast, attempts.queue_s, None)
    elif attempts.sent_s is None and outcome.label == "refused":  # it waited for nothing
        outlook.note(forecast, inf, inf)


# -- the decision record


def record_of(
    progress: RequestProgress, *, prompts: bool, digest_key: bytes = b""
) -> DecisionRecord:
    """The request's line in the log; `prompts` where it shall hold the request's body."""
    incoming, facts, served = progress.incoming, progress.facts, progress.served
    principal, outcome, told = progress.principal, progress.outcome, progress.told
    attempts, charged, estimate = progress.attempts, progress.charged, progress.sent_estimate
    body, binding, pool = incoming.body, None, None
    if attempts is not None and attempts.binding is not None:
        binding = attempts.binding
        pool = attempts.served.fleet.pools[binding.pool]
    tail = body if len(body) <= DIGESTED_BYTES else body[-DIGESTED_BYTES:]
    measure = _UNREAD if facts is None else facts.measure
    return DecisionRecord(
        schema=DECISION_SCHEMA,
        time_unix_s=incoming.received_unix_s,
        request_id=incoming.request_id,
        endpoint=incoming.endpoint.name,
        outcome=outcome.label,
        status=outcome.status,
        model=None if served is None else served.name,
        asked_model=None if facts is None else facts.model,
        tenant=None if principal is None else principal.tenant,
        entitlement=None if principal is None else principal.entitlement or None,
        key=None if principal is None else key_name(principal, incoming.head.key_digest),
        stream=facts is not None and facts.stream,
        reason=None if told is None else told.reason,
        retry_after_s=None if told is None else told.retry_after_s,
        figures="" if told is None else told.figures,
        mode="observe" if served is not None and served.routing.observe else "enforce",
        pool=None if pool is None else pool.name,
        worker=None if pool is None or binding is None else pool.workers[binding.worker],
        rescued=attempts is not None and attempts.rescued,
        finish_reason=outcome.finish_reason,
        request=RequestSection(
            body_bytes=len(body),
            body_digest=xxh3_64_intdigest(tail, seed()) & 0xFFFF_FFFF,
            text_bytes=None if facts is None else measure.text_bytes,
            messages=measure.messages,
            media_parts=measure.media_parts,
            rag=measure.rag,
            prompt_digests=()
            if attempts is None or not digest_key or attempts.sending.prompt.only_pool is not None
            else keyed_digests(attempts.sending.prefix.points, digest_key),
        ),
        estimate=NO_ESTIMATE
        if estimate is None
        else EstimateSection(
            category=estimate.category,
            bytes_per_token=estimate.ratio,
            bytes_per_token_conservative=estimate.ratio_conservative,
            input_tokens=estimate.input_tokens_total,
            output_tokens=estimate.output_tokens,
            total_tokens=estimate.fit_tokens,
            cap_tokens=estimate.cap_tokens,
            sequences=estimate.sequences,
        ),
        plan=NO_PLAN if served is None else _plan(progress, served),
        admission=AdmissionSection(lease_id=incoming.lease_id)
        if attempts is None
        else _admission(progress, attempts),
        compression=NO_COMPRESSION if attempts is None else _compression(attempts),
        scheduling=NO_SCHEDULING
        if attempts is None or binding is None
        else _scheduling(attempts, binding),
        prefill=NO_PREFILL
        if attempts is None or attempts.prefill is None
        else _prefill(attempts, attempts.prefill),
        attempts=() if attempts is None else tuple(attempts.done),
        usage=NO_USAGE if charged is None else usage_section(charged, progress.cost_nano),
        timing=_timing(progress),
        trace=incoming.trace,
        batch=incoming.batch,
        prompt=body.decode("utf-8", "replace") if prompts else None,
    )


def _plan(progress: RequestProgress, served: ModelRuntime) -> PlanSection:
    planned, plan = progress.planned, progress.plan
    if planned is None:
        return NO_PLAN
    if progress.attempts is not None:
        plan = progress.attempts.sending.plan
    name = served.fleet.pools[planned.pool].name
    moved = served.routing.observe and plan is not None and plan.pool != planned.pool
    return PlanSection(
        pool=name,
        reason=plan.reason if plan is not None and plan.compress else planned.reason,
        would_route=name if moved else None,
    )


def _admission(progress: RequestProgress, attempts: Attempts) -> AdmissionSection:
    served, held, charged = attempts.served, attempts.lease, progress.charged
    lease, taken, asked, pools = held.current, held.taken, held.asked, served.fleet.pools
    charge = None if charged is None else charge_tokens(served.admission.profile, charged)
    managed = lease.limits is not None  # else its lease says nothing of the pool
    return AdmissionSection(
        lease_id=progress.incoming.lease_id,
        service_class=attempts.principal.service_class if managed else None,
        asked_pool=pools[asked.pool].name if managed else None,
        alternates=tuple([pools[pool].name for pool in asked.alternates]) if managed else (),
        spilled=lease.spilled,
        admitted_unix_s=lease.issued_unix_s if managed else None,
        settled_unix_s=progress.settled_unix_s if managed else None,
        reserved_tokens=taken.cost_tokens if managed else None,
        reserved_kv_bytes=taken.kv_bytes if managed else None,
        priority=lease.weight if managed else None,
        contended=lease.contended,
        would_deny=lease.would_deny or None,
        evicted=progress.evicted,
        lease_changes=tuple(held.changes) if managed else (),
        charge_tokens=charge,
    )


def _compression(attempts: Attempts) -> CompressionSection:
    prompt, compression = attempts.sending.prompt, attempts.served.compression
    if prompt.only_pool is None and not prompt.not_compressed:
        return NO_COMPRESSION
    return CompressionSection(
        compressed=prompt.compressed,
        not_compressed=prompt.not_compressed or None,
        kept_share=None if prompt.only_pool is None else prompt.kept_share,
        when=None if compression is None else compression.rules.when,
    )


def _scheduling(attempts: Attempts, binding: Binding) -> SchedulingSection:
    job, relay = attempts.job, attempts.relay
    if job is None:  # a last resort, out of the rotation
        return SchedulingSection(score=binding.score, candidates=binding.candidates)
    first_s = None if relay is None or not job.stream else relay.first_s
    workers = attempts.served.fleet.pools[binding.pool].workers
    return SchedulingSection(
        score=binding.score,
        candidates=binding.candidates,
        expected_hit_tokens=job.hit_tokens,
        backlog_tokens=job.backlog_tokens,
        worker_active=job.active,
        worker_kv_usage=job.kv_usage,
        predicted_prefill_s=job.expected_s or job.mean_s or None,
        predicted_prefill_q_s=job.quantile_s or None,
        prefill_s=None if first_s is None else first_s - job.sent_s,
        would_bind=None if job.would_bind < 0 else workers[job.would_bind],
        would_prefill_s=job.would_s or None,
    )


def _prefill(attempts: Attempts, phase: PrefillPhase) -> PrefillSection:
    if phase.phases is None:
        return NO_PREFILL
    side = phase.sides[-1] if phase.sides else None
    job = None if side is None else side.job
    duration_ms = None
    if side is not None and side.sent_s is not None and phase.answered_s is not None:
        duration_ms = (phase.answered_s - side.sent_s) * 1000
    return PrefillSection(
        pool=attempts.served.fleet.pools[phase.phases.prefill].name,
        worker=phase.worker or None,
        candidates=() if side is None or side.binding is None else side.binding.candidates,
        skipped=phase.skipped or None,
        wait_ms=phase.wait_s * 1000,
        duration_ms=duration_ms,
        predicted_s=None if job is None else job.expected_s + job.after_s or None,
        expected_hit_tokens=None if job is None else job.hit_tokens,
        transfer_s=phase.transfer_s,
    )


def cached_at_prefill(phase: PrefillPhase, usage: Usage) -> Usage:
    """Usage with the cached tokens of the engine that computed the prompt.

    To the decode engine all that it fetched was cached.
    """
    first = None if phase.skipped else phase.usage
    if first is None or first.source != "engine" or usage.source != "engine":
        return usage
    return msgspec.structs.replace(
        usage, cached_tokens=first.cached_tokens, cached_reported=first.cached_reported
    )


def usage_section(charged: Usage, cost: int | None = None) -> UsageSection:
    """What is metered and its cost in nano-units."""
    return UsageSection(
        prompt_tokens=charged.prompt_tokens,
        completion_tokens=charged.completion_tokens,
        cached_tokens=charged.cached_tokens,
        source=charged.source,
        cost_nano=cost,
    )


def _timing(progress: RequestProgress) -> TimingSection:
    received_s, outcome = progress.incoming.received_s, progress.outcome
    queue_s, sent_s, compress_s, waited_s = 0.0, None, None, 0.0
    if (attempts := progress.attempts) is not None:
        queue_s, sent_s, compress_s = attempts.queue_s, attempts.sent_s, attempts.compress_s
        waited_s = attempts.waited_s
    return TimingSection(
        queue_ms=queue_s * 1000,
        overhead_ms=None if sent_s is None else (sent_s - received_s - waited_s) * 1000,
        compress_ms=None if compress_s is None else compress_s * 1000,
        ttft_s=outcome.ttft_s,
        tpot_s=outcome.tpot_s,
        duration_s=progress.ended_s - received_s,
    )


# -- what is counted


def count(
    metrics: Metrics,
    record: DecisionRecord,
    estimate: LengthEstimate | None,
    served: ModelRuntime | None,
    lease: Lease | None,
) -> None:
    """Count one finished request."""
    model, pool = record.model or "", record.pool or ""
    metrics.requests.add(model, pool, record.outcome)
    if served is not None:
        served.demand.add(record)
        if served.watch is not None:
            served.watch.settled(record, served.routing)
    _count_admission(metrics, record, lease)
    _count_times(metrics, record)
    compression = record.compression
    result = compression.not_compressed
    if compression.kept_share is not None:
        result = "compressed"
        metrics.kept_share.observe(compression.kept_share)
    if result is not None:
        metrics.compressions.add(model, result)
        if served is not None and served.compression is not None:
            served.compression.settled(compression)
    if record.usage.cost_nano is not None:
        metrics.cost.add(model, record.tenant or "", by=record.usage.cost_nano)
    if record.usage.prompt_tokens is not None and estimate is not None and served is not None:
        _count_tokens(metrics, record, estimate, served)


def _count_admission(metrics: Metrics, record: DecisionRecord, lease: Lease | None) -> None:
    if lease is not None:
        metrics.admission.add(lease.entitlement, "admitted", "")
        if lease.would_deny:
            metrics.admission.add(lease.entitlement, "would_deny", lease.would_deny)
            metrics.would.add("deny")
    elif record.reason is not None and record.reason in _DENIALS:
        metrics.admission.add(record.entitlement or "", "denied", record.reason)
    if record.admission.evicted:
        metrics.evictions.add(record.model or "", record.pool or "")
    if record.admission.spilled:
        metrics.spillovers.add(record.model or "", record.pool or "")
    if record.plan.would_route is not None:
        metrics.would.add("route")
    if record.plan.reason == "would_refuse":
        metrics.would.add("deny")
    if record.compression.not_compressed == "observed":
        metrics.would.add("compress")


def _count_times(metrics: Metrics, record: DecisionRecord) -> None:
    timing, model, pool = record.timing, record.model or "", record.pool or ""
    if timing.overhead_ms is not None:
        metrics.overhead.observe(timing.overhead_ms / 1000, "to_dispatch")
    if timing.queue_ms:
        metrics.queue.observe(timing.queue_ms / 1000, model, pool)
    if timing.ttft_s is not None:
        metrics.ttft.observe(timing.ttft_s, model, pool)
        if record.stream and record.entitlement is not None:
            metrics.tenant_ttft.observe(timing.ttft_s, model, record.entitlement)
    if (first := record.prefill).pool is not None:
        ran = first.duration_ms is not None or record.outcome == "ok"
        if first.skipped or ran:
            metrics.prefills.add(first.pool, first.skipped or "ok")
        if first.duration_ms is not None:
            metrics.prefill.observe(first.duration_ms / 1000, first.pool)
        if first.transfer_s is not None:
            metrics.transfer.observe(first.transfer_s, pool)
    if timing.tpot_s is not None:
        metrics.tpot.observe(timing.tpot_s, model, pool)
    if timing.compress_ms is not None:
        metrics.overhead.observe(timing.compress_ms / 1000, "compress")


def _count_tokens(
    metrics: Metrics, record: DecisionRecord, estimate: LengthEstimate, served: ModelRuntime
) -> None:
    usage, model, entitlement = record.usage, record.model or "", record.entitlement or ""
    prompt_tokens = usage.prompt_tokens or 0
    metrics.tokens.add(model, entitlement, "input", by=prompt_tokens)
    metrics.tokens.add(model, entitlement, "output", by=usage.completion_tokens or 0)
    metrics.tokens.add(model, entitlement, "cached_input", by=usage.cached_tokens or 0)
    # A compressed prompt says nothing of how well prompts are estimated.
    if usage.source == "engine" and prompt_tokens and record.compression.kept_share is None:
        metrics.estimate_error.observe(
            estimate.input_tokens_total / prompt_tokens, estimate.category
        )
        # Whether it was sent past the first pool though the true lengths would have fitted that.
        shape, completion_tokens = served.routing.pools[0], usage.completion_tokens or 0
        if (
            record.plan.pool not in (None, shape.name)
            and shape.boundary_tokens is not None
            and estimate.sequences == 1
            and prompt_tokens + completion_tokens <= shape.boundary_tokens
            and can_serve(
                msgspec.structs.replace(estimate, input_tokens=prompt_tokens), shape.window_tokens
            )
        ):
            metrics.misroutes.add("long_fitted_short")
