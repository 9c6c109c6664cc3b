"""Requests between admission and their end: bound, queued, sent, heard of, settled."""

from array import array
from collections.abc import Callable, Sequence
from math import inf, nan
from typing import Final, Literal

import numpy as np

from gateway.fleet import fleet
from gateway.fleet.model_runtime import PrefixEntry
from gateway.records.attempt import Usage
from gateway.routing.routing import larger_pools
from gateway.scheduling.fairness import newest_of_largest
from gateway.scheduling.scheduler import Job
from simulator.engine.records import Emission, EngineRequest
from simulator.fleet import outcome as fates
from simulator.fleet.outcome import FleetOutcome
from simulator.pipeline.engine_fleet import EngineFleet
from simulator.pipeline.intake import Flight, Intake, fits, with_output
from simulator.pipeline.leases import Leases, Refused
from simulator.pipeline.records import (
    BROKEN,
    EVICTED,
    NO_WORKER,
    QUEUE_FULL,
    QUEUE_TIMEOUT,
    REFUSED_LENGTH,
    Gateway,
    TenantTraffic,
)

_FATES: Final = {
    "": fates.DONE,
    REFUSED_LENGTH: fates.REFUSED_LENGTH,
    NO_WORKER: fates.UNAVAILABLE,
    BROKEN: fates.BROKEN,
}
KV_LEASE_S: Final = 30.0
"""How long an engine holds KV that nobody fetches, as vLLM."""
WAITS_S: Final = {QUEUE_FULL: 2.0, QUEUE_TIMEOUT: 2.0, NO_WORKER: 2.0, EVICTED: 5.0}
"""After which waits the gateway tells clients to come back."""
Timer = Literal["queue", "reclaim", "kv"]
SetTimer = Callable[[float, Timer, Flight], None]
"""(at, what, whose)."""
OnRefusal = Callable[[int, Refused, float], None]
"""(request, why, when)."""


class Columns:
    """What became of each request of a run, in columns.

    Times in seconds, NaN for events that did not happen; everything by request.
    """

    def __init__(self, requests: TenantTraffic) -> None:
        n = len(requests)
        self._requests = requests
        self.sent_s, self.start_s, self.first_s, self.end_s, self.prefilled_s = (
            array("d", [nan]) * n for _ in range(5)
        )
        self.planned, self.pool, self.worker, self.lost_in = (
            array("q", [-1]) * n for _ in range(4)
        )
        self.prompts: list[int] = requests.traffic.prompt_tokens.tolist()
        """As sent."""
        self.outputs: list[int] = requests.traffic.output_tokens.tolist()
        self.compressed = array("b", [0]) * n
        self.reasons = [""] * n
        """Why it was not served to its end; "" if it was."""
        self.first_refusals = [""] * n
        """Why its first attempt was refused; "" if it was not."""
        self.retried = 0

    def outcome(self, preemptions: tuple[int, ...]) -> FleetOutcome:
        """In the form of any simulated fleet's."""
        status = [_FATES.get(reason, fates.REFUSED_BY_GATE) for reason in self.reasons]
        return FleetOutcome(
            arrival_s=self._requests.traffic.arrival_s,
            start_s=np.frombuffer(self.start_s),
            first_s=np.frombuffer(self.first_s),
            end_s=np.frombuffer(self.end_s),
            prompt_tokens=np.array(self.prompts, dtype=np.int64),
            output_tokens=np.array(self.outputs, dtype=np.int64),
            compressed=np.frombuffer(self.compressed, dtype=np.int8) > 0,
            planned=np.frombuffer(self.planned, dtype=np.int64),
            pool=np.frombuffer(self.pool, dtype=np.int64),
            worker=np.frombuffer(self.worker, dtype=np.int64),
            status=np.array(status, dtype=np.int8),
            preemptions=preemptions,
            retried=self.retried,
        )


class Serving:
    """The requests in flight; methods are called in order of time."""

    def __init__(
        self,
        gateway: Gateway,
        requests: TenantTraffic,
        leases: Leases,
        intake: Intake,
        set_timer: SetTimer,
        on_refusal: OnRefusal,
    ) -> None:
        self.gateway, self.served = gateway, gateway.served
        self.pools: Final = gateway.served.fleet.pools
        self.leases, self.intake = leases, intake
        self.engines = EngineFleet(gateway, self.on_emission)
        self.columns = Columns(requests)
        self.flights: dict[int, Flight] = {}
        self.waiting: dict[Job, Flight] = {}
        """Jobs that a scheduler holds, in order of arrival."""
        self._set_timer, self._on_refusal = set_timer, on_refusal

    def bind(
        self, flight: Flight, pools: Sequence[int], now_s: float, excluded: Sequence[int] = ()
    ) -> None:
        """Hand the request to the first pool that takes it."""
        for pool in pools:
            flight.place = place = self._place(flight, pool, now_s)
            if not fleet.available(self.pools[place], now_s):
                continue
            scheduler = self.pools[place].scheduler
            if pool != flight.held.pool:
                moved = self.leases.move(flight.index, pool, now_s, force=True)
                if not isinstance(moved, Refused):
                    flight.held = moved
                self.intake.uncompress(flight, now_s)
            job = self.intake.job_of(flight, now_s)
            job.excluded = excluded
            if flight.prefix.points:
                job.match = flight.prefix.match(place)
                flight.entry = flight.entry or PrefixEntry(flight.prefix.points)
            if flight.prefill:
                prior_s = 1 / self.gateway.kv_tokens_per_s
                job.after_s = self.pools[pool].transfer.predict(job.prompt_tokens, prior_s)
            ready = scheduler.submit(job, now_s)
            if job.state == "nowhere":
                continue
            flight.job, flight.scheduler = job, scheduler
            if flight.entry is not None:
                flight.entry.enter(self.pools[place], job)
            if job.state == "waiting":
                self.waiting[job] = flight
                limit_s = self.served.scheduling.queue_timeout_s
                self._set_timer(now_s + limit_s, "queue", flight)
            self.send_all(ready, now_s)
            if job.state == "waiting":
                self._bound_queue(flight, now_s)
            return
        self.lose(flight, NO_WORKER, now_s)

    def _place(self, flight: Flight, pool: int, now_s: float) -> int:
        """Which pool's engine is next: one for the prompt alone, or this pool's."""
        phases = self.served.fleet.phases.get(pool)
        flight.prefill = (
            phases is not None
            and flight.kv_at is None
            and flight.estimate.input_tokens_total >= phases.skip_below_tokens
            and bool(fleet.available(self.pools[phases.prefill], now_s))
        )
        return phases.prefill if phases is not None and flight.prefill else pool

    def _bound_queue(self, flight: Flight, now_s: float) -> None:
        """Displace a request where more wait than the queue's limit."""
        scheduler = flight.scheduler
        limit = self.served.scheduling.queue_limit
        if scheduler is None or sum(scheduler.waiting) <= limit:
            return
        here = [job for job, other in self.waiting.items() if other.scheduler is scheduler]
        self.leave_queue(self.waiting[newest_of_largest(here)], QUEUE_FULL, now_s)

    def leave_queue(self, flight: Flight, reason: str, now_s: float) -> None:
        """Take a request out of its queue and refuse it; nothing if it does not wait."""
        job, scheduler = flight.job, flight.scheduler
        if job is None or scheduler is None or job.state != "waiting":
            return
        del self.waiting[job]
        ready = scheduler.cancel(job, now_s)
        self.lose(flight, reason, now_s)
        self.send_all(ready, now_s)

    def send_all(self, ready: Sequence[Job], now_s: float) -> None:
        """Send what a scheduler released; bind anew what has no worker left in its pool."""
        for job in ready:
            flight: Flight = job.owner
            self.waiting.pop(job, None)
            if job.state == "nowhere":
                flight.job = flight.scheduler = None
                if flight.entry is not None:
                    flight.entry.withdraw()
                self.bind(flight, flight.pools, now_s)
            else:
                if flight.entry is not None:  # its worker may be another than before
                    flight.entry.enter(self.pools[flight.place], job)
                self.send(flight, job.worker, now_s)

    def send(self, flight: Flight, worker: int, now_s: float) -> None:
        """Submit to an engine, or rescue what its window does not hold to a larger pool."""
        pool, index = flight.place, flight.index
        window = self.gateway.profiles[pool].max_model_len
        if not fits(flight, window):
            self._release(flight, now_s, answered=False)
            larger = larger_pools(self.served.routing, flight.held.pool)
            if larger:
                self._drop_kv(flight, now_s)
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
        if flight.kv_at is None:
            self._submit(flight, now_s)
            return
        flight.kv_s = now_s + flight.prompt_tokens / self.gateway.kv_tokens_per_s
        self._set_timer(flight.kv_s, "kv", flight)

    def _submit(self, flight: Flight, now_s: float) -> None:
        block_tokens = self.gateway.profiles[flight.place].block_tokens
        request = EngineRequest(
            id=str(flight.index),
            prompt_tokens=flight.prompt_tokens,
            output_tokens=1 if flight.prefill else flight.output_tokens,
            remote=flight.kv_at is not None,
            hold=flight.prefill,
            block_hashes=self.intake.blocks(flight, block_tokens),
        )
        self.engines.submit(flight.where, request, now_s)

    def kv_due(self, flight: Flight, now_s: float) -> None:
        """KV has come, and decoding begins; or its lease is over while it waits for a worker."""
        if now_s != flight.kv_s:
            return  # of an earlier try
        flight.kv_s = inf
        if flight.where[0] >= 0:
            self._submit(flight, now_s)
        else:
            self._drop_kv(flight, now_s)

    def _drop_kv(self, flight: Flight, now_s: float) -> None:
        """Free what another engine holds of the request, if any does."""
        at, flight.kv_at, flight.kv_s = flight.kv_at, None, inf
        if at is not None:
            self.engines.release(at, flight.index, now_s)

    def _release(self, flight: Flight, now_s: float, *, answered: bool) -> None:
        """Give the job back to its scheduler, which may send others."""
        job, scheduler = flight.job, flight.scheduler
        flight.job = flight.scheduler = None
        if flight.entry is not None and not (answered or flight.answered):
            flight.entry.withdraw()
        if job is not None and scheduler is not None:
            self.send_all(scheduler.finished(job, now_s, answered=answered), now_s)

    def lose(self, flight: Flight, reason: str, now_s: float) -> None:
        """End a request that is not served to its end; what it reserved is refunded."""
        index = flight.index
        self.columns.reasons[index] = reason
        self.columns.lost_in[index] = flight.place
        self._drop_kv(flight, now_s)
        if flight.answered:
            self.columns.end_s[index] = now_s
        elif flight.entry is not None:
            flight.entry.withdraw()
        self.leases.settle(index, None, now_s)
        del self.flights[index]
        if not flight.answered:
            self._on_refusal(index, Refused(reason, WAITS_S.get(reason, 0.0)), now_s)

    def on_emission(self, emission: Emission, at_s: float) -> None:
        """A first or last token."""
        index = int(emission.id)
        flight = self.flights[index]
        job, scheduler = flight.job, flight.scheduler
        if emission.index == 1:
            if flight.kv_at is None:
                self.columns.start_s[index] = self.columns.sent_s[index] + emission.queue_s
                flight.cached_tokens = emission.cached_tokens
            if not flight.prefill:
                self.columns.first_s[index] = at_s
                flight.answered = True
                if flight.kv_at is not None:
                    sent_s = self.columns.sent_s[index]
                    transfer = self.pools[flight.held.pool].transfer
                    tokens = flight.estimate.input_tokens_total
                    transfer.learn(sent_s - flight.prefilled_s, at_s - sent_s, tokens)
                self._drop_kv(flight, at_s)
            if job is not None and scheduler is not None:
                self.send_all(scheduler.first_token(job, at_s, emission.cached_tokens), at_s)
        if flight.prefill:
            self._prefilled(flight, at_s)
        elif emission.finished:
            self.columns.end_s[index] = at_s
            if not flight.prefilled_s:
                self._correct(flight)
            self._off_worker(flight)
            self.leases.settle(index, flight.prompt_tokens + flight.output_tokens, at_s)
            self.intake.learn(flight)
            del self.flights[index]
            self._release(flight, at_s, answered=True)

    def _prefilled(self, flight: Flight, at_s: float) -> None:
        """A prompt is computed, and held where it was: bind the request to decode."""
        flight.prefilled_s = self.columns.prefilled_s[flight.index] = at_s
        flight.kv_at, flight.kv_s = flight.where, at_s + KV_LEASE_S
        self._set_timer(flight.kv_s, "kv", flight)
        self._correct(flight)
        flight.entry = None
        self._off_worker(flight)
        self._release(flight, at_s, answered=True)
        self.bind(flight, (flight.held.pool,), at_s)

    def _correct(self, flight: Flight) -> None:
        """Teach the prefix index what the engine held of the prompt."""
        if flight.entry is not None:
            pool, worker = flight.where
            reported = Usage(
                prompt_tokens=flight.prompt_tokens,
                completion_tokens=flight.output_tokens,
                cached_tokens=flight.cached_tokens,
                cached_reported=True,
            )
            flight.entry.correct(self.pools[pool], worker, reported)

    def _off_worker(self, flight: Flight) -> None:
        pool, worker = flight.where
        fleet.finish(self.pools[pool], worker, 1, flight.held.cost_tokens)
        flight.where = (-1, -1)

    def evict(self, flight: Flight, now_s: float) -> None:
        """A request gives way to a protected one, wherever it is."""
        if flight.where[0] < 0:
            self.leave_queue(flight, EVICTED, now_s)
            return
        self.engines.catch_up(flight.where, now_s)
        if flight.index in self.flights:
            self.engines.abort(flight.where, flight.index)
            self._off_worker(flight)
            self.lose(flight, EVICTED, now_s)
            self._release(flight, now_s, answered=False)

    def change(self, pool: int, worker: int, now_s: float, *, up: bool) -> None:
        """An engine fails or returns; requests without a token yet go elsewhere."""
        state = self.pools[pool]
        if up:
            fleet.probed(state, worker, ok=True)
            return
        self.engines.catch_up((pool, worker), now_s)
        fleet.unreachable(state, worker)
        homes = self.engines.restart((pool, worker))
        for flight in self.flights.values():
            if flight.kv_at in homes:  # the engine that decodes computes what it can't fetch
                flight.kv_at = None
        for flight in [f for f in self.flights.values() if f.where in homes]:
            self._off_worker(flight)
            self._release(flight, now_s, answered=False)
            if flight.answered or flight.tries >= self.served.fleet.max_attempts:
                self.lose(flight, BROKEN, now_s)
                continue
            self.columns.retried += 1
            lost = [w for p, w in homes if p == pool]
            self._drop_kv(flight, now_s)
            self.bind(flight, flight.pools, now_s, lost)

    def tick(self, now_s: float) -> None:
        """Let the schedulers look after their queues."""
        for pool in self.pools:
            self.send_all(pool.scheduler.tick(now_s), now_s)
