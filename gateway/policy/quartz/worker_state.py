"""What QUARTZ knows of each worker of a pool: its queue, the prefill ahead, recent writes."""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from math import exp
from typing import Final

from gateway.policy.scheduling.scheduler import Job

SPARE_ENTRIES = 64

_Entry = tuple[int, float, int, Job]


def uncached_tokens(job: Job) -> int:
    """Prefill that a bound job needs, >= 1."""
    return max(1, job.prompt_tokens - job.hit_tokens)


class WorkerQueues:
    """What waits in the gateway: one heap a worker, the least (band, key, arrival) first.

    Every job in a heap has state `waiting`, or is forgotten: a cancelled job stays until it comes
    up or until such outnumber the others. A heap never holds more than twice its waiting jobs and
    a few.
    """

    __slots__ = ("_heaps", "lengths", "tokens", "total_tokens", "waiting")

    def __init__(self, workers: int) -> None:
        self._heaps: list[list[_Entry]] = [[] for _ in range(workers)]
        self.lengths = [0] * workers
        """Jobs that wait for each worker."""
        self.waiting = [0, 0, 0]
        """Jobs that wait, by band."""
        self.tokens: dict[str, int] = {}
        """Uncached prompt tokens that wait, by client; no entry for none."""
        self.total_tokens = 0
        """Of all clients."""

    def push(self, job: Job) -> None:
        """Let a bound job wait; its key must not change until it leaves."""
        job.state = "waiting"
        heappush(self._heaps[job.worker], (job.band, job.key, job.order, job))
        self.lengths[job.worker] += 1
        self.waiting[job.band] += 1
        client, tokens = job.client, uncached_tokens(job)
        self.tokens[client] = self.tokens.get(client, 0) + tokens
        self.total_tokens += tokens

    def first(self, worker: int) -> Job | None:
        """The first in line, which stays there; None when nobody waits."""
        heap = self._heaps[worker]
        while heap and heap[0][3].state != "waiting":
            heappop(heap)
        return heap[0][3] if heap else None

    def pop(self, worker: int) -> Job | None:
        """Take the first in line; None when nobody waits."""
        heap = self._heaps[worker]
        while heap:
            job = heappop(heap)[3]
            if job.state == "waiting":
                self._left(job)
                return job
        return None

    def forget(self, job: Job) -> None:
        """A waiting job will not come: its state is `gone` from now on."""
        job.state = "gone"
        self._left(job)
        heap = self._heaps[job.worker]
        if len(heap) > 2 * self.lengths[job.worker] + SPARE_ENTRIES:
            heap[:] = [entry for entry in heap if entry[3].state == "waiting"]
            heapify(heap)

    def drain(self, worker: int) -> list[Job]:
        """Take all that wait for a worker, in order."""
        jobs = []
        while (job := self.pop(worker)) is not None:
            jobs.append(job)
        return jobs

    def excess_tokens(self, client: str, clients: int) -> float:
        """What waits of a client beyond an even part of all that waits; >= 0.

        `clients` are active. A client alone has no excess: its own order is left as it is.
        """
        held = self.tokens.get(client, 0)
        return max(0.0, held - self.total_tokens / max(1, clients)) if held else 0.0

    def entries(self) -> int:
        """Heap entries, forgotten ones included."""
        return sum(map(len, self._heaps))

    def _left(self, job: Job) -> None:
        self.lengths[job.worker] -= 1
        self.waiting[job.band] -= 1
        client, tokens = job.client, uncached_tokens(job)
        self.total_tokens -= tokens
        left = self.tokens[client] - tokens
        if left > 0:
            self.tokens[client] = left
        else:
            del self.tokens[client]


class Backlogs:
    """The prefill that each worker has ahead: bound here and without a first token yet.

    The expected wait (the paper's W-hat) is the predicted prefill of all that is bound to a
    worker, less what of the one in progress should be done by now. It falls by no more than that
    until first tokens come, so a worker that stalls, or whose slots are full, keeps the rest of
    its backlog.
    """

    __slots__ = (
        "_oldest_s",
        "_since_s",
        "_told",
        "bound_s",
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
        """The same of the other gateways, as last told."""
        self.sent: list[dict[Job, int]] = [{} for _ in range(workers)]
        """Of those, the jobs sent, oldest first, with their uncached tokens."""
        self.sent_tokens = [0] * workers
        """The sum of these tokens."""
        self._oldest_s = [0.0] * workers
        """Predicted prefill of the oldest one sent; 0 where there is none."""
        self._since_s = [0.0] * workers
        """When that may have begun."""
        self._told = False

    def waits_s(self, workers: Sequence[int], now_s: float) -> list[float]:
        """W-hat of each, >= 0: seconds until a newcomer's prefill may begin."""
        bound, others, oldest, since = self.bound_s, self.others_s, self._oldest_s, self._since_s
        share = 1 if self._told else self.replicas  # untold, the others are taken to have as much
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
        """A job will go to its worker, and take its `mean_s` there."""
        self.bound_s[job.worker] += job.mean_s

    def unbind(self, job: Job) -> None:
        """It needs no prefill there any more: it has its first token, or never will."""
        worker = job.worker
        left_s = self.bound_s[worker] - job.mean_s
        self.bound_s[worker] = left_s if left_s > 1e-9 else 0.0

    def send(self, job: Job, tokens: int, now_s: float) -> None:
        """A bound job is sent; so many of its tokens are not cached."""
        sent = self.sent[job.worker]
        if not sent:
            self._oldest_s[job.worker] = job.mean_s
            self._since_s[job.worker] = now_s
        sent[job] = tokens
        self.sent_tokens[job.worker] += tokens

    def leave(self, job: Job, now_s: float) -> None:
        """A sent job has its first token, or has ended without."""
        worker = job.worker
        sent = self.sent[worker]
        self.sent_tokens[worker] -= sent.pop(job)
        self._oldest_s[worker] = next(iter(sent)).mean_s if sent else 0.0
        self._since_s[worker] = now_s
        self.unbind(job)

    def tell(self, others_s: Sequence[float]) -> None:
        """Take in what the other gateways have bound and not seen answered, by worker."""
        self._told = True
        self.others_s = list(others_s)


EVEN_TOKENS: Final = 1024
"""Counted for every worker beside what was written: a few requests say little."""
LEAST_WRITE_FACTOR: Final = 0.1
MOST_WRITE_FACTOR: Final = 10.0
_RESCALE_AT: Final = 200.0
"""In tau: exp of it is far from the largest float."""


class RecentWrites:
    """Uncached tokens assigned to each worker, fading by 1/e in `tau_s`.

    An uncached prefill evicts what others would have hit, the more so where much was written:
    there the cache's memory is short. So its price (psi) goes by the worker's part of what was
    lately assigned, uncached, to all. Counters decay by growing the unit instead: their ratios,
    which are all that is asked for, need no update while time passes.
    """

    __slots__ = ("_even", "_start_s", "_tau_s", "_total", "_written")

    def __init__(self, workers: int, tau_s: float) -> None:
        self._written = [0.0] * workers
        self._total = 0.0
        self._even = float(EVEN_TOKENS)  # in the unit of the last assignment
        self._tau_s = tau_s
        self._start_s = 0.0

    def add(self, worker: int, tokens: int, now_s: float) -> None:
        """Assign a prefill."""
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
        """What was written to each, what is counted beside it for all alike, the mean of both.

        A worker's factor is the first two over the third, held within LEAST_WRITE_FACTOR ...
        MOST_WRITE_FACTOR; 1 at first.
        """
        even = self._even
        return self._written, even, self._total / len(self._written) + even

    def _rescale(self, age: float, now_s: float) -> None:
        scale = exp(-min(age, 700.0))
        self._written = [value * scale for value in self._written]
        self._total = sum(self._written)
        self._start_s = now_s
