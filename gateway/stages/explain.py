"""Explaining a request: response headers, the log record, the counters. Joined to stage 10.

Nothing here holds prompt text, keys or header values, but for the prompt itself where the
configuration asks for it.
"""

from typing import Any, Final, get_args

import msgspec

from gateway.errors import Refusal, Unavailable, UpstreamBroken, UpstreamTimeout
from gateway.metrics import Metrics
from gateway.policy.admission.admission import DenialReason
from gateway.policy.admission.charging import charge_tokens
from gateway.policy.admission.denials import limit_lines
from gateway.policy.model_runtime import ServedModel
from gateway.policy.pools.retry import Fault
from gateway.policy.pools.routing import can_serve
from gateway.policy.response.overflow import engine_message
from gateway.policy.scheduling.scheduler import Job
from gateway.ports import Lines
from gateway.records.attempt import Attempt, Binding, Outcome, Usage
from gateway.records.decision import DECISION_SCHEMA, DecisionRecord
from gateway.records.estimate import LengthEstimate, Plan
from gateway.records.lease import Lease
from gateway.records.request import BodyFacts, Incoming, Principal, Prompt

_DENIALS = frozenset(get_args(DenialReason))


def response_lines(
    request_id: str,
    served: ServedModel | None,
    estimate: LengthEstimate | None,
    lease: Lease | None,
    binding: Binding | None,
    prompt: Prompt | None,
    queue_s: float,
) -> Lines:
    """The x-sluice-* headers known so far."""
    lines = f"x-request-id: {request_id}\r\n"
    if estimate is not None:
        lines += f"x-sluice-estimated-tokens: {estimate.fit_tokens}\r\n"
    if served is not None and lease is not None and binding is not None:
        pool = served.pools[binding.pool]
        lines += (
            f"x-sluice-pool: {pool.name}\r\n"
            f"x-sluice-worker: {pool.workers[binding.worker]}\r\n"
            f"x-sluice-spilled: {'true' if lease.spilled else 'false'}\r\n"
            f"x-sluice-compressed: {'none' if prompt is None else prompt.compressed}\r\n"
            f"x-sluice-queue-ms: {int(queue_s * 1000)}\r\n"
        )
    if lease is not None and lease.limits is not None and _applied(served, lease):
        lines += limit_lines(lease.limits)
    return lines.encode()


def _applied(served: ServedModel | None, lease: Lease) -> bool:
    """Whether the limits are in force, not only observed."""
    observed = served is not None and (served.routing.observe or served.observe_admission)
    return not (observed or lease.would_deny)


def engine_refusal(fault: Fault) -> Refusal:
    """What the client is told when the last attempt failed."""
    said = engine_message(fault.body)
    detail = f" It said: {said}" if said else ""
    match fault.kind:
        case "busy":
            return Unavailable(
                f"Every engine that could serve this request is busy.{detail}",
                reason="engine_busy",
                code="engine_busy",
                retry_after_s=1.0,
                should_retry=True,
            )
        case "local":
            return Unavailable(
                f"The gateway could not open a connection to an engine: {fault.message}. "
                "Its operator should raise its limits.",
                reason="gateway_exhausted",
                code="gateway_exhausted",
                retry_after_s=2.0,
            )
        case "connect":
            return Unavailable(
                "No engine that could serve this request accepts connections.",
                reason="no_worker_ready",
                code="no_worker_ready",
                retry_after_s=2.0,
            )
        case "timeout":
            return UpstreamTimeout(
                "The engine did not answer in time.", reason="engine_timeout", code="engine_timeout"
            )
        case "server_error":
            return UpstreamBroken(
                f"The engine failed ({fault.message}).{detail}",
                reason="engine_error",
                code="engine_error",
            )
        case _:
            return UpstreamBroken(
                f"The engine's answer broke off before it began: {fault.message}.",
                reason="engine_connection_broken",
                code="engine_connection_broken",
            )


def decision_record(
    incoming: Incoming,
    outcome: Outcome,
    charged: Usage | None,
    principal: Principal | None,
    facts: BodyFacts | None,
    served: ServedModel | None,
    estimate: LengthEstimate | None,
    planned: Plan | None,
    plan: Plan | None,
    lease: Lease | None,
    admitted: tuple[Plan, Lease] | None,
    prompt: Prompt | None,
    binding: Binding | None,
    attempts: tuple[Attempt, ...],
    refusal: Refusal | None,
    queue_s: float,
    sent_s: float | None,
    now_s: float,
    settled_unix_s: float,
    lease_changes: tuple[tuple[float, str, int], ...],
    compress_s: float | None,
    job: Job | None,
    first_s: float | None,
    *,
    rescued: bool,
    evicted: bool,
    prompts: bool,
) -> DecisionRecord:
    """One request, explained: all that the stages found, in one flat record."""
    managed = lease is not None and lease.limits is not None
    asked, taken = admitted if managed and admitted else (None, None)
    pools = () if served is None else served.pools
    would = (
        pools[planned.pool].name
        if served and served.routing.observe and planned and plan and planned.pool != plan.pool
        else None
    )
    # What a request did not get to has no figures: asked once here, not once for each of them.
    told: Any = principal or _NOTHING
    found: Any = facts or _NOTHING
    measure: Any = _NOTHING if facts is None else facts.measure
    guess: Any = estimate or _NOTHING
    bound: Any = binding or _NOTHING
    used: Any = charged or _NOTHING
    sent: Any = job or _NOTHING
    # By position: naming seventy fields costs more than all else here.
    return DecisionRecord(
        DECISION_SCHEMA,  # schema
        incoming.received_unix_s,  # time_unix_s
        incoming.request_id,
        incoming.endpoint.name,  # endpoint
        outcome.label,  # outcome
        outcome.status,
        None if served is None else served.name,  # model
        found.model,  # asked_model
        told.tenant,
        told.entitlement,
        found.stream or False,
        None if refusal is None else refusal.reason,
        "observe" if served and served.routing.observe else "enforce",  # mode
        guess.category,
        measure.rag or False,
        measure.text_bytes,
        len(incoming.body),  # body_bytes
        measure.messages or 0,
        measure.media_parts or 0,
        guess.ratio,  # bytes_per_token
        guess.ratio_conservative,  # bytes_per_token_conservative
        guess.input_tokens_total,  # estimated_input_tokens
        guess.output_tokens,  # estimated_output_tokens
        guess.fit_tokens,  # estimated_total_tokens
        guess.cap_tokens,
        guess.sequences,
        None if planned is None else pools[planned.pool].name,  # planned_pool
        plan.reason
        if plan and plan.compress
        else planned.reason
        if planned
        else None,  # plan_reason
        would,  # would_route
        None if binding is None else pools[binding.pool].name,  # pool
        None if binding is None else pools[binding.pool].workers[binding.worker],  # worker
        lease is not None and lease.spilled,
        rescued,
        "none" if prompt is None else prompt.compressed,
        bound.score,
        bound.candidates or (),
        attempts,
        used.prompt_tokens,
        used.completion_tokens,
        used.cached_tokens,
        used.source,  # usage_source
        outcome.finish_reason,
        queue_s * 1000,  # queue_ms
        None if sent_s is None else (sent_s - incoming.received_s - queue_s) * 1000,  # overhead_ms
        outcome.ttft_s,
        outcome.tpot_s,
        now_s - incoming.received_s,  # duration_s
        prompt.not_compressed or None if prompt else None,  # not_compressed
        prompt.kept_share if prompt and prompt.only_pool is not None else None,  # kept_share
        None if compress_s is None else compress_s * 1000,  # compress_ms
        incoming.lease_id,
        told.service_class if managed else None,  # service_class
        pools[asked.pool].name if asked and pools else None,  # asked_pool
        tuple([pools[p].name for p in asked.alternates]) if asked else (),  # alternates
        lease.issued_unix_s if managed and lease else None,  # admitted_unix_s
        taken.cost_tokens if taken else None,  # reserved_tokens
        taken.kv_bytes if taken else None,  # reserved_kv_bytes
        lease.weight if managed and lease else None,  # priority
        lease is not None and lease.contended,
        lease.would_deny or None if lease else None,  # would_deny
        evicted,
        _charge(served, charged),  # charge_tokens
        settled_unix_s if managed else None,  # settled_unix_s
        sent.hit_tokens,  # expected_hit_tokens
        sent.backlog_tokens,
        sent.active,  # worker_active
        sent.kv_usage,  # worker_kv_usage
        sent.mean_s or None,  # predicted_prefill_s
        sent.quantile_s or None,  # predicted_prefill_q_s
        first_s - sent.sent_s if first_s is not None and sent.stream else None,  # prefill_s
        lease_changes if managed else (),  # lease_changes
        incoming.body.decode("utf-8", "replace") if prompts else None,  # prompt
    )


class _Nothing:
    """Stands for a record that was never made: everything it is asked for is None."""

    __slots__ = ()

    def __getattr__(self, name: str) -> object:
        return None


_NOTHING: Final = _Nothing()


def _charge(served: ServedModel | None, charged: Usage | None) -> int | None:
    if served is None or charged is None:
        return None
    return charge_tokens(
        served.admission,
        charged.prompt_tokens,
        charged.completion_tokens,
        charged.cached_tokens,
    )


def count(
    metrics: Metrics,
    record: DecisionRecord,
    estimate: LengthEstimate | None,
    served: ServedModel | None,
    lease: Lease | None,
) -> None:
    """Count one finished request."""
    model, pool = record.model or "", record.pool or ""
    metrics.requests.add(model, pool, record.outcome)
    if served is not None and served.watch is not None:
        served.watch.settled(record, served.routing)
    _count_admission(metrics, record, lease)
    _count_compression(metrics, record)
    if record.overhead_ms is not None:
        metrics.overhead.observe(record.overhead_ms / 1000, "to_dispatch")
    if record.queue_ms:
        metrics.queue.observe(record.queue_ms / 1000, model, pool)
    if record.ttft_s is not None:
        metrics.ttft.observe(record.ttft_s, model, pool)
    if record.tpot_s is not None:
        metrics.tpot.observe(record.tpot_s, model, pool)
    if record.spilled:
        metrics.spillovers.add(model, pool)
    if record.would_route is not None:
        metrics.would.add("route")
    if record.plan_reason == "would_refuse":
        metrics.would.add("deny")
    if record.prompt_tokens is None or estimate is None or served is None:
        return
    entitlement = record.entitlement or ""
    metrics.tokens.add(model, entitlement, "input", by=record.prompt_tokens)
    metrics.tokens.add(model, entitlement, "output", by=record.completion_tokens or 0)
    metrics.tokens.add(model, entitlement, "cached_input", by=record.cached_tokens or 0)
    if record.usage_source != "engine" or not record.prompt_tokens or record.kept_share is not None:
        return
    metrics.estimate_error.observe(
        estimate.input_tokens_total / record.prompt_tokens, estimate.category
    )
    _count_misroute(metrics, record, estimate, served)


def _count_admission(metrics: Metrics, record: DecisionRecord, lease: Lease | None) -> None:
    if lease is not None:
        metrics.admission.add(lease.entitlement, "admitted", "")
        if lease.would_deny:
            metrics.admission.add(lease.entitlement, "would_deny", lease.would_deny)
            metrics.would.add("deny")
    elif record.reason is not None and record.reason in _DENIALS:
        metrics.admission.add(record.entitlement or "", "denied", record.reason)
    if record.evicted:
        metrics.evictions.add(record.model or "", record.pool or "")


def _count_compression(metrics: Metrics, record: DecisionRecord) -> None:
    if record.kept_share is not None:
        metrics.compressions.add(record.model or "", "compressed")
        metrics.kept_share.observe(record.kept_share)
    elif record.not_compressed is not None:
        metrics.compressions.add(record.model or "", record.not_compressed)
        if record.not_compressed == "observed":
            metrics.would.add("compress")
    if record.compress_ms is not None:
        metrics.overhead.observe(record.compress_ms / 1000, "compress")


def _count_misroute(
    metrics: Metrics, record: DecisionRecord, estimate: LengthEstimate, served: ServedModel
) -> None:
    """Sent past the first pool though the true lengths would have fitted it."""
    shape = served.routing.pools[0]
    if record.planned_pool in (None, shape.name) or shape.boundary_tokens is None:
        return
    true_total = (record.prompt_tokens or 0) + (record.completion_tokens or 0)
    exact = msgspec.structs.replace(estimate, input_tokens=record.prompt_tokens or 0)
    if (
        estimate.sequences == 1
        and true_total <= shape.boundary_tokens
        and can_serve(exact, shape.window_tokens)
    ):
        metrics.misroutes.add("long_fitted_short")
