"""What is sent of an admitted request, and the attempts at engines so far."""

import asyncio
from typing import NamedTuple

from gateway.metrics import UNTIMED, StageTimer
from gateway.pipeline.request_lease import RequestLease
from gateway.policy.model_runtime import ModelRuntime, ModelScheduling
from gateway.policy.prefix.cache_estimate import ExpectedHit
from gateway.policy.prefix.digests import Points
from gateway.policy.scheduling.scheduler import Job, Prefix, Scheduler
from gateway.records.attempt import Attempt, Binding
from gateway.records.estimate import LengthEstimate, Plan
from gateway.records.request import BodyFacts, Principal, Prompt
from gateway.stages.forward import Relay


class Sending(NamedTuple):
    """A prompt, what it should take, and where it should go."""

    prompt: Prompt
    estimate: LengthEstimate
    plan: Plan
    prefix: Prefix
    """Who holds which beginning of the prompt."""


class Admitted(NamedTuple):
    """A request that holds a lease, as the dispatcher gets it."""

    principal: Principal
    facts: BodyFacts
    served: ModelRuntime
    lease: RequestLease
    whole: LengthEstimate
    """Of the client's own prompt, where a compressed one is sent."""
    sending: Sending


class PrefixEntry:
    """A request's entry in the prefix index of the pool where it is bound.

    Made when it is bound, not when it is sent: requests that arrive while it waits would
    otherwise not know of it and scatter one prompt over all workers. Withdrawn when it is not
    served there.
    """

    __slots__ = ("_place", "_points", "_scheduling", "_tokens_per_byte", "expected")

    def __init__(self, scheduling: ModelScheduling, points: Points) -> None:
        self._scheduling = scheduling
        self._points = points
        self._place = (-1, -1)
        """Pool and worker."""
        self._tokens_per_byte = 1.0
        self.expected: ExpectedHit | None = None
        """What the worker was expected to hold of the prompt."""

    def enter(self, pool: int, job: Job) -> None:
        """The job is bound in the pool: enter the prompt, once for each worker."""
        place = (pool, job.worker)
        if self.expected is not None:
            if self._place == place:
                return
            self.withdraw()
        scheduling, points = self._scheduling, self._points
        index = scheduling.prefixes[pool]
        if index is None:
            return
        tokens_per_byte = job.prompt_tokens / points[-1][0]
        expected = index.insert(points, job.worker, tokens_per_byte)
        self._place, self._tokens_per_byte, self.expected = place, tokens_per_byte, expected
        gossip = scheduling.prefix_gossip[pool] if scheduling.prefix_gossip else None
        if gossip is not None:
            gossip.sent(points, job.worker, tokens_per_byte, expected.hit_tokens)

    def withdraw(self) -> None:
        """It gets no first token there, so the worker does not hold the prompt. Idempotent."""
        expected, self.expected = self.expected, None
        if expected is not None:
            pool, worker = self._place
            index = self._scheduling.prefixes[pool]
            if index is not None:
                index.withdraw(self._points, worker, expected, self._tokens_per_byte)


class Attempts:
    """The dispatcher's account of one request, which settlement reads; nobody else writes it."""

    __slots__ = (
        "admitted",
        "assumed_turn",
        "binding",
        "done",
        "entry",
        "job",
        "moved",
        "queue_s",
        "reason",
        "relay",
        "rescued",
        "scheduler",
        "sender",
        "sending",
        "sent_s",
        "slot_nano",
        "timer",
    )

    def __init__(self, admitted: Admitted, timer: StageTimer = UNTIMED) -> None:
        self.timer = timer
        self.admitted = admitted
        self.sending = admitted.sending
        """As it is now: a rescue, or a pool other than a compressed prompt's, changes it."""
        points = admitted.sending.prefix.points
        self.entry = PrefixEntry(admitted.served.scheduling, points) if points else None
        self.binding: Binding | None = None
        self.job: Job | None = None
        """Where a scheduler assigns the workers."""
        self.scheduler: Scheduler | None = None
        """Whose the job is, until it is given back."""
        self.assumed_turn = 0
        """When its first token is assumed, where it cannot be seen (see `assumed_tokens`)."""
        self.relay: Relay | None = None
        self.queue_s = 0.0
        self.sent_s: float | None = None
        """When the first attempt was sent."""
        self.slot_nano = 0.0
        """What its time at workers costs, where they have a price by the hour."""
        self.done: list[Attempt] = []
        self.sender: asyncio.Task[object] | None = None
        """The task that waits for an engine, while it does."""
        self.moved = False
        """Taken from a frozen engine to another, which is done once."""
        self.rescued = False
        self.reason: str | None = None
        """Of the refusal that the client got when the last attempt had failed."""

    @property
    def sent(self) -> bool:
        """Whether an engine may have got the request: not every connection failed."""
        return any(attempt.result not in ("local", "connect") for attempt in self.done)
