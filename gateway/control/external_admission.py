"""Requests that another proxy forwards: what it asks and reports, and what that is charged.

Unknown fields of a body are refused, because a misspelt limit must not count as absent.
"""

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from gateway.admission.leases import believed, charge_tokens
from gateway.errors import BadRequest, Refusal
from gateway.fleet.model_runtime import ModelRuntime
from gateway.payload.body import MAX_CHOICES, MAX_MODEL_CHARS
from gateway.payload.head import MAX_REQUEST_ID
from gateway.payload.refusals import invalid, missing
from gateway.records.attempt import Usage
from gateway.records.decision import (
    DECISION_SCHEMA,
    AdmissionSection,
    DecisionRecord,
    EstimateSection,
    RequestSection,
    TimingSection,
    UsageSection,
)
from gateway.records.endpoint import CHAT
from gateway.records.estimate import LengthEstimate, Observation
from gateway.records.lease import Lease, Limits
from gateway.records.record import Record
from gateway.records.request import BodyFacts, Measure, Principal
from gateway.routing.routing import defaulted_cap

MAX_LEASE_S: Final = 3_600
LEASE_S: Final = 600.0
_MAX_TOKENS: Final = 2_147_483_647

Tokens = Annotated[int, Meta(ge=0, le=_MAX_TOKENS)]
Ending = Literal["ok", "failed", "cancelled", "expired", "evicted"]
"""How a lease ended. expired: no report in time; evicted: made room for a protected request."""


class AuthorizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request that another proxy would forward: the body of POST /admission/authorize."""

    model: Annotated[str, Meta(min_length=1, max_length=MAX_MODEL_CHARS)]
    input_tokens: Tokens | None = None
    """Of all prompts, as the proxy counted; without it `text_bytes` is needed."""
    text_bytes: Tokens | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=_MAX_TOKENS)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    request_id: Annotated[str, Meta(min_length=1, max_length=MAX_REQUEST_ID)] | None = None
    lease_s: Annotated[float, Meta(ge=1, le=MAX_LEASE_S)] = LEASE_S


class AuthorizeAnswer(Record, frozen=True, kw_only=True):
    """A lease. If no usage is reported within `expires_in_s`, its estimate is charged."""

    lease_id: str
    pool: str
    spilled: bool
    weight: float
    reserved_tokens: int
    reserved_kv_bytes: int
    max_tokens: int | None
    """The limit to send upstream: the request's own, or the model's default."""
    expires_in_s: float
    would_deny: str | None
    limits: Limits | None


class UsageReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a request ended: the body of POST /admission/usage; for absent tokens see `usage_of`."""

    lease_id: Annotated[str, Meta(min_length=1, max_length=MAX_REQUEST_ID)]
    status: Literal["ok", "failed", "cancelled"] = "ok"
    prompt_tokens: Tokens | None = None
    completion_tokens: Tokens = 0
    cached_tokens: Tokens = 0
    latency_s: Annotated[float, Meta(ge=0, le=86_400)] | None = None


class Settled(Record, frozen=True, kw_only=True):
    """The settlement of a lease; repeated reports get the same answer."""

    lease_id: str
    status: Ending
    charge_tokens: int | None
    """None for a full refund."""
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    held_tokens: int = 0
    """Part of `completion_tokens`: added because the slot was held longer than usage explains."""


class ExternalLease(Record, frozen=True, kw_only=True):
    """A lease whose usage is not reported yet."""

    lease: Lease
    served: ModelRuntime
    principal: Principal
    slots_of: str
    """The pool whose slots for other proxies it counts against; "" for none."""
    estimate: LengthEstimate
    request: AuthorizeBody
    key: str | None
    """Name of the key that the proxy presented."""
    received_s: float
    received_unix_s: float
    ends_s: float
    """When it expires without a report."""


def facts_of(request: AuthorizeBody) -> BodyFacts:
    """Facts for the estimator. Raises BadRequest when the prompt's length is not given."""
    if request.input_tokens is not None:
        measure = Measure(
            text_bytes=0,
            longest_text_bytes=0,
            exact_tokens=request.input_tokens,
            longest_exact_tokens=request.input_tokens,
        )
    elif request.text_bytes is not None:
        measure = Measure(
            text_bytes=request.text_bytes, longest_text_bytes=request.text_bytes, messages=1
        )
    else:
        raise missing("input_tokens")
    return BodyFacts(
        model=request.model,
        measure=measure,
        cap_tokens=request.max_tokens,
        sequences_per_prompt=request.n,
    )


def usage_of(report: UsageReport, open_lease: ExternalLease) -> Usage | None:
    """The usage to charge for a report; None refunds all.

    `ok` needs the prompt's tokens. `failed` without tokens is refunded. `cancelled` without tokens
    is charged the estimated prompt. Raises BadRequest for implausible usage, by the same rules as
    for an engine (`gateway.admission.leases`).
    """
    prompt, completion = report.prompt_tokens, report.completion_tokens
    if prompt is None:
        if report.status == "ok":
            raise missing("prompt_tokens")
        if report.status == "failed" and not completion:
            return None
        prompt = open_lease.estimate.input_tokens_total
    if report.status == "failed" and not prompt + completion:
        return None
    usage = Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        cached_tokens=min(report.cached_tokens, prompt),
    )
    window_tokens = open_lease.served.routing.pools[open_lease.lease.pool].window_tokens
    if believed(usage, open_lease.estimate, window_tokens) is not usage:
        raise _impossible(usage, open_lease, window_tokens)
    return usage


def _impossible(usage: Usage, open_lease: ExternalLease, window_tokens: int) -> BadRequest:
    estimate = open_lease.estimate
    if not usage.prompt_tokens:
        return invalid("prompt_tokens", "no engine serves a request without a prompt.")
    cap = estimate.cap_tokens
    if cap is not None and usage.completion_tokens > cap * estimate.sequences:
        return invalid("completion_tokens", f"the request allows {cap * estimate.sequences}.")
    field = "prompt_tokens" if usage.prompt_tokens > window_tokens else "completion_tokens"
    return invalid(
        field,
        f"prompt and completion together are more than the pool's window and twice the estimate "
        f"allow ({window_tokens} tokens a sequence).",
    )


def estimated_usage(open_lease: ExternalLease) -> Usage:
    """The reserved estimate as usage: the charge when the proxy reports nothing."""
    estimate = open_lease.estimate
    return Usage(
        prompt_tokens=estimate.input_tokens_total,
        completion_tokens=estimate.sequences * estimate.output_tokens,
        source="counted",
    )


def lesson_of(
    report: UsageReport, usage: Usage | None, open_lease: ExternalLease
) -> Observation | None:
    """What a trusted report teaches; None if nothing. `usage` is what the report was read as.

    The same counts as an engine's: prompts only as the proxy counted them, and no length of an
    answer that failed. An answer that was cancelled, or as long as allowed, was cut.
    """
    if usage is None or report.status == "failed":
        return None
    estimate = open_lease.estimate
    cap = defaulted_cap(open_lease.served.routing, estimate, open_lease.lease.pool)
    cap = estimate.cap_tokens if cap is None else cap
    full = cap is not None and usage.completion_tokens >= cap * estimate.sequences
    return Observation(
        endpoint=CHAT.name,
        tenant=open_lease.principal.tenant,
        measure=facts_of(open_lease.request).measure,
        prompt_tokens=report.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        sequences=estimate.sequences,
        output_censored=full or report.status == "cancelled",
    )


def with_time_held(
    open_lease: ExternalLease, usage: Usage | None, held_s: float
) -> tuple[Usage | None, int]:
    """Usage raised to the tokens its slots could have produced while held, and the tokens added.

    The proxy reports usage itself, so without this minimum it could hold slots for free.
    """
    price_tokens = int(
        held_s * open_lease.served.admission.slot_tokens_per_s * open_lease.estimate.sequences
    )
    used_tokens = 0 if usage is None else charge_of(open_lease, usage)
    missing_tokens = price_tokens - used_tokens
    if missing_tokens <= 0:
        return usage, 0
    usage = usage or Usage(prompt_tokens=0, completion_tokens=0)
    completion_tokens = usage.completion_tokens + missing_tokens
    return msgspec.structs.replace(usage, completion_tokens=completion_tokens), missing_tokens


def nano_held(open_lease: ExternalLease, held_s: float) -> float:
    """What its slots cost while they were held, where the pool's workers have a price.

    In nano-units of the currency; one slot of the pool for each sequence.
    """
    lease = open_lease.lease
    pool = open_lease.served.fleet.pools[lease.pool]
    if pool.slot_clock is None:
        return 0.0
    slot_s = lease.sequences * held_s
    return pool.slot_clock.nano_per_s * slot_s / max(pool.slots_per_worker, 1)


def charge_of(open_lease: ExternalLease, usage: Usage) -> int:
    """In the entitlement's tokens."""
    return charge_tokens(
        open_lease.served.admission.profile,
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.cached_tokens,
    )


_OUTCOMES: dict[Ending, tuple[str, int]] = {
    "ok": ("ok", 200),
    "failed": ("upstream_error", 502),
    "cancelled": ("disconnected", 499),
    "expired": ("expired", 504),
    "evicted": ("evicted", 429),
}


def refused_record(
    principal: Principal,
    request: AuthorizeBody,
    key: str | None,
    served: ModelRuntime | None,
    estimate: LengthEstimate | None,
    refusal: Refusal,
    lease_id: str,
    unix_s: float,
) -> DecisionRecord:
    """A request that was not admitted."""
    return DecisionRecord(
        schema=DECISION_SCHEMA,
        time_unix_s=unix_s,
        request_id=request.request_id or lease_id,
        endpoint="admission",
        outcome="refused",
        status=refusal.status,
        model=None if served is None else served.name,
        asked_model=request.model,
        tenant=principal.tenant,
        entitlement=principal.entitlement or None,
        key=key,
        reason=refusal.reason,
        retry_after_s=refusal.retry_after_s,
        figures=refusal.figures,
        estimate=EstimateSection(total_tokens=None if estimate is None else estimate.fit_tokens),
        admission=AdmissionSection(lease_id=lease_id),
    )


def settled_record(
    open_lease: ExternalLease,
    settled: Settled,
    cost_nano: int | None,
    duration_s: float,
    unix_s: float,
) -> DecisionRecord:
    """A lease that ended; `cost_nano` as its settlement counted it."""
    lease, estimate, served = open_lease.lease, open_lease.estimate, open_lease.served
    outcome, status = _OUTCOMES[settled.status]
    source = "counted" if settled.status in ("expired", "evicted") else "proxy"
    return DecisionRecord(
        schema=DECISION_SCHEMA,
        time_unix_s=open_lease.received_unix_s,
        request_id=open_lease.request.request_id or lease.id,
        endpoint="admission",
        outcome=outcome,
        status=status,
        model=served.name,
        asked_model=open_lease.request.model,
        tenant=open_lease.principal.tenant,
        entitlement=open_lease.principal.entitlement,
        key=open_lease.key,
        pool=served.fleet.pools[lease.pool].name,
        request=RequestSection(text_bytes=open_lease.request.text_bytes),
        estimate=EstimateSection(
            category=estimate.category,
            input_tokens=estimate.input_tokens_total,
            output_tokens=estimate.output_tokens,
            total_tokens=estimate.fit_tokens,
            cap_tokens=estimate.cap_tokens,
            sequences=estimate.sequences,
        ),
        admission=AdmissionSection(
            lease_id=lease.id,
            spilled=lease.spilled,
            admitted_unix_s=open_lease.received_unix_s,
            settled_unix_s=unix_s,
            reserved_tokens=lease.cost_tokens,
            reserved_kv_bytes=lease.kv_bytes,
            priority=lease.weight,
            contended=lease.contended,
            would_deny=lease.would_deny or None,
            evicted=settled.status == "evicted",
            charge_tokens=settled.charge_tokens,
        ),
        usage=UsageSection(
            prompt_tokens=settled.prompt_tokens,
            completion_tokens=settled.completion_tokens,
            cached_tokens=settled.cached_tokens,
            source=None if settled.charge_tokens is None else source,
            cost_nano=cost_nano,
        ),
        timing=TimingSection(duration_s=duration_s),
    )
