"""Workers that step together: a step takes as long as the fullest of them needs.

"A Universal Load Balancing Principle", section 6.2: dt = C + t_l max_g L_g; each active request
makes one token a step, stays on its worker, and is never preempted; requests come from a queue
that is topped up to a number that the router sees. Beyond the paper: arrivals in time, workers
with queues of their own, workloads that grow by another drift than a token a step.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from simulator.barrier.records import BarrierSpec, BarrierWork, Floats, History, Pairs
from simulator.barrier.state import BarrierGroup


class Policy(Protocol):
    """Assigns requests to workers, once per step."""

    def choose(self, group: BarrierGroup, pool: Sequence[int]) -> Pairs:
        """Pairs of an index into `pool` (requests in order of arrival) and a worker with room."""
        ...


class _Queue:
    """Undiscovered requests, and the waiting requests that the router sees."""

    __slots__ = ("arrival_s", "next", "pool", "total")

    def __init__(self, work: BarrierWork) -> None:
        self.arrival_s = None if work.arrival_s is None else work.arrival_s.tolist()
        self.total = len(work.prompt_tokens)
        self.next = 0
        self.pool: list[int] = []

    def reveal(self, group: BarrierGroup, now_s: float) -> None:
        """Reveal requests up to `reveal` at once, or all that have arrived."""
        first = self.next
        if self.arrival_s is None:
            self.next = min(self.total, first + max(0, group.spec.reveal - len(self.pool)))
        else:
            while self.next < self.total and self.arrival_s[self.next] <= now_s:
                self.next += 1
        if self.next > first:
            self.pool.extend(range(first, self.next))
            group.revealed[first : self.next] = group.step

    def drop(self, places: Sequence[int]) -> None:
        """Remove bound requests."""
        out = set(places)
        if len(out) != len(places):
            raise ValueError("a request was chosen twice")
        self.pool = [request for at, request in enumerate(self.pool) if at not in out]


def simulate_group(
    spec: BarrierSpec,
    work: BarrierWork,
    policy: Policy,
    *,
    drain: bool = False,
    ended: Callable[[BarrierGroup, Sequence[int]], None] | None = None,
) -> History:
    """Run until no request is undiscovered, or with `drain` until all have ended.

    `ended` is called after each step with the requests that ended. Raises ValueError if a policy
    chooses a worker without room or a request twice.
    """
    group, queue, tape = BarrierGroup(spec, work), _Queue(work), _Tape(work)
    while True:
        queue.reveal(group, tape.now_s)
        if group.room.max() > 0 and queue.pool:
            window = queue.pool[: spec.reveal]
            pairs = policy.choose(group, window)
            for place, worker in pairs:
                group.bind(window[place], worker)
                tape.bound[window[place]] = group.step
            if pairs:
                queue.drop([place for place, _ in pairs])
        for request, worker in group.start():
            tape.start[request] = group.step
            tape.worker[request] = worker
        over = queue.next >= queue.total and not (
            drain and (queue.pool or group.queued.any() or group.active.any())
        )
        if over:
            return tape.history(group)
        if not group.active.any() and queue.arrival_s is not None and not queue.pool:
            tape.now_s = max(tape.now_s, queue.arrival_s[queue.next])
            continue
        tape.step(group)
        gone = group.advance()
        tape.end[gone] = group.step
        if ended is not None and gone:
            ended(group, gone)


class _Tape:
    """Records the history of a run."""

    __slots__ = ("active", "at_s", "bound", "dt_s", "end", "load", "now_s", "start", "worker")

    def __init__(self, work: BarrierWork) -> None:
        count = len(work.prompt_tokens)
        self.now_s = 0.0
        self.load: list[Floats] = []
        self.active: list[int] = []
        self.dt_s: list[float] = []
        self.at_s: list[float] = []
        self.bound = np.full(count, -1)
        self.start = np.full(count, -1)
        self.end = np.full(count, -1)
        self.worker = np.full(count, -1)

    def step(self, group: BarrierGroup) -> None:
        """Record the step about to be made, and advance time by it."""
        dt_s = group.spec.overhead_s + group.spec.seconds_per_token * float(group.load.max())
        self.load.append(group.load.copy())
        self.active.append(int(group.active.sum()))
        self.dt_s.append(dt_s)
        self.at_s.append(self.now_s)
        self.now_s += dt_s

    def history(self, group: BarrierGroup) -> History:
        """The recorded history."""
        at_s = np.array([*self.at_s, self.now_s])
        arrival_s = group.work.arrival_s
        if arrival_s is None:
            arrival_s = np.where(group.revealed >= 0, at_s[np.maximum(group.revealed, 0)], np.inf)
        return History(
            load=np.array(self.load).reshape(-1, group.spec.workers),
            active=np.array(self.active),
            dt_s=np.array(self.dt_s),
            at_s=at_s[:-1],
            revealed_step=group.revealed,
            start_step=self.start,
            end_step=self.end,
            bound_step=self.bound,
            worker=self.worker,
            output_tokens=group.work.output_tokens,
            seconds_per_token=group.spec.seconds_per_token,
            arrival_s=arrival_s,
        )
