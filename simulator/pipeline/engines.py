"""The engines of one pool in virtual time: replicas, or the data-parallel ranks of an engine."""

from collections.abc import Sequence
from math import inf
from typing import Protocol

from simulator.engine.engine import Engine
from simulator.engine.profiles import EngineProfile
from simulator.engine.rank_group import RankGroupEngine
from simulator.engine.records import Emission, EngineRequest

Event = tuple[float, Emission]
"""(seconds, first or last token of a request)."""


class EngineUnit(Protocol):
    """One engine process; `worker` is the index of a rank in it, 0 for an engine without ranks."""

    @property
    def due_s(self) -> float:
        """A lower bound of its next event; infinity when idle."""
        ...

    @property
    def preemptions(self) -> int:
        """Preemptions so far, also before a restart."""
        ...

    def submit(self, worker: int, request: EngineRequest, now_s: float) -> None:
        """Queue a request."""
        ...

    def abort(self, worker: int, request_id: str) -> None:
        """Drop a request."""
        ...

    def run_until(self, now_s: float) -> list[Event]:
        """All events up to a time."""
        ...

    def kv_usage(self, worker: int) -> float:
        """Share of the KV cache in use."""
        ...

    def restart(self) -> None:
        """Lose everything."""
        ...


class SoleEngine:
    """An engine that is one worker."""

    def __init__(self, profile: EngineProfile) -> None:
        self._profile = profile
        self._engine = Engine(profile)
        self._preempted = 0

    @property
    def due_s(self) -> float:
        due_s = self._engine.next_event_s()
        return inf if due_s is None else due_s

    @property
    def preemptions(self) -> int:
        return self._preempted + self._engine.preemptions_total

    def submit(self, worker: int, request: EngineRequest, now_s: float) -> None:
        self._engine.submit(request, now_s)

    def abort(self, worker: int, request_id: str) -> None:
        self._engine.abort(request_id)

    def run_until(self, now_s: float) -> list[Event]:
        return self._engine.run_until(now_s)

    def kv_usage(self, worker: int) -> float:
        return self._engine.kv_usage

    def restart(self) -> None:
        self._preempted += self._engine.preemptions_total
        self._engine = Engine(self._profile)


class RankedEngine:
    """An engine whose ranks are workers and wait for one another at the barrier."""

    def __init__(self, profile: EngineProfile, ranks: int) -> None:
        self._profile, self._ranks = profile, ranks
        self._group = RankGroupEngine(profile, ranks)
        self._preempted = 0

    @property
    def due_s(self) -> float:
        due_s = self._group.next_event_s()
        return inf if due_s is None else due_s

    @property
    def preemptions(self) -> int:
        return self._preempted + sum(e.preemptions_total for e in self._group.engines)

    def submit(self, worker: int, request: EngineRequest, now_s: float) -> None:
        self._group.submit(worker, request, now_s)

    def abort(self, worker: int, request_id: str) -> None:
        self._group.abort(worker, request_id)

    def run_until(self, now_s: float) -> list[Event]:
        return [(at_s, emission) for at_s, _, emission in self._group.run_until(now_s)]

    def kv_usage(self, worker: int) -> float:
        return self._group.engines[worker].kv_usage

    def restart(self) -> None:
        self._preempted = self.preemptions
        self._group = RankGroupEngine(self._profile, self._ranks)


def units_of(profile: EngineProfile, engines: Sequence[Sequence[int]]) -> list[EngineUnit]:
    """The engines of a pool; `engines` has the workers of each, as the gateway counts them."""
    return [
        SoleEngine(profile) if len(ranks) == 1 else RankedEngine(profile, len(ranks))
        for ranks in engines
    ]
