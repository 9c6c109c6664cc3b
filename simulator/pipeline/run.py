"""Runs a simulated gateway event by event: its schedulers hold requests, its engines serve them.

Events of one time run in this order: engines, failures and repairs, timers, ticks, arrivals. All
randomness comes from one seed. The run goes on after the last arrival until all work is done.

Not simulated: prefix caches (every prompt is new text), clients that come back after a refusal, the
gateway's own time, and what a compressor takes.
"""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Final, Literal

import numpy as np

from gateway.policy.fleet import fleet
from gateway.policy.fleet.binding import bind_least_loaded
from gateway.policy.pools.routing import larger_pools
from gateway.policy.scheduling.displacement import newest_of_largest
from gateway.policy.scheduling.scheduler import Job
from simulator.engine.records import Emission, EngineRequest
from simulator.fleet.failures import Outage, changes_of
from simulator.pipeline.columns import Columns
from simulator.pipeline.engine_fleet import EngineFleet
from simulator.pipeline.intake import Flight, Intake, fits, with_output
from simulator.pipeline.leases import Leases
from simulator.pipeline.records import (
    BROKEN,
    EVICTED,
    NO_WORKER,
    QUEUE_FULL,
    QUEUE_TIMEOUT,
    REFUSED_LENGTH,
    Gateway,
    PipelineOutcome,
    TenantTraffic,
)

TICK_S: Final = 0.25
LOOK_S: Final = 1.0
"""Between two readings of the engines' metrics."""
PROGRESS_EVERY: Final = 500

Timer = Literal["queue", "reclaim"]


def run_pipeline(
    gateway: Gateway,
    requests: TenantTraffic,
    *,
    seed: int = 0,
    failures: Sequence[Outage] = (),
    progress: Callable[[int], None] | None = None,
) -> PipelineOutcome:
    """Serve all requests; `progress` is called now and then with the number of arrivals."""
    run = _Run(gateway, requests, seed)
    run.all(failures, progress)
    return run.outcome()


class _Run:
    """The state of one run; methods are called in order of time."""

    def __init__(self, gateway: Gateway, requests: TenantTraffic, seed: int) -> None:
        self.gateway, self.requests, self.served = gateway, requests, gateway.served
        self.pools = gateway.served.fleet.pools
        self.leases = Leases(gateway)
        self.intake = Intake(gateway, requests, self.leases, np.random.default_rng(seed))
        self.engines = EngineFleet(gateway, self.heard)
        self.columns = Columns(requests)
        self.timers: list[tuple[float, int, Timer, Flight]] = []
        self.order = count()
        self.flights: dict[int, Flight] = {}
        self.waiting: dict[Job, Flight] = {}
        """Jobs that a scheduler holds, in order of arrival."""

    # Requests

    def arrive(self, index: int, now_s: float) -> None:
        flight = self.intake.enter(index, now_s)
        if isinstance(flight, str):
            self.columns.reasons[index] = flight
            return
        self.columns.planned[index] = flight.planned
        self.flights[index] = flight
        if flight.held.protected:
            self._timer(now_s + self.served.admission.reclaim_s, "reclaim", flight)
        self.bind(flight, flight.pools, now_s)

    def bind(
        self, flight: Flight, pools: Sequence[int], now_s: float, excluded: Sequence[int] = ()
    ) -> None:
        """Hand the request to the first pool that takes it."""
        for pool in pools:
            if not fleet.available(self.pools[pool], now_s):
                continue
            schedulers = self.served.scheduling.schedulers
            scheduler = schedulers[pool] if schedulers else None
            self._enter(flight, pool, now_s)
            if scheduler is None:
                binding = bind_least_loaded(pool, self.pools[pool], now_s, excluded)
                if binding is not None:
                    flight.job = flight.scheduler = None
                    self.send(flight, binding.worker, now_s)
                    return
                continue
            job = self.intake.job_of(flight, now_s)
            job.excluded = excluded
            ready = scheduler.submit(job, now_s)
            if job.state == "nowhere":
                continue
            flight.job, flight.scheduler = job, scheduler
            if job.state == "waiting":
                self.waiting[job] = flight
                self._timer(now_s + self.served.scheduling.queue.timeout_s, "queue", flight)
            self.send_all(ready, now_s)
            if job.state == "waiting":
                self._bound_queue(flight, now_s)
            return
        self.lose(flight, NO_WORKER, now_s)

    def _enter(self, flight: Flight, pool: int, now_s: float) -> None:
        """Move the lease along where the request goes elsewhere."""
        if pool == flight.held.pool:
            return
        moved = self.leases.move(flight.index, pool, now_s, force=True)
        if not isinstance(moved, str):
            flight.held = moved
        self.intake.uncompress(flight, now_s)

    def _bound_queue(self, flight: Flight, now_s: float) -> None:
        """Displace a request where more wait than the queue's limit."""
        scheduler = flight.scheduler
        limit = self.served.scheduling.queue.limit
        if scheduler is None or sum(scheduler.waiting) <= limit:
            return
        here = [job for job, other in self.waiting.items() if other.scheduler is scheduler]
        self.leave_queue(self.waiting[newest_of_largest(here)], QUEUE_FULL, now_s)

    def leave_queue(self, flight: Flight, reason: str, now_s: float) -> None:
        job, scheduler = flight.job, flight.scheduler
        if job is None or scheduler is None or job.state != "waiting":
            return
        del self.waiting[job]
        ready = scheduler.cancel(job, now_s)
        self.lose(flight, reason, now_s)
        self.send_all(ready, now_s)

    def send_all(self, ready: Sequence[Job], now_s: float) -> None:
        for job in ready:
            flight: Flight = job.owner
            self.waiting.pop(job, None)
            if job.state == "nowhere":
                flight.job = flight.scheduler = None
                self.bind(flight, flight.pools, now_s)
            else:
                self.send(flight, job.worker, now_s)

    def send(self, flight: Flight, worker: int, now_s: float) -> None:
        """Submit to an engine, or rescue what its window does not hold to a larger pool."""
        pool, index = flight.held.pool, flight.index
        window = self.gateway.profiles[pool].max_model_len
        if not fits(flight, window):
            self._release(flight, now_s, answered=False)
            larger = larger_pools(self.served.routing, pool)
            if larger:
                self.bind(flight, larger, now_s)
            else:
                self.lose(flight, REFUSED_LENGTH, now_s)
            return
        fleet.start(self.pools[pool], worker, 1, flight.held.cost_tokens)
        flight.where = (pool, worker)
        flight.tries += 1
        flight.output_tokens = with_output(flight, window)
        columns = self.columns
        columns.pool[index], columns.worker[index], columns.sent_s[index] = pool, worker, now_s
        columns.compressed[index] = flight.compressed
        columns.prompts[index] = flight.prompt_tokens
        columns.outputs[index] = flight.output_tokens
        request = EngineRequest(
            id=str(index),
            prompt_tokens=flight.prompt_tokens,
            output_tokens=flight.output_tokens,
        )
        self.engines.submit(flight.where, request, now_s)

    def _release(self, flight: Flight, now_s: float, *, answered: bool) -> None:
        """Give the job back to its scheduler, which may send others."""
        job, scheduler = flight.job, flight.scheduler
        flight.job = flight.scheduler = None
        if job is not None and scheduler is not None:
            self.send_all(scheduler.finished(job, now_s, answered=answered), now_s)

    def lose(self, flight: Flight, reason: str, now_s: float) -> None:
        """End a request that is not served to its end; what it reserved is refunded."""
        index = flight.index
        self.columns.reasons[index] = reason
        if flight.answered:
            self.columns.end_s[index] = now_s
        self.leases.settle(index, None, now_s)
        del self.flights[index]

    # Engines

    def heard(self, emission: Emission, at_s: float) -> None:
        """A first or last token."""
        index = int(emission.id)
        flight = self.flights[index]
        job, scheduler = flight.job, flight.scheduler
        if emission.index == 1:
            self.columns.start_s[index] = self.columns.sent_s[index] + emission.queue_s
            self.columns.first_s[index] = at_s
            flight.answered = True
            if job is not None and scheduler is not None:
                self.send_all(scheduler.first_token(job, at_s, emission.cached_tokens), at_s)
        if emission.finished:
            self.columns.end_s[index] = at_s
            self._off_worker(flight)
            self.leases.settle(index, flight.prompt_tokens + flight.output_tokens, at_s)
            self.intake.learn(flight)
            del self.flights[index]
            self._release(flight, at_s, answered=True)

    def _off_worker(self, flight: Flight) -> None:
        pool, worker = flight.where
        fleet.finish(self.pools[pool], worker, 1, flight.held.cost_tokens)
        flight.where = (-1, -1)

    def change(self, pool: int, worker: int, now_s: float, *, up: bool) -> None:
        """An engine fails or returns; requests without a token yet go elsewhere."""
        state = self.pools[pool]
        if up:
            fleet.probed(state, worker, ok=True)
            return
        self.engines.catch_up((pool, worker), now_s)
        fleet.unreachable(state, worker)
        homes = self.engines.restart((pool, worker))
        for flight in [f for f in self.flights.values() if f.where in homes]:
            self._off_worker(flight)
            self._release(flight, now_s, answered=False)
            if flight.answered or flight.tries >= self.served.fleet.max_attempts:
                self.lose(flight, BROKEN, now_s)
                continue
            self.columns.retried += 1
            lost = [w for p, w in homes if p == pool]
            self.bind(flight, flight.pools, now_s, lost)

    # Timers

    def _timer(self, at_s: float, what: Timer, flight: Flight) -> None:
        heappush(self.timers, (at_s, next(self.order), what, flight))

    def rang(self, what: Timer, flight: Flight, now_s: float) -> None:
        """A queue's time limit, or that of a protected request that still has no first token."""
        if flight.index not in self.flights:
            return
        if what == "queue":
            self.leave_queue(flight, QUEUE_TIMEOUT, now_s)
            return
        if flight.answered:
            return
        for index in self.leases.victims(flight.index):
            self.evict(self.flights[index], now_s)

    def evict(self, flight: Flight, now_s: float) -> None:
        if flight.where[0] < 0:
            self.leave_queue(flight, EVICTED, now_s)
            return
        self.engines.catch_up(flight.where, now_s)
        if flight.index in self.flights:
            self.engines.abort(flight.where, flight.index)
            self._off_worker(flight)
            self.lose(flight, EVICTED, now_s)
            self._release(flight, now_s, answered=False)

    def tick(self, now_s: float) -> None:
        for scheduler in self.served.scheduling.schedulers:
            if scheduler is not None:
                self.send_all(scheduler.tick(now_s), now_s)

    # The clock

    def all(self, failures: Sequence[Outage], progress: Callable[[int], None] | None) -> None:
        """Run to the end."""
        arrivals: list[float] = self.requests.traffic.arrival_s.tolist()
        changes = list(changes_of(failures))[::-1]
        n, at, tick_s = len(arrivals), 0, TICK_S
        look_s = 0.0 if self.served.fleet.telemetry else inf
        while at < n or self.flights:
            engine_s = self.engines.next_s()
            timer_s = self.timers[0][0] if self.timers else inf
            change_s = changes[-1][0] if changes else inf
            arrival_s = arrivals[at] if at < n else inf
            now_s = min(engine_s, timer_s, change_s, arrival_s, tick_s, look_s)
            if engine_s <= now_s:
                self.engines.step(now_s)
            elif change_s <= now_s:
                _, pool, worker, up = changes.pop()
                self.change(pool, worker, now_s, up=up)
            elif timer_s <= now_s:
                _, _, what, flight = heappop(self.timers)
                self.rang(what, flight, now_s)
            elif look_s <= now_s:
                look_s += LOOK_S
                self.engines.report(now_s)
            elif tick_s <= now_s:
                tick_s += TICK_S
                self.tick(now_s)
            else:
                self.arrive(at, now_s)
                at += 1
                if progress is not None and at % PROGRESS_EVERY == 0:
                    progress(at)

    def outcome(self) -> PipelineOutcome:
        """The results of all requests."""
        covered = [
            s.coverage for s in self.served.scheduling.schedulers if s and s.coverage is not None
        ]
        return PipelineOutcome(
            fleet=self.columns.outcome(self.engines.preemptions),
            entitlement=self.requests.entitlement,
            reasons=self.columns.reasons,
            covered=min(covered) if covered else None,
        )
