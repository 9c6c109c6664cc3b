"""Fakes of the ports: scripted engines, a recording client, a ledger, a clock, a sink."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from gateway.admission.terms import AdmissionRequest, Denial
from gateway.errors import FailureKind, Refusal, UpstreamFailure
from gateway.payload.head import pairs_of
from gateway.ports import (
    CompressResult,
    CompressTask,
    Lines,
    Settlement,
    UpstreamCall,
    UpstreamResponse,
)
from gateway.records.attempt import WorkerAddress
from gateway.records.decision import DecisionRecord
from gateway.records.lease import Lease
from gateway.records.limit import Limit
from gateway.replicas.bus import Received
from gateway.workers.pool import CompressWorkers

HANG: Literal["hang"] = "hang"
"""In a script: from here on the engine says nothing."""

JSON_HEADERS = ((b"content-type", b"application/json"),)
SSE_HEADERS = ((b"content-type", b"text/event-stream; charset=utf-8"),)

Step = bytes | UpstreamFailure | Literal["hang"]


class FakeClock:
    """Seconds that pass only when told to."""

    def __init__(self, now_s: float = 100.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds


class ListSink:
    """A sink of records that keeps everything."""

    def __init__(self) -> None:
        self.records: list[DecisionRecord] = []

    def append(self, record: msgspec.Struct) -> None:
        """A RecordSink."""
        assert isinstance(record, DecisionRecord)
        self.records.append(record)


@dataclass
class Answer:
    """A scripted answer: a head, then steps (bytes, a failure, or HANG)."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    steps: Sequence[Step]


def stream(*steps: Step) -> Answer:
    """A 200 event stream that arrives in these pieces."""
    return Answer(200, SSE_HEADERS, steps)


def whole(status: int, *steps: Step) -> Answer:
    """A JSON answer."""
    return Answer(status, JSON_HEADERS, steps)


def failure(kind: FailureKind) -> UpstreamFailure:
    """An exchange that fails before a head."""
    return UpstreamFailure(kind, f"scripted {kind}")


def broken(kind: Literal["reset", "timeout"] = "reset") -> UpstreamFailure:
    """An exchange that fails in the body."""
    return UpstreamFailure(kind, f"scripted {kind}", head_received=True)


Script = Answer | UpstreamFailure | Literal["hang"]


class FakeResponse:
    """UpstreamResponse that plays an Answer."""

    def __init__(self, answer: Answer, upstream: "FakeUpstream") -> None:
        self.status = answer.status
        self.headers = answer.headers
        self.aborted = False
        self.ended = False
        self._steps = list(answer.steps)
        self._upstream = upstream

    async def read(self) -> bytes:
        """See UpstreamResponse."""
        if not self._steps:
            self.ended = True
            return b""
        step = self._steps.pop(0)
        self._upstream.on_read()
        if isinstance(step, bytes):
            return step
        if isinstance(step, UpstreamFailure):
            raise step
        return await self._upstream.hang()

    def take_whole(self) -> bytes | None:
        """See UpstreamResponse."""
        if len(self._steps) != 1 or not isinstance(self._steps[0], bytes):
            return None
        self.ended = True
        step = self._steps.pop()
        return step if isinstance(step, bytes) else None

    async def relay(self, sink: Callable[[bytes], bool]) -> bool:
        """See UpstreamResponse."""
        while data := await self.read():
            if not sink(data):
                return False
        return True

    def expect_end(self) -> None:
        """See UpstreamResponse."""

    def abort(self) -> None:
        """See UpstreamResponse."""
        self.aborted = True


@dataclass
class FakeUpstream:
    """Upstream that plays its script in order, whichever worker is called.

    `script` entries: an Answer, an UpstreamFailure to raise from `open`, or HANG. After the
    last one, the last is repeated.
    """

    script: list[Script]
    calls: list[tuple[WorkerAddress, UpstreamCall]] = field(default_factory=list)
    responses: list[FakeResponse] = field(default_factory=list)
    hanging: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the exchange came to a HANG."""
    cancelled: int = 0
    on_read: Callable[[], None] = lambda: None
    """Called before each step of an answer's body."""

    async def open(self, worker: WorkerAddress, call: UpstreamCall) -> UpstreamResponse:
        """See Upstream."""
        entry = self.script[min(len(self.calls), len(self.script) - 1)]
        self.calls.append((worker, call))
        if isinstance(entry, UpstreamFailure):
            # A new one: the script's would keep the traceback, and that the request's frames.
            again = UpstreamFailure(entry.kind, str(entry), head_received=entry.head_received)
            raise again from entry.__cause__
        if isinstance(entry, Answer):
            response = FakeResponse(entry, self)
            self.responses.append(response)
            return response
        await self.hang()
        raise AssertionError("unreachable")

    async def hang(self) -> bytes:
        """Say nothing until cancelled."""
        self.hanging.set()
        silence: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        try:
            return await silence
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def close(self) -> None:
        """See Upstream."""

    @property
    def called(self) -> list[str]:
        """Workers in the order they were called."""
        return [worker.id for worker, _ in self.calls]


class FakeReply:
    """ClientReply that records; `on_write` may hang or raise, as a slow or gone client does."""

    def __init__(self, on_write: Callable[[], Awaitable[None]] | None = None) -> None:
        self.started = False
        self.status: int | None = None
        self.headers: dict[bytes, bytes] = {}
        self.body = b""
        self.finished = False
        self.refusal: Refusal | None = None
        self.broken_off: Refusal | None = None
        self._on_write = on_write

    @property
    def reason(self) -> str | None:
        """Of its refusal."""
        return None if self.refusal is None else self.refusal.reason

    async def start(self, status: int, lines: Lines, *, events: bool = True) -> None:
        """See ClientReply."""
        assert not self.started, "a head is sent once"
        self.started = True
        self.status, self.headers = status, dict(pairs_of(lines))

    async def write(self, data: bytes) -> None:
        """See ClientReply."""
        assert self.started, "a body follows a head"
        assert not self.finished, "a body ends once"
        self.body += data
        if self._on_write is not None:
            await self._on_write()

    def write_now(self, data: bytes) -> bool:
        """See ClientReply."""
        assert self.started, "a body follows a head"
        assert not self.finished, "a body ends once"
        self.body += data
        return self._on_write is None

    async def drain(self) -> None:
        """See ClientReply."""
        if self._on_write is not None:
            await self._on_write()

    async def finish(self) -> None:
        """See ClientReply."""
        assert self.started, "a body follows a head"
        assert not self.finished, "a body ends once"
        self.finished = True

    async def send(self, status: int, lines: Lines, body: bytes) -> None:
        """See ClientReply."""
        await self.start(status, lines)
        await self.write(body)
        await self.finish()

    async def refuse(self, refusal: Refusal, lines: Lines) -> None:
        """See ClientReply."""
        if self.started:
            await self.break_off(refusal)
            return
        self.refusal = refusal
        await self.send(refusal.status, lines, b"")

    async def break_off(self, refusal: Refusal) -> None:
        """See ClientReply."""
        self.broken_off = refusal
        await self.finish()


class FakeStore:
    """LeaseStore that counts: in-flight is the sum of the leases in force.

    It admits where it is told (`spill_to`) or refuses (`refuse_with`), and remembers every
    settlement, repeated ones too.
    """

    def __init__(self) -> None:
        self.leases: dict[str, Lease] = {}
        self.settlements: list[tuple[Lease, Settlement]] = []
        self.transfers: list[tuple[int, int]] = []
        self.sizes: list[tuple[str, int, int]] = []
        self.reclaims: list[str] = []
        self.evict: Callable[[str], None] = lambda _: None
        self.spill_to: int | None = None
        self.refuse_with: Refusal | None = None

    @property
    def active(self) -> int:
        """Leases in force."""
        return len(self.leases)

    def inflight(self, pool: int) -> int:
        """Sequences that hold a lease in a pool."""
        return sum(lease.sequences for lease in self.leases.values() if lease.pool == pool)

    async def admit(self, ask: AdmissionRequest) -> Lease:
        """See LeaseStore."""
        if self.refuse_with is not None:
            raise self.refuse_with
        if ask.lease_id in self.leases:
            return self.leases[ask.lease_id]
        pool = ask.pool if self.spill_to is None else self.spill_to
        lease = Lease(
            id=ask.lease_id,
            model=ask.model,
            entitlement=ask.entitlement,
            pool=pool,
            spilled=pool != ask.pool,
            cost_tokens=ask.estimate_tokens,
            sequences=ask.sequences,
        )
        self.leases[ask.lease_id] = lease
        return lease

    async def quote(self, ask: AdmissionRequest, counted: Sequence[Limit]) -> Lease | Denial:
        """See LeaseStore."""
        lease = await FakeStore.admit(self, ask)
        del self.leases[ask.lease_id]
        return lease

    async def transfer(self, lease: Lease, pool: int, *, force: bool = True) -> Lease:
        """See LeaseStore."""
        held = self.leases.get(lease.id)
        if held is None or held.pool == pool:
            return lease
        self.transfers.append((held.pool, pool))
        moved = msgspec.structs.replace(held, pool=pool)
        self.leases[lease.id] = moved
        return moved

    def resize(self, lease: Lease, cost_tokens: int, kv_bytes: int) -> None:
        """See LeaseStore."""
        self.sizes.append((lease.id, cost_tokens, kv_bytes))

    async def reclaim(self, lease: Lease) -> None:
        """See LeaseStore."""
        self.reclaims.append(lease.id)

    def on_evict(self, evict: Callable[[str], None]) -> None:
        """See LeaseStore."""
        self.evict = evict

    def settle(self, lease: Lease, settlement: Settlement, *, heard: bool = False) -> None:
        """See LeaseStore."""
        self.settlements.append((lease, settlement))
        self.leases.pop(lease.id, None)


class FakeCompressor(CompressWorkers):
    """Answers as told and remembers what it was asked."""

    def __init__(self, result: CompressResult) -> None:  # starts no process
        self.result = result
        self.tasks: list[CompressTask] = []

    async def compress(self, task: CompressTask) -> CompressResult:
        self.tasks.append(task)
        return self.result


class FakeShared:
    """What replicas published: the server's side of FakeNotes."""

    def __init__(self, clock: FakeClock | None = None) -> None:
        self.clock = clock or FakeClock()
        self.notes: dict[str, dict[str, tuple[int, float, bytes]]] = {}
        """Name -> replica -> (revision, time, note)."""
        self.revision = 0


class FakeNotes:
    """NoteStore of one replica. `fail_with` is raised instead of an exchange."""

    every_s = 1.0
    away = "the fake is away"
    back = "the fake is back"

    def __init__(self, shared: FakeShared, replica: str) -> None:
        self.replica = replica
        self.fail_with: Exception | None = None
        self.exchanges = 0
        self.closed = False
        self._shared = shared
        self._since: dict[str, int] = {}

    async def exchange(self, notes: Mapping[str, bytes]) -> dict[str, Received]:
        """See NoteStore."""
        self.exchanges += 1
        if self.fail_with is not None:
            raise self.fail_with
        received, now_s = {}, self._shared.clock()
        for name, note in notes.items():
            kept = self._shared.notes.setdefault(name, {})
            since = self._since.get(name, 0)
            found = [
                (now_s - at_s, other)
                for replica, (revision, at_s, other) in kept.items()
                if replica != self.replica and revision > since
            ]
            self._since[name] = max((r for r, _, _ in kept.values()), default=0)
            if note:
                self._shared.revision += 1
                kept[self.replica] = (self._shared.revision, now_s, note)
            received[name] = Received(held=self.replica in kept, notes=found)
        return received

    async def close(self) -> None:
        """See NoteStore."""
        self.closed = True


@dataclass
class FakeEngines:
    """Upstream of engines that answer by port and path, until told otherwise.

    What was said last and fits is played; where nothing does, the answer is 404.
    """

    calls: list[tuple[WorkerAddress, UpstreamCall]] = field(default_factory=list)
    _rules: list[tuple[str, int | None, Script]] = field(default_factory=list)

    def answer(
        self, path: str, text: str | bytes = b"", status: int = 200, port: int | None = None
    ) -> None:
        """Answer this to a path: at one engine, or at all."""
        body = text.encode() if isinstance(text, str) else text
        self.play(path, whole(status, *((body,) if body else ())), port)

    def play(self, path: str, script: Script, port: int | None = None) -> None:
        """The same with a failure, or HANG."""
        self._rules.append((path, port, script))

    def asked(self, path: str, port: int | None = None) -> int:
        """How often a path was asked for."""
        return sum(call.path == path and port in (None, worker.port) for worker, call in self.calls)

    async def open(self, worker: WorkerAddress, call: UpstreamCall) -> UpstreamResponse:
        """See Upstream."""
        self.calls.append((worker, call))
        fitting = (
            script
            for path, port, script in reversed(self._rules)
            if path == call.path and port in (None, worker.port)
        )
        upstream = FakeUpstream([next(fitting, whole(404))])
        return await upstream.open(worker, call)

    async def close(self) -> None:
        """See Upstream."""


async def nothing_drained(_worker: str, _on: bool) -> int:
    """The drain of a gateway without workers."""
    return 0
