"""Load and health of a pool's workers: a struct of arrays that only these functions mutate.

Invariants: counters never fall below zero; exactly one `finish` takes away what a `start` added;
health checks never change load (a probe must not zero a worker's in-flight count).
Workers that are ranks of one engine are up, ejected and tried again together.
`gateway.fleet.members` adds and removes workers at run time.
`gateway.fleet.progress` tracks running attempts and detects frozen engines.
Times are arguments, in seconds of any monotonic clock.
"""

from collections.abc import Sequence
from math import inf
from typing import Final

from gateway.fleet.progress import Progress
from gateway.fleet.slot_clock import SlotClock
from gateway.records.attempt import HealthRules

MISSES: Final = 3
"""Probes in a row that an engine must miss to leave the rotation."""
BLAMELESS: Final = 0.25
"""Weight of a failure that is the request's own doing. Not 0: engines that answer nothing but
errors leave the rotation, whatever they are sent."""
NOT_PROBED: Final = "not probed yet"
DOUBTED_S: Final = 2.5
"""How long a `doubt` lasts unless repeated: two exchanges of replicas."""


class PoolState:
    """Workers of one pool by index: load as this gateway sees it, and health."""

    __slots__ = (
        "active",
        "alive",
        "beyond_window_tokens",
        "cursor",
        "doubted_until_s",
        "draining",
        "ejected_until_s",
        "ejections",
        "elsewhere",
        "engines",
        "failures",
        "inflight",
        "kv_tokens",
        "last_ejection_end_s",
        "leaving",
        "may_be_empty",
        "misses",
        "name",
        "present",
        "progress",
        "refused",
        "remarks",
        "revision",
        "siblings",
        "slot_clock",
        "slots_per_worker",
        "sound",
        "sound_from_s",
        "sound_until_s",
        "tokens",
        "total_active",
        "total_elsewhere",
        "total_tokens",
        "unfit",
        "up",
        "vacated_s",
        "warm_credit",
        "warming",
        "why_down",
        "why_ejected",
        "workers",
    )

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
        self.engines = list(map(tuple, engines)) or [(i,) for i in range(n)]
        engine_of = {worker: engine for engine in reversed(self.engines) for worker in engine}
        self.siblings = [engine_of[worker] for worker in range(n)]
        """By worker: the workers of its engine, itself included."""
        self.name = name
        self.workers = list(workers)
        """Ids. A vacated place keeps its last id until a new worker takes it."""
        self.may_be_empty = may_be_empty
        self.present = [True] * n
        """False: the worker is gone and its place is vacant."""
        self.leaving = [False] * n
        """Gets no new requests: it was removed. A vacant place stays True."""
        self.remarks: dict[int, str] = {}
        """What is odd about a worker that serves all the same, for operators."""
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
        self.total_elsewhere = 0
        """Sum of `elsewhere`."""
        self.tokens = [0] * n
        """Reserved KV tokens (L_cost) of those sequences."""
        self.total_active = 0
        self.total_tokens = 0
        """Sum of `tokens`. Only `start` and `finish` change `active`, `tokens` and their sums."""
        self.kv_tokens: dict[int, int] = {}
        """KV cache of a worker, as its engine reports it; 0 or absent if unknown."""
        self.up = [True] * n
        """The probes' verdict; a refused connection also sets it to False."""
        self.why_down = [""] * n
        """The error of the last probe or connection; "" if it succeeded."""
        self.refused = [False] * n
        """Down because the connection was refused, not because probes were missed."""
        self.unfit: set[int] = set()
        """Down because the engine does not serve the model now, not even as a last resort."""
        self.misses = [MISSES - 1] * n
        """Probes missed in a row, at the engine's first worker. Initially a single miss decides."""
        self.progress = Progress(self.siblings)
        """Running attempts at each worker, and the engines' silence."""
        self.draining = [False] * n
        self.failures = [0.0] * n
        """Consecutive failures, by their weight."""
        self.doubted_until_s = [0.0] * n
        """Until then one failure ejects, at the engine's first worker; see `doubt`."""
        self.ejections = [0] * n
        self.ejected_until_s = [0.0] * n
        self.why_ejected: dict[int, str] = {}
        """By the engine's first worker: the failure that ejected it, and for how long."""
        self.revision = 0
        """Rises with every change of health."""
        self.alive = list(range(n))
        """Derived: up and not draining."""
        self.last_ejection_end_s = 0.0
        """Derived: the time after which no worker is ejected."""
        self.sound = self.alive
        """Derived: alive and not ejected, from `sound_from_s` until `sound_until_s`."""
        self.sound_from_s = inf
        self.sound_until_s = -inf
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
        ends_s = [pool.ejected_until_s[i] for i in pool.alive]
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
        i
        for i, draining in enumerate(pool.draining)
        if not draining and not pool.leaving[i] and i not in pool.unfit
    ]
    return [i for i in present if not pool.refused[i]] or (present if refused else [])


def refresh(pool: PoolState) -> None:
    """Recompute the derived lists after a change of health; requests only read them."""
    draining, leaving = pool.draining, pool.leaving
    pool.alive = [i for i, up in enumerate(pool.up) if up and not draining[i] and not leaving[i]]
    pool.last_ejection_end_s = max(pool.ejected_until_s, default=0.0)
    pool.sound_from_s, pool.sound_until_s = inf, -inf
    pool.revision += 1


def out_of_rotation(pool: PoolState, now_s: float) -> dict[str, str]:
    """Engines that get no requests, by their first worker's id, with cause and undo."""
    found: dict[str, str] = {}
    for head, *_ in pool.engines:
        why = pool.why_down[head]
        if pool.leaving[head] or (not pool.up[head] and why == NOT_PROBED):
            continue
        if not pool.up[head]:
            found[pool.workers[head]] = f"{why}; it returns when a probe succeeds"
        elif pool.ejected_until_s[head] > now_s and head in pool.why_ejected:
            found[pool.workers[head]] = f"{pool.why_ejected[head]}; then it is tried again"
    return found


def drain(pool: PoolState, worker: int, *, on: bool) -> None:
    """Take a worker out of the rotation, or return it."""
    pool.draining[worker] = on
    refresh(pool)


def ready_slots(pool: PoolState, now_s: float) -> int:
    """Concurrent sequences that the available workers can hold."""
    return len(available(pool, now_s)) * pool.slots_per_worker


def overloaded(pool: PoolState, spill_queue: int, now_s: float) -> bool:
    """In-flight, of all gateways, >= ready slots + spill_queue; for models without limits."""
    inflight = pool.inflight + pool.total_elsewhere
    return inflight >= ready_slots(pool, now_s) + spill_queue


def heard(pool: PoolState, worker: int, sequences: float) -> None:
    """Note how many sequences a worker's engine says it runs and queues, from any gateway."""
    others = max(0, int(sequences) - pool.active[worker])
    pool.total_elsewhere += others - pool.elsewhere[worker]
    pool.elsewhere[worker] = others


def start(pool: PoolState, worker: int, sequences: int, tokens: int) -> None:
    """Count a request sent to a worker; `tokens` is its L_cost."""
    pool.active[worker] += sequences
    pool.tokens[worker] += tokens
    pool.total_active += sequences
    pool.total_tokens += tokens


def finish(pool: PoolState, worker: int, sequences: int, tokens: int) -> None:
    """Take away what `start` added."""
    pool.active[worker] -= sequences
    pool.tokens[worker] -= tokens
    pool.total_active -= sequences
    pool.total_tokens -= tokens


def succeeded(pool: PoolState, worker: int) -> None:
    """A served exchange clears its engine's failure count and ejection history."""
    head = pool.siblings[worker][0]
    pool.failures[head] = 0.0
    pool.doubted_until_s[head] = 0.0
    if pool.ejections[head]:  # otherwise it is in the rotation, and no list changes
        pool.ejections[head] = 0
        pool.why_ejected.pop(head, None)
        for rank in pool.siblings[worker]:
            pool.ejected_until_s[rank] = 0.0
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
    head = pool.siblings[worker][0]  # failures count per engine
    pool.failures[head] += BLAMELESS if blameless else 1.0
    doubted = pool.doubted_until_s[head] > now_s and not blameless
    if pool.failures[head] < rules.eject_after and not doubted:
        return False
    eject(pool, worker, rules, now_s, why)
    return True


def acquit(pool: PoolState, worker: int) -> None:
    """A failure that was counted in full turns out to be the request's own doing."""
    head = pool.siblings[worker][0]
    pool.failures[head] = max(0.0, pool.failures[head] - 1.0 + BLAMELESS)


def eject(
    pool: PoolState, worker: int, rules: HealthRules, now_s: float, why: str = "it failed"
) -> None:
    """Eject a worker's engine for a while, twice as long as the time before."""
    head = pool.siblings[worker][0]
    pool.failures[head] = 0.0
    pool.doubted_until_s[head] = 0.0
    wait_s = min(rules.eject_s * 2.0 ** pool.ejections[head], rules.max_eject_s)
    pool.ejections[head] = min(pool.ejections[head] + 1, 16)
    pool.why_ejected[head] = f"{why}; ejected for {wait_s:g} s"
    for rank in pool.siblings[worker]:
        pool.ejected_until_s[rank] = now_s + wait_s
    refresh(pool)


def rest(pool: PoolState, worker: int, until_s: float) -> None:
    """Prefer other workers until a busy engine wants to be asked again; it is not ill."""
    for rank in pool.siblings[worker]:
        pool.ejected_until_s[rank] = max(pool.ejected_until_s[rank], until_s)
    refresh(pool)


def doubt(pool: PoolState, worker: int, now_s: float) -> None:
    """Note that another replica ejected a worker's engine: one failure here then ejects it, too.

    The other replica repeats this once a second while its ejection lasts.
    """
    head = pool.siblings[worker][0]
    if pool.ejected_until_s[head] <= now_s:
        pool.doubted_until_s[head] = now_s + DOUBTED_S


def unreachable(pool: PoolState, worker: int, why: str = "it refuses connections") -> None:
    """Note a refused connection: the engine leaves the rotation until a probe succeeds."""
    for rank in pool.siblings[worker]:
        pool.up[rank] = False
        pool.refused[rank] = True
        pool.why_down[rank] = why
    refresh(pool)


def unfit(pool: PoolState, worker: int, why: str) -> bool:
    """Note that an engine does not serve the model now; True if that takes it out.

    It says so itself, so one word is enough. It returns when a probe succeeds.
    """
    for rank in pool.siblings[worker]:
        pool.why_down[rank] = why
        pool.unfit.add(rank)
    return probed(pool, worker, ok=False)


def missed(pool: PoolState, worker: int, why: str, *, answers: bool) -> bool:
    """Note a failed probe; True if it takes the engine out of the rotation.

    It takes MISSES in a row, because a busy engine misses one now and then. An engine that
    `answers` requests stays in.
    """
    head = pool.siblings[worker][0]
    for rank in pool.siblings[worker]:
        pool.why_down[rank] = why
    pool.misses[head] = 0 if answers else pool.misses[head] + 1
    return pool.misses[head] >= MISSES and probed(pool, worker, ok=False)


def probed(pool: PoolState, worker: int, *, ok: bool) -> bool:
    """Set an engine's health by a probe; True if it changed. Load counters stay."""
    ranks = pool.siblings[worker]
    if ok:
        pool.misses[ranks[0]] = 0
        for rank in ranks:
            pool.refused[rank] = False
            pool.unfit.discard(rank)
            pool.why_down[rank] = ""
    changed = any(pool.up[rank] != ok for rank in ranks)
    if not changed:
        return False
    for rank in ranks:
        pool.up[rank] = ok
        if ok:
            pool.failures[rank] = 0.0
            pool.doubted_until_s[rank] = 0.0
            pool.ejected_until_s[rank] = 0.0
    refresh(pool)
    return True
