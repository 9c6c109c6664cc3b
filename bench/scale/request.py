"""A request of `bench scale`, and the record of its decisions."""

from gateway.fleet.model_runtime import ModelRuntime
from gateway.pipeline import decision_record
from gateway.records.attempt import Binding, Outcome, Usage
from gateway.records.decision import DecisionRecord
from gateway.records.estimate import LengthEstimate, Plan
from gateway.records.lease import Lease
from gateway.records.request import BodyFacts, Incoming, Principal, Prompt
from gateway.scheduling.prefix_cache_estimate import ExpectedHit
from gateway.scheduling.scheduler import Job, Prefix


class ScaleRequest:
    """One on its way: what the stages found of it."""

    __slots__ = (
        *("binding", "expected", "facts", "incoming", "job", "lease", "lengths", "plan"),
        *("prefix", "principal", "prompt", "started_s"),
    )

    binding: Binding

    def __init__(
        self,
        incoming: Incoming,
        principal: Principal,
        facts: BodyFacts,
        lengths: LengthEstimate,
        prefix: Prefix,
        planned: Plan,
        lease: Lease,
    ) -> None:
        self.incoming = incoming
        self.principal = principal
        self.facts = facts
        self.lengths = lengths
        self.prefix = prefix
        self.plan = planned
        self.lease = lease
        self.prompt = Prompt(body=incoming.body)
        self.job: Job | None = None
        self.expected: ExpectedHit | None = None
        self.started_s = 0.0


def record_of(
    served: ModelRuntime, request: ScaleRequest, outcome: Outcome, usage: Usage, now_s: float
) -> DecisionRecord:
    """Stage 10's record."""
    return decision_record.decision_record(
        incoming=request.incoming,
        principal=request.principal,
        facts=request.facts,
        served=served,
        outcome=outcome,
        told=None,
        binding=request.binding,
        rescued=False,
        estimate=decision_record.estimate_section(request.lengths),
        plan=decision_record.plan_section(served=served, planned=request.plan, plan=request.plan),
        admission=decision_record.admission_section(
            lease_id=request.incoming.lease_id,
            lease=request.lease,
            asked=request.plan,
            taken=request.lease,
            principal=request.principal,
            served=served,
            charged=usage,
            lease_changes=(),
            evicted=False,
            settled_unix_s=now_s,
        ),
        compression=decision_record.compression_section(served, request.prompt),
        scheduling=decision_record.scheduling_section(
            served=served, binding=request.binding, job=request.job, first_s=None
        ),
        attempts=(),
        usage=decision_record.usage_section(usage),
        timing=decision_record.timing_section(
            outcome=outcome,
            received_s=request.incoming.received_s,
            sent_s=request.started_s,
            ended_s=now_s,
            queue_s=0.0,
            compress_s=None,
        ),
        prompts=False,
    )
