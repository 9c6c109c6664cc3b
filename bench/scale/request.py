"""A request of `bench scale` on its way, and the record of its decisions."""

from gateway.policy.model_runtime import ServedModel
from gateway.policy.prefix.cache_estimate import Expected
from gateway.policy.scheduling.scheduler import Job, Prefix
from gateway.records.attempt import Binding, Outcome, Usage
from gateway.records.decision import DecisionRecord
from gateway.records.estimate import LengthEstimate, Plan
from gateway.records.lease import Lease
from gateway.records.request import BodyFacts, Incoming, Principal, Prompt
from gateway.stages import explain


class Request:
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
        self.expected: Expected | None = None
        self.started_s = 0.0


def record_of(
    served: ServedModel, request: Request, outcome: Outcome, usage: Usage, now_s: float
) -> DecisionRecord:
    """Stage 10's record."""
    return explain.decision_record(
        request.incoming, outcome, usage, principal=request.principal, facts=request.facts,
        served=served, estimate=request.lengths, planned=request.plan, plan=request.plan,
        lease=request.lease, prompt=request.prompt, binding=request.binding, attempts=(),
        refusal=None, rescued=False, queue_s=0.0, sent_s=request.started_s, now_s=now_s,
        settled_unix_s=now_s, lease_changes=(), evicted=False, compress_s=None,
        admitted=(request.plan, request.lease), job=request.job, first_s=None, prompts=False,
    )  # fmt: skip
