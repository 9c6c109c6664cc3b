"""`bench scale`, workers: one pool of 4 to 2,000, loaded, its prefix index full of conversations.

Requests pass the shipped stages one after the other in simulated time; the CPU of each part is
measured as it is called. Every worker gets eight requests a second of four seconds each: 32 are
in flight at each, and a good third of its prefill capacity is used.
"""

import heapq
from collections.abc import Sequence
from itertools import count
from random import Random
from typing import Final, NamedTuple

from bench.scale.traffic import (
    SLOTS,
    ChatBodies,
    Cpu,
    Size,
    clock_ns,
    digest_of,
    entitlements,
    finished,
    fleet_of,
    key_of,
    spent_us,
    token_pool_of,
)
from gateway.fleet import fleet
from gateway.fleet.model_runtime import ModelRuntime, Prefix
from gateway.metrics import Metrics
from gateway.payload.head import read_head
from gateway.pipeline import bind, dispatcher, plan, settlement
from gateway.pipeline.request_progress import (
    Attempts,
    RequestLease,
    RequestProgress,
    Sending,
    answer_lines,
    require,
)
from gateway.ports import LeaseStore, Settlement
from gateway.records.attempt import Outcome, Usage
from gateway.records.endpoint import CHAT
from gateway.records.estimate import LengthEstimate, Plan
from gateway.records.lease import Lease
from gateway.records.request import BodyFacts, Incoming, Principal, Prompt, RequestHead
from gateway.scheduling.scheduler import Job
from gateway.store.memory_leases import MemoryLeases
from gateway.tenancy import keyring

RATE_EACH: Final = 8.0
"""Requests a second at each worker."""
SERVICE_S: Final = 4.0
INFLIGHT_EACH: Final = int(RATE_EACH * SERVICE_S)
PREFILL_TOKENS_PER_S: Final = 12_000.0
STAGES: Final = {
    "authenticate": "1 authenticate",
    "estimate": "2 read, estimate",
    "look": "3 prefix look-up",
    "plan": "3 plan",
    "admit": "4 admit",
    "bind": "7 bind + 8 queue",
    "call": "9 call, prefix kept",
    "first": "8 first token",
    "settle": "10 settle, learn",
    "record": "10 record, count",
}
"""Part -> stage."""
_TICK_S: Final = 0.25
_LIVE_EACH: Final = 8
"""Conversations for each worker."""
_COMPLETION_TOKENS: Final = 120


class ScaleRequest(NamedTuple):
    """One on its way."""

    progress: RequestProgress
    attempts: Attempts


def admitted(
    served: ModelRuntime,
    store: LeaseStore,
    incoming: Incoming,
    principal: Principal,
    facts: BodyFacts,
    lengths: LengthEstimate,
    planned: Plan,
    lease: Lease,
    prefix: Prefix,
) -> tuple[RequestProgress, Attempts]:
    """A request that was admitted, as the pipeline notes it."""
    progress = RequestProgress(incoming)
    progress.principal, progress.facts, progress.served = principal, facts, served
    progress.estimate, progress.planned, progress.plan = lengths, planned, planned
    held = RequestLease(store, lambda: incoming.received_unix_s, planned, lease)
    sending = Sending(Prompt(body=incoming.body), lengths, planned, prefix)
    progress.attempts = attempts = Attempts(incoming, principal, facts, served, held, sending)
    return progress, attempts


class Loaded:
    """A pool under load, in simulated time."""

    def __init__(self, size: Size, turns: int = 8) -> None:
        """`turns`: of the longest conversation."""
        self.cpu = Cpu()
        self.now_s = 1_000.0
        self.ticks_us: list[float] = []
        self.build_ms = spent_us(lambda: self._serve(size)) / 1e3
        tokens = token_pool_of(SLOTS * size.workers)
        self.keyring = keyring.Keyring()
        for number, terms in enumerate(entitlements(size.entitlements)):
            tokens.define(terms)
            principal = Principal(
                entitlement=terms.name,
                tenant=terms.tenant,
                model="m",
                tokens_per_s=terms.tokens_per_s,
            )
            self.keyring.put(principal, [digest_of(number)])
        self.store = MemoryLeases(
            {"m": self.served}, self.clock, {"m": tokens}, wall_clock=self.clock
        )
        self.metrics = Metrics()
        self._keys = size.active or size.entitlements
        self._talk = ChatBodies(_LIVE_EACH * size.workers, turns=turns)
        self._step_s = 1.0 / (RATE_EACH * size.workers)
        self._numbers = count()
        self._order = count()
        self._random = Random(1)
        self._free_s = [0.0] * size.workers
        self._due: list[tuple[float, int, bool, ScaleRequest]] = []
        self._tick_at_s = self.now_s

    def _serve(self, size: Size) -> None:
        self.served = fleet_of(size.policy, size.workers)
        self.pool = self.served.fleet.pools[0]
        self.scheduler = self.pool.scheduler

    def clock(self) -> float:
        """The time it is there."""
        return self.now_s

    def run(self, requests: int) -> None:
        """Let so many more arrive."""
        for _ in range(requests):
            self.now_s += self._step_s
            while self._due and self._due[0][0] <= self.now_s:
                _, _, answers, request = heapq.heappop(self._due)
                if answers:
                    self._first(request)
                else:
                    self._end(request)
            if self.now_s >= self._tick_at_s:
                self._tick_at_s = self.now_s + _TICK_S
                begin_ns = clock_ns()
                ready = self.scheduler.tick(self.now_s)
                self.ticks_us.append((clock_ns() - begin_ns) / 1e3)
                self._send(ready)
            self._arrive(next(self._numbers))

    def _arrive(self, number: int) -> None:
        served, body = self.served, self._talk.body()
        key = key_of(number % self._keys)
        head = read_head([(b"host", b"g"), (b"authorization", b"Bearer " + key)])
        name = f"r{number}"
        incoming = Incoming(
            request_id=name, lease_id=name, endpoint=CHAT, head=head, body=body,
            received_s=self.now_s, received_unix_s=self.now_s,
        )  # fmt: skip
        times = [clock_ns()]
        principal = keyring.authenticate(self.keyring, head.key_digest, self.now_s)
        times.append(clock_ns())
        facts = plan.read(CHAT, body, RequestHead())
        lengths = plan.estimate(served, CHAT, facts, principal)
        times.append(clock_ns())
        prefix = plan.look_up(
            served, CHAT, principal, facts, facts.members, lengths.input_tokens_total
        )
        times.append(clock_ns())
        planned = plan.plan(served, CHAT, lengths, prefix)
        times.append(clock_ns())
        lease = finished(plan.admit(self.store, served, principal, name, lengths, planned))
        times.append(clock_ns())
        for part, begin_ns, end_ns in zip(
            ("authenticate", "estimate", "look", "plan", "admit"), times, times[1:], strict=False
        ):
            self.cpu.add(part, begin_ns, end_ns)
        self._bind(
            ScaleRequest(
                *admitted(
                    served, self.store, incoming, principal, facts, lengths, planned, lease, prefix
                )
            )
        )

    def _bind(self, request: "ScaleRequest") -> None:
        attempts, prefix = request.attempts, request.attempts.sending.prefix
        begin_ns = clock_ns()
        attempts.job = job = bind.job_of(attempts, self.now_s)
        job.owner = request
        if prefix.points:
            job.match = prefix.match(0)
        ready = self.scheduler.submit(job, self.now_s)
        self.cpu.add("bind", begin_ns, clock_ns())
        self._send(ready)

    def _send(self, ready: Sequence[Job]) -> None:
        for job in ready:
            request: ScaleRequest = job.owner
            begin_ns = clock_ns()
            request.attempts.binding = bind.binding_of(self.served.fleet, 0, job)
            self.cpu.add("name", begin_ns, clock_ns())
            self._start(request, job)

    def _start(self, request: "ScaleRequest", job: Job) -> None:
        attempts, lease = request.attempts, request.attempts.lease.current
        binding = require(attempts.binding)
        begin_ns = clock_ns()
        usage, running = dispatcher.asks_usage(attempts, binding)
        dispatcher.upstream_call(attempts, binding, usage=usage, running=running)
        answer_lines(attempts)
        fleet.start(self.pool, binding.worker, lease.sequences, lease.cost_tokens)
        if attempts.entry is not None:
            attempts.entry.enter(self.pool, job)
        self.cpu.add("call", begin_ns, clock_ns())
        attempts.sent_s = self.now_s
        expected = None if attempts.entry is None else attempts.entry.expected
        hit = 0 if expected is None else expected.hit_tokens
        uncached = max(1, attempts.whole.input_tokens_total - hit)
        takes_s = (0.01 + uncached / PREFILL_TOKENS_PER_S) * self._random.lognormvariate(0, 0.25)
        free_s = self._free_s[binding.worker] = max(self.now_s, self._free_s[binding.worker])
        self._free_s[binding.worker] += takes_s
        self._plan(free_s + takes_s - self.now_s, request, answers=True)

    def _plan(self, in_s: float, request: ScaleRequest, *, answers: bool) -> None:
        heapq.heappush(self._due, (self.now_s + in_s, next(self._order), answers, request))

    def _first(self, request: ScaleRequest) -> None:
        left_s = SERVICE_S - (self.now_s - require(request.attempts.sent_s))
        self._plan(max(0.0, left_s), request, answers=False)
        begin_ns = clock_ns()
        ready = self.scheduler.first_token(require(request.attempts.job), self.now_s)
        self.cpu.add("first", begin_ns, clock_ns())
        self._send(ready)

    def _end(self, request: ScaleRequest) -> None:
        progress, attempts = request.progress, request.attempts
        binding, lease = require(attempts.binding), attempts.lease.current
        expected = None if attempts.entry is None else attempts.entry.expected
        usage = Usage(
            prompt_tokens=attempts.whole.input_tokens_total,
            completion_tokens=_COMPLETION_TOKENS,
            cached_tokens=0 if expected is None else expected.hit_tokens,
            cached_reported=True,
        )
        progress.outcome = Outcome(
            label="ok", status=200, usage=usage, finish_reason="stop", completed=True, ttft_s=0.1
        )
        progress.charged, progress.settled_unix_s = usage, self.now_s
        begin_ns = clock_ns()
        fleet.finish(self.pool, binding.worker, lease.sequences, lease.cost_tokens)
        self.scheduler.finished(require(attempts.job), self.now_s)
        fleet.succeeded(self.pool, binding.worker)
        ended = Settlement(usage=usage, dispatched=True, unix_s=self.now_s)
        self.store.settle(lease, ended)
        settlement.learn(attempts, progress.outcome, set())
        settled_ns = clock_ns()
        record = settlement.record_of(progress, prompts=False)
        settlement.count(self.metrics, record, attempts.whole, self.served, lease)
        self.cpu.add("settle", begin_ns, settled_ns)
        self.cpu.add("record", settled_ns, clock_ns())
