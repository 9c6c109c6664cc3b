"""Closed form of engines limited by admission alone: about two events per request.

It applies if final lengths are reserved, every prompt has a chunk of its own, and nothing is
cached (the papers' engine; `Scheduler.fixed`). A sequence admitted after V iterations then emits
its first token at V + chunks and its last at V + chunks + L_out - 1, whatever else happens.
Between two changes of the batch, iterations have one length:

    t = tau + (v - V) t_iter,   t_iter = W + H n   or   W + h x reserved tokens.

An arrival that fits joins at the next boundary, which is known at once; so (V, tau) may lie one
iteration ahead. An arrival that does not fit waits for a last token. A test checks that results
equal those of `simulator.engine.engine.Engine`.
"""

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf, nan

from simulator.engine.profiles import EngineProfile
from simulator.fleet.jobs import Needs, Times

_SHIFT = 28
_INDEX = (1 << _SHIFT) - 1
"""Events are one number, iteration and index, which is cheaper to compare than pairs."""


def applies(profile: EngineProfile) -> bool:
    """Whether the closed form equals this engine; otherwise use `EngineInstance`."""
    return (
        profile.load == "reserved"
        and profile.prefill == "independent"
        and profile.prefill_s_per_token == 0
        and profile.attention_s_per_pair == 0
        and profile.prefix_cache_tokens == 0
        and profile.scheduling == "fcfs"
    )


class ClosedInstance:
    """One engine. `due_s` is when its next sequence ends; infinite while idle."""

    __slots__ = (
        "_blocks",
        "_chunks",
        "_coefficient",
        "_ends",
        "_firsts",
        "_free",
        "_iterations",
        "_queue",
        "_running",
        "_slots",
        "_step_s",
        "_tau_s",
        "_times",
        "_total_blocks",
        "_units",
        "_units_of",
        "_v",
        "_w_s",
        "due_s",
    )

    def __init__(self, profile: EngineProfile, needs: Needs, times: Times) -> None:
        if not applies(profile):
            raise ValueError(f"profile {profile.name} has no closed form")
        if len(needs.tokens) > _INDEX:
            raise ValueError(f"at most {_INDEX} requests")
        self.due_s = inf
        self._times = times
        self._chunks, self._iterations, self._blocks = needs.chunks, needs.iterations, needs.blocks
        self._slots = profile.max_num_seqs
        self._total_blocks = self._free = profile.kv_blocks
        self._w_s = profile.w_s
        by_tokens = profile.timing == "kv"
        self._coefficient = profile.h_s_per_token if by_tokens else profile.h_s
        self._units_of: Sequence[int] | None = needs.tokens if by_tokens else None
        self._units = 0  # sequences or reserved tokens, as the profile times them
        self._running = 0
        self._v, self._tau_s, self._step_s = 0, 0.0, 0.0
        self._ends: list[int] = []
        self._firsts: list[int] = []
        self._queue: deque[int] = deque()

    @property
    def running(self) -> int:
        """Sequences that hold a slot, or will at the next boundary."""
        return self._running

    @property
    def waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._queue)

    @property
    def preemptions(self) -> int:
        """Always 0: reserved blocks are never taken away."""
        return 0

    @property
    def used_blocks(self) -> int:
        """Reserved KV blocks."""
        return self._total_blocks - self._free

    def submit(self, index: int, now_s: float) -> None:
        """Queue a request, or admit it at the next boundary; call `advance` up to now first."""
        if self._queue or self._running >= self._slots or self._blocks[index] > self._free:
            self._queue.append(index)
            return
        tau_s = self._tau_s
        if now_s > tau_s:
            if self._running:
                step_s = self._step_s
                k = int((now_s - tau_s) / step_s)
                boundary_s = tau_s + k * step_s
                while boundary_s < now_s:
                    k += 1
                    boundary_s = tau_s + k * step_s
                v = self._v + k
                if self._firsts:
                    self._first_tokens(v)
                self._v, self._tau_s = v, boundary_s
            else:
                self._tau_s = now_s
        self._enter(index)
        self._step_s = step_s = self._w_s + self._coefficient * self._units
        self.due_s = self._tau_s + ((self._ends[0] >> _SHIFT) - self._v) * step_s

    def advance(self, now_s: float) -> list[int]:
        """End the sequences that are due and return their indices; `now_s` is `due_s`."""
        ends, end, blocks, units_of = self._ends, self._times.end, self._blocks, self._units_of
        v = ends[0] >> _SHIFT
        if self._firsts:
            self._first_tokens(v)
        self._v, self._tau_s = v, now_s
        after = (v + 1) << _SHIFT
        done = []
        while ends and ends[0] < after:
            index = heappop(ends) & _INDEX
            end[index] = now_s
            self._free += blocks[index]
            self._units -= 1 if units_of is None else units_of[index]
            done.append(index)
        self._running -= len(done)
        queue = self._queue
        while queue and self._running < self._slots and blocks[queue[0]] <= self._free:
            self._enter(queue.popleft())
        if ends:
            self._step_s = step_s = self._w_s + self._coefficient * self._units
            self.due_s = now_s + ((ends[0] >> _SHIFT) - v) * step_s
        else:
            self.due_s = inf
        return done

    def fail(self, now_s: float) -> list[int]:
        """Lose all sequences, returned in order of index; missing first tokens become NaN."""
        if self._firsts:
            self._first_tokens(self._v + max(0, int((now_s - self._tau_s) / self._step_s)))
        held = sorted([key & _INDEX for key in self._ends] + list(self._queue))
        first = self._times.first
        for index in held:
            if not first[index] <= now_s:
                first[index] = nan
        self._ends.clear()
        self._firsts.clear()
        self._queue.clear()
        self._running = self._units = 0
        self._free = self._total_blocks
        self._tau_s, self.due_s = now_s, inf
        return held

    def _enter(self, index: int) -> None:
        """Admit at iteration `_v`, which ends at `_tau_s`."""
        v = self._v
        self._times.start[index] = self._tau_s
        heappush(self._firsts, (v + self._chunks[index]) << _SHIFT | index)
        heappush(self._ends, (v + self._iterations[index]) << _SHIFT | index)
        self._running += 1
        self._free -= self._blocks[index]
        self._units += 1 if self._units_of is None else self._units_of[index]

    def _first_tokens(self, v: int) -> None:
        """Record the first tokens of iterations up to v, before the iteration length changes."""
        firsts, first = self._firsts, self._times.first
        v0, tau_s, step_s = self._v, self._tau_s, self._step_s
        after = (v + 1) << _SHIFT
        while firsts and firsts[0] < after:
            key = heappop(firsts)
            first[key & _INDEX] = tau_s + ((key >> _SHIFT) - v0) * step_s
