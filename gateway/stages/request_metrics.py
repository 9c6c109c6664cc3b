"""What one finished request adds to the counters. Joined to stage 10."""

from typing import get_args

import msgspec

from gateway.metrics import Metrics
from gateway.policy.admission.admission import DenialReason
from gateway.policy.entitlements.slo import slo_result
from gateway.policy.model_runtime import ModelRuntime
from gateway.policy.pools.routing import can_serve
from gateway.records.decision import DecisionRecord, TimingSection, UsageSection
from gateway.records.estimate import LengthEstimate
from gateway.records.lease import Lease
from gateway.records.request import Principal

_DENIALS = frozenset(get_args(DenialReason))


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
    if served is not None and served.watch is not None:
        served.watch.settled(record, served.routing)
    _count_admission(metrics, record, lease)
    _count_compression(metrics, record)
    _count_times(metrics, record.timing, model, pool)
    if record.stream and record.entitlement is not None and record.timing.ttft_s is not None:
        metrics.tenant_ttft.observe(record.timing.ttft_s, model, record.entitlement)
    if record.admission.spilled:
        metrics.spillovers.add(model, pool)
    if record.plan.would_route is not None:
        metrics.would.add("route")
    if record.plan.reason == "would_refuse":
        metrics.would.add("deny")
    if record.usage.cost_nano is not None:
        metrics.cost.add(model, record.tenant or "", by=record.usage.cost_nano)
    if record.usage.prompt_tokens is not None and estimate is not None and served is not None:
        _count_tokens(metrics, record, record.usage, estimate, served)


def count_slo(
    metrics: Metrics, record: DecisionRecord, principal: Principal, *, admitted: bool
) -> None:
    """Count whether a request kept its entitlement's target."""
    met = slo_result(record, principal.slo_ms, admitted=admitted)
    if met is not None:
        metrics.slo_requests.add(principal.entitlement, met)


def _count_times(metrics: Metrics, timing: TimingSection, model: str, pool: str) -> None:
    if timing.overhead_ms is not None:
        metrics.overhead.observe(timing.overhead_ms / 1000, "to_dispatch")
    if timing.queue_ms:
        metrics.queue.observe(timing.queue_ms / 1000, model, pool)
    if timing.ttft_s is not None:
        metrics.ttft.observe(timing.ttft_s, model, pool)
    if timing.tpot_s is not None:
        metrics.tpot.observe(timing.tpot_s, model, pool)
    if timing.compress_ms is not None:
        metrics.overhead.observe(timing.compress_ms / 1000, "compress")


def _count_tokens(
    metrics: Metrics,
    record: DecisionRecord,
    usage: UsageSection,
    estimate: LengthEstimate,
    served: ModelRuntime,
) -> None:
    model, entitlement = record.model or "", record.entitlement or ""
    prompt_tokens = usage.prompt_tokens or 0
    metrics.tokens.add(model, entitlement, "input", by=prompt_tokens)
    metrics.tokens.add(model, entitlement, "output", by=usage.completion_tokens or 0)
    metrics.tokens.add(model, entitlement, "cached_input", by=usage.cached_tokens or 0)
    # A compressed prompt says nothing of how well prompts are estimated.
    if usage.source == "engine" and prompt_tokens and record.compression.kept_share is None:
        metrics.estimate_error.observe(
            estimate.input_tokens_total / prompt_tokens, estimate.category
        )
        _count_misroute(metrics, record, usage, estimate, served)


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


def _count_compression(metrics: Metrics, record: DecisionRecord) -> None:
    compression = record.compression
    if compression.kept_share is not None:
        metrics.compressions.add(record.model or "", "compressed")
        metrics.kept_share.observe(compression.kept_share)
    elif compression.not_compressed is not None:
        metrics.compressions.add(record.model or "", compression.not_compressed)
        if compression.not_compressed == "observed":
            metrics.would.add("compress")


def _count_misroute(
    metrics: Metrics,
    record: DecisionRecord,
    usage: UsageSection,
    estimate: LengthEstimate,
    served: ModelRuntime,
) -> None:
    """Sent past the first pool though the true lengths would have fitted it."""
    shape = served.routing.pools[0]
    if record.plan.pool in (None, shape.name) or shape.boundary_tokens is None:
        return
    true_total = (usage.prompt_tokens or 0) + (usage.completion_tokens or 0)
    exact = msgspec.structs.replace(estimate, input_tokens=usage.prompt_tokens or 0)
    if (
        estimate.sequences == 1
        and true_total <= shape.boundary_tokens
        and can_serve(exact, shape.window_tokens)
    ):
        metrics.misroutes.add("long_fitted_short")
