"""The load of each data-parallel rank as this gateway sees it: sequences and KV tokens L_g.

A rank's load is the prompts of its requests plus the tokens streamed of their answers. Ranks of
a group step in lockstep, and each sequence grows by one token a step, so the load is
extrapolated by the step time between two counts of the streams. Requests that are not streamed
are assumed to grow like the others.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import chain
from typing import Final

from gateway.scheduling.scheduler import PRIORITY_CLASS_NAMES, Job

RECOUNT_S: Final = 0.25
"""Seconds between two counts of a rank's streams; a count costs a call per request."""
FIRST_STEP_S: Final = 0.03
"""Step time assumed until answers were timed."""
_MIN_TOKENS: Final = 8
_FOREIGN_PART: Final = 0.05
_MEMORY: Final = 0.95


class StepClock:
    """Estimates the group's step time from completed answers: one token a step."""

    __slots__ = ("_known", "step_s")

    def __init__(self) -> None:
        self.step_s = FIRST_STEP_S
        self._known = 0.0

    def ended(self, tokens: int, took_s: float) -> None:
        """Learn from an answer's tokens and duration; short answers are mostly prefill, ignored."""
        if tokens < _MIN_TOKENS or took_s <= 0:
            return
        self._known = _MEMORY * self._known + (1 - _MEMORY)
        self.step_s += (1 - _MEMORY) / self._known * (took_s / tokens - self.step_s)


class SentNote:
    """The policy's data about a job."""

    __slots__ = ("offered_s",)

    def __init__(self) -> None:
        self.offered_s = -1.0
        """When the job first became a candidate; negative before."""


class RankLoad:
    """The load of one rank."""

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
        """KV tokens that the engine's telemetry reports beyond those sent from here."""
        self._steps = steps
        self._tokens = 0.0
        self._beyond_tokens = 0.0
        self._at_s = self._counted_s = float("-inf")

    def tokens(self, now_s: float) -> float:
        """L_g, in tokens; counted every RECOUNT_S, extrapolated in between."""
        return self._own(now_s) + self.foreign_tokens

    def observe(self, tokens: float, now_s: float) -> None:
        """Take in the KV tokens its engine's telemetry reports; an excess over ours is foreign.

        A reading is seconds old and may be above or below the current load, so only an excess
        that persists over many readings counts.
        """
        beyond = tokens - self._own(now_s)
        self._beyond_tokens += _FOREIGN_PART * (beyond - self._beyond_tokens)
        self.foreign_tokens = max(0.0, self._beyond_tokens)

    def add(self, job: Job, now_s: float) -> None:
        """Add a job that is sent to this rank."""
        self._tokens = self._own(now_s) + job.prompt_tokens
        self.jobs[job] = None
        self.sequences += job.sequences

    def remove(self, job: Job, now_s: float) -> None:
        """Remove a job that left this rank."""
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
    """Tokens of a sent job's answer: counted by its stream, else estimated from the time."""
    if job.emitted is not None:
        return job.emitted()
    return min(job.output_tokens, int((now_s - job.sent_s) / step_s)) * job.sequences


_Entry = tuple[float, int, Job]
"""(key, order, job); orders are unique, so jobs are never compared."""


class RankLine:
    """The queue; every job in it has state `waiting`."""

    __slots__ = ("_by_class", "_preferring", "total", "waiting")

    def __init__(self) -> None:
        self._by_class: list[list[_Entry]] = [[] for _ in PRIORITY_CLASS_NAMES]
        self._preferring: dict[int, list[list[_Entry]]] = {}
        self.waiting = [0] * len(PRIORITY_CLASS_NAMES)
        """Waiting jobs by priority class."""
        self.total = 0

    def put(self, job: Job) -> None:
        """Queue a job; its key, class and preferred rank must not change until it leaves."""
        job.state = "waiting"
        insort(self._line(job), (job.key, job.order, job))
        self.waiting[job.priority_class] += 1
        self.total += 1

    def take(self, job: Job) -> None:
        """Remove a job."""
        line = self._line(job)
        del line[bisect_left(line, (job.key, job.order))]
        self.waiting[job.priority_class] -= 1
        self.total -= 1

    def first(self, priority_class: int, count: int) -> list[Job]:
        """The first jobs of a priority class that may go to any rank."""
        return [entry[2] for entry in self._by_class[priority_class][:count]]

    def preferring(self, rank: int, priority_class: int, count: int) -> list[Job]:
        """The first jobs of a priority class that must go to this rank."""
        lines = self._preferring.get(rank)
        return [entry[2] for entry in lines[priority_class][:count]] if lines else []

    def release(self, rank: int) -> None:
        """A rank is unavailable: its jobs may go to any other."""
        for line in self._preferring.pop(rank, ()):
            for entry in line:
                entry[2].preferred = -1
                insort(self._by_class[entry[2].priority_class], entry)

    @property
    def preferred_ranks(self) -> list[int]:
        """Ranks with jobs of their own waiting."""
        return [rank for rank, lines in self._preferring.items() if any(lines)]

    def all(self) -> Iterator[Job]:
        """All waiting jobs, in no order; the queue must not change meanwhile."""
        for line in (
            *self._by_class,
            *chain(*self._preferring.values()),
        ):
            for entry in line:
                yield entry[2]

    def _line(self, job: Job) -> list[_Entry]:
        if job.preferred < 0:
            return self._by_class[job.priority_class]
        return self._preferring.setdefault(job.preferred, [[] for _ in PRIORITY_CLASS_NAMES])[
            job.priority_class
        ]
