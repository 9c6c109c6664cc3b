"""Queueing in front of a pool's workers: bound at arrival, sent as prefill capacity frees up.

What all schedulers with queues of their own share; which worker and which key are for those
that stand on it (`_bind`, `_rank`).

- The gate: a worker is sent requests while the uncached prefill that it has been sent and has
  not answered is below its share of two scheduling steps. So at least one request, and never
  so many that their order could not be changed any more. A cap on requests in flight would
  leave bubbles or no order.
- The clock: a gateway that is late to notice first tokens takes those for come that should
  have, so that engines do not idle for its sake (`owed`). `pump` is called when the next should;
  how much later than `due_s` that happens is how late the gateway is. On time it takes nothing
  for come: what is overdue then is the engine's, and order is worth more than a fuller engine.
- A worker that dies or stalls loses its queue: `tick` binds it anew.
"""

from collections.abc import Sequence
from math import inf
from typing import Final

from gateway.policy import fleet
from gateway.policy.fleet import PoolState
from gateway.policy.owed import Owed
from gateway.policy.quartz_breaker import StallBreaker
from gateway.policy.quartz_profile import QuartzProfile
from gateway.policy.quartz_queue import WorkerQueues, uncached_tokens
from gateway.policy.scheduling import Job

NOTHING: Final[Sequence[Job]] = ()


class Gated:
    """A Scheduler but for `_bind`; see `gateway.policy.scheduling`."""

    __slots__ = (
        "_available",
        "_bound_tokens",
        "_breaker",
        "_choice",
        "_choice_mask",
        "_gate_tokens",
        "_orders",
        "_owed",
        "_pool",
        "_queues",
        "_seen_alive",
        "_seen_until_s",
        "backlog_tokens",
        "due_s",
        "replicas",
    )

    gates: bool = True

    def __init__(self, pool: PoolState, profile: QuartzProfile) -> None:
        workers = len(pool.workers)
        self.replicas = 1
        self.due_s = inf
        self._owed = Owed(workers)
        self.backlog_tokens = self._owed.tokens
        """Uncached prefill of the requests sent to each worker and not seen answered yet."""
        self._pool = pool
        self._gate_tokens = profile.gate_steps * profile.chunk_tokens
        self._bound_tokens = profile.gates_ahead * self._gate_tokens
        self._queues = WorkerQueues(workers)
        self._breaker = StallBreaker(workers, profile.stall_least_s, profile.stall_factor)
        self._orders = 0
        self._seen_alive: list[int] | None = None
        self._seen_until_s = -inf
        self._available: Sequence[int] = ()
        self._choice: Sequence[int] = ()
        self._choice_mask = 0

    # What a scheduler on top of this one decides

    def _bind(self, job: Job, choice: Sequence[int], now_s: float) -> None:
        """Choose among these workers (at least one) and fill in worker and hit."""
        raise NotImplementedError

    def _rank(self, job: Job, now_s: float) -> None:
        """A bound job is about to wait: fill in its key, where `_bind` has not."""

    def _unbind(self, job: Job, now_s: float) -> None:
        """A bound job needs its worker no more: take back what `_bind` counted."""

    def _sending(self, job: Job, now_s: float) -> float:
        """A job is about to be sent: seconds to its first token, inf where none are predicted."""
        return inf

    def _answered(
        self, job: Job, now_s: float, cached_tokens: int | None, *, teaches: bool
    ) -> None:
        """A job's first token came; or it is assumed to have, and then it teaches nothing."""

    def _answered_whole(self, job: Job, now_s: float) -> None:
        """A job has its answer, and its first token was not due yet."""

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
        if not self._queues.lengths[worker] and self._open(worker, now_s):
            self._send(job, now_s)
            return (job,)
        self._rank(job, now_s)
        self._queues.push(job)
        return self._pump(worker, now_s)

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
        self._owed.remove(job)
        late = self._breaker.stalled[worker]
        # An assumed token proves no life, but a worker cannot stay on probation for want of one.
        if (not assumed or self._breaker.probation[worker]) and self._breaker.answered(worker):
            self._seen_alive = None
        # A stall says nothing of how fast the worker is.
        self._answered(job, now_s, cached_tokens, teaches=not (assumed or late))
        return self._pump(worker, now_s) if self._queues.lengths[worker] else NOTHING

    def finished(self, job: Job, now_s: float, *, answered: bool = False) -> Sequence[Job]:
        """See Scheduler."""
        worker = job.worker
        if job.state == "answering":
            job.state = "gone"
        elif job.state == "sent":
            job.state = "gone"
            self._owed.remove(job)
            if answered:
                self._answered_whole(job, now_s)
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
        owed, breaker = self._owed, self._breaker
        for worker in range(len(owed.tokens)):
            if breaker.look(worker, owed.oldest(worker), now_s):
                self._seen_alive = None
        self._refresh(now_s)
        out: list[Job] = []
        for worker, length in enumerate(self._queues.lengths):
            if length and worker not in self._choice:
                self._rebind(worker, out, now_s)
        if self.due_s > now_s:  # else the call is on its way, and how late it is will be told
            self.due_s = inf
        self._pump_all(out, now_s)
        return out

    def pump(self, now_s: float) -> Sequence[Job]:
        """See Scheduler; called too late, it learns that the gateway is."""
        if now_s > self.due_s:
            self._owed.called_late(now_s - self.due_s, now_s)
        self.due_s = inf
        out: list[Job] = []
        self._pump_all(out, now_s)
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
                self._rank(job, now_s)
                self._queues.push(job)
            else:
                job.state = "nowhere"
                out.append(job)

    def _open(self, worker: int, now_s: float) -> bool:
        """Whether the gate lets another request through; not to workers that are away."""
        backlog_tokens = self.backlog_tokens[worker]
        if not self._choice_mask >> worker & 1 and worker not in self._available:
            return False
        if self._breaker.probation[worker]:
            return backlog_tokens <= 0
        if backlog_tokens * self.replicas < self._gate_tokens or backlog_tokens <= 0:
            return True
        if not self._by_the_clock(worker, now_s):
            return False
        owed = self._owed
        owed.let_go(worker, now_s)
        left_tokens = backlog_tokens - owed.overdue_tokens[worker]
        return left_tokens * self.replicas < self._gate_tokens or left_tokens <= 0

    def _by_the_clock(self, worker: int, now_s: float) -> bool:
        """Whether predictions may open a worker's gate, too: never so far as to flood it."""
        if self._breaker.stalled[worker]:
            return False
        if not self._owed.excused(worker, now_s):
            return False
        return self.backlog_tokens[worker] * self.replicas < self._bound_tokens

    def _pump_all(self, out: list[Job], now_s: float) -> None:
        for worker, length in enumerate(self._queues.lengths):
            if length:
                out += self._pump(worker, now_s)

    def _pump(self, worker: int, now_s: float) -> Sequence[Job]:
        """Send what the gate lets through, if the worker has not gone away meanwhile."""
        if self._pool.alive is not self._seen_alive:
            self._refresh(now_s)
        out: list[Job] = []
        while self._open(worker, now_s):
            job = self._queues.pop(worker)
            if job is None:
                return out
            self._send(job, now_s)
            out.append(job)
        if not self._breaker.probation[worker]:
            self.due_s = min(self.due_s, self._owed.next_s(worker, now_s))
        return out

    def _send(self, job: Job, now_s: float) -> None:
        job.expected_s = expected_s = self._sending(job, now_s)
        job.state = "sent"
        job.sent_s = now_s
        self._owed.add(job, uncached_tokens(job), now_s + expected_s)
