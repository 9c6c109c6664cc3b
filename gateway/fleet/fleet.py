"""Load and health of a pool's workers, which only these functions change.

A worker is its place: an index into the pool's lists. Load is in arrays by place, since decisions
over thousands of workers read it; health is the engine's. Workers that are ranks of one engine are
up, ejected and tried again together.

Invariants: counters never fall below zero; exactly one `finish` takes away what a `start` added;
health checks never change load (a probe must not zero a worker's in-flight count).
`gateway.fleet.members` adds and removes workers at run time.
Times are arguments, in seconds of any monotonic clock.
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Final

from gateway.fleet.engine_metrics import STALE_S, TelemetryView, kv_usage
from gateway.records.attempt import HealthRules

MISSES: Final = 3
"""Probes in a row that an engine must miss to leave the rotation."""
BLAMELESS: Final = 0.25
"""Weight of a failure that is the request's own doing. Not 0: engines that answer nothing but
errors leave the rotation, whatever they are sent."""
NOT_PROBED: Final = "not probed yet"
DOUBTED_S: Final = 2.5
"""How long a `doubt` lasts unless repeated: two exchanges of replicas."""
SECONDS_AN_HOUR: Final = 3600.0
_NANO: Final = 1e9


class SlotClock:
    """What a worker's time costs, shared among the sequences that run on it.

    A worker's KV cache is its slots. A sequence that holds one of `slots` for a second owes that
    share of what the worker costs in a second; where more sequences than slots run, they share the
    worker evenly. So no more is ever shared out than the worker costs, and what is not is idle.

    For each worker a total grows at the rate that one sequence owes. The difference of two readings
    is what a sequence that ran between them owes, whatever else began and ended meanwhile.
    """

    def __init__(self, worker_hour: float) -> None:
        """`worker_hour`: what an hour of one worker costs, in units of the currency."""
        self.nano_per_s = worker_hour * _NANO / SECONDS_AN_HOUR
        """What a second of one worker costs, in nano-units."""
        self._owed_nano: list[float] = []
        """By worker: what one sequence would owe that ran since the start."""
        self._at_s: list[float] = []
        """By worker: when that was computed."""

    def read(self, worker: int, active: int, slots: int, now_s: float) -> float:
        """The worker's total; `active` sequences ran on it since the last reading.

        Call it before `active` changes, each time that it changes.
        """
        while worker >= len(self._at_s):
            self._owed_nano.append(0.0)
            self._at_s.append(now_s)
        elapsed_s = now_s - self._at_s[worker]
        if elapsed_s > 0.0:
            self._at_s[worker] = now_s
            self._owed_nano[worker] += self.nano_per_s * elapsed_s / max(active, slots, 1)
        return self._owed_nano[worker]


class EngineState:
    """An engine of a pool, with a worker for each of its ranks: health and progress."""

    def __init__(self, ranks: tuple[int, ...], *, up: bool = True) -> None:
        self.ranks = ranks
        """Its workers' places."""
        self.sources: set[str] = set()
        """Who names it; see `gateway.fleet.rotation`."""
        self.leaving = False
        """Gets no new requests: it was removed."""
        self.remark = ""
        """What is odd about it while it serves all the same, for operators."""
        self.up = up
        """The probes' verdict; a refused connection also sets it to False."""
        self.why_down = "" if up else NOT_PROBED
        """The error of the last probe or connection; "" if it succeeded."""
        self.refused = False
        """Down because the connection was refused, not because probes were missed."""
        self.unfit = False
        """Down because it does not serve the model now, not even as a last resort."""
        self.misses = MISSES - 1
        """Probes missed in a row. Initially a single miss decides."""
        self.progress = Progress()
        """Its running attempts, and its silence."""
        self.failures = 0.0
        """Consecutive failures, by their weight."""
        self.doubted_until_s = 0.0
        """Until then one failure ejects; see `doubt`."""
        self.ejections = 0
        self.ejected_until_s = 0.0
        self.why_ejected = ""
        """The failure that ejected it, and for how long."""
        # What probes know of it between two of them.
        self.counted: tuple[float | None, float | None] | None = None
        """The tokens that it had counted at the last look, while it is silent."""
        self.kv_read = False
        """Whether it was asked for its KV cache since it came up."""
        self.models_read_s = -inf
        """When its model list was read last; never since it came up: -inf."""
        self.sleepless = False
        """It has no /is_sleeping."""


class PoolState:
    """Workers of one pool by place: load as this gateway sees it, and their engines."""

    def __init__(  # noqa: PLR0915 - one statement a field
        self,
        name: str,
        workers: Sequence[str],
        slots_per_worker: int,
        engines: Sequence[Sequence[int]] = (),
        *,
        may_be_empty: bool = False,
    ) -> None:
        """`engines`: all workers by engine, as indices; () if each worker is its own engine.

        `may_be_empty`: workers come and go, so requests wait while there is none.
        """
        n = len(workers)
        self.engines = [EngineState(tuple(ranks)) for ranks in engines or [(i,) for i in range(n)]]
        engine_of = {rank: engine for engine in reversed(self.engines) for rank in engine.ranks}
        self.engine_of = [engine_of[worker] for worker in range(n)]
        """By worker; a vacated place keeps its last engine, as its id."""
        self.name = name
        self.workers = list(workers)
        """Ids. A vacated place keeps its last id until a new worker takes it."""
        self.may_be_empty = may_be_empty
        self.present = [True] * n
        """False: the worker is gone and its place is vacant."""
        self.vacated_s = [0.0] * n
        """When the place became vacant."""
        self.warming: dict[int, float] = {}
        """Workers in slow start -> when it began; negative before they are up."""
        self.warm_credit: dict[int, float] = {}
        """Their turns not taken yet, below 2."""
        self.slots_per_worker = slots_per_worker
        self.slot_clock: SlotClock | None = None
        """Where its workers have a price by the hour."""
        self.active = [0] * n
        """Unfinished sequences at each worker."""
        self.elsewhere = [0] * n
        """Sequences that other gateways have at each worker; see `heard`."""
        self.tokens = [0] * n
        """Reserved KV tokens (L_cost) of those sequences."""
        self.total_active = self.total_tokens = self.total_elsewhere = 0
        """Sums of `active`, `tokens` and `elsewhere`; of the first two only `start` and `finish`
        change anything."""
        self.started_tokens = 0
        """Of all requests sent since the start."""
        self.kv_tokens: dict[int, int] = {}
        """KV cache of a worker, as its engine reports it; 0 or absent if unknown."""
        self.view = TelemetryView()
        """What its engines' pages said last, where they are read."""
        self.reports_cached: set[int] = set()
        """Workers that have told cached tokens: of them silence means none."""
        self.draining = [False] * n
        self.revision = 0
        """Rises with every change of health."""
        self.alive = list(range(n))
        """Derived: up and not draining."""
        self.last_ejection_end_s = 0.0
        """Derived: the time after which no worker is ejected."""
        self.sound = self.alive
        """Derived: alive and not ejected, from `sound_from_s` until `sound_until_s`."""
        self.sound_from_s, self.sound_until_s = inf, -inf
        self.prefill: PoolState | None = None
        """The pool that computes its prompts, if it is in phases."""
        self.inflight = 0
        """Sequences with a lease in this pool, queued and running."""
        self.cursor = 0
        """Rotates the choice among ties."""
        self.beyond_window_tokens = 0
        """Longest sequence that an engine served beyond the configured window; 0 for none."""


def available(pool: PoolState, now_s: float) -> list[int]:
    """Workers to choose from: up and not ejected; if none, the ejected ones that are up.

    Ejection is a preference: if all are ejected, a doubtful worker is better than none. A worker
    that refuses connections or that an operator drains is never chosen. Do not mutate the list.
    """
    if pool.last_ejection_end_s <= now_s:
        return pool.alive
    if not pool.sound_from_s <= now_s < pool.sound_until_s:
        # Once per beginning or end of an ejection, not per request.
        ends_s = [pool.engine_of[i].ejected_until_s for i in pool.alive]
        sound = [i for i, end_s in zip(pool.alive, ends_s, strict=True) if end_s <= now_s]
        pool.sound = sound or pool.alive
        pool.sound_from_s = max([end_s for end_s in ends_s if end_s <= now_s], default=-inf)
        pool.sound_until_s = min([end_s for end_s in ends_s if end_s > now_s], default=inf)
    return pool.sound


def last_resort(pool: PoolState, *, refused: bool) -> list[int]:
    """Workers to try when none is available anywhere: those that only missed probes.

    If there are none and `refused` is set: those that refused the last connection.
    """
    present = [
        (i, engine)
        for i, engine in enumerate(pool.engine_of)
        if not pool.draining[i] and not engine.leaving and not engine.unfit
    ]
    reachable = [i for i, engine in present if not engine.refused]
    return reachable or ([i for i, _ in present] if refused else [])


def refresh(pool: PoolState) -> None:
    """Recompute the derived lists after a change of health; requests only read them."""
    draining = pool.draining
    pool.alive = [
        i for i, e in enumerate(pool.engine_of) if e.up and not e.leaving and not draining[i]
    ]
    pool.last_ejection_end_s = max([e.ejected_until_s for e in pool.engines], default=0.0)
    pool.sound_from_s, pool.sound_until_s = inf, -inf
    pool.revision += 1


def out_of_rotation(pool: PoolState, now_s: float) -> dict[str, str]:
    """Engines that get no requests, by their first worker's id, with cause and undo."""
    out: dict[str, str] = {}
    for engine in pool.engines:
        if engine.leaving or (not engine.up and engine.why_down == NOT_PROBED):
            continue
        name = pool.workers[engine.ranks[0]]
        if not engine.up:
            out[name] = f"{engine.why_down}; it returns when a probe succeeds"
        elif engine.ejected_until_s > now_s and engine.why_ejected:
            out[name] = f"{engine.why_ejected}; then it is tried again"
    return out


def drain(pool: PoolState, worker: int, *, on: bool) -> None:
    """Take a worker out of the rotation, or return it."""
    pool.draining[worker] = on
    refresh(pool)


def ready_slots(pool: PoolState, now_s: float) -> int:
    """Concurrent sequences that the available workers can hold, in all phases."""
    slots = len(available(pool, now_s)) * pool.slots_per_worker
    prefill = pool.prefill if slots else None
    return slots if prefill is None else slots + ready_slots(prefill, now_s)


def overloaded(pool: PoolState, spill_queue: int, now_s: float) -> bool:
    """In-flight, of all gateways, >= ready slots + spill_queue; for models without limits."""
    inflight = pool.inflight + pool.total_elsewhere
    if pool.prefill is not None:
        inflight += pool.prefill.total_elsewhere
    return inflight >= ready_slots(pool, now_s) + spill_queue


def heard(pool: PoolState, worker: int, sequences: float) -> None:
    """Note how many sequences a worker's engine says it runs and queues, from any gateway."""
    others = max(0, int(sequences) - pool.active[worker])
    pool.total_elsewhere += others - pool.elsewhere[worker]
    pool.elsewhere[worker] = others


def held_tokens(
    pool: PoolState, worker: int, now_s: float, stale_s: float = STALE_S
) -> float | None:
    """Tokens in a worker's KV cache; None if stale or unknown."""
    usage, most = kv_usage(pool.view, worker, now_s, stale_s), pool.kv_tokens.get(worker, 0)
    return usage * most if usage is not None and most else None


def start(pool: PoolState, worker: int, sequences: int, tokens: int) -> None:
    """Count a request sent to a worker; `tokens` is its L_cost."""
    pool.active[worker] += sequences
    pool.tokens[worker] += tokens
    pool.total_active += sequences
    pool.total_tokens += tokens
    pool.started_tokens += tokens


def finish(pool: PoolState, worker: int, sequences: int, tokens: int) -> None:
    """Take away what `start` added."""
    pool.active[worker] -= sequences
    pool.tokens[worker] -= tokens
    pool.total_active -= sequences
    pool.total_tokens -= tokens


def succeeded(pool: PoolState, worker: int) -> None:
    """A served exchange clears its engine's failure count and ejection history."""
    engine = pool.engine_of[worker]
    engine.failures = engine.doubted_until_s = 0.0
    if engine.ejections:  # otherwise it is in the rotation, and no list changes
        engine.ejections, engine.ejected_until_s, engine.why_ejected = 0, 0.0, ""
        refresh(pool)


def failed(
    pool: PoolState,
    worker: int,
    rules: HealthRules,
    now_s: float,
    why: str = "it failed",
    *,
    blameless: bool = False,
) -> bool:
    """Note a failed exchange; True if it ejects all workers of the worker's engine.

    `blameless`: the request is to blame rather than the engine.
    """
    engine = pool.engine_of[worker]
    engine.failures += BLAMELESS if blameless else 1.0
    doubted = engine.doubted_until_s > now_s and not blameless
    if engine.failures < rules.eject_after and not doubted:
        return False
    eject(pool, worker, rules, now_s, why)
    return True


def acquit(pool: PoolState, worker: int) -> None:
    """A failure that was counted in full turns out to be the request's own doing."""
    engine = pool.engine_of[worker]
    engine.failures = max(0.0, engine.failures - 1.0 + BLAMELESS)


def eject(
    pool: PoolState, worker: int, rules: HealthRules, now_s: float, why: str = "it failed"
) -> None:
    """Eject a worker's engine for a while, twice as long as the time before."""
    engine = pool.engine_of[worker]
    engine.failures = engine.doubted_until_s = 0.0
    wait_s = min(rules.eject_s * 2.0**engine.ejections, rules.max_eject_s)
    engine.ejections = min(engine.ejections + 1, 16)
    engine.why_ejected = f"{why}; ejected for {wait_s:g} s"
    engine.ejected_until_s = now_s + wait_s
    refresh(pool)


def rest(pool: PoolState, worker: int, until_s: float) -> None:
    """Prefer other workers until a busy engine wants to be asked again; it is not ill."""
    engine = pool.engine_of[worker]
    engine.ejected_until_s = max(engine.ejected_until_s, until_s)
    refresh(pool)


def doubt(pool: PoolState, worker: int, now_s: float) -> None:
    """Note that another replica ejected a worker's engine: one failure here then ejects it, too.

    The other replica repeats this once a second while its ejection lasts.
    """
    engine = pool.engine_of[worker]
    if engine.ejected_until_s <= now_s:
        engine.doubted_until_s = now_s + DOUBTED_S


def unreachable(pool: PoolState, worker: int, why: str = "it refuses connections") -> None:
    """Note a refused connection: the engine leaves the rotation until a probe succeeds."""
    engine = pool.engine_of[worker]
    engine.up, engine.refused, engine.why_down = False, True, why
    refresh(pool)


def unfit(pool: PoolState, worker: int, why: str) -> bool:
    """Note that an engine does not serve the model now; True if that takes it out.

    It says so itself, so one word is enough. It returns when a probe succeeds.
    """
    engine = pool.engine_of[worker]
    engine.unfit, engine.why_down = True, why
    return probed(pool, worker, ok=False)


def missed(pool: PoolState, worker: int, why: str, *, answers: bool) -> bool:
    """Note a failed probe; True if it takes the engine out of the rotation.

    It takes MISSES in a row, because a busy engine misses one now and then. An engine that
    `answers` requests stays in.
    """
    engine = pool.engine_of[worker]
    engine.why_down = why
    engine.misses = 0 if answers else engine.misses + 1
    return engine.misses >= MISSES and probed(pool, worker, ok=False)


def probed(pool: PoolState, worker: int, *, ok: bool) -> bool:
    """Set an engine's health by a probe; True if it changed. Load counters stay."""
    engine = pool.engine_of[worker]
    if ok:
        engine.misses, engine.refused, engine.unfit, engine.why_down = 0, False, False, ""
    if engine.up == ok:
        return False
    engine.up = ok
    if ok:
        engine.failures = engine.doubted_until_s = engine.ejected_until_s = 0.0
    refresh(pool)
    return True


PREFILL_TOKENS_PER_S: Final = 1000.0
"""Prefill rate of a slow engine, used without a better prediction."""
DECODE_TOKENS_PER_S: Final = 10.0
"""Decode rate of a slow engine, for answers that are not streamed: they arrive only when whole."""
MIN_ALLOWED_S: Final = 1.0


class Pending:
    """A running attempt at a worker."""

    __slots__ = ("allowed_s", "emitted", "owner", "seen", "sent_s")

    def __init__(
        self, owner: Any, sent_s: float, allowed_s: float, emitted: Callable[[], int]
    ) -> None:
        """`allowed_s`: time to its first byte (see `allowed_s`); `emitted` counts its output."""
        self.owner = owner
        self.sent_s = sent_s
        self.allowed_s = allowed_s
        self.emitted = emitted
        self.seen = 0
        """`emitted` at the last look."""


class Progress:
    """Progress of one engine, over all its ranks, by which a frozen one is found.

    An engine makes progress when any of its answers grows or completes. A frozen engine may still
    answer its health checks. Its sign is silence: time in which some request waits for its first
    byte longer than allowed while no answer grows. Silence adds up, even if the waiting clients
    give up, until the engine makes progress. A client that leaves within its allowed time adds
    none.
    """

    __slots__ = ("_answered", "_looked_s", "_overdue", "_patience_s", "pending", "silent_s")

    def __init__(self, now_s: float = 0.0) -> None:
        self.pending: dict[Pending, None] = {}
        """Running attempts."""
        self.silent_s = 0.0
        """Silence: overdue time since the engine last made progress."""
        self._overdue = False
        """Whether a request was overdue at the last look."""
        self._patience_s = 0.0
        """The longest allowed time of any request that waited during the silence."""
        self._answered = False
        """Whether an attempt ended with progress since the last look."""
        self._looked_s = now_s

    def begin(self, pending: Pending) -> None:
        """Note that an attempt was sent."""
        self.pending[pending] = None

    def end(self, pending: Pending, *, answered: bool) -> None:
        """Note that an attempt ended; `answered`: with the tokens that it asked for."""
        self.pending.pop(pending, None)
        if answered or pending.emitted() != pending.seen:
            self._answered = True

    def look(self, now_s: float, late_s: float = 0.0) -> bool:
        """Check the engine periodically; True if it made progress since the last look.

        `late_s`: total time that this process has stood still so far; it adds no silence.
        """
        lived_s = now_s - late_s
        moved, self._answered = self._answered, False
        overdue_s, allowed_s = 0.0, 0.0
        for pending in self.pending:
            count = pending.emitted()
            if count != pending.seen:
                pending.seen = count
                moved = True
            elif not count:
                overdue_s = max(overdue_s, now_s - pending.sent_s - pending.allowed_s)
                allowed_s = max(allowed_s, pending.allowed_s)
        self._overdue = overdue_s > 0
        if moved:
            self.got_on()
        elif overdue_s > 0:
            self.silent_s += min(overdue_s, lived_s - self._looked_s)
            self._patience_s = max(self._patience_s, allowed_s)
        self._looked_s = lived_s
        return moved

    def got_on(self) -> None:
        """Note progress: the silence ends."""
        self.silent_s = self._patience_s = 0.0

    def frozen(self, stall_s: float) -> bool:
        """Whether the engine was silent for too long and a request is overdue now.

        Without an overdue request the engine may be tried again.
        """
        return self._overdue and self.silent_s > stall_s + self._patience_s

    def waiting(self) -> list[Pending]:
        """Attempts that wait for a first byte."""
        return [pending for pending in self.pending if not pending.emitted()]


def allowed_s(prompt_tokens: int, output_tokens: int, predicted_s: float) -> float:
    """Allowed seconds to a first byte; pass `output_tokens` 0 for a streamed answer."""
    prefill_s = max(predicted_s, prompt_tokens / PREFILL_TOKENS_PER_S)
    return MIN_ALLOWED_S + prefill_s + output_tokens / DECODE_TOKENS_PER_S
