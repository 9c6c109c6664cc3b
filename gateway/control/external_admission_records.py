"""Decision records of requests that another proxy forwards."""

from gateway.control.external_admission import (
    Ending,
    ExternalLease,
    ExternalRequest,
    Settled,
)
from gateway.errors import Refusal
from gateway.fleet.model_runtime import ModelRuntime
from gateway.records.decision import (
    DECISION_SCHEMA,
    AdmissionSection,
    DecisionRecord,
    EstimateSection,
    RequestSection,
    TimingSection,
    UsageSection,
)
from gateway.records.estimate import LengthEstimate
from gateway.records.request import Principal

_OUTCOMES: dict[Ending, tuple[str, int]] = {
    "ok": ("ok", 200),
    "failed": ("upstream_error", 502),
    "cancelled": ("disconnected", 499),
    "expired": ("expired", 504),
    "evicted": ("evicted", 429),
}


def refused_record(
    principal: Principal,
    request: ExternalRequest,
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
        key=request.key,
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
        key=open_lease.request.key,
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
