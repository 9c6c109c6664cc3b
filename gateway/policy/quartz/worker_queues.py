"""What waits in the gateway: one heap a worker, the least (band, key, order of arrival) first.

A job that is cancelled stays in its heap until it comes up or until such outnumber the others:
a heap never holds more than twice its waiting jobs and a few.
"""

from heapq import heapify, heappop, heappush

from gateway.policy.scheduling.scheduler import Job

SPARE_ENTRIES = 64

_Entry = tuple[int, float, int, Job]


def uncached_tokens(job: Job) -> int:
    """Prefill that a bound job needs, >= 1."""
    return max(1, job.prompt_tokens - job.hit_tokens)


class WorkerQueues:
    """The heaps of one pool; every job in them has state `waiting`, or is forgotten."""

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
