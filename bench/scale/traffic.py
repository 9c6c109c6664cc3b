"""Requests of `bench scale`: conversations that share system prompts and grow by turns."""

import asyncio
import gc
import heapq
import os
import time
from array import array
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import orjson

from gateway.admission.terms import Terms
from gateway.admission.token_pool import TokenPool
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
from gateway.records.entitlement import Entitlement
from gateway.records.estimate import Plan
from gateway.records.lease import Lease
from gateway.records.request import Incoming, Principal, Prompt, RequestHead
from gateway.records.tenancy import Row
from gateway.scheduling.scheduler import Job
from gateway.settings import parse
from gateway.store.memory_leases import MemoryLeases
from gateway.tenancy import keyring
from gateway.wiring.models import served_model

# -- how `bench scale` measures: CPU of parts, the longest hold of an event loop, memory


_T = TypeVar("_T")

clock_ns: Final = time.thread_time_ns


class Cpu:
    """Microseconds of CPU by part, one value a call; what a reading of the clock takes is off."""

    def __init__(self) -> None:
        self.parts: dict[str, array[float]] = {}
        self._reading_ns = min(_reading_ns() for _ in range(200))

    def add(self, part: str, begin_ns: int, end_ns: int) -> None:
        """Note what a call of a part took."""
        values = self.parts.get(part)
        if values is None:
            values = self.parts[part] = array("d")
        values.append(max(0, end_ns - begin_ns - self._reading_ns) / 1e3)

    def clear(self) -> None:
        """Forget what was noted: it was warm-up."""
        self.parts.clear()

    def mean_us(self, part: str) -> float:
        """Mean of a part; 0 where it was never called."""
        values = self.parts.get(part)
        return sum(values) / len(values) if values else 0.0

    def quantile_us(self, part: str, share: float) -> float:
        """A quantile of a part's calls; 0 where it was never called."""
        return quantile(self.parts.get(part, ()), share)


def quantile(values: Any, share: float) -> float:
    """The value that a share (0 to 1) of the values is not above; 0 without any."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    return float(ordered[min(len(ordered) - 1, int(share * len(ordered)))])


def spent_us(call: Callable[[], object]) -> float:
    """CPU of one call."""
    begin_ns = clock_ns()
    call()
    return (clock_ns() - begin_ns) / 1e3


def finished(work: Coroutine[Any, Any, _T]) -> _T:
    """The result of a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as stop:
        result: _T = stop.value
        return result
    work.close()
    raise RuntimeError("this coroutine was to wait for nothing")


class WatchedLoop(asyncio.SelectorEventLoop):
    """An event loop that notes how long each of its turns took; who waits, waits a turn."""

    def __init__(self) -> None:
        super().__init__()
        self.holds_ms: list[float] = []

    def _run_once(self) -> None:
        begin_ns = clock_ns()
        super()._run_once()  # type: ignore[misc]
        self.holds_ms.append((clock_ns() - begin_ns) / 1e6)


def watched(work: Callable[[], Coroutine[Any, Any, _T]]) -> tuple[_T, float, float]:
    """Run in a loop of its own: the result, CPU ms of all threads, ms in the longest turn."""
    loop = WatchedLoop()
    try:
        begin_ns = time.process_time_ns()
        result = loop.run_until_complete(work())
        return result, (time.process_time_ns() - begin_ns) / 1e6, max(loop.holds_ms)
    finally:
        loop.close()


def calm() -> None:
    """The collector as a gateway sets it once it is built."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@contextmanager
def pauses() -> Iterator[list[float]]:
    """Milliseconds of CPU that each run of the collector takes while the block runs."""
    found: list[float] = []
    began_ns = 0

    def told(phase: str, _: dict[str, int]) -> None:
        nonlocal began_ns
        if phase == "start":
            began_ns = clock_ns()
        else:
            found.append((clock_ns() - began_ns) / 1e6)

    gc.callbacks.append(told)
    try:
        yield found
    finally:
        gc.callbacks.remove(told)


def collection_ms() -> float:
    """CPU of a full collection: what a gateway would stand still for."""
    return spent_us(gc.collect) / 1e3


def resident_bytes() -> int:
    """Resident memory of this process (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def _reading_ns() -> int:
    begin_ns = clock_ns()
    return clock_ns() - begin_ns


SLOTS: Final = 128
"""Sequences a worker runs at once."""
_SENTENCE: Final = (
    "the river rose in the night and by morning the lower road was gone and nobody had seen "
    "the ferryman since the bells of the old town rang"
)
_APPS: Final = 40
_POOL: Final = " ".join(Random(7).choices(_SENTENCE.split(), k=4_000))


class ChatBodies:
    """Bodies of chats: 40 system prompts of 1.5 KB, up to eight turns of some 800 bytes."""

    def __init__(self, count: int, turns: int = 8) -> None:
        self._random = Random(0)
        self._last = turns
        self._turns = [(number, 0) for number in range(count)]
        self._next = count

    def body(self) -> bytes:
        """The next turn of one of them; one that is over is followed by a new one."""
        at = self._random.randrange(len(self._turns))
        number, turn = self._turns[at]
        told = [{"role": "system", "content": _text(number % _APPS, 1_500)}]
        for past in range(turn + 1):
            told.append({"role": "user", "content": f"{number} {_text(number + past, 300)}"})
            if past < turn:
                told.append({"role": "assistant", "content": _text(3 * number + past, 500)})
        if turn + 1 < self._last:
            self._turns[at] = (number, turn + 1)
        else:
            self._turns[at] = (self._next, 0)
            self._next += 1
        return orjson.dumps({"model": "m", "stream": True, "max_tokens": 512, "messages": told})


def _text(start: int, length: int) -> str:
    at = start * 37 % (len(_POOL) - length)
    return _POOL[at : at + length]


def fleet_text(policy: str, workers: int) -> str:
    """The configuration of one pool of so many workers."""
    urls = ", ".join(f'"http://w{number}:1"' for number in range(workers))
    return f"""version: 1
models:
  - name: m
    scheduling: {{policy: {policy}, shadow: false, queue_limit: 1000000}}
    pools:
      main: {{max_model_len: 32768, max_num_seqs: {SLOTS}, workers: [{urls}]}}
"""


def fleet_of(policy: str, workers: int) -> ModelRuntime:
    """The pool as the stages know it."""
    config = parse(fleet_text(policy, workers), "scale.yaml", {})
    return served_model(config, config.models[0])


def key_of(number: int) -> bytes:
    """The API key of an entitlement."""
    return b"sk-scale-%d" % number


def digest_of(number: int) -> bytes:
    """SHA-256 of that key."""
    return sha256(key_of(number)).digest()


def entitlements(count: int) -> Iterator[Entitlement]:
    """So many entitlements, elastic with a rate and a concurrency."""
    for number in range(count):
        yield Entitlement(
            name=f"entitlement-{number}",
            tenant=f"tenant-{number}",
            model="m",
            baseline=(4,),
            limit=1_000_000,
            tokens_per_s=1e9,
            created=number + 1,
        )


def entitlement_rows(count: int) -> Iterator[Row]:
    """The same as an administrator made them, with a key each."""
    for number, terms in enumerate(entitlements(count)):
        uid = f"e{number:015x}"
        fields = {
            "name": terms.name,
            "tenant": terms.tenant,
            "model": terms.model,
            "concurrency": sum(terms.baseline),
            "max_concurrency": terms.limit,
            "tokens_per_second": terms.tokens_per_s,
        }
        yield Row(
            kind="entitlement", name=terms.name, uid=uid, fields=fields, created=terms.created
        )
        digest = digest_of(number).hex()
        yield Row(
            kind="key",
            name=f"{terms.name}:{digest[:8]}",
            uid=f"o{number:015x}",
            of=uid,
            fields={"sha256": digest},
        )


def token_pool_of(slots: int) -> TokenPool:
    """A token pool that has room for so many sequences, and twice that to spare."""
    return TokenPool(
        Terms(slots=(3 * slots,), tokens_per_s=1e12, largest_tokens=32_768, mean_slo_ms=500.0)
    )


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """A point of a ladder: what is asked of one process."""

    workers: int = 4
    entitlements: int = 100
    active: int = 0
    """Entitlements that ask; 0 for all."""
    leases: int = 0
    requests: int = 2_000
    policy: str = "quartz"


# -- `bench scale`, workers: one pool of 4 to 2,000, loaded, its prefix index full of conversations


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
    asked: plan.Asked, store: LeaseStore, planned: Plan, lease: Lease, prefix: Prefix
) -> tuple[RequestProgress, Attempts]:
    """A request that was admitted, as the pipeline notes it."""
    incoming = asked.incoming
    progress = RequestProgress(incoming)
    _, progress.principal, progress.facts, progress.served, progress.estimate = asked
    progress.planned = progress.plan = planned
    held = RequestLease(store, lambda: incoming.received_unix_s, planned, lease)
    sending = Sending(Prompt(body=incoming.body), asked.estimate, planned, prefix)
    progress.attempts = attempts = Attempts(asked, held, sending)
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
        asked = plan.Asked(incoming, principal, facts, served, lengths)
        prefix = plan.look_up(asked, facts.members, lengths.input_tokens_total)
        times.append(clock_ns())
        planned = plan.plan(served, CHAT, lengths, prefix)
        times.append(clock_ns())
        lease = finished(plan.admit(self.store, served, principal, name, lengths, planned))
        times.append(clock_ns())
        for part, begin_ns, end_ns in zip(
            ("authenticate", "estimate", "look", "plan", "admit"), times, times[1:], strict=False
        ):
            self.cpu.add(part, begin_ns, end_ns)
        self._bind(ScaleRequest(*admitted(asked, self.store, planned, lease, prefix)))

    def _bind(self, request: "ScaleRequest") -> None:
        attempts, prefix = request.attempts, request.attempts.sending.prefix
        begin_ns = clock_ns()
        attempts.job = job = bind.job_of(
            attempts.asked, attempts.sending.estimate, attempts.lease.current, self.now_s
        )
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
