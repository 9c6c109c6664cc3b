"""One request, explained: its line of the request log. Joined to stage 10.

Each section is built from the records of one stage; a stage that the request did not reach has
the section's empty instance. Nothing here holds prompt text, keys or header values, but for the
prompt itself where the configuration asks for it.
"""

from typing import Final

from xxhash import xxh3_64_intdigest

from gateway.admission.leases import charge_tokens
from gateway.errors import Told
from gateway.fleet.model_runtime import ModelRuntime
from gateway.records.attempt import Attempt, Binding, Outcome, Usage
from gateway.records.decision import (
    DECISION_SCHEMA,
    NO_COMPRESSION,
    NO_ESTIMATE,
    NO_PLAN,
    NO_SCHEDULING,
    NO_USAGE,
    AdmissionSection,
    CompressionSection,
    DecisionRecord,
    EstimateSection,
    PlanSection,
    RequestSection,
    SchedulingSection,
    TimingSection,
    UsageSection,
)
from gateway.records.entitlement import key_name
from gateway.records.estimate import LengthEstimate, Plan
from gateway.records.lease import Lease
from gateway.records.request import BodyFacts, Incoming, Principal, Prompt
from gateway.scheduling.prefix_digests import seed
from gateway.scheduling.scheduler import Job

DIGESTED_BYTES: Final = 65_536
"""End of a body that its digest covers; a conversation's turns differ there."""


def decision_record(
    *,
    incoming: Incoming,
    principal: Principal | None,
    facts: BodyFacts | None,
    served: ModelRuntime | None,
    outcome: Outcome,
    told: Told | None,
    binding: Binding | None,
    rescued: bool,
    estimate: EstimateSection,
    plan: PlanSection,
    admission: AdmissionSection,
    compression: CompressionSection,
    scheduling: SchedulingSection,
    attempts: tuple[Attempt, ...],
    usage: UsageSection,
    timing: TimingSection,
    prompts: bool,
) -> DecisionRecord:
    """The whole record; `prompts` where it shall hold the request's body."""
    pool = None if served is None or binding is None else served.fleet.pools[binding.pool]
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
        rescued=rescued,
        finish_reason=outcome.finish_reason,
        request=_request(incoming, facts),
        estimate=estimate,
        plan=plan,
        admission=admission,
        compression=compression,
        scheduling=scheduling,
        attempts=attempts,
        usage=usage,
        timing=timing,
        trace=incoming.trace,
        prompt=incoming.body.decode("utf-8", "replace") if prompts else None,
    )


def _request(incoming: Incoming, facts: BodyFacts | None) -> RequestSection:
    body = incoming.body
    tail = body if len(body) <= DIGESTED_BYTES else body[-DIGESTED_BYTES:]
    digest = xxh3_64_intdigest(tail, seed()) & 0xFFFF_FFFF
    if facts is None:
        return RequestSection(body_bytes=len(body), body_digest=digest)
    measure = facts.measure
    return RequestSection(
        body_bytes=len(body),
        body_digest=digest,
        text_bytes=measure.text_bytes,
        messages=measure.messages,
        media_parts=measure.media_parts,
        rag=measure.rag,
    )


def estimate_section(estimate: LengthEstimate | None) -> EstimateSection:
    """What the request was expected to take."""
    if estimate is None:
        return NO_ESTIMATE
    return EstimateSection(
        category=estimate.category,
        bytes_per_token=estimate.ratio,
        bytes_per_token_conservative=estimate.ratio_conservative,
        input_tokens=estimate.input_tokens_total,
        output_tokens=estimate.output_tokens,
        total_tokens=estimate.fit_tokens,
        cap_tokens=estimate.cap_tokens,
        sequences=estimate.sequences,
    )


def plan_section(
    *, served: ModelRuntime | None, planned: Plan | None, plan: Plan | None
) -> PlanSection:
    """`planned` is what the boundary said, `plan` what was carried out."""
    if served is None or planned is None:
        return NO_PLAN
    name = served.fleet.pools[planned.pool].name
    moved = served.routing.observe and plan is not None and plan.pool != planned.pool
    return PlanSection(
        pool=name,
        reason=plan.reason if plan is not None and plan.compress else planned.reason,
        would_route=name if moved else None,
    )


def admission_section(
    *,
    lease_id: str,
    lease: Lease,
    asked: Plan,
    taken: Lease,
    principal: Principal | None,
    served: ModelRuntime,
    charged: Usage | None,
    lease_changes: tuple[tuple[float, str, int], ...],
    evicted: bool,
    settled_unix_s: float,
) -> AdmissionSection:
    """`asked` and `taken`: what admission was asked for and gave; `lease`: as it was settled."""
    charge = None
    if charged is not None:
        charge = charge_tokens(
            served.admission.profile,
            charged.prompt_tokens,
            charged.completion_tokens,
            charged.cached_tokens,
        )
    if lease.limits is None:
        return AdmissionSection(
            lease_id=lease_id,
            spilled=lease.spilled,
            contended=lease.contended,
            would_deny=lease.would_deny or None,
            evicted=evicted,
            charge_tokens=charge,
        )
    return AdmissionSection(
        lease_id=lease_id,
        service_class=None if principal is None else principal.service_class,
        asked_pool=served.fleet.pools[asked.pool].name,
        alternates=tuple([served.fleet.pools[pool].name for pool in asked.alternates]),
        spilled=lease.spilled,
        admitted_unix_s=lease.issued_unix_s,
        settled_unix_s=settled_unix_s,
        reserved_tokens=taken.cost_tokens,
        reserved_kv_bytes=taken.kv_bytes,
        priority=lease.weight,
        contended=lease.contended,
        would_deny=lease.would_deny or None,
        evicted=evicted,
        lease_changes=lease_changes,
        charge_tokens=charge,
    )


def compression_section(served: ModelRuntime | None, prompt: Prompt | None) -> CompressionSection:
    """What became of a prompt that compression could have made fit."""
    if prompt is None or (prompt.only_pool is None and not prompt.not_compressed):
        return NO_COMPRESSION
    compression = None if served is None else served.compression
    return CompressionSection(
        compressed=prompt.compressed,
        not_compressed=prompt.not_compressed or None,
        kept_share=None if prompt.only_pool is None else prompt.kept_share,
        when=None if compression is None else compression.rules.when,
    )


def scheduling_section(
    *, served: ModelRuntime | None, binding: Binding | None, job: Job | None, first_s: float | None
) -> SchedulingSection:
    """How the worker was chosen; `first_s` is when the first token came."""
    score = None if binding is None else binding.score
    candidates = () if binding is None else binding.candidates
    if job is None:
        if binding is None:
            return NO_SCHEDULING
        return SchedulingSection(score=score, candidates=candidates)
    would_bind = None
    if served is not None and binding is not None and job.would_bind >= 0:
        would_bind = served.fleet.pools[binding.pool].workers[job.would_bind]
    return SchedulingSection(
        score=score,
        candidates=candidates,
        expected_hit_tokens=job.hit_tokens,
        backlog_tokens=job.backlog_tokens,
        worker_active=job.active,
        worker_kv_usage=job.kv_usage,
        predicted_prefill_s=job.expected_s or job.mean_s or None,
        predicted_prefill_q_s=job.quantile_s or None,
        prefill_s=first_s - job.sent_s if first_s is not None and job.stream else None,
        would_bind=would_bind,
        would_prefill_s=job.would_s or None,
    )


def usage_section(charged: Usage | None, cost_nano: int | None = None) -> UsageSection:
    """What is metered and its cost; nothing where the client got a full refund."""
    if charged is None:
        return NO_USAGE
    return UsageSection(
        prompt_tokens=charged.prompt_tokens,
        completion_tokens=charged.completion_tokens,
        cached_tokens=charged.cached_tokens,
        source=charged.source,
        cost_nano=cost_nano,
    )


def timing_section(
    *,
    outcome: Outcome,
    received_s: float,
    sent_s: float | None,
    ended_s: float,
    queue_s: float,
    compress_s: float | None,
) -> TimingSection:
    """Durations; `sent_s` is when the first attempt was sent. All by the same clock."""
    return TimingSection(
        queue_ms=queue_s * 1000,
        overhead_ms=None if sent_s is None else (sent_s - received_s - queue_s) * 1000,
        compress_ms=None if compress_s is None else compress_s * 1000,
        ttft_s=outcome.ttft_s,
        tpot_s=outcome.tpot_s,
        duration_s=ended_s - received_s,
    )
