"""Queueing in front of a pool's workers: bound at arrival, sent as prefill capacity frees up.

What all schedulers with queues of their own share; which worker and which key are for those
that stand on it (`_bind`, `_rank`).

- The gate: a worker is sent requests while the uncached prefill that it has been sent and has
  not answered is below its share of two scheduling steps. So at least one request, and never
  so many that their order could not be changed any more. A cap on requests in flight would
  leave bubbles or no order.
- A worker that dies or stalls loses its queue: `tick` binds it anew.
"""

from collections.abc import Sequence
from math import inf
from typing import Final

from gateway.policy import fleet
from gateway.policy.fleet import PoolState
from gateway.policy.quartz_breaker import StallBreaker
from gateway.policy.quartz_queue import WorkerQueues, uncached_tokens
from gateway.policy.scheduling import Job

NOTHING: Final[Sequence[Job]] = ()


class Gated:
    """A Scheduler but for `_bind`; see `gateway.policy.scheduling`."""

    __slots__ = (
        "_available",
        "_breaker",
        "_choice",
        "_choice_mask",
        "_gate_tokens",
        "_orders",
        "_outstanding",
        "_pool",
        "_queues",
        "_seen_alive",
        "_seen_until_s",
        "backlog_tokens",
        "replicas",
    )

    gates: bool = True

    def __init__(
        self, pool: PoolState, gate_tokens: float, stall_least_s: float, stall_factor: float
    ) -> None:
        workers = len(pool.workers)
        self.replicas = 1
        self.backlog_tokens = [0] * workers
        """Uncached prefill of the requests sent to each worker and not answered yet."""
        self._pool = pool
        self._gate_tokens = gate_tokens
        self._queues = WorkerQueues(workers)
        self._breaker = StallBreaker(workers, stall_least_s, stall_factor)
        self._outstanding: list[dict[Job, int]] = [{} for _ in range(workers)]
        self._orders = 0
        self._seen_alive: list[int] | None = None
        self._seen_until_s = -inf
        self._available: Sequence[int] = ()
        self._choice: Sequence[int] = ()
        self._choice_mask = 0

    # What a scheduler on top of this one decides

    def _bind(self, job: Job, choice: Sequence[int], now_s: float) -> None:
        """Choose among these workers (at least one) and fill in worker, hit and key."""
        raise NotImplementedError

    def _unbind(self, job: Job, now_s: float) -> None:
        """A bound job will not be served there: take back what `_bind` counted."""

    def _sending(self, job: Job, now_s: float) -> None:
        """A job is about to be sent."""

    def _answered(
        self, job: Job, now_s: float, cached_tokens: int | None, *, teaches: bool
    ) -> None:
        """A job's first token came; or it is assumed to have, and then it teaches nothing."""

    def _choice_changed(self) -> None:
        """The workers to choose from are others now."""

    # Scheduler

    @property
    def waiting(self) -> Sequence[int]:
        """See Scheduler."""
        return self._queues.waiting

    @property
    def fallback(self) -> bool:
        """See Scheduler."""
        return False

    @property
    def coverage(self) -> float | None:
        """See Scheduler."""
        return None

    def submit(self, job: Job, now_s: float) -> Sequence[Job]:
        """See Scheduler."""
        job.order = self._orders
        self._orders += 1
        if not self._place(job, now_s):
            job.state = "nowhere"
            return NOTHING
        worker = job.worker
        if not self._queues.lengths[worker] and self._open(worker):
            self._send(job, now_s)
            return (job,)
        self._queues.push(job)
        return self._pump(worker, now_s) if self._open(worker) else NOTHING

    def first_token(
        self,
        job: Job,
        now_s: float,
        cached_tokens: int | None = None,
        *,
        assumed: bool = False,
    ) -> Sequence[Job]:
        """See Scheduler."""
        if job.state != "sent":
            return NOTHING
        job.state = "answering"
        worker = job.worker
        self.backlog_tokens[worker] -= self._outstanding[worker].pop(job)
        late = self._breaker.stalled[worker]
        # An assumed token proves no life, but a worker cannot stay on probation for want of one.
        if (not assumed or self._breaker.probation[worker]) and self._breaker.answered(worker):
            self._seen_alive = None
        # A stall says nothing of how fast the worker is.
        self._answered(job, now_s, cached_tokens, teaches=not (assumed or late))
        return self._pump(worker, now_s) if self._queues.lengths[worker] else NOTHING

    def finished(self, job: Job, now_s: float) -> Sequence[Job]:
        """See Scheduler."""
        worker = job.worker
        if job.state == "answering":
            job.state = "gone"
        elif job.state == "sent":
            job.state = "gone"
            self.backlog_tokens[worker] -= self._outstanding[worker].pop(job)
            self._unbind(job, now_s)
            if self._queues.lengths[worker]:
                return self._pump(worker, now_s)
        return NOTHING

    def cancel(self, job: Job, now_s: float) -> Sequence[Job]:
        """See Scheduler."""
        if job.state == "waiting":
            self._queues.forget(job)
            self._unbind(job, now_s)
        return NOTHING

    def tick(self, now_s: float) -> Sequence[Job]:
        """See Scheduler."""
        for worker, owed in enumerate(self._outstanding):
            oldest = next(iter(owed)) if owed else None
            if self._breaker.look(worker, oldest, now_s):
                self._seen_alive = None
        self._refresh(now_s)
        out: list[Job] = []
        for worker, length in enumerate(self._queues.lengths):
            if length and worker not in self._choice:
                self._rebind(worker, out, now_s)
        for worker in self._choice:
            if self._queues.lengths[worker]:
                out += self._pump(worker, now_s)
        return out

    # The rest

    def _refresh(self, now_s: float) -> None:
        """Who can be chosen: every change of health gives the pool another list `alive`."""
        pool = self._pool
        if pool.alive is self._seen_alive and now_s < self._seen_until_s:
            return
        self._seen_alive = pool.alive
        pending = [at_s for at_s in pool.ejected_until_s if at_s > now_s]
        self._seen_until_s = min(pending, default=inf)
        self._available = fleet.available(pool, now_s)
        stalled = self._breaker.stalled
        self._choice = [w for w in self._available if not stalled[w]] or self._available
        self._choice_mask = sum(1 << worker for worker in self._choice)
        self._choice_changed()

    def _place(self, job: Job, now_s: float) -> bool:
        """Bind a job; False when there is no worker for it."""
        if self._pool.alive is not self._seen_alive or now_s >= self._seen_until_s:
            self._refresh(now_s)
        choice = self._choice
        if not choice:
            return False
        if job.home >= 0 and job.home in self._available:
            choice = (job.home,)
        elif job.excluded:
            left = [w for w in choice if w not in job.excluded]
            choice = left or [w for w in self._available if w not in job.excluded] or choice
        self._bind(job, choice, now_s)
        return True

    def _rebind(self, worker: int, out: list[Job], now_s: float) -> None:
        """Bind a worker's queue anew; who finds no worker is appended, nowhere."""
        for job in self._queues.drain(worker):
            self._unbind(job, now_s)
            if self._place(job, now_s):
                self._queues.push(job)
            else:
                job.state = "nowhere"
                out.append(job)

    def _open(self, worker: int) -> bool:
        """Whether the gate lets another request through; not to workers that are away."""
        backlog_tokens = self.backlog_tokens[worker]
        if not self._choice_mask >> worker & 1 and worker not in self._available:
            return False
        if self._breaker.probation[worker]:
            return backlog_tokens <= 0
        return backlog_tokens * self.replicas < self._gate_tokens or backlog_tokens <= 0

    def _pump(self, worker: int, now_s: float) -> Sequence[Job]:
        """Send what the gate lets through, if the worker has not gone away meanwhile."""
        if self._pool.alive is not self._seen_alive:
            self._refresh(now_s)
        out: list[Job] = []
        while self._open(worker) and (job := self._queues.pop(worker)) is not None:
            self._send(job, now_s)
            out.append(job)
        return out

    def _send(self, job: Job, now_s: float) -> None:
        worker = job.worker
        self._sending(job, now_s)
        job.state = "sent"
        job.sent_s = now_s
        uncached = uncached_tokens(job)
        self._outstanding[worker][job] = uncached
        self.backlog_tokens[worker] += uncached
