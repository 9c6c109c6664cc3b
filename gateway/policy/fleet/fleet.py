"""What the gateway knows of a pool's workers: struct of arrays, mutated by these functions only.

Invariants: counters never fall below zero; what `start` adds is taken away by exactly one
`finish`; health checks never touch load (a probe must not zero a worker's in-flight).
Workers that are ranks of one engine are up, ejected and tried again together.
What is under way at a worker, and whether it gets on, is `gateway.policy.fleet.progress`'s.
Times are arguments, in seconds of any monotonic clock.
"""

from collections.abc import Sequence
from math import inf
from typing import Final

from gateway.policy.fleet.health_rules import MISSES, HealthRules
from gateway.policy.fleet.progress import Progress

DOUBTED_S: Final = 2.5
"""How long a doubt lasts that is not said again: two exchanges of replicas."""


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
        "engines",
        "failures",
        "inflight",
        "last_ejection_end_s",
        "misses",
        "name",
        "progress",
        "refused",
        "siblings",
        "slots_per_worker",
        "sound",
        "sound_from_s",
        "sound_until_s",
        "tokens",
        "total_active",
        "total_tokens",
        "up",
        "why_down",
        "workers",
    )

    def __init__(
        self,
        name: str,
        workers: tuple[str, ...],
        slots_per_worker: int,
        engines: Sequence[Sequence[int]] = (),
    ) -> None:
        """`engines`: the workers of each engine, all of them; () where each is its own."""
        n = len(workers)
        self.engines = tuple(map(tuple, engines)) or tuple((i,) for i in range(n))
        engine_of = {worker: engine for engine in reversed(self.engines) for worker in engine}
        self.siblings = [engine_of[worker] for worker in range(n)]
        """By worker: those of its engine, itself included."""
        self.name = name
        self.workers = workers
        self.slots_per_worker = slots_per_worker
        self.active = [0] * n
        """Sequences sent to each worker and not finished."""
        self.tokens = [0] * n
        """Reserved KV tokens (L_cost) of those sequences."""
        self.total_active = 0
        self.total_tokens = 0
        """Of all workers: `active` and `tokens` are changed by `start` and `finish` only."""
        self.up = [True] * n
        """The probes' verdict, or False since a refused connection."""
        self.why_down = [""] * n
        """What the last failed probe or connection said; "" where the last one was well."""
        self.refused = [False] * n
        """Down because nothing listens there, not because probes were missed."""
        self.misses = [MISSES - 1] * n
        """Probes missed in a row, by the engine's first worker. The very first one decides."""
        self.progress = Progress(self.siblings)
        """What is under way at each worker, and when the engine last got on with it."""
        self.draining = [False] * n
        self.failures = [0] * n
        """Consecutive failures."""
        self.doubted_until_s = [0.0] * n
        """Until then one failure ejects, by the engine's first worker; see `doubt`."""
        self.ejections = [0] * n
        self.ejected_until_s = [0.0] * n
        self.alive = list(range(n))
        """Derived: up and not draining."""
        self.last_ejection_end_s = 0.0
        """Derived: after it no worker is ejected."""
        self.sound = self.alive
        """Derived: alive and not ejected, from `sound_from_s` until `sound_until_s`."""
        self.sound_from_s = inf
        self.sound_until_s = -inf
        self.inflight = 0
        """Sequences holding a lease in this pool: queued and running."""
        self.cursor = 0
        """Rotates ties."""
        self.beyond_window_tokens = 0
        """The longest sequence that an engine served beyond the configured window; 0: none."""


def available(pool: PoolState, now_s: float) -> list[int]:
    """Workers to choose from: up and not ejected; if none, the ejected ones that are up.

    Ejection is a preference: when all are ejected, a doubtful worker beats none. A worker
    that refuses connections or that an operator drains is never chosen. Not to be mutated.
    """
    if pool.last_ejection_end_s <= now_s:
        return pool.alive
    if not pool.sound_from_s <= now_s < pool.sound_until_s:
        _find_sound(pool, now_s)
    return pool.sound


def last_resort(pool: PoolState, *, refused: bool) -> list[int]:
    """Workers to try when none is available anywhere: those that only missed probes.

    Without any, and with `refused`, those where nothing listened when they were last asked.
    """
    present = [i for i, draining in enumerate(pool.draining) if not draining]
    return [i for i in present if not pool.refused[i]] or (present if refused else [])


def _find_sound(pool: PoolState, now_s: float) -> None:
    """Look at all workers: once for every beginning and end of an ejection, not for requests.

    In a large fleet one is nearly always under way.
    """
    ends_s = [pool.ejected_until_s[i] for i in pool.alive]
    sound = [i for i, end_s in zip(pool.alive, ends_s, strict=True) if end_s <= now_s]
    pool.sound = sound or pool.alive
    pool.sound_from_s = max([end_s for end_s in ends_s if end_s <= now_s], default=-inf)
    pool.sound_until_s = min([end_s for end_s in ends_s if end_s > now_s], default=inf)


def _refresh(pool: PoolState) -> None:
    """Note a change of health; requests only read what is derived here."""
    pool.alive = [i for i, up in enumerate(pool.up) if up and not pool.draining[i]]
    pool.last_ejection_end_s = max(pool.ejected_until_s, default=0.0)
    pool.sound_from_s, pool.sound_until_s = inf, -inf


def drain(pool: PoolState, worker: int, *, on: bool) -> None:
    """Take a worker out of the rotation, or return it."""
    pool.draining[worker] = on
    _refresh(pool)


def ready_slots(pool: PoolState, now_s: float) -> int:
    """Concurrent sequences that the available workers can hold."""
    return len(available(pool, now_s)) * pool.slots_per_worker


def overloaded(pool: PoolState, spill_queue: int, now_s: float) -> bool:
    """In-flight >= ready slots + spill_queue (of models that are not managed)."""
    return pool.inflight >= ready_slots(pool, now_s) + spill_queue


def start(pool: PoolState, worker: int, sequences: int, tokens: int) -> None:
    """Count a request that is sent to a worker."""
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
    pool.failures[head] = 0
    pool.doubted_until_s[head] = 0.0
    if pool.ejections[head]:  # without, it is in the rotation: nobody's list changes
        pool.ejections[head] = 0
        for rank in pool.siblings[worker]:
            pool.ejected_until_s[rank] = 0.0
        _refresh(pool)


def failed(pool: PoolState, worker: int, rules: HealthRules, now_s: float) -> bool:
    """Note a failed exchange; True when this one ejects the worker, with all of its engine."""
    head = pool.siblings[worker][0]  # counts for the engine
    pool.failures[head] += 1
    if pool.failures[head] < rules.eject_after and pool.doubted_until_s[head] <= now_s:
        return False
    eject(pool, worker, rules, now_s)
    return True


def eject(pool: PoolState, worker: int, rules: HealthRules, now_s: float) -> None:
    """Prefer others to a worker's engine for a while, twice as long as the time before."""
    head = pool.siblings[worker][0]
    pool.failures[head] = 0
    pool.doubted_until_s[head] = 0.0
    wait_s = min(rules.eject_s * 2.0 ** pool.ejections[head], rules.max_eject_s)
    pool.ejections[head] = min(pool.ejections[head] + 1, 16)
    for rank in pool.siblings[worker]:
        pool.ejected_until_s[rank] = now_s + wait_s
    _refresh(pool)


def doubt(pool: PoolState, worker: int, now_s: float) -> None:
    """Another replica has ejected a worker's engine: here one failure is enough to do the same.

    Said once a second while that ejection lasts.
    """
    head = pool.siblings[worker][0]
    if pool.ejected_until_s[head] <= now_s:
        pool.doubted_until_s[head] = now_s + DOUBTED_S


def unreachable(pool: PoolState, worker: int, why: str = "it refuses connections") -> None:
    """A refused connection: its engine is out of the rotation until a probe succeeds."""
    for rank in pool.siblings[worker]:
        pool.up[rank] = False
        pool.refused[rank] = True
        pool.why_down[rank] = why
    _refresh(pool)


def missed(pool: PoolState, worker: int, why: str, *, answers: bool) -> bool:
    """A probe failed; True when this one takes the engine out of the rotation.

    Several in a row do: an engine that computes misses one now and then. None does while it
    `answers` requests.
    """
    head = pool.siblings[worker][0]
    for rank in pool.siblings[worker]:
        pool.why_down[rank] = why
    pool.misses[head] = 0 if answers else pool.misses[head] + 1
    return pool.misses[head] >= MISSES and probed(pool, worker, ok=False)


def probed(pool: PoolState, worker: int, *, ok: bool) -> bool:
    """Take a verdict on an engine; True when it changed. Load counters stay."""
    ranks = pool.siblings[worker]
    if ok:
        pool.misses[ranks[0]] = 0
        for rank in ranks:
            pool.refused[rank] = False
            pool.why_down[rank] = ""
    changed = any(pool.up[rank] != ok for rank in ranks)
    if not changed:
        return False
    for rank in ranks:
        pool.up[rank] = ok
        if ok:
            pool.failures[rank] = 0
            pool.doubted_until_s[rank] = 0.0
            pool.ejected_until_s[rank] = 0.0
    _refresh(pool)
    return True
