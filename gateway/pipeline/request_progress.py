"""What the stages found about one request, and how it ended.

The pipeline writes a request's `RequestProgress` and nobody else does. Once the request is
admitted, the dispatcher gets what it needs as a record, `Admitted`, and keeps `Attempts` of its
own.
"""

from typing import NamedTuple

from gateway.metrics import UNTIMED, StageTimer
from gateway.pipeline.attempts import Attempts, Sending
from gateway.pipeline.request_lease import RequestLease
from gateway.policy.model_runtime import ModelRuntime
from gateway.records.attempt import Outcome
from gateway.records.estimate import LengthEstimate, Plan
from gateway.records.request import BodyFacts, Principal


class RequestProgress:
    """How far a request got: a field is None until its stage is done, and then set once.

    A request may be refused or cancelled anywhere; settlement goes by what is there.
    """

    __slots__ = (
        "attempts",
        "compress_s",
        "estimate",
        "facts",
        "key",
        "lease",
        "plan",
        "planned",
        "principal",
        "sending",
        "served",
        "timer",
    )

    def __init__(self, timer: StageTimer = UNTIMED) -> None:
        self.timer = timer
        self.key: Principal | None = None
        """The key's principal, before an entitlement was chosen."""
        self.principal: Principal | None = None
        self.facts: BodyFacts | None = None
        self.served: ModelRuntime | None = None
        self.estimate: LengthEstimate | None = None
        """Of the client's own prompt."""
        self.planned: Plan | None = None
        """What the boundary said."""
        self.plan: Plan | None = None
        """What admission is asked for."""
        self.lease: RequestLease | None = None
        self.compress_s: float | None = None
        self.sending: Sending | None = None
        """What is to be sent, compressed or not."""
        self.attempts: Attempts | None = None


class RequestEnding(NamedTuple):
    """How a request ended."""

    outcome: Outcome
    reason: str | None = None
    """Of the refusal that the client got."""
    evicted: bool = False
    retry_after_s: float | None = None
    """The wait that the refusal told the client."""
