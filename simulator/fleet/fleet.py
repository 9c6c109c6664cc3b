"""A fleet in virtual time: the gateway's decisions in front of engine models, event by event.

A request is planned (`routing`), spills over where its pool is full, is bound to an instance
(`dispatch`) and served (`instance`). Rules:
- Events run in order of time. At one time, engines come before failures and repairs, and those
  before arrivals; instances of one time, in order.
- An instance that fails leaves the rotation at once and loses all its requests. As the gateway
  retries, requests without a token yet are sent elsewhere, at most `ATTEMPTS` times; broken
  answers are not.
- The run continues after the last arrival until all work is done, so no request is cut off.
- All randomness comes from one seed: the same call gives the same bytes.
"""

import gc
from array import array
from collections.abc import Callable, Sequence
from heapq import heappop, heappush, heapreplace, merge
from math import inf, nan
from typing import Final, Protocol

import msgspec
import numpy as np

from gateway.fleet import fleet as health
from gateway.fleet.fleet import PoolState
from simulator.engine.profiles import EngineProfile
from simulator.fleet.dispatch import DISPATCHERS
from simulator.fleet.failures import Outage, changes_of, outages
from simulator.fleet.instance import Instance, make_instance
from simulator.fleet.jobs import Needs, Times
from simulator.fleet.outcome import (
    BROKEN,
    DONE,
    REFUSED_LENGTH,
    UNAVAILABLE,
    FleetOutcome,
)
from simulator.fleet.routing import REFUSED
from simulator.fleet.spec import FleetSpec, PoolSpec, moved, routed
from simulator.fleet.traffic import Random, Traffic, selected

__all__ = ["ATTEMPTS", "FleetSpec", "Outage", "PoolSpec", "outages", "simulate"]

ATTEMPTS: Final = 3
"""Most instances tried for one request, only before its first token."""
PROGRESS_EVERY: Final = 2000
_LOOK: Final = -1
"""In place of a pool's index: the event is a look at the boundaries, not a change of instances."""


class PoolObservation(msgspec.Struct, frozen=True, kw_only=True):
    """One pool's figures so far."""

    sent: int
    """Requests sent to an instance."""
    finished: int
    preemptions: int
    slots_used: float
    """Sequences over slots; above 1 while requests wait."""
    waiting: float
    """Sequences that wait at the engines, over slots."""
    kv_used: float
    """Share of its KV cache in use."""


class Steer(Protocol):
    """Moves the boundaries while a fleet runs, every `every_s` > 0 seconds, as the gateway does."""

    every_s: float

    def step(self, now_s: float, pools: Sequence[PoolObservation]) -> Sequence[int] | None:
        """New boundaries, one for each pool but the last; None to keep the present ones."""


def simulate(
    spec: FleetSpec,
    traffic: Traffic,
    *,
    seed: int = 0,
    failures: Sequence[Outage] = (),
    progress: Callable[[int], None] | None = None,
    steer: Steer | None = None,
) -> FleetOutcome:
    """Run the fleet on this traffic to its end.

    `progress` is called now and then with the number of arrivals; `steer` moves the boundaries
    (gamma must be 1).
    """
    if steer is not None and spec.gamma != 1:
        raise ValueError("boundaries are moved without compression only: set gamma to 1")
    run = _FleetRun(spec, traffic, np.random.default_rng(seed))
    # Millions of small objects and no cycles: garbage collection would only cost time.
    collecting = gc.isenabled()
    gc.disable()
    try:
        run.all(failures, progress, steer)
    finally:
        if collecting:
            gc.enable()
    return run.outcome()


class _FleetRun:
    """The state of one run; methods are called in order of time."""

    def __init__(self, spec: FleetSpec, traffic: Traffic, random: Random) -> None:
        count = len(traffic)
        self._spec, self._traffic, self._random = spec, traffic, random
        self._route = routed(spec, traffic.prompt_tokens, traffic.output_tokens, random)
        prompts, outputs = self._route.prompt_tokens, traffic.output_tokens
        self._planned: list[int] = self._route.pool.tolist()
        self._alternates = self._route.alternates
        self._times = Times(count)
        self._pool_of = array("q", [-1]) * count
        self._worker_of = array("q", [-1]) * count
        self._status = array("b", [DONE]) * count
        self._attempts: dict[int, int] = {}
        self._tokens: list[int] = (prompts + outputs).tolist()
        self._states = [
            PoolState(p.name, [f"{p.name}-{i}" for i in range(p.instances)], p.profile.max_num_seqs)
            for p in spec.pools
        ]
        make = DISPATCHERS[spec.dispatch]
        self._dispatchers = [make(s, self._tokens, random.spawn(1)[0]) for s in self._states]
        self._instances: list[Instance] = []
        self._home: list[tuple[int, int]] = []  # (pool, worker) of an instance
        self._first: list[int] = []  # a pool's first instance
        needs: dict[EngineProfile, Needs] = {}
        for p, pool in enumerate(spec.pools):
            self._first.append(len(self._instances))
            if pool.profile not in needs:
                needs[pool.profile] = Needs(pool.profile, prompts, outputs)
            for worker in range(pool.instances):
                self._instances.append(
                    make_instance(
                        pool.profile,
                        needs[pool.profile],
                        self._times,
                        block_exact=spec.block_exact,
                    )
                )
                self._home.append((p, worker))
        # Times at which to look at an instance, never later than its next event. Entries that
        # differ from `_entry_s` are stale; the sentinel at infinity keeps the heap non-empty.
        self._heap = [(inf, -1)]
        self._entry_s = [inf] * len(self._instances)

    def all(
        self,
        failures: Sequence[Outage],
        progress: Callable[[int], None] | None,
        steer: Steer | None,
    ) -> None:
        """Run the arrivals between changes of the fleet, then the rest."""
        arrivals = self._traffic.arrival_s
        looks = [] if steer is None else np.arange(1, arrivals[-1] / steer.every_s).tolist()
        changes = [(steer.every_s * n, _LOOK, 0, True) for n in looks] if steer else []
        done = 0
        for at_s, pool, worker, up in merge(changes_of(failures), changes):
            until = int(np.searchsorted(arrivals, at_s, side="left"))
            self._arrivals(done, until, progress)
            done = until
            self._run_until(at_s)
            if steer is not None and pool == _LOOK:
                self._steer(steer, at_s, done)
            else:
                self._change(pool, worker, at_s, up=up)
        self._arrivals(done, len(arrivals), progress)
        self._run_until(inf)

    def _arrivals(self, start: int, end: int, progress: Callable[[int], None] | None) -> None:
        for low in range(start, end, PROGRESS_EVERY):
            high = min(end, low + PROGRESS_EVERY)
            times: list[float] = self._traffic.arrival_s[low:high].tolist()
            heap, run_until, arrive = self._heap, self._run_until, self._arrive
            for index, now_s in enumerate(times, low):
                if heap[0][0] <= now_s:
                    run_until(now_s)
                arrive(index, now_s)
            if progress is not None:
                progress(high)

    def _run_until(self, until_s: float) -> None:
        """All events of the engines up to a time."""
        heap, instances, entry_s = self._heap, self._instances, self._entry_s
        dispatchers, home, states = self._dispatchers, self._home, self._states
        while True:
            at_s, i = heap[0]
            if at_s > until_s or i < 0:
                return
            if at_s != entry_s[i]:
                heappop(heap)
                continue
            instance = instances[i]
            if instance.due_s > at_s:  # its time was postponed since
                entry_s[i] = due_s = instance.due_s
                heapreplace(heap, (due_s, i))
                continue
            done = instance.advance(at_s)
            entry_s[i] = due_s = instance.due_s
            heapreplace(heap, (due_s, i))
            if not done:
                continue
            pool, worker = home[i]
            finish = dispatchers[pool].finish
            for index in done:
                finish(worker, index)
            states[pool].inflight -= len(done)

    def _arrive(self, index: int, now_s: float) -> None:
        pool = self._planned[index]
        if pool == REFUSED:
            self._status[index] = REFUSED_LENGTH
            return
        queue, states = self._spec.spill_queue, self._states
        if queue is not None and health.overloaded(states[pool], queue, now_s):
            # As the gateway does for a model that is not managed.
            others = (
                p for p in self._alternates[index] if not health.overloaded(states[p], queue, now_s)
            )
            pool = next(others, pool)
        self._bind(index, pool, now_s)

    def _bind(self, index: int, pool: int, now_s: float) -> None:
        """Send a request to an instance of the pool, or of an alternate if it has none."""
        worker = self._dispatchers[pool].pick(index, now_s)
        if worker < 0:
            for other in self._alternates[index]:
                if (worker := self._dispatchers[other].pick(index, now_s)) >= 0:
                    pool = other
                    break
            else:
                self._lost(index, UNAVAILABLE, now_s)
                return
        i = self._first[pool] + worker
        self._pool_of[index] = pool
        self._worker_of[index] = worker
        self._states[pool].inflight += 1
        instance = self._instances[i]
        instance.submit(index, now_s)
        if instance.due_s < self._entry_s[i]:
            self._entry_s[i] = instance.due_s
            heappush(self._heap, (instance.due_s, i))

    def _change(self, pool: int, worker: int, now_s: float, *, up: bool) -> None:
        """Apply a failure or a repair; requests without a token yet move elsewhere."""
        state, dispatcher = self._states[pool], self._dispatchers[pool]
        if up:
            health.probed(state, worker, ok=True)
            dispatcher.refresh()
            return
        lost = self._instances[self._first[pool] + worker].fail(now_s)
        health.unreachable(state, worker)
        dispatcher.refresh()
        for index in lost:
            dispatcher.finish(worker, index)
        state.inflight -= len(lost)
        for index in lost:
            tried = self._attempts.get(index, 1)
            if self._times.first[index] <= now_s or tried >= ATTEMPTS:
                self._lost(index, BROKEN, now_s)
                continue
            self._attempts[index] = tried + 1
            self._times.forget(index)
            self._bind(index, pool, now_s)

    def _steer(self, steer: Steer, now_s: float, done: int) -> None:
        """Show the figures so far to `steer`, and re-plan later arrivals by its boundaries."""
        taken = np.frombuffer(self._pool_of, dtype=np.int64)[:done]
        sent = np.bincount(taken[taken >= 0], minlength=len(self._states)).tolist()
        preempted = self._preemptions()
        boundaries = steer.step(
            now_s,
            [
                PoolObservation(
                    sent=sent[p],
                    finished=sent[p] - state.inflight,
                    preemptions=preempted[p],
                    slots_used=state.inflight / (len(state.workers) * state.slots_per_worker),
                    waiting=self._waiting(p),
                    kv_used=self._kv_used(p),
                )
                for p, state in enumerate(self._states)
            ],
        )
        if boundaries is None:
            return
        rest = np.arange(len(self._traffic)) >= done
        later = selected(self._traffic, rest)
        spec = moved(self._spec, boundaries)
        route = routed(spec, later.prompt_tokens, later.output_tokens, self._random)
        self._planned[done:] = route.pool.tolist()
        self._alternates = [*self._alternates[:done], *route.alternates]

    def _lost(self, index: int, status: int, now_s: float) -> None:
        self._status[index] = status
        self._times.end[index] = now_s if status == BROKEN else nan

    def outcome(self) -> FleetOutcome:
        """The results of all requests."""
        times = self._times
        return FleetOutcome(
            arrival_s=self._traffic.arrival_s,
            start_s=np.frombuffer(times.start),
            first_s=np.frombuffer(times.first),
            end_s=np.frombuffer(times.end),
            prompt_tokens=self._route.prompt_tokens,
            output_tokens=self._traffic.output_tokens,
            compressed=self._route.compressed,
            planned=np.array(self._planned, dtype=np.int64),
            pool=np.frombuffer(self._pool_of, dtype=np.int64),
            worker=np.frombuffer(self._worker_of, dtype=np.int64),
            status=np.frombuffer(self._status, dtype=np.int8),
            preemptions=self._preemptions(),
            retried=sum(self._attempts.values()) - len(self._attempts),
        )

    def _kv_used(self, pool: int) -> float:
        """Mean share of KV blocks in use over a pool's instances."""
        used = sum(instance.used_blocks for instance in self._of(pool))
        return used / (len(self._of(pool)) * self._spec.pools[pool].profile.kv_blocks)

    def _waiting(self, pool: int) -> float:
        waiting = sum(instance.waiting for instance in self._of(pool))
        return waiting / (len(self._of(pool)) * self._spec.pools[pool].profile.max_num_seqs)

    def _of(self, pool: int) -> list[Instance]:
        first = self._first[pool]
        return self._instances[first : first + self._spec.pools[pool].instances]

    def _preemptions(self) -> tuple[int, ...]:
        """Preemptions so far, by pool."""
        found = [0] * len(self._spec.pools)
        for (pool, _), instance in zip(self._home, self._instances, strict=True):
            found[pool] += instance.preemptions
        return tuple(found)
