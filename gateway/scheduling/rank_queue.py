"""The central queue in front of a rank group: waiting jobs, their order and their ranks.

Jobs are ordered by (priority class, key, order of arrival). Jobs with response affinity to a rank
have a queue of their own, so that no other job waits behind them. Insertion and removal move a
block of pointers, which takes a microsecond for some thousands of jobs.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import chain

from gateway.scheduling.scheduler import PRIORITY_CLASS_NAMES, Job

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
