"""All engines of a simulated gateway, by pool and worker, and when to look at them.

An engine is one worker, or its data-parallel ranks are workers each.
"""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from math import inf
from typing import Final, Protocol

from gateway.fleet.engine_metrics import EngineSample, record
from gateway.fleet.model_runtime import ModelRuntime
from simulator.engine.engine import Engine
from simulator.engine.profiles import EngineProfile
from simulator.engine.rank_group import RankGroupEngine
from simulator.engine.records import Emission, EngineRequest
from simulator.pipeline.records import Gateway

HEARD_S: Final = 1e-6
"""How long tokens are on their way: an engine has begun its next step when the gateway hears of
them, so what they let through waits for the step after it."""
Event = tuple[float, Emission]
"""(seconds, first or last token of a request)."""
OnEmission = Callable[[Emission, float], None]
"""(first or last token, its time)."""
Worker = tuple[int, int]
"""(pool, worker)."""


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

    def release(self, worker: int, request_id: str) -> None:
        """Free what an ended request holds."""
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

    def release(self, worker: int, request_id: str) -> None:
        self._engine.release(request_id)

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

    def release(self, worker: int, request_id: str) -> None:
        self._group.release(worker, request_id)

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


class EngineFleet:
    """Engine units in order of their next event; call in order of time."""

    def __init__(self, gateway: Gateway, on_emission: OnEmission) -> None:
        self._gateway, self._on_emission = gateway, on_emission
        self._served: ModelRuntime = gateway.served
        self._units = [
            unit
            for profile, pool in zip(gateway.profiles, self._served.fleet.pools, strict=True)
            for unit in units_of(profile, [engine.ranks for engine in pool.engines])
        ]
        self._place: dict[Worker, tuple[int, int]] = {}
        """Worker -> (unit, rank)."""
        self._workers: list[list[Worker]] = []
        """By unit: its workers."""
        for p, pool in enumerate(self._served.fleet.pools):
            for workers in [engine.ranks for engine in pool.engines]:
                unit = len(self._workers)
                self._place |= {(p, w): (unit, rank) for rank, w in enumerate(workers)}
                self._workers.append([(p, w) for w in workers])
        self._heap: list[tuple[float, int]] = []
        self._due_s = [inf] * len(self._units)

    def next_s(self) -> float:
        """A lower bound of the next event; infinity when all are idle."""
        heap, due_s = self._heap, self._due_s
        while heap and due_s[heap[0][1]] != heap[0][0]:
            heappop(heap)
        return heap[0][0] if heap else inf

    def step(self, now_s: float) -> None:
        """Run the engine that is due."""
        unit = heappop(self._heap)[1]
        self._due_s[unit] = inf
        self._advance(unit, now_s)
        self._look_ahead(unit)

    def submit(self, at: Worker, request: EngineRequest, now_s: float) -> None:
        """Queue a request at a worker."""
        unit, rank = self._place[at]
        self._advance(unit, now_s)
        self._units[unit].submit(rank, request, now_s)
        self._look_ahead(unit)

    def catch_up(self, at: Worker, now_s: float) -> None:
        """Hear everything that a worker's engine did until now."""
        self._advance(self._place[at][0], now_s)

    def abort(self, at: Worker, index: int) -> None:
        """Drop a request."""
        unit, rank = self._place[at]
        self._units[unit].abort(rank, str(index))
        self._look_ahead(unit)

    def release(self, at: Worker, index: int, now_s: float) -> None:
        """Free what an ended request holds at a worker."""
        unit, rank = self._place[at]
        self._advance(unit, now_s)
        self._units[unit].release(rank, str(index))
        self._look_ahead(unit)

    def restart(self, at: Worker) -> set[Worker]:
        """An engine loses everything; returns all its workers."""
        unit, _ = self._place[at]
        self._units[unit].restart()
        self._look_ahead(unit)
        return set(self._workers[unit])

    def report(self, now_s: float) -> None:
        """Put the engines' metrics where the gateway keeps them."""
        for (pool, worker), (unit, rank) in self._place.items():
            state, profile = self._served.fleet.pools[pool], self._gateway.profiles[pool]
            state.kv_tokens[worker] = profile.kv_blocks * profile.block_tokens
            sample = EngineSample(kv_usage=self._units[unit].kv_usage(rank))
            record(state.view, worker, sample, now_s)

    @property
    def preemptions(self) -> tuple[int, ...]:
        """Preemptions so far, by pool."""
        found = [0] * len(self._served.fleet.pools)
        for unit, workers in zip(self._units, self._workers, strict=True):
            found[workers[0][0]] += unit.preemptions
        return tuple(found)

    def _advance(self, unit: int, now_s: float) -> None:
        for at_s, emission in self._units[unit].run_until(now_s + HEARD_S):
            self._on_emission(emission, at_s)

    def _look_ahead(self, unit: int) -> None:
        due_s = self._units[unit].due_s
        if due_s != self._due_s[unit]:
            self._due_s[unit] = due_s
            if due_s < inf:
                heappush(self._heap, (due_s, unit))
