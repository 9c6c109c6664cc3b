"""What the pipeline knows of one request: how far it got, its lease, its attempts, how it ended.

The pipeline and settlement write a request's `RequestProgress`. What is known of it only once it
is admitted is in its `Attempts`, which the dispatcher keeps.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple, TypeVar

import msgspec

from gateway.admission.denials import limit_lines, title
from gateway.errors import Told
from gateway.fleet.fleet import PoolState
from gateway.fleet.model_runtime import ModelRuntime, Phases, Prefix, PrefixEntry
from gateway.metrics import UNTIMED, StageTimer
from gateway.pipeline.forward import Relay
from gateway.pipeline.plan import Asked
from gateway.ports import LeaseStore, Lines
from gateway.records.attempt import Attempt, Binding, Handover, Outcome, Usage
from gateway.records.estimate import LengthEstimate, Plan
from gateway.records.lease import Lease
from gateway.records.request import BodyFacts, Incoming, Principal, Prompt
from gateway.routing.retry import Fault, Harm
from gateway.scheduling.outlook import Forecast, Outlook
from gateway.scheduling.scheduler import Job, Scheduler

_T = TypeVar("_T")


def require(value: _T | None) -> _T:
    """What must be there by now."""
    if value is None:
        raise RuntimeError("a stage ran before the one it stands on")
    return value


class RequestLease:
    """A request's one lease from admission to settlement: as taken, as it is, and its changes.

    Only its own methods change it: whatever the store is asked for is noted at the same place.
    """

    __slots__ = ("_store", "_wall_clock", "asked", "changes", "current", "reserved_tokens", "taken")

    def __init__(
        self, store: LeaseStore, wall_clock: Callable[[], float], asked: Plan, taken: Lease
    ) -> None:
        self._store = store
        self._wall_clock = wall_clock
        self.asked = asked
        """The plan that admission decided on."""
        self.taken = taken
        """The lease as admission granted it."""
        self.current = taken
        self.changes: list[tuple[float, str, int]] = []
        self.reserved_tokens = taken.cost_tokens
        """Extensions included."""

    async def transfer(self, pool: int, *, force: bool = True) -> None:
        """Take it along to another pool; without `force` only if it may enter. Raises Refusal."""
        self.current = await self._store.transfer(self.current, pool, force=force)
        self._note("transfer", pool)

    def resize(self, cost_tokens: int, kv_bytes: int) -> None:
        """Have it reserve what another prompt takes."""
        self.extend(cost_tokens, kv_bytes)
        self.current = msgspec.structs.replace(
            self.current, cost_tokens=cost_tokens, kv_bytes=kv_bytes
        )

    def extend(self, tokens: int, kv_bytes: int) -> None:
        """Have it reserve more for a stream that ran past its reserve; its cost stays."""
        self._note("resize", tokens)
        self.reserved_tokens = tokens
        self._store.resize(self.current, tokens, kv_bytes)

    def _note(self, change: str, value: int) -> None:
        self.changes.append((self._wall_clock(), change, value))


class Sending(NamedTuple):
    """A prompt, what it should take, and where it should go."""

    prompt: Prompt
    estimate: LengthEstimate
    plan: Plan
    prefix: Prefix
    """Who holds which beginning of the prompt."""


class Attempts:
    """A request that holds a lease: what is sent where, and what came of it."""

    __slots__ = (
        *("after_s", "asked", "assumed", "awaits", "binding", "blamed", "compress_s", "done"),
        *("entry", "facts", "guilty", "handover", "incoming", "job", "lease", "moved", "over"),
        *("pools", "prefill", "principal", "queue_s", "relay", "rescued", "scheduler", "sending"),
        *("sent_s", "served", "slot_nano", "slot_read_nano", "stopped", "task", "timer", "told"),
        *("sampled", "tell", "waited_s", "whole"),
    )

    def __init__(
        self, asked: Asked, lease: RequestLease, sending: Sending, timer: StageTimer = UNTIMED
    ) -> None:
        self.asked = asked
        self.incoming, self.principal, self.facts, self.served, self.whole = asked
        """`whole`: of the client's own prompt, where a compressed one is sent."""
        self.lease = lease
        self.timer = timer
        self.task: asyncio.Task[object] | None = None
        """The task that serves it."""
        self.compress_s: float | None = None
        self.prepare(sending)
        self.over: Callable[[Outcome], Awaitable[None]] | None = None
        """Settles the request; awaited before its client sees the end."""
        self.binding: Binding | None = None
        self.job: Job | None = None
        """Where a scheduler assigns the workers."""
        self.scheduler: Scheduler | None = None
        """The scheduler that has the job, until the job is released."""
        self.assumed: asyncio.TimerHandle | None = None
        """Assumes its first token, where that cannot be seen."""
        # Of a request that its pool's outlook watches.
        self.sampled: tuple[Outlook, Forecast] | None = None
        # Tells a client that asked for it of its place in the queue, and its expected wait.
        self.tell: Callable[[int, float | None], Awaitable[None]] | None = None
        self.relay: Relay | None = None
        self.queue_s = self.waited_s = 0.0
        self.sent_s: float | None = None
        """When the first attempt was sent, after `waited_s` in queues."""
        self.slot_nano = 0.0
        """What its time at workers costs, where they have a price by the hour."""
        self.slot_read_nano = 0.0
        """The cost of a slot of its worker when that was last counted."""
        self.done: list[Attempt] = []
        self.awaits = False
        """Whether its task waits for an engine."""
        self.moved = False
        """Taken from a frozen engine to another, which is done once."""
        self.stopped: Fault | None = None
        """Why the gateway itself cancelled the attempt that is under way."""
        self.prefill: PrefillPhase | None = None
        """Where its pool is in phases."""
        self.handover: Handover | None = None
        """What the next call tells its engine of the other phase."""
        self.pools: tuple[int, ...] = ()
        """The only pools that may serve it; () as planned. Of the first of two phases."""
        self.after_s = 0.0
        """Expected from the end of that to the first token."""
        self.rescued = False
        self.guilty: Harm = ""
        """What two engines came to on this request's body."""
        self.blamed: tuple[tuple[PoolState, int], ...] = ()
        """Pools and workers whose failures on it were counted."""
        self.told: Told | None = None
        """What the client heard when the last attempt failed, or its stream broke."""

    def prepare(self, sending: Sending) -> None:
        """Have this sent. Compression, a rescue or another pool change it."""
        self.sending = sending
        points = sending.prefix.points
        self.entry = PrefixEntry(points) if points else None

    @property
    def held_tokens(self) -> int:
        """KV tokens that it holds at a worker: of a prefill, its prompt's."""
        if self.pools:
            return self.sending.estimate.input_tokens_total
        return self.lease.current.cost_tokens

    @property
    def sent(self) -> bool:
        """Whether an engine may have got the request: not every connection failed."""
        if self.relay is not None and self.relay.sent:
            return True
        return any(attempt.result not in ("local", "connect") for attempt in self.done)


class PrefillPhase:
    """The first phase of a request whose pool has its prompts computed by other engines."""

    __slots__ = (
        *("answered_s", "handover", "phases", "pool", "sent", "sides", "skipped", "transfer_s"),
        *("tried", "usage", "wait_s"),
    )

    def __init__(self) -> None:
        self.sides: list[Attempts] = []
        """Its attempts, each as a request of its own that shares the lease. They do not know it."""
        self.tried: list[tuple[int, int]] = []
        """Prefill pools and workers that failed it."""
        self.sent = 0
        """Attempts that failed and had reached an engine."""
        self.wait_s = 0.0
        """In queues for prefill workers."""
        self.begin(-1, None)

    def begin(self, pool: int, phases: Phases | None) -> None:
        """It is for this routed pool from here on."""
        self.pool, self.phases = pool, phases
        self.skipped = ""
        """Why decode computes the prompt."""
        self.handover: Handover | None = None
        """A computed prompt that no decode engine has fetched yet, as far as is known."""
        self.usage: Usage | None = None
        """As the prefill engine told it."""
        self.answered_s: float | None = None
        self.transfer_s: float | None = None

    @property
    def worker(self) -> str:
        """Id of the last prefill worker that was asked; "" if none was."""
        side = self.sides[-1] if self.sides else None
        if side is None or side.binding is None or self.phases is None:
            return ""
        return side.served.fleet.pools[side.binding.pool].workers[side.binding.worker]


class RequestProgress:
    """How far a request got: a field is None until its stage is done, and then set once.

    A request may be refused or cancelled anywhere; settlement goes by what is there.
    """

    __slots__ = (
        *("attempts", "charged", "cost_nano", "ended_s", "estimate", "evicted", "facts"),
        *("incoming", "key", "outcome", "plan", "planned", "principal", "served"),
        *("settled_unix_s", "timer", "told", "usage"),
    )

    def __init__(self, incoming: Incoming, timer: StageTimer = UNTIMED) -> None:
        self.incoming = incoming
        self.timer = timer
        self.key: Principal | None = None
        """The key's principal, before an entitlement was chosen."""
        self.principal: Principal | None = None
        self.facts: BodyFacts | None = None
        self.served: ModelRuntime | None = None
        self.estimate: LengthEstimate | None = None
        """Of the client's own prompt."""
        self.planned: Plan | None = None
        """What the boundary said."""
        self.plan: Plan | None = None
        """What admission is asked for."""
        self.attempts: Attempts | None = None
        """From admission on."""
        # How it ended.
        self.outcome = _UNKNOWN
        self.told: Told | None = None
        """By a refusal."""
        self.evicted = False
        self.ended_s = 0.0
        """When its client had all, by the clock of durations."""
        # How it was settled, a moment before its client sees the end.
        self.settled_unix_s: float | None = None
        self.usage: Usage | None = None
        """Of its outcome, if it can be true."""
        self.charged: Usage | None = None
        """What its lease was charged; None for a full refund."""
        self.cost_nano: int | None = None
        """Of that; None where its model has no prices, too."""

    @property
    def sent_estimate(self) -> LengthEstimate | None:
        """Of what was sent last or was to be, or of the client's own prompt if not admitted."""
        return self.estimate if self.attempts is None else self.attempts.sending.estimate


_UNKNOWN: Final = Outcome(label="internal_error", status=500)


def known_lines(progress: RequestProgress) -> Lines:
    """The headers of an answer that tell how far its request got."""
    if progress.attempts is not None:
        return answer_lines(progress.attempts)
    return _lines(progress.incoming, progress.served, progress.facts, progress.estimate).encode()


def answer_lines(attempts: Attempts) -> Lines:
    """The same for an admitted request."""
    served, lease, binding = attempts.served, attempts.lease.current, attempts.binding
    lines = _lines(attempts.incoming, served, attempts.facts, attempts.sending.estimate)
    if binding is not None:
        pool = served.fleet.pools[binding.pool]
        lines += (
            f"x-sluice-pool: {pool.name}\r\n"
            f"x-sluice-worker: {pool.workers[binding.worker]}\r\n"
            f"x-sluice-spilled: {'true' if lease.spilled else 'false'}\r\n"
            f"x-sluice-compressed: {attempts.sending.prompt.compressed}\r\n"
            f"x-sluice-queue-ms: {int(attempts.queue_s * 1000)}\r\n"
        )
    if attempts.prefill is not None and (worker := attempts.prefill.worker):
        lines += f"x-sluice-prefill-worker: {worker}\r\n"
    # Budgets that warn, and x-ratelimit-* where limits are enforced.
    if lease.uses:
        warned = [
            f"{limit.scope} {limit.name}: {title(limit)} "
            f"{100 * use.level // max(1, use.amount)}% used"
            for limit, use in zip(lease.asked, lease.uses, strict=True)
            if 0 < limit.warn <= use.level
        ]
        lines += f"x-sluice-budget: {', '.join(warned)}\r\n" if warned else ""
    observed = lease.would_deny or served.routing.observe or served.admission.observe
    if lease.limits is not None and not observed:
        lines += limit_lines(lease.limits)
    return lines.encode()


def _lines(
    incoming: Incoming,
    served: ModelRuntime | None,
    facts: BodyFacts | None,
    estimate: LengthEstimate | None,
) -> str:
    lines = f"x-request-id: {incoming.request_id}\r\n"
    if served is not None and facts is not None and served.name != facts.model:
        lines += f"x-sluice-model: {served.name}\r\n"
    if estimate is not None:
        lines += f"x-sluice-estimated-tokens: {estimate.fit_tokens}\r\n"
    return lines
