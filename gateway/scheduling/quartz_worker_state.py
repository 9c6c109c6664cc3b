"""QUARTZ's state for each worker of a pool: queue, pending prefill, recent cache writes."""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from math import exp
from typing import Final

from gateway.scheduling.scheduler import Job

SPARE_ENTRIES = 64

_Entry = tuple[int, float, int, Job]


def uncached_tokens(job: Job) -> int:
    """Uncached prompt tokens of a bound job, >= 1."""
    return max(1, job.prompt_tokens - job.hit_tokens)


class WorkerQueues:
    """Jobs waiting in the gateway: a heap per worker, lowest (priority class, key, arrival) first.

    A cancelled job stays in its heap, no longer in state `waiting`, until it reaches the top or a
    cleanup. A heap holds at most twice its waiting jobs plus SPARE_ENTRIES.
    """

    __slots__ = ("_heaps", "lengths", "tokens", "total_tokens", "waiting")

    def __init__(self, workers: int) -> None:
        self._heaps: list[list[_Entry]] = [[] for _ in range(workers)]
        self.lengths = [0] * workers
        """Waiting jobs by worker."""
        self.waiting = [0, 0, 0]
        """Waiting jobs by priority class."""
        self.tokens: dict[str, int] = {}
        """Waiting uncached prompt tokens by client; no entry for none."""
        self.total_tokens = 0
        """Sum of `tokens` over all clients."""

    def joined(self, worker: int) -> None:
        """A new worker took this place; nothing waits for it."""
        if worker == len(self.lengths):
            self._heaps.append([])
            self.lengths.append(0)

    def push(self, job: Job) -> None:
        """Queue a bound job; its key must not change until it leaves."""
        job.state = "waiting"
        heappush(self._heaps[job.worker], (job.priority_class, job.key, job.order, job))
        self.lengths[job.worker] += 1
        self.waiting[job.priority_class] += 1
        client, tokens = job.client, uncached_tokens(job)
        self.tokens[client] = self.tokens.get(client, 0) + tokens
        self.total_tokens += tokens

    def first(self, worker: int) -> Job | None:
        """The next job, which stays queued; None when the queue is empty."""
        heap = self._heaps[worker]
        while heap and heap[0][3].state != "waiting":
            heappop(heap)
        return heap[0][3] if heap else None

    def pop(self, worker: int) -> Job | None:
        """Take the next job; None when the queue is empty."""
        heap = self._heaps[worker]
        while heap:
            job = heappop(heap)[3]
            if job.state == "waiting":
                self._left(job)
                return job
        return None

    def forget(self, job: Job) -> None:
        """Remove a waiting job; its state becomes `gone`."""
        job.state = "gone"
        self._left(job)
        heap = self._heaps[job.worker]
        if len(heap) > 2 * self.lengths[job.worker] + SPARE_ENTRIES:
            heap[:] = [entry for entry in heap if entry[3].state == "waiting"]
            heapify(heap)

    def drain(self, worker: int) -> list[Job]:
        """Take all jobs waiting for a worker, in order."""
        jobs = []
        while (job := self.pop(worker)) is not None:
            jobs.append(job)
        return jobs

    def excess_tokens(self, client: str, clients: int) -> float:
        """A client's waiting tokens beyond an even share among the active `clients`; >= 0.

        A lone client has no excess, so its jobs keep their order.
        """
        held = self.tokens.get(client, 0)
        return max(0.0, held - self.total_tokens / max(1, clients)) if held else 0.0

    def entries(self) -> int:
        """Heap entries, forgotten ones included."""
        return sum(map(len, self._heaps))

    def _left(self, job: Job) -> None:
        self.lengths[job.worker] -= 1
        self.waiting[job.priority_class] -= 1
        client, tokens = job.client, uncached_tokens(job)
        self.total_tokens -= tokens
        left = self.tokens[client] - tokens
        if left > 0:
            self.tokens[client] = left
        else:
            del self.tokens[client]


class Backlogs:
    """Each worker's pending prefill: jobs bound here that have no first token yet.

    The expected wait (the paper's W-hat) is the predicted prefill of all jobs bound to a worker,
    less the elapsed part of the prefill in progress. It falls no further until first tokens come,
    so a worker that stalls, or whose slots are full, keeps the rest of its backlog.
    """

    __slots__ = (
        "_oldest_s",
        "_since_s",
        "bound_s",
        "others_held",
        "others_known",
        "others_s",
        "replicas",
        "sent",
        "sent_tokens",
    )

    def __init__(self, workers: int) -> None:
        self.replicas = 1
        """Gateways that share the workers, >= 1."""
        self.bound_s = [0.0] * workers
        """Predicted prefill of the jobs bound here without a first token; >= 0."""
        self.others_s = [0.0] * workers
        """The other gateways' `bound_s`, summed, as of their last gossip."""
        self.others_held = [0.0] * workers
        """Likewise the sequences that they have at each worker, running or waiting for it."""
        self.sent: list[dict[Job, int]] = [{} for _ in range(workers)]
        """The bound jobs already sent, oldest first, with their uncached tokens."""
        self.sent_tokens = [0] * workers
        """Sum of the tokens in `sent`."""
        self._oldest_s = [0.0] * workers
        """Predicted prefill of the oldest job sent; 0 without one."""
        self._since_s = [0.0] * workers
        """Earliest time at which that prefill may have begun."""
        self.others_known = False
        """Whether the other gateways have told of theirs."""

    def joined(self, worker: int) -> None:
        """A new worker took this place; nothing is bound to it."""
        if worker == len(self.bound_s):
            self.sent.append({})
            self.sent_tokens.append(0)
            for values in (self.bound_s, self.others_s, self._oldest_s, self._since_s):
                values.append(0.0)
            self.others_held.append(0.0)
        self.bound_s[worker] = self.others_s[worker] = self.others_held[worker] = 0.0

    def waits_s(self, workers: Sequence[int], now_s: float) -> list[float]:
        """W-hat of each, >= 0: seconds until a newcomer's prefill may begin."""
        bound, others, oldest, since = self.bound_s, self.others_s, self._oldest_s, self._since_s
        share = 1 if self.others_known else self.replicas  # before gossip, assume all have as much
        waits_s = []
        for worker in workers:
            wait_s = bound[worker] * share + others[worker]
            done_s = now_s - since[worker]
            if done_s > 0.0:
                wait_s -= min(done_s, oldest[worker])
            waits_s.append(max(0.0, wait_s))
        return waits_s

    def behind_tokens(self, worker: int) -> int:
        """Uncached tokens sent, behind the prefill in progress."""
        for tokens in self.sent[worker].values():
            return self.sent_tokens[worker] - tokens
        return 0

    def bind(self, job: Job) -> None:
        """Add a job's `mean_s` to the backlog of its worker."""
        self.bound_s[job.worker] += job.mean_s

    def unbind(self, job: Job) -> None:
        """Remove a job's `mean_s`: it has its first token, or never will."""
        worker = job.worker
        left_s = self.bound_s[worker] - job.mean_s
        self.bound_s[worker] = left_s if left_s > 1e-9 else 0.0

    def send(self, job: Job, tokens: int, now_s: float) -> None:
        """Record that a bound job is sent; `tokens` are its uncached ones."""
        sent = self.sent[job.worker]
        if not sent:
            self._oldest_s[job.worker] = job.mean_s
            self._since_s[job.worker] = now_s
        sent[job] = tokens
        self.sent_tokens[job.worker] += tokens

    def leave(self, job: Job, now_s: float) -> None:
        """Remove a sent job that has its first token, or ended without one."""
        worker = job.worker
        sent = self.sent[worker]
        self.sent_tokens[worker] -= sent.pop(job)
        self._oldest_s[worker] = next(iter(sent)).mean_s if sent else 0.0
        self._since_s[worker] = now_s
        self.unbind(job)

    def note_others(self, others_s: Sequence[float], others_held: Sequence[float]) -> None:
        """Store the other gateways' pending prefill, in seconds, and sequences, by worker."""
        self.others_known = True
        self.others_s = list(others_s)
        self.others_held = list(others_held)


FIRST_ANSWER_S: Final = 10.0
"""How long a sequence is taken to hold its slot before the first one has ended."""
ANSWERS_KEPT: Final = 50
KV_FULL: Final = 0.8
"""Share of a KV cache beyond which sequences that grow preempt one another."""


class Slots:
    """How many sequences each worker can run, and how long one of them holds its slot.

    The limit is the configured one, or less where the KV cache holds fewer of those running.
    """

    __slots__ = ("_answers", "_slots", "answer_s", "limits")

    def __init__(self, workers: int, slots: int) -> None:
        self._slots = float(slots)
        self._answers = 0
        self.answer_s = FIRST_ANSWER_S
        """Mean time from start to end of an answer."""
        self.limits = [self._slots] * workers

    def joined(self, worker: int) -> None:
        """A new worker took this place: its KV cache is empty."""
        if worker == len(self.limits):
            self.limits.append(self._slots)
        self.limits[worker] = self._slots

    def read(self, kv: Sequence[float], active: Sequence[int], backlogs: Backlogs) -> None:
        """Take over the share of each KV cache in use; 0 when unknown.

        A cache that is nearly empty, or filled by what this gateway does not know, says little.
        """
        share = 1 if backlogs.others_known else backlogs.replicas
        for worker, usage in enumerate(kv):
            running = active[worker] * share + backlogs.others_held[worker]
            says = usage >= KV_FULL / 2 and running >= 1
            fit = KV_FULL * running / usage if says else self._slots
            self.limits[worker] = min(self._slots, max(1.0, fit))

    def learn(self, worker: int, took_s: float, others: int) -> None:
        """An answer ended `took_s` after it was sent behind `others` on its worker."""
        limit = self.limits[worker]
        if others >= limit:  # it waited for its slot first
            took_s *= limit / (others + 1)
        self._answers += 1
        self.answer_s += (took_s - self.answer_s) / min(self._answers, ANSWERS_KEPT)

    def aheads(
        self,
        candidates: Sequence[tuple[int, int]],
        active: Sequence[int],
        queued: Sequence[int],
        backlogs: Backlogs,
    ) -> list[float]:
        """Of each: how many answers must end before one more can start, over those running.

        Times `answer_s`, it is the wait for a slot; 0 or less where one is free.
        """
        limits, others = self.limits, backlogs.others_held
        share = 1 if backlogs.others_known else backlogs.replicas
        return [
            ((active[w] + queued[w]) * share + others[w] + 1 - limits[w]) / limits[w]
            for w, _ in candidates
        ]


EVEN_TOKENS: Final = 1024
"""Added to every worker's writes, so that a few requests do not skew the shares."""
MIN_WRITE_FACTOR: Final = 0.1
MAX_WRITE_FACTOR: Final = 10.0
_RESCALE_AT: Final = 200.0
"""Age in units of tau at which counters are rescaled, long before exp overflows."""


class RecentWrites:
    """Uncached tokens assigned to each worker, decaying to 1/e in `tau_s`.

    An uncached prefill evicts cached prefixes, and on a worker with many recent writes they are
    evicted sooner. So its price (psi) is scaled by the worker's share of all recent writes.
    Instead of decaying the counters, new writes are added in a growing unit: only ratios are
    read, and these need no update as time passes.
    """

    __slots__ = ("_even", "_start_s", "_tau_s", "_total", "_written")

    def __init__(self, workers: int, tau_s: float) -> None:
        self._written = [0.0] * workers
        self._total = 0.0
        self._even = float(EVEN_TOKENS)  # in the unit of the last assignment
        self._tau_s = tau_s
        self._start_s = 0.0

    def joined(self, worker: int) -> None:
        """A new worker took this place: it starts with the mean of the others."""
        written = self._written
        if worker == len(written):
            written.append(0.0)
        self._total -= written[worker]
        others = len(written) - 1
        written[worker] = self._total / others if others else 0.0
        self._total += written[worker]

    def add(self, worker: int, tokens: int, now_s: float) -> None:
        """Count the uncached tokens of a prefill."""
        age = (now_s - self._start_s) / self._tau_s
        if age > _RESCALE_AT:
            self._rescale(age, now_s)
            age = 0.0
        unit = exp(age) if age > 0.0 else 1.0
        weight = tokens * unit
        self._even = EVEN_TOKENS * unit
        self._written[worker] += weight
        self._total += weight

    def levels(self) -> tuple[Sequence[float], float, float]:
        """(writes by worker, EVEN_TOKENS in the same unit, mean of their sum).

        A worker's factor is (writes + even) / mean, clamped to MIN_WRITE_FACTOR ...
        MAX_WRITE_FACTOR; 1 at first.
        """
        even = self._even
        return self._written, even, self._total / max(1, len(self._written)) + even

    def _rescale(self, age: float, now_s: float) -> None:
        scale = exp(-min(age, 700.0))
        self._written = [value * scale for value in self._written]
        self._total = sum(self._written)
        self._start_s = now_s
