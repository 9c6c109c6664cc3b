"""Stage 10, settle: usage -> lease released, estimator taught, request counted. Always runs.

Only what the engine itself reported teaches the ratio; what the gateway counted is charged, and
teaches at most the length of an answer. An answer that was cut (client left, stream broke,
limit reached) is a lower bound of its length, never an observation of it. The counters take a
finished request's figures from its decision record.
"""

from collections.abc import Awaitable
from typing import get_args

import msgspec

from gateway.admission.admission import DenialReason
from gateway.estimate.estimator import LengthEstimator
from gateway.fleet.model_runtime import ModelRuntime, ModelScheduling
from gateway.metrics import Metrics
from gateway.ports import LeaseStore, Settlement
from gateway.records.attempt import Binding, Outcome, Usage
from gateway.records.decision import DecisionRecord, TimingSection, UsageSection
from gateway.records.endpoint import Endpoint
from gateway.records.entitlement import slo_result
from gateway.records.estimate import LengthEstimate, Observation
from gateway.records.lease import Lease
from gateway.records.request import BodyFacts, Principal, Prompt
from gateway.records.usage import cost_nano
from gateway.routing.routing import can_serve
from gateway.scheduling.prefix_cache_estimate import ExpectedHit
from gateway.scheduling.prefix_digests import points_of
from gateway.scheduling.scheduler import Prefix

_CUT = frozenset({"length", "max_tokens", "incomplete"})


def settle(
    store: LeaseStore,
    lease: Lease,
    outcome: Outcome,
    estimate: LengthEstimate,
    served: ModelRuntime | None,
    *,
    dispatched: bool,
    computes: bool = True,
    unix_s: float = 0.0,
    slot_nano: float = 0.0,
    heard: bool = False,
) -> tuple[Usage | None, int | None, Awaitable[None] | None]:
    """Release the lease; the usage it was charged (None for a full refund), its cost, its arrival.

    What no model computed (`computes` is false) is charged nothing.
    `slot_nano` is what its time at workers costs, where they have a price by the hour. The cost
    is in nano-units of the currency, None where the model has no prices. The arrival is awaited
    by who asked to be `heard` (see LeaseStore).
    """
    usage = charged(outcome, estimate) if dispatched and computes else None
    dispatched = dispatched and outcome.label != "fell_back"
    cost = None if served is None or usage is None else cost_of(served, usage, slot_nano)
    money = money_of(lease, cost) if lease.asked else 0
    settlement = Settlement(usage=usage, dispatched=dispatched, unix_s=unix_s, money=money)
    return usage, cost, store.settle(lease, settlement, heard=heard)


def cost_of(served: ModelRuntime, usage: Usage, slot_nano: float = 0.0) -> int | None:
    """The cost of a charged request, in nano-units; None where its model has no prices."""
    if served.price is None and not served.by_hour:
        return None
    return request_cost_nano(
        served, usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, slot_nano
    )


def money_of(lease: Lease, cost: int | None) -> int:
    """What budgets in money count of a request, in nano-units; 0 where it has none."""
    if not cost or not any(one.unit == "money" for one in lease.asked):
        return 0
    return cost


def charged(outcome: Outcome, estimate: LengthEstimate) -> Usage | None:
    """What the request used: the engine's report, else prompt as estimated + tokens emitted.

    `outcome.usage` is what is believed (`gateway.admission.leases`). None, a full refund,
    when the client got an error instead of an answer.
    """
    usage = outcome.usage
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


def remember(
    served: ModelRuntime,
    endpoint: Endpoint,
    principal: Principal,
    facts: BodyFacts,
    prefix: Prefix,
    prompt: Prompt,
    outcome: Outcome,
) -> None:
    """Note a conversation that an engine holds as it came: its next turn is not compressed."""
    compression = served.compression
    if compression is not None and outcome.completed and prompt.only_pool is None:
        tenant = principal.tenant
        points = prefix.points or points_of(
            endpoint.name,
            facts.members,
            facts.measure.text_bytes,
            tenant,
            facts.adapter,
            salted=served.scheduling.salted,
        )
        compression.conversations.remember(tenant, points)


def note_cached(
    scheduling: ModelScheduling, binding: Binding, expected: ExpectedHit, outcome: Outcome
) -> None:
    """Compare what the worker was expected to hold of the prompt with what it says it held."""
    usage = outcome.usage
    if usage is None or usage.source != "engine" or not outcome.completed:
        return
    place = (binding.pool, binding.worker)
    if usage.cached_reported:
        scheduling.reports_cached.add(place)
    elif place not in scheduling.reports_cached:
        return
    index = scheduling.prefixes[binding.pool]
    if index is not None:
        index.correct(binding.worker, expected, usage.cached_tokens)


def learn(
    estimator: LengthEstimator,
    endpoint: Endpoint,
    principal: Principal,
    facts: BodyFacts,
    estimate: LengthEstimate,
    prompt: Prompt,
    outcome: Outcome,
) -> None:
    """Teach the estimator what this request turned out to be."""
    usage = outcome.usage
    reported = usage if usage is not None and usage.source == "engine" else None
    if outcome.label in ("refused", "fell_back", "error", "evicted") or (
        usage is None and not outcome.completed
    ):
        return
    estimator.learn(
        Observation(
            endpoint=endpoint.name,
            tenant=principal.tenant,
            measure=facts.measure,
            prompt_tokens=None if reported is None else reported.prompt_tokens,
            completion_tokens=None if usage is None else usage.completion_tokens,
            sequences=estimate.sequences,
            output_censored=not outcome.completed or outcome.finish_reason in _CUT,
            learn_ratio=prompt.compressed == "none",
        )
    )


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
    _count_compression(metrics, record, served)
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


def _count_compression(
    metrics: Metrics, record: DecisionRecord, served: ModelRuntime | None
) -> None:
    compression = record.compression
    result = compression.not_compressed
    if compression.kept_share is not None:
        result = "compressed"
        metrics.kept_share.observe(compression.kept_share)
    elif result == "observed":
        metrics.would.add("compress")
    if result is not None:
        metrics.compressions.add(record.model or "", result)
        if served is not None and served.compression is not None:
            served.compression.settled(compression)


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


def request_cost_nano(
    served: ModelRuntime,
    prompt_tokens: int,
    completion_tokens: int,
    cached_tokens: int,
    slot_nano: float,
) -> int | None:
    """The cost of a charged request; `slot_nano` is what its time at workers costs.

    None where its model has no prices.
    """
    price = served.price
    if price is not None:
        return cost_nano(price, prompt_tokens, completion_tokens, cached_tokens)
    return int(slot_nano + 0.5) if served.by_hour else None
