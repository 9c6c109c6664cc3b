"""`bench scale`, workers: one pool of 4 to 2,000, loaded, its prefix index full of conversations.

Requests pass the shipped stages one after the other in simulated time; the CPU of each part is
measured as it is called. Every worker gets eight requests a second of four seconds each: 32 are
in flight at each, and a good third of its prefill capacity is used.
"""

import heapq
from collections.abc import Sequence
from itertools import count
from random import Random
from typing import Final

import msgspec

from bench.scale.measure import Cpu, clock_ns, finished, spent_us
from bench.scale.traffic import (
    SLOTS,
    ChatBodies,
    Size,
    digest_of,
    entitlements,
    fleet_of,
    key_of,
    token_pool_of,
)
from gateway.fleet import fleet
from gateway.fleet.model_runtime import ModelRuntime
from gateway.metrics import Metrics
from gateway.payload.head import read_head
from gateway.pipeline import (
    admit,
    authenticate,
    bind,
    decision_record,
    dispatch,
    estimate,
    plan,
    settle,
)
from gateway.pipeline.dispatcher import require
from gateway.pipeline.request_progress import response_lines
from gateway.records.attempt import Binding, Outcome, Usage
from gateway.records.decision import DecisionRecord
from gateway.records.endpoint import CHAT
from gateway.records.estimate import LengthEstimate, Plan
from gateway.records.lease import Lease
from gateway.records.request import BodyFacts, Incoming, Principal, Prompt, RequestHead
from gateway.scheduling.prefix_cache_estimate import ExpectedHit
from gateway.scheduling.scheduler import Job, Prefix
from gateway.store.memory_leases import MemoryLeases

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


class ScaleRequest(msgspec.Struct, kw_only=True, eq=False):
    """One on its way: what the stages found of it."""

    incoming: Incoming
    principal: Principal
    facts: BodyFacts
    lengths: LengthEstimate
    prefix: Prefix
    plan: Plan
    lease: Lease
    prompt: Prompt
    job: Job | None = None
    binding: Binding | None = None
    expected: ExpectedHit | None = None
    started_s: float = 0.0


class Loaded:
    """A pool under load, in simulated time."""

    def __init__(self, size: Size, turns: int = 8) -> None:
        """`turns`: of the longest conversation."""
        self.cpu = Cpu()
        self.now_s = 1_000.0
        self.ticks_us: list[float] = []
        self.build_ms = spent_us(lambda: self._serve(size)) / 1e3
        tokens = token_pool_of(SLOTS * size.workers)
        self.keyring = authenticate.Keyring()
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
        self.scheduler = (
            self.served.scheduling.schedulers[0] if self.served.scheduling.schedulers else None
        )

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
            if self.scheduler is not None and self.now_s >= self._tick_at_s:
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
        principal = authenticate.authenticate(self.keyring, head.key_digest, self.now_s)
        times.append(clock_ns())
        facts = estimate.read(CHAT, body, RequestHead())
        lengths = estimate.estimate(served, CHAT, facts, principal)
        times.append(clock_ns())
        prefix = plan.look_up(
            served.scheduling, CHAT, principal, facts, facts.members, lengths.input_tokens_total
        )
        times.append(clock_ns())
        planned = plan.plan(served, CHAT, lengths, prefix)
        times.append(clock_ns())
        lease = finished(admit.admit(self.store, served, principal, name, lengths, planned))
        times.append(clock_ns())
        for part, begin_ns, end_ns in zip(
            ("authenticate", "estimate", "look", "plan", "admit"), times, times[1:], strict=False
        ):
            self.cpu.add(part, begin_ns, end_ns)
        self._bind(
            ScaleRequest(
                incoming=incoming,
                principal=principal,
                facts=facts,
                lengths=lengths,
                prefix=prefix,
                plan=planned,
                lease=lease,
                prompt=Prompt(body=body),
            )
        )

    def _bind(self, request: ScaleRequest) -> None:
        served = self.served
        begin_ns = clock_ns()
        if self.scheduler is None:
            request.binding = bind.bind(served, (0,), (), self.now_s)
            self.cpu.add("bind", begin_ns, clock_ns())
            self._start(request)
            return
        job = request.job = bind.job_of(
            served, request.principal, request.facts, request.lengths, request.lease, self.now_s
        )
        job.owner = request
        placed = bind.place(served, (0,), (), self.now_s, None, job, request.prefix)
        self.cpu.add("bind", begin_ns, clock_ns())
        assert isinstance(placed, tuple)
        self._send(placed[1])

    def _send(self, ready: Sequence[Job]) -> None:
        for job in ready:
            request: ScaleRequest = job.owner
            begin_ns = clock_ns()
            request.binding = bind.binding_of(self.served.fleet, 0, job)
            self.cpu.add("name", begin_ns, clock_ns())
            self._start(request)

    def _start(self, request: ScaleRequest) -> None:
        served, lease, job = self.served, request.lease, request.job
        binding = require(request.binding)
        begin_ns = clock_ns()
        dispatch.upstream_call(
            served=served,
            incoming=request.incoming,
            facts=request.facts,
            principal=request.principal,
            estimate=request.lengths,
            lease=lease,
            prompt=request.prompt,
            binding=binding,
        )
        response_lines("r", served, request.lengths, lease, binding, request.prompt, 0.0)
        fleet.start(self.pool, binding.worker, lease.sequences, lease.cost_tokens)
        points = request.prefix.points
        if points and job is not None:
            tokens_per_byte = job.prompt_tokens / points[-1][0]
            request.expected = require(served.scheduling.prefixes[0]).insert(
                points, binding.worker, tokens_per_byte
            )
            gossip = require(served.scheduling.prefix_gossip[0])
            gossip.sent(points, binding.worker, tokens_per_byte)
        self.cpu.add("call", begin_ns, clock_ns())
        request.started_s = self.now_s
        hit = 0 if request.expected is None else request.expected.hit_tokens
        uncached = max(1, request.lengths.input_tokens_total - hit)
        takes_s = (0.01 + uncached / PREFILL_TOKENS_PER_S) * self._random.lognormvariate(0, 0.25)
        free_s = self._free_s[binding.worker] = max(self.now_s, self._free_s[binding.worker])
        self._free_s[binding.worker] += takes_s
        self._plan(free_s + takes_s - self.now_s, request, answers=True)

    def _plan(self, in_s: float, request: ScaleRequest, *, answers: bool) -> None:
        heapq.heappush(self._due, (self.now_s + in_s, next(self._order), answers, request))

    def _first(self, request: ScaleRequest) -> None:
        left_s = SERVICE_S - (self.now_s - request.started_s)
        self._plan(max(0.0, left_s), request, answers=False)
        if self.scheduler is not None and request.job is not None:
            begin_ns = clock_ns()
            ready = self.scheduler.first_token(request.job, self.now_s)
            self.cpu.add("first", begin_ns, clock_ns())
            self._send(ready)

    def _end(self, request: ScaleRequest) -> None:
        served, lease = self.served, request.lease
        binding = require(request.binding)
        expected = request.expected
        usage = Usage(
            prompt_tokens=request.lengths.input_tokens_total,
            completion_tokens=_COMPLETION_TOKENS,
            cached_tokens=0 if expected is None else expected.hit_tokens,
            cached_reported=True,
        )
        outcome = Outcome(
            label="ok", status=200, usage=usage, finish_reason="stop", completed=True, ttft_s=0.1
        )
        begin_ns = clock_ns()
        fleet.finish(self.pool, binding.worker, lease.sequences, lease.cost_tokens)
        if self.scheduler is not None and request.job is not None:
            self.scheduler.finished(request.job, self.now_s)
        fleet.succeeded(self.pool, binding.worker)
        settle.settle(
            self.store, lease, outcome, request.lengths, served, dispatched=True, unix_s=self.now_s
        )
        settle.learn(
            served.estimator,
            CHAT,
            request.principal,
            request.facts,
            request.lengths,
            request.prompt,
            outcome,
        )
        if expected is not None:
            settle.note_cached(served.scheduling, binding, expected, outcome)
        settled_ns = clock_ns()
        record = record_of(self.served, request, outcome, usage, self.now_s)
        settle.count(self.metrics, record, request.lengths, served, lease)
        self.cpu.add("settle", begin_ns, settled_ns)
        self.cpu.add("record", settled_ns, clock_ns())


def record_of(
    served: ModelRuntime, request: ScaleRequest, outcome: Outcome, usage: Usage, now_s: float
) -> DecisionRecord:
    """Stage 10's record."""
    return decision_record.decision_record(
        incoming=request.incoming,
        principal=request.principal,
        facts=request.facts,
        served=served,
        outcome=outcome,
        told=None,
        binding=require(request.binding),
        rescued=False,
        estimate=decision_record.estimate_section(request.lengths),
        plan=decision_record.plan_section(served=served, planned=request.plan, plan=request.plan),
        admission=decision_record.admission_section(
            lease_id=request.incoming.lease_id,
            lease=request.lease,
            asked=request.plan,
            taken=request.lease,
            principal=request.principal,
            served=served,
            charged=usage,
            lease_changes=(),
            evicted=False,
            settled_unix_s=now_s,
        ),
        compression=decision_record.compression_section(served, request.prompt),
        scheduling=decision_record.scheduling_section(
            served=served, binding=require(request.binding), job=request.job, first_s=None
        ),
        attempts=(),
        usage=decision_record.usage_section(usage),
        timing=decision_record.timing_section(
            outcome=outcome,
            received_s=request.incoming.received_s,
            sent_s=request.started_s,
            ended_s=now_s,
            queue_s=0.0,
            compress_s=None,
        ),
        prompts=False,
    )
