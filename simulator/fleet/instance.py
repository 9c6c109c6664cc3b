"""One engine of a simulated fleet: the closed form if it applies, else the full engine."""

from math import inf
from typing import Protocol

from simulator.engine.engine import Engine, EngineProfile, EngineRequest
from simulator.fleet.closed_form import ClosedInstance, applies
from simulator.fleet.jobs import Needs, Times


class Instance(Protocol):
    """Call in order of time: `advance(due_s)`, then `submit` or `fail` at a later time.

    `due_s` is a lower bound of the next event; `advance` may find no event and set a later one.
    """

    due_s: float

    @property
    def running(self) -> int:
        """Sequences that hold a slot."""
        ...

    @property
    def waiting(self) -> int:
        """Sequences in the queue."""
        ...

    @property
    def preemptions(self) -> int:
        """Preemptions so far."""
        ...

    @property
    def used_blocks(self) -> int:
        """KV blocks in use."""
        ...

    def submit(self, index: int, now_s: float) -> None:
        """Give it a request."""
        ...

    def advance(self, now_s: float) -> list[int]:
        """Advance to `due_s`; returns the indices of the requests that ended."""
        ...

    def fail(self, now_s: float) -> list[int]:
        """Lose all requests and return their indices; missing first tokens become NaN."""
        ...


class EngineInstance:
    """The block-exact engine: growing sequences, preemption, packed prefill."""

    __slots__ = ("_engine", "_held", "_needs", "_preempted", "_times", "due_s")

    def __init__(self, profile: EngineProfile, needs: Needs, times: Times) -> None:
        self.due_s = inf
        self._engine = Engine(profile)
        self._needs = needs
        self._times = times
        self._preempted = 0  # by engines that failed
        self._held: dict[int, float] = {}  # index -> when it was submitted

    @property
    def running(self) -> int:
        return self._engine.running

    @property
    def waiting(self) -> int:
        return self._engine.waiting

    @property
    def preemptions(self) -> int:
        return self._preempted + self._engine.preemptions_total

    @property
    def used_blocks(self) -> int:
        return round(self._engine.kv_usage * self._engine.profile.kv_blocks)

    def submit(self, index: int, now_s: float) -> None:
        self._run(now_s)
        needs = self._needs
        request = EngineRequest(
            id=str(index), prompt_tokens=needs.prompts[index], output_tokens=needs.outputs[index]
        )
        self._held[index] = now_s
        self._engine.submit(request, now_s)
        self._look_ahead()

    def advance(self, now_s: float) -> list[int]:
        done = self._run(now_s)
        self._look_ahead()
        return done

    def fail(self, now_s: float) -> list[int]:
        self._run(now_s)
        held = sorted(self._held)
        self._held.clear()
        self._preempted += self._engine.preemptions_total
        self._engine = Engine(self._engine.profile)
        self.due_s = inf
        return held

    def _run(self, now_s: float) -> list[int]:
        done = []
        times = self._times
        for at_s, emission in self._engine.run_until(now_s):
            index = int(emission.id)
            if emission.index == 1:
                times.start[index] = self._held[index] + emission.queue_s
                times.first[index] = at_s
            if emission.finished:
                times.end[index] = at_s
                del self._held[index]
                done.append(index)
        return done

    def _look_ahead(self) -> None:
        due_s = self._engine.next_event_s()
        self.due_s = inf if due_s is None else due_s


def make_instance(
    profile: EngineProfile, needs: Needs, times: Times, *, block_exact: bool = False
) -> Instance:
    """The fastest form of this engine; `block_exact` forces the full engine."""
    if applies(profile) and not block_exact:
        return ClosedInstance(profile, needs, times)
    return EngineInstance(profile, needs, times)
