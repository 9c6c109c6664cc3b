"""The state of a barrier-synchronised group while it runs; policies read it."""

import numpy as np

from simulator.barrier.records import BarrierSpec, BarrierWork, Floats, Ints


class BarrierGroup:
    """The workers' state; policies read it."""

    __slots__ = (
        "_free",
        "active",
        "age",
        "end",
        "load",
        "queued",
        "queued_load",
        "queues",
        "request",
        "revealed",
        "room",
        "sizes",
        "spec",
        "step",
        "weight",
        "work",
    )

    def __init__(self, spec: BarrierSpec, work: BarrierWork) -> None:
        shape = (spec.workers, spec.slots)
        self.spec = spec
        self.work = work
        self.step = 0
        self.sizes: list[float] = work.prompt_tokens.tolist()
        """Prompt tokens of every request."""
        self.revealed: Ints = np.full(len(work.prompt_tokens), -1)
        """The step in which the router first saw each request; -1 before."""
        self.load: Floats = np.zeros(spec.workers)
        """Tokens resident on each worker."""
        self.active: Ints = np.zeros(spec.workers, dtype=np.int64)
        self.queued: Ints = np.zeros(spec.workers, dtype=np.int64)
        """Requests in each worker's own queue."""
        self.queued_load: Floats = np.zeros(spec.workers)
        self.queues: list[list[int]] = [[] for _ in range(spec.workers)]
        self.request: Ints = np.full(shape, -1)
        """The request in each slot; -1 for none."""
        self.weight: Floats = np.zeros(shape)
        self.age: Ints = np.zeros(shape, dtype=np.int64)
        """Tokens that the request in each slot has generated."""
        self.end: Ints = np.full(shape, -1)
        """The first step in which the request will not be active; only oracles may read it."""
        self._free = [list(range(spec.slots - 1, -1, -1)) for _ in range(spec.workers)]
        self.room = self._room()

    def _room(self) -> Ints:
        spec = self.spec
        if spec.depth is None:
            return np.full(spec.workers, len(self.sizes), dtype=np.int64)
        found: Ints = spec.slots + spec.depth - self.active - self.queued
        return found

    def grown(self, horizon: int) -> Floats:
        """Growth of an active request's workload after h steps, shape (H+1,)."""
        drift = self.spec.drift
        steps = [drift[(self.step + h) % len(drift)] for h in range(horizon)]
        return np.cumsum([0.0, *steps])

    def bind(self, request: int, worker: int) -> None:
        """Assign a request to a worker's slot or queue; raises ValueError if neither has room."""
        if self.room[worker] <= 0:
            raise ValueError(f"worker {worker} has no room in step {self.step}")
        self.queues[worker].append(request)
        self.queued[worker] += 1
        self.queued_load[worker] += self.sizes[request]
        if self.spec.depth is not None:
            self.room[worker] -= 1

    def start(self) -> list[tuple[int, int]]:
        """Move queued requests into free slots; returns (request, worker) pairs."""
        begun = []
        for worker in np.flatnonzero((self.queued > 0) & (self.active < self.spec.slots)).tolist():
            queue, free = self.queues[worker], self._free[worker]
            count = min(len(queue), len(free))
            for request in queue[:count]:
                slot = free.pop()
                self.request[worker, slot] = request
                self.weight[worker, slot] = self.sizes[request]
                self.age[worker, slot] = 0
                self.end[worker, slot] = self.step + int(self.work.output_tokens[request])
                begun.append((request, worker))
            moved = sum(self.sizes[request] for request in queue[:count])
            self.load[worker] += moved
            self.queued_load[worker] -= moved
            self.active[worker] += count
            self.queued[worker] -= count
            del queue[:count]
        return begun

    def advance(self) -> list[int]:
        """Run one step: every active request generates a token; returns those that ended."""
        drift = self.spec.drift
        grown = drift[self.step % len(drift)]
        self.step += 1
        self.weight += grown
        self.age += 1
        self.load += grown * self.active
        workers, slots = np.nonzero(self.end == self.step)
        ended: list[int] = self.request[workers, slots].tolist()
        if ended:
            weights = self.weight[workers, slots]
            self.load -= np.bincount(workers, weights, minlength=self.spec.workers)
            self.active -= np.bincount(workers, minlength=self.spec.workers)
            self.request[workers, slots] = -1
            self.end[workers, slots] = -1
            for worker, slot in zip(workers.tolist(), slots.tolist(), strict=True):
                self._free[worker].append(slot)
        self.room = self._room()
        return ended
