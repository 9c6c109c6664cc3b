"""What the stages have found so far about one request; each reads its predecessors' records."""

import asyncio
from typing import TypeVar

from gateway.errors import Refusal
from gateway.policy.model_runtime import ServedModel
from gateway.policy.prefix.cache_estimate import Expected
from gateway.policy.scheduling.scheduler import NO_PREFIX, Job, Scheduler
from gateway.records.attempt import Attempt, Binding, Outcome, Usage
from gateway.records.estimate import LengthEstimate, Plan
from gateway.records.lease import Lease
from gateway.records.request import BodyFacts, Principal, Prompt
from gateway.stages.forward import Relay

_T = TypeVar("_T")


class Walk:
    """One request's way through the stages; the settle stage reads it.

    Each field is one stage's frozen record, set once (lease and plan may be replaced by a
    rescue or a spill, a job by the next attempt's); None where the request did not get that far.
    """

    __slots__ = (
        "admitted",
        "assumed_turn",
        "attempts",
        "binding",
        "charged",
        "compress_s",
        "dispatched",
        "ended_s",
        "ended_unix_s",
        "estimate",
        "evicted",
        "expected",
        "expected_at",
        "facts",
        "job",
        "lease",
        "lease_changes",
        "moved",
        "outcome",
        "plan",
        "planned",
        "prefix",
        "principal",
        "prompt",
        "queue_s",
        "refusal",
        "relay",
        "rescued",
        "reserved_tokens",
        "scheduler",
        "sender",
        "sent_s",
        "served",
        "task",
        "whole",
    )

    def __init__(self) -> None:
        self.principal: Principal | None = None
        self.facts: BodyFacts | None = None
        self.served: ServedModel | None = None
        self.estimate: LengthEstimate | None = None
        self.whole: LengthEstimate | None = None
        """The client's own prompt's, where `estimate` is of a compressed one."""
        self.planned: Plan | None = None
        self.plan: Plan | None = None
        self.lease: Lease | None = None
        self.admitted: tuple[Plan, Lease] | None = None
        """What admission was asked for and gave, whatever became of both later."""
        self.prompt: Prompt | None = None
        self.compress_s: float | None = None
        self.binding: Binding | None = None
        self.job: Job | None = None
        """Where a scheduler assigns the workers."""
        self.scheduler: Scheduler | None = None
        """Whose the job is, until it is given back."""
        self.prefix = NO_PREFIX
        """Who holds which beginning of the prompt."""
        self.expected: Expected | None = None
        """What the worker was expected to hold of it."""
        self.expected_at = (-1, -1)
        """Which worker: pool and index."""
        self.assumed_turn = 0
        """When its first token is assumed, where it cannot be seen (see `assumed_tokens`)."""
        self.relay: Relay | None = None
        self.queue_s = 0.0
        self.sent_s: float | None = None
        self.attempts: list[Attempt] = []
        self.sender: asyncio.Task[object] | None = None
        """Who waits for an engine, while it does."""
        self.moved = False
        """Taken from a frozen engine to another, which is done once."""
        self.dispatched = False
        self.rescued = False
        self.refusal: Refusal | None = None
        self.outcome: Outcome | None = None
        self.task: asyncio.Task[object] | None = None
        """Who walks, once it holds a managed lease."""
        self.evicted = False
        self.charged: Usage | None = None
        """What its lease was charged; None for a full refund."""
        self.ended_s = 0.0
        """When it was settled, by the clock of durations."""
        self.ended_unix_s = 0.0
        self.lease_changes: list[tuple[float, str, int]] = []
        self.reserved_tokens = 0
        """What the lease has reserved, extensions included."""


def found(record: _T | None) -> _T:
    """A record that an earlier stage has set."""
    if record is None:
        raise too_early()
    return record


def too_early() -> RuntimeError:
    """A bug of the gateway's: for those who ask for several at once."""
    return RuntimeError("a stage ran before the one it stands on")
