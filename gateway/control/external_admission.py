"""Admission for requests that another proxy forwards: its reports, and the charges."""

from typing import Literal

import msgspec

from gateway.admission.leases import believed, charge_tokens
from gateway.errors import BadRequest
from gateway.fleet.model_runtime import ModelRuntime
from gateway.payload.refusals import invalid, missing
from gateway.records.attempt import Usage
from gateway.records.endpoint import CHAT
from gateway.records.estimate import LengthEstimate, Observation
from gateway.records.lease import Lease
from gateway.records.record import Record
from gateway.records.request import BodyFacts, Measure, Principal
from gateway.routing.routing import defaulted_cap

Ending = Literal["ok", "failed", "cancelled", "expired", "evicted"]
"""How a lease ended. expired: no report in time; evicted: made room for a protected request."""


class ExternalRequest(Record, frozen=True, kw_only=True):
    """A request that another proxy would forward."""

    model: str
    input_tokens: int | None = None
    """Of all prompts, as the proxy counted; without it `text_bytes` is needed."""
    text_bytes: int | None = None
    max_tokens: int | None = None
    n: int = 1
    request_id: str | None = None
    lease_s: float = 600.0
    key: str | None = None
    """Name of the key that the proxy presented."""
    entitlement: str | None = None
    """The entitlement that the proxy asks for; None for the key's first."""


class UsageReport(Record, frozen=True, kw_only=True):
    """The proxy's report of how a request ended; for absent tokens see `usage_of`."""

    lease_id: str
    status: Literal["ok", "failed", "cancelled"] = "ok"
    prompt_tokens: int | None = None
    completion_tokens: int = 0
    cached_tokens: int = 0
    latency_s: float | None = None


class Reporter(Record, frozen=True, kw_only=True):
    """What the settlement of a lease needs to know of who reports, at whichever replica."""

    tenant: str
    trusted: bool
    """Whether its reports may teach the tenant's estimates."""


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


class ExternalGrant(Record, frozen=True, kw_only=True):
    """A lease that is held for the proxy."""

    lease: Lease
    pool: str
    max_tokens: int | None
    """The limit to send upstream: the request's own, or the model's default."""
    expires_in_s: float


class ExternalLease(Record, frozen=True, kw_only=True):
    """A lease whose usage is not reported yet."""

    lease: Lease
    served: ModelRuntime
    principal: Principal
    slots_of: str
    """The pool whose slots for other proxies it counts against; "" for none."""
    estimate: LengthEstimate
    request: ExternalRequest
    received_s: float
    received_unix_s: float


def facts_of(request: ExternalRequest) -> BodyFacts:
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
    used_tokens = 0 if usage is None else _charge(open_lease, usage)
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


def _charge(open_lease: ExternalLease, usage: Usage) -> int:
    return charge_tokens(
        open_lease.served.admission.profile,
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.cached_tokens,
    )


def settled_as(
    open_lease: ExternalLease, ending: Ending, usage: Usage | None, held_tokens: int = 0
) -> Settled:
    """The settlement of a lease; `usage` None is a full refund."""
    if usage is None:
        return Settled(
            lease_id=open_lease.lease.id,
            status=ending,
            charge_tokens=None,
            prompt_tokens=None,
            completion_tokens=None,
            cached_tokens=None,
        )
    return Settled(
        lease_id=open_lease.lease.id,
        status=ending,
        charge_tokens=_charge(open_lease, usage),
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        held_tokens=held_tokens,
    )
