"""First tokens that workers owe: what counts against the gate, and what the clock takes for come.

A prefill counts until its first token is seen. A gateway that is late sees it late, and would
hold back what an idle engine waits for, the longer the busier it is. So, while it is late, a
prefill counts only until it should be done.

- An engine takes its prompts in order, so none is expected before those sent earlier: what is
  overdue are the oldest.
- What is overdue by far more than the gateway is late is the engine's own delay: the gate stays
  shut until it answers.
"""

from math import exp, inf
from typing import Final

from gateway.policy.scheduling import Job

LEAST_LATE_S: Final = 0.02
"""Below it a gateway is on time: an engine's step takes longer."""
MOST_LATE_S: Final = 2.0
"""Above it was a clock that stood still."""
LATE_TAU_S: Final = 3.0
"""Lateness fades by 1/e in this time."""
LATE_TIMES: Final = 2.0
"""A first token overdue by more than so many times the gateway's lateness has not come."""

_Entry = tuple[int, float]
"""Uncached tokens, and when the first token should have come."""


class Owed:
    """Of one pool's workers; how late the gateway is, is the same for all of them."""

    __slots__ = ("_due", "_last_s", "_late_at_s", "_late_s", "_overdue", "overdue_tokens", "tokens")

    def __init__(self, workers: int) -> None:
        self.tokens = [0] * workers
        """Uncached prefill sent to each worker and not seen answered yet."""
        self.overdue_tokens = [0] * workers
        """Of that, what is taken for answered, because it should have been."""
        self._due: list[dict[Job, _Entry]] = [{} for _ in range(workers)]
        self._overdue: list[dict[Job, _Entry]] = [{} for _ in range(workers)]
        self._last_s = [-inf] * workers
        self._late_s = 0.0
        self._late_at_s = -inf

    def add(self, job: Job, tokens: int, due_s: float) -> None:
        """A job was sent, its first token expected then; inf where nothing predicts it."""
        worker = job.worker
        due = self._due[worker]
        if due_s < self._last_s[worker] and due:
            due_s = self._last_s[worker]
        self._last_s[worker] = due_s
        due[job] = (tokens, due_s)
        self.tokens[worker] += tokens

    def remove(self, job: Job) -> None:
        """Its first token came, or never will."""
        worker = job.worker
        entry = self._due[worker].pop(job, None)
        if entry is None:
            entry = self._overdue[worker].pop(job)
            self.overdue_tokens[worker] -= entry[0]
        self.tokens[worker] -= entry[0]

    def let_go(self, worker: int, now_s: float) -> None:
        """What should have been answered by now is taken for it."""
        due, overdue = self._due[worker], self._overdue[worker]
        while due:
            job = next(iter(due))
            if due[job][1] > now_s:
                return
            overdue[job] = entry = due.pop(job)
            self.overdue_tokens[worker] += entry[0]

    def called_late(self, late_s: float, now_s: float) -> None:
        """The gateway came so much later than it was asked to: so late it notices all else."""
        self._late_s = max(min(late_s, MOST_LATE_S), self.late_s(now_s))
        self._late_at_s = now_s

    def late_s(self, now_s: float) -> float:
        """How late the gateway is, at worst, of late."""
        if not self._late_s:
            return 0.0
        return self._late_s * exp((self._late_at_s - now_s) / LATE_TAU_S)

    def excused(self, worker: int, now_s: float) -> bool:
        """Whether the oldest first token may have come already: the gateway is late enough."""
        late_s = self.late_s(now_s)
        if late_s < LEAST_LATE_S:
            return False
        for jobs in (self._overdue[worker], self._due[worker]):
            if jobs:
                return now_s - next(iter(jobs.values()))[1] <= LATE_TIMES * late_s
        return False

    def oldest(self, worker: int) -> Job | None:
        """Who was sent first of those that wait for their first token."""
        for jobs in (self._overdue[worker], self._due[worker]):
            if jobs:
                return next(iter(jobs))
        return None

    def next_s(self, worker: int, now_s: float) -> float:
        """When the next prefill that still counts should be done, after now; inf for none.

        Of a gateway on time only the last one is told: enough to see whether it still is.
        """
        due = self._due[worker]
        if not due:
            return inf
        if self.late_s(now_s) >= LEAST_LATE_S:
            due_s = next(iter(due.values()))[1]
            if due_s > now_s:
                return due_s
        due_s = self._last_s[worker]
        return due_s if due_s > now_s else inf
