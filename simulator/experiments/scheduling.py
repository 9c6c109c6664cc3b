"""The gateway's schedulers for one pool of engine models, in virtual time.

The schedulers, predictor and prefix index are the gateway's own; the engines are
`simulator.engine.engine`. `simulator.fleet.fleet` binds at arrival; here requests may wait in the
gateway, several gateways may share the workers, and workers may stall, restart or be slow.

Events at the same time run in this order: engines, delayed notices, troubles, ticks, arrivals.
"""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from math import inf
from typing import Final

import numpy as np

from gateway.fleet import fleet
from gateway.scheduling.prefix_index import POSITIONS, ExpectedHit
from gateway.scheduling.scheduler import Job, Points
from simulator.engine.engine import Engine, EngineProfile, EngineRequest
from simulator.experiments.scheduling_records import (
    BLOCK_TOKENS,
    WORKER,
    Demand,
    ServedRequest,
    SimulatedGateway,
    Trouble,
)

__all__ = [
    "BLOCK_TOKENS",
    "WORKER",
    "Demand",
    "ServedRequest",
    "SimulatedGateway",
    "Trouble",
    "block_points",
    "serve",
]

TICK_S: Final = 0.25
SAMPLE_S: Final = 1.0
"""From one reading of the engines' metrics to the next."""
ATTEMPTS: Final = 5
_ROUNDING_S: Final = 1e-9
BYTES_PER_TOKEN: Final = 4
"""Converts the gateway's fixed positions to tokens."""


class _Worker:
    """An engine with a clock that can be halted."""

    def __init__(self, profile: EngineProfile) -> None:
        self.profile = profile
        self.engine = Engine(profile)
        self.behind_s = 0.0
        self.halted_s = inf

    @property
    def halted(self) -> bool:
        """Whether its clock is halted."""
        return self.halted_s < inf

    def local_s(self, now_s: float) -> float:
        """Time by its own clock; rounded up, so that rounding never misses a due event."""
        local_s = min(now_s, self.halted_s) - self.behind_s
        return local_s + _ROUNDING_S if self.behind_s else local_s

    def resume(self, now_s: float) -> None:
        """Continue at the time at which it was halted."""
        self.behind_s += now_s - self.halted_s
        self.halted_s = inf

    def due_s(self) -> float:
        """Time of the next event; never while it is halted."""
        due_s = None if self.halted else self.engine.next_event_s()
        return inf if due_s is None else due_s + self.behind_s


def block_points(
    hashes: Sequence[int], block_tokens: int, ends_tokens: Sequence[int] = ()
) -> Points:
    """Points, in tokens, of a prompt given by its blocks' chained hashes .

    `ends_tokens` are further positions, such as the ends of earlier turns.
    """
    last = len(hashes)
    asked = {position // (BYTES_PER_TOKEN * block_tokens) for position in POSITIONS}
    asked.update(end // block_tokens for end in ends_tokens)
    asked.add(last)
    return tuple(
        (blocks * block_tokens, hashes[blocks - 1])
        for blocks in sorted(asked)
        if 0 < blocks <= last
    )


class _SchedulingRun:
    def __init__(
        self,
        demands: Sequence[Demand],
        profiles: Sequence[EngineProfile],
        gateways: Sequence[SimulatedGateway],
        seed: int,
        notice_s: float,
        gossip: Callable[[float], None] | None,
    ) -> None:
        n = len(demands)
        self.gossip = gossip
        self.notice_s = notice_s
        self.notices: list[tuple[float, int, int, str]] = []  # heap by time, then as they came
        self.noted = 0
        self.demands = demands
        self.workers = [_Worker(p) for p in profiles]
        self.gateways = gateways
        for gateway in gateways:
            gateway.prefix_gossip.listened(by_others=len(gateways) > 1)
        self.of = np.random.default_rng(seed).integers(len(gateways), size=n).tolist()
        self.heap: list[tuple[float, int]] = []
        self.due_s = [inf] * len(profiles)
        self.jobs: list[Job | None] = [None] * n
        self.tries = [0] * n
        self.expected: list[ExpectedHit | None] = [None] * n
        self.points: list[Points] = [
            block_points(d.blocks, BLOCK_TOKENS, d.ends_tokens) for d in demands
        ]
        self.sent_s = np.full(n, np.nan)
        self.ttft_s = np.full(n, np.nan)
        self.wait_s = np.full(n, np.nan)
        self.end_s = np.full(n, np.nan)
        self.cached = np.zeros(n)
        self.within = np.full(n, np.nan)
        self.worker = np.full(n, -1)
        self.open = 0
        self.lost = 0

    # Requests

    def arrive(self, index: int, now_s: float, excluded: Sequence[int] = ()) -> None:
        demand, gateway = self.demands[index], self.gateways[self.of[index]]
        output_tokens = demand.expected_output_tokens or demand.output_tokens
        job = Job(
            owner=index,
            prompt_tokens=demand.prompt_tokens,
            output_tokens=output_tokens,
            arrived_s=demand.arrival_s,
            client=demand.client,
            priority_class=demand.priority_class,
            cap_tokens=demand.cap_tokens,
            kv_tokens=demand.prompt_tokens + output_tokens,
            excluded=excluded,
            slo_s=demand.told_slo_s,
            stream=demand.stream,
        )
        if gateway.prefixes is not None and self.points[index]:
            job.match = gateway.prefixes.match(self.points[index])
        self.jobs[index] = job
        self.open += 1
        ready = gateway.scheduler.submit(job, now_s)
        if job.state == "nowhere":
            self.refused()
        else:
            self.bound(job, gateway)
        self.send(gateway, ready, now_s)

    def bound(self, job: Job, gateway: SimulatedGateway) -> None:
        """Record the prompt's worker before it is sent, so that later arrivals can use it."""
        if gateway.prefixes is None:
            return
        points = self.points[job.owner]
        expected = gateway.prefixes.insert(points, job.worker)
        self.expected[job.owner] = expected
        self.worker[job.owner] = job.worker
        gateway.prefix_gossip.sent(points, job.worker, 1.0, expected.hit_tokens)

    def refused(self) -> None:
        self.open -= 1
        self.lost += 1

    def send(self, gateway: SimulatedGateway, ready: Sequence[Job], now_s: float) -> None:
        for job in ready:
            if job.state == "nowhere":
                self.refused()
                continue
            index, worker = job.owner, self.workers[job.worker]
            demand = self.demands[index]
            fleet.start(gateway.pool, job.worker, 1, job.kv_tokens)
            if self.worker[index] != job.worker:  # bound anew
                self.bound(job, gateway)
            self.sent_s[index] = now_s
            self.worker[index] = job.worker
            request = EngineRequest(
                id=str(index),
                prompt_tokens=demand.prompt_tokens,
                output_tokens=demand.output_tokens,
                block_hashes=demand.blocks,
            )
            if not worker.halted:
                self.advance(job.worker, now_s)
            worker.engine.submit(request, worker.local_s(now_s))
            self.look_ahead(job.worker)
            if not demand.stream:
                self.note(now_s + job.expected_s, index, "assumed")

    def job_of(self, index: int) -> Job:
        job = self.jobs[index]
        if job is None:
            raise RuntimeError("no request is answered before it arrives")
        return job

    # Workers

    def look_ahead(self, i: int) -> None:
        due_s = self.workers[i].due_s()
        if due_s != self.due_s[i]:
            self.due_s[i] = due_s
            if due_s < inf:
                heappush(self.heap, (due_s, i))

    def advance(self, i: int, now_s: float) -> None:
        worker = self.workers[i]
        for local_s, emission in worker.engine.run_until(worker.local_s(now_s)):
            at_s, index = local_s + worker.behind_s, int(emission.id)
            job, gateway = self.job_of(index), self.gateways[self.of[index]]
            if emission.index == 1:
                self.answered(index, job, emission.cached_tokens, emission.queue_s, at_s)
                if job.stream:
                    self.correct(index, job, gateway)
                    self.tell(at_s, index, "first")
            if emission.finished:
                self.open -= 1
                self.end_s[index] = at_s
                if not job.stream:  # its usage comes with its end
                    self.correct(index, job, gateway)
                self.tell(at_s, index, "end")

    def tell(self, at_s: float, index: int, what: str) -> None:
        """Tell the gateway of a first token or an end, `notice_s` later."""
        if self.notice_s:
            self.note(at_s + self.notice_s, index, what)
        else:
            self.noticed(at_s, index, what)

    def note(self, at_s: float, index: int, what: str) -> None:
        """Have the gateway notice something at its time."""
        self.noted += 1
        heappush(self.notices, (at_s, self.noted, index, what))

    def noticed(self, now_s: float, index: int, what: str) -> None:
        job, gateway = self.job_of(index), self.gateways[self.of[index]]
        if what == "end":
            fleet.finish(gateway.pool, job.worker, 1, job.kv_tokens)
            self.pending.append((gateway, gateway.scheduler.finished(job, now_s, answered=True)))
            return
        assumed = what == "assumed"
        if job.state == "sent" or not assumed:
            ready = gateway.scheduler.first_token(job, now_s, assumed=assumed)
            self.pending.append((gateway, ready))

    def answered(
        self,
        index: int,
        job: Job,
        cached_tokens: int,
        queue_s: float,
        at_s: float,
    ) -> None:
        demand = self.demands[index]
        self.ttft_s[index] = at_s - demand.arrival_s
        self.wait_s[index] = self.sent_s[index] + queue_s - demand.arrival_s
        self.cached[index] = cached_tokens
        if job.policy is not None and job.quantile_s:
            self.within[index] = at_s - job.sent_s <= job.quantile_s

    def correct(self, index: int, job: Job, gateway: SimulatedGateway) -> None:
        """Tell the prefix index what the engine found in its cache."""
        expected = self.expected[index]
        if gateway.prefixes is not None and expected is not None:
            gateway.prefixes.correct(job.worker, expected, int(self.cached[index]))

    def sample(self) -> None:
        """Have the gateways read the engines' metrics."""
        usage = [worker.engine.kv_usage for worker in self.workers]
        for gateway in self.gateways:
            gateway.kv_usage[:] = usage

    pending: list[tuple[SimulatedGateway, Sequence[Job]]]

    def flush(self, now_s: float) -> None:
        """Send requests released by first tokens and ends."""
        while self.pending:
            gateway, ready = self.pending.pop(0)
            self.send(gateway, ready, now_s)

    def trouble(self, event: tuple[str, int], now_s: float) -> None:
        what, i = event
        worker = self.workers[i]
        if what == "stall":
            self.advance(i, now_s)
            self.flush(now_s)
            worker.halted_s = now_s
        elif what == "resume":
            worker.resume(now_s)
        elif what == "cold":
            self.restart(i, now_s)
        elif what == "down":
            for gateway in self.gateways:
                fleet.unreachable(gateway.pool, i)
                if gateway.prefixes is not None:
                    gateway.prefixes.forget(i)
            self.restart(i, now_s)
            worker.halted_s = now_s
        elif what == "up":
            worker.resume(now_s)
            for gateway in self.gateways:
                fleet.probed(gateway.pool, i, ok=True)
        self.look_ahead(i)

    def restart(self, i: int, now_s: float) -> None:
        """Lose all requests; those without a first token are retried elsewhere."""
        worker = self.workers[i]
        self.advance(i, now_s)
        self.flush(now_s)
        worker.engine, worker.behind_s = Engine(worker.profile), 0.0
        held = [j for j in self.jobs if j and j.worker == i and j.state in {"sent", "answering"}]
        for job in held:
            gateway, answered = self.gateways[self.of[job.owner]], job.state == "answering"
            self.open -= 1
            fleet.finish(gateway.pool, i, 1, job.kv_tokens)
            self.pending.append((gateway, gateway.scheduler.finished(job, now_s)))
            if answered:
                self.end_s[job.owner] = now_s
                continue
            self.tries[job.owner] += 1
            if self.tries[job.owner] >= ATTEMPTS:
                self.lost += 1
            else:
                self.arrive(job.owner, now_s, (i,))

    # The clock

    def all(self, troubles: Sequence[Trouble]) -> None:
        self.pending = []
        events = _events_of(troubles)
        n, at = len(self.demands), 0
        tick_s, sample_s = TICK_S, SAMPLE_S
        while at < n or self.open:
            while self.heap and self.due_s[self.heap[0][1]] != self.heap[0][0]:
                heappop(self.heap)
            engine_s = self.heap[0][0] if self.heap else inf
            arrival_s = self.demands[at].arrival_s if at < n else inf
            event_s = events[-1][0] if events else inf
            notice_s = self.notices[0][0] if self.notices else inf
            now_s = min(engine_s, arrival_s, event_s, tick_s, notice_s)
            if engine_s <= now_s:
                i = heappop(self.heap)[1]
                self.due_s[i] = inf
                self.advance(i, now_s)
                self.flush(now_s)
                self.look_ahead(i)
            elif notice_s <= now_s:
                at_s, _, index, what = heappop(self.notices)
                self.noticed(at_s, index, what)
                self.flush(now_s)
            elif event_s <= now_s:
                self.trouble(events.pop()[1], now_s)
                self.flush(now_s)
            elif tick_s <= now_s:
                tick_s += TICK_S
                if tick_s >= sample_s:
                    sample_s += SAMPLE_S
                    self.sample()
                for gateway in self.gateways:
                    self.send(gateway, gateway.scheduler.tick(now_s), now_s)
                if self.gossip is not None:
                    self.gossip(now_s)
                self.flush(now_s)
            else:
                self.arrive(at, now_s)
                self.flush(now_s)
                at += 1


def serve(
    demands: Sequence[Demand],
    gateways: Sequence[SimulatedGateway],
    *,
    profiles: Sequence[EngineProfile],
    troubles: Sequence[Trouble] = (),
    seed: int = 0,
    notice_s: float = 0.0,
    gossip: Callable[[float], None] | None = None,
    on_engine: Callable[[int, Engine], None] | None = None,
) -> ServedRequest:
    """Run all requests to their end; the seed draws the gateway of each request.

    `gossip` is called at every tick to exchange news between gateways. Gateways notice first tokens
    and ends `notice_s` late; raises ValueError if that is combined with troubles. `on_engine` is
    called with each worker's engine before the first request; a restarted one has another.
    """
    if notice_s and troubles:
        raise ValueError("what a worker in trouble answered is noticed at once")
    for gateway in gateways:
        gateway.scheduler.replicas = len(gateways)
    run = _SchedulingRun(demands, profiles, gateways, seed, notice_s, gossip)
    if on_engine is not None:
        for place, worker in enumerate(run.workers):
            on_engine(place, worker.engine)
    run.all(troubles)
    arrivals = np.array([d.arrival_s for d in demands])
    return ServedRequest(
        ttft_s=run.ttft_s,
        wait_s=run.wait_s,
        queue_s=run.sent_s - arrivals,
        end_s=run.end_s,
        worker=run.worker,
        cached_tokens=run.cached,
        within=run.within,
        lost=run.lost,
    )


def _events_of(troubles: Sequence[Trouble]) -> list[tuple[float, tuple[str, int]]]:
    """Starts and ends of troubles, latest first."""
    names = {"stall": ("stall", "resume"), "restart": ("down", "up"), "cold": ("cold", "")}
    events = []
    for trouble in troubles:
        first, last = names[trouble.what]
        events.append((trouble.at_s, (first, trouble.worker)))
        if last:
            events.append((trouble.at_s + trouble.lasts_s, (last, trouble.worker)))
    return sorted(events, reverse=True)
