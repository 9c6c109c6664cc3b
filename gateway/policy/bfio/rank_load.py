"""What each data-parallel rank holds, as this gateway sees it: sequences, and KV tokens L_g.

A rank's load is the prompts of the requests sent to it and the tokens that were streamed of
their answers. Ranks of a group step in lockstep, so all their sequences grow by one token a
step: between two counts the load grows by that, and a count reads the streams themselves. A
request whose answer is not streamed is taken to grow like the others.
"""

from collections.abc import Callable
from typing import Final

from gateway.policy.scheduling.scheduler import Job

RECOUNT_S: Final = 0.25
"""How often a rank's streams are read; a read costs a call for each of its requests."""
FIRST_STEP_S: Final = 0.03
"""Assumed until answers were timed."""
_LEAST_TOKENS: Final = 8
_FOREIGN_PART: Final = 0.05
_MEMORY: Final = 0.95

Emitted = Callable[[], int]
"""Tokens of an answer that have been streamed so far."""


class StepClock:
    """Seconds a step of the group takes, from the answers that ended: one token a step."""

    __slots__ = ("_known", "step_s")

    def __init__(self) -> None:
        self.step_s = FIRST_STEP_S
        self._known = 0.0

    def ended(self, tokens: int, took_s: float) -> None:
        """Learn from an answer of so many tokens; short ones are mostly prefill."""
        if tokens < _LEAST_TOKENS or took_s <= 0:
            return
        self._known = _MEMORY * self._known + (1 - _MEMORY)
        self.step_s += (1 - _MEMORY) / self._known * (took_s / tokens - self.step_s)


class Sent:
    """The policy's note on a job: when it might have gone."""

    __slots__ = ("offered_s",)

    def __init__(self) -> None:
        self.offered_s = -1.0
        """When it was first among those to choose from; negative before."""


class RankLoad:
    """One rank."""

    __slots__ = (
        "_at_s",
        "_beyond_tokens",
        "_counted_s",
        "_steps",
        "_tokens",
        "foreign_tokens",
        "jobs",
        "sequences",
    )

    def __init__(self, steps: StepClock) -> None:
        self.jobs: dict[Job, None] = {}
        self.sequences = 0
        self.foreign_tokens = 0.0
        """What its engine holds beyond what was sent from here, by its telemetry."""
        self._steps = steps
        self._tokens = 0.0
        self._beyond_tokens = 0.0
        self._at_s = self._counted_s = float("-inf")

    def tokens(self, now_s: float) -> float:
        """L_g, in tokens; exact every RECOUNT_S, in between grown by the step."""
        return self._own(now_s) + self.foreign_tokens

    def observe(self, tokens: float, now_s: float) -> None:
        """What its engine's telemetry says it holds: more than was sent from here is foreign.

        A reading is seconds old, and differs from what is held now in both directions: only
        what stays over many readings counts.
        """
        beyond = tokens - self._own(now_s)
        self._beyond_tokens += _FOREIGN_PART * (beyond - self._beyond_tokens)
        self.foreign_tokens = max(0.0, self._beyond_tokens)

    def add(self, job: Job, now_s: float) -> None:
        """A job is sent to it."""
        self._tokens = self._own(now_s) + job.prompt_tokens
        self.jobs[job] = None
        self.sequences += job.sequences

    def remove(self, job: Job, now_s: float) -> None:
        """A job left it."""
        left = self._own(now_s) - self._of(job, now_s)
        del self.jobs[job]
        self.sequences -= job.sequences
        self._tokens = max(0.0, left) if self.jobs else 0.0

    def _own(self, now_s: float) -> float:
        if now_s - self._counted_s >= RECOUNT_S:
            self._tokens = float(sum([self._of(job, now_s) for job in self.jobs]))
            self._counted_s = now_s
        else:
            self._tokens += self.sequences * (now_s - self._at_s) / self._steps.step_s
        self._at_s = now_s
        return self._tokens

    def _of(self, job: Job, now_s: float) -> int:
        return job.prompt_tokens + streamed(job, now_s, self._steps.step_s)


def streamed(job: Job, now_s: float, step_s: float) -> int:
    """Tokens of a sent job's answer: as its stream says, or as time went by."""
    if job.emitted is not None:
        return job.emitted()
    return min(job.output_tokens, int((now_s - job.sent_s) / step_s)) * job.sequences
