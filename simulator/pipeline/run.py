"""Runs a simulated gateway event by event: its schedulers hold requests, its engines serve them.

Events of one time run in this order: engines, failures and repairs, timers, ticks, arrivals. All
randomness comes from one seed. The run goes on after the last arrival until all work is done.

In a pool in phases a request is bound to a prefill engine first, then to one that decodes, which
starts once the KV has come. The prefill engine holds it until the first token (a step longer than
real ones). The same with SGLang, whose decode engines are in truth bound first.

Clients may come back after a refusal, as OpenAI's do: after the wait that they are told, else after
RETRY_S, doubled each time up to MOST_RETRY_S, less a random quarter at most. Times count from the
first attempt.

Prefix caches are simulated where it is known what prompts share (`TenantTraffic.prompts`); else
every prompt is new text. Answers are in no cache. Not simulated: the gateway's own time, and what a
compressor takes.
"""

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Final

import numpy as np

from gateway.admission.denials import retry_after_s
from simulator.fleet.failures import Outage, changes_of
from simulator.pipeline.intake import Flight, Intake
from simulator.pipeline.leases import Leases, Refused
from simulator.pipeline.records import (
    QUEUE_TIMEOUT,
    REFUSED_LENGTH,
    Gateway,
    PipelineOutcome,
    TenantTraffic,
)
from simulator.pipeline.serving import Serving, Timer

TICK_S: Final = 0.25
LOOK_S: Final = 1.0
"""Between two readings of the engines' metrics."""
PROGRESS_EVERY: Final = 500
RETRY_S: Final = 0.5
MOST_RETRY_S: Final = 8.0
_FINAL: Final = frozenset({REFUSED_LENGTH, "exceeds_entitlement"})
"""Refusals (400) after which no client comes back."""


def run_pipeline(
    gateway: Gateway,
    requests: TenantTraffic,
    *,
    seed: int = 0,
    failures: Sequence[Outage] = (),
    retries: int = 0,
    taught: Iterable[int] = (),
    progress: Callable[[int], None] | None = None,
) -> PipelineOutcome:
    """Serve all requests; `progress` is called now and then with the number of arrivals.

    `retries`: how often a client comes back. `taught`: requests of which the estimator has learned
    before.
    """
    run = Run(gateway, requests, seed, retries)
    run.intake.teach(taught)
    run.all(failures, progress)
    return run.outcome()


class Run:
    """The clock, arrivals and timers of one run.

    The last `called` requests do not arrive by themselves: a subclass calls `arrive`.
    """

    tick_every_s = TICK_S
    look_every_s = LOOK_S

    def __init__(
        self,
        gateway: Gateway,
        requests: TenantTraffic,
        seed: int,
        retries: int = 0,
        *,
        called: int = 0,
    ) -> None:
        self.requests, self.served = requests, gateway.served
        self._called = called
        self.leases = Leases(gateway)
        self.random = np.random.default_rng(seed)
        self.intake = Intake(gateway, requests, self.leases, self.random)
        self.serving = Serving(
            gateway, requests, self.leases, self.intake, self._timer, self.refused
        )
        self.retries, self.came_back = retries, bytearray(len(requests))
        """By request: how often its client came back."""
        self.again: list[tuple[float, int]] = []
        """When clients come back, with which request."""
        self.timers: list[tuple[float, int, Timer, Flight]] = []
        self.order = count()

    def goes_on(self, *, arriving: bool) -> bool:
        """Whether there is more to simulate; `arriving`: more requests come."""
        return arriving or bool(self.serving.flights or self.again)

    def after(self, now_s: float) -> None:
        """Called after each event."""

    def arrive(self, index: int, now_s: float) -> None:
        """Take a request in, or refuse it."""
        self.serving.columns.reasons[index] = ""
        flight = self.intake.enter(index, now_s)
        if isinstance(flight, Refused):
            self.serving.columns.reasons[index] = flight.reason
            wait_s = retry_after_s(flight.wait_s, self.random.random()) if flight.wait_s else 0.0
            self.refused(index, flight._replace(wait_s=wait_s), now_s)
            return
        self.serving.columns.planned[index] = flight.planned
        self.serving.flights[index] = flight
        if flight.held.protected:
            self._timer(now_s + self.served.admission.reclaim_s, "reclaim", flight)
        self.serving.bind(flight, flight.pools, now_s)

    def refused(self, index: int, why: Refused, now_s: float) -> None:
        """An attempt has failed before its first token: its client may come back."""
        tries = self.came_back[index]
        if not tries:
            self.serving.columns.first_refusals[index] = why.reason
        if tries >= self.retries or why.reason in _FINAL:
            return
        wait_s = min(RETRY_S * 2**tries, MOST_RETRY_S) * (1 - self.random.random() / 4)
        self.came_back[index] = tries + 1
        heappush(self.again, (now_s + (why.wait_s or wait_s), index))

    def _timer(self, at_s: float, what: Timer, flight: Flight) -> None:
        heappush(self.timers, (at_s, next(self.order), what, flight))

    def rang(self, what: Timer, flight: Flight, now_s: float) -> None:
        """A time limit of a queue, a protected request, or held KV; or KV that has come."""
        if self.serving.flights.get(flight.index) is not flight:
            return
        if what == "kv":
            self.serving.kv_due(flight, now_s)
            return
        if what == "queue":
            self.serving.leave_queue(flight, QUEUE_TIMEOUT, now_s)
            return
        if flight.answered:
            return
        for index in self.leases.victims(flight.index):
            victim = self.serving.flights.get(index)  # another's eviction may have ended it
            if victim is not None:
                self.serving.evict(victim, now_s)

    def all(self, failures: Sequence[Outage], progress: Callable[[int], None] | None) -> None:
        """Run to the end."""
        arrivals: list[float] = self.requests.traffic.arrival_s.tolist()
        changes = list(changes_of(failures))[::-1]
        n, at, tick_s = len(arrivals) - self._called, 0, self.tick_every_s
        look_s = 0.0 if self.served.fleet.reads_metrics else inf
        again = self.again
        while self.goes_on(arriving=at < n):
            engine_s = self.serving.engines.next_s()
            timer_s = self.timers[0][0] if self.timers else inf
            change_s = changes[-1][0] if changes else inf
            arrival_s = arrivals[at] if at < n else inf
            again_s = again[0][0] if again else inf
            now_s = min(engine_s, timer_s, change_s, arrival_s, again_s, tick_s, look_s)
            if engine_s <= now_s:
                self.serving.engines.step(now_s)
            elif change_s <= now_s:
                _, pool, worker, up = changes.pop()
                self.serving.change(pool, worker, now_s, up=up)
            elif timer_s <= now_s:
                _, _, what, flight = heappop(self.timers)
                self.rang(what, flight, now_s)
            elif look_s <= now_s:
                look_s += self.look_every_s
                self.serving.engines.report(now_s)
            elif tick_s <= now_s:
                tick_s += self.tick_every_s
                self.serving.tick(now_s)
            elif again_s <= now_s:
                self.arrive(heappop(again)[1], now_s)
            else:
                self.arrive(at, now_s)
                at += 1
                if progress is not None and at % PROGRESS_EVERY == 0:
                    progress(at)
            self.after(now_s)

    def outcome(self) -> PipelineOutcome:
        """The results of all requests."""
        schedulers = [pool.scheduler for pool in self.served.fleet.pools]
        covered = [s.coverage for s in schedulers if s.coverage is not None]
        columns = self.serving.columns
        return PipelineOutcome(
            fleet=columns.outcome(self.serving.engines.preemptions),
            entitlement=self.requests.entitlement,
            reasons=columns.reasons,
            uncut=self.intake.uncut,
            covered=min(covered) if covered else None,
            sent_s=np.frombuffer(columns.sent_s),
            prefilled_s=np.frombuffer(columns.prefilled_s),
            first_refusals=columns.first_refusals,
            lost_in=np.frombuffer(columns.lost_in, dtype=np.int64),
        )
