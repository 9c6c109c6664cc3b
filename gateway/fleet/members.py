"""Workers that join and leave a pool at run time, and the slow start of new ones.

A worker is its place: an index into the pool's arrays. Places stay true for all who hold one:

- An engine that leaves gets no new requests, and keeps its places until nothing of it runs.
- Vacant places are used again, but only after `REUSE_AFTER_S`, so that a request's record, its
  list of failed workers and gossip on its way still name the worker that they mean.

A worker that joins others is in slow start: it is a candidate for a share of the requests that
rises to an even share within `WARM_UP_S`. Its cache is cold and it is idle, so that otherwise
every request would go to it. Times are arguments, in seconds of any monotonic clock.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from gateway.fleet import fleet
from gateway.fleet.fleet import EngineState, PoolState, Progress

REUSE_AFTER_S: Final = 60.0
WARM_UP_S: Final = 30.0
_TURNS: Final = 64
"""Most workers in slow start examined per request."""
_APART: Final = 0.618
"""Of a turn: the golden ratio, which keeps any number of workers apart."""
_COMPARED: Final = 16
"""Fewest workers that a policy compares in a large fleet; see `without_cold`."""


def present(pool: PoolState) -> Iterator[tuple[int, str]]:
    """(place, id) of each worker, leaving ones included."""
    return ((i, name) for i, name in enumerate(pool.workers) if pool.present[i])


def join(pool: PoolState, ids: Sequence[str], now_s: float, *, up: bool = False) -> tuple[int, ...]:
    """Add an engine, with an id for each of its ranks; returns their places.

    It is out of the rotation until a probe succeeds, or at once if `up`.
    """
    vacant = [
        i
        for i, here in enumerate(pool.present)
        if not here and now_s - pool.vacated_s[i] >= REUSE_AFTER_S
    ]
    new = len(pool.workers)
    ranks = tuple((vacant + list(range(new, new + len(ids))))[: len(ids)])
    engine = EngineState(ranks, up=up)
    engine.progress = Progress(now_s)
    warming = bool(pool.alive)
    for rank, name in zip(ranks, ids, strict=True):
        if rank == len(pool.workers):
            pool.workers.append(name)
            pool.engine_of.append(engine)
            pool.present.append(True)
            pool.draining.append(False)
            pool.vacated_s.append(0.0)
            for load in (pool.active, pool.tokens, pool.elsewhere):
                load.append(0)
        pool.workers[rank], pool.engine_of[rank] = name, engine
        pool.present[rank], pool.draining[rank] = True, False
        if warming:
            pool.warming[rank] = -1.0
            # Apart from the others', else workers that join together have their turns together.
            pool.warm_credit[rank] = rank * _APART % 1.0
    pool.engines.append(engine)
    if up:
        fleet.refresh(pool)
    return ranks


def leave(pool: PoolState, worker: int) -> None:
    """Send a worker's engine no more requests; those that run finish."""
    engine = pool.engine_of[worker]
    engine.leaving = True
    for rank in engine.ranks:
        pool.warming.pop(rank, None)
        pool.warm_credit.pop(rank, None)
    fleet.refresh(pool)


def stay(pool: PoolState, worker: int) -> None:
    """Undo `leave` before the engine was gone: it was found again."""
    pool.engine_of[worker].leaving = False
    fleet.refresh(pool)


def finished(pool: PoolState, worker: int) -> bool:
    """Whether a leaving worker's engine serves nothing any more."""
    engine = pool.engine_of[worker]
    if not engine.leaving or engine.progress.pending:
        return False
    return not any(pool.active[rank] for rank in engine.ranks)


def vacate(pool: PoolState, worker: int, now_s: float) -> None:
    """Remove a worker's engine that has `finished`. `leave` took it out of the derived lists."""
    engine = pool.engine_of[worker]
    engine.up, engine.leaving, engine.ejected_until_s = False, True, 0.0
    for rank in engine.ranks:
        pool.present[rank] = False
        pool.vacated_s[rank] = now_s
        fleet.heard(pool, rank, 0)
        pool.view.forget(rank)
        pool.kv_tokens.pop(rank, None)
        pool.reports_cached.discard(rank)
    pool.engines.remove(engine)


def without_cold(pool: PoolState, choice: list[int], now_s: float) -> list[int]:
    """The workers to choose from, without those in slow start whose turn it is not.

    A worker has a turn for a rising share of an even share of the requests, and nearly always
    takes it, since it has the least load. In a large fleet only some of the choice are compared
    for a request, so that turns come that much more often.
    """
    often = 1.0 / min(len(choice), _COMPARED) if choice else 0.0
    warming = list(pool.warming.items())
    if len(warming) > _TURNS:
        at = pool.cursor * _TURNS % len(warming)
        often *= len(warming) / _TURNS
        warming = [*warming[at : at + _TURNS], *warming[: max(0, at + _TURNS - len(warming))]]
        pool.cursor += 1
    turns = set()
    for worker, began_s in warming:
        if began_s < 0.0:
            if pool.engine_of[worker].up:
                pool.warming[worker] = now_s
            continue
        warmth = (now_s - began_s) / WARM_UP_S
        if warmth >= 1.0:
            del pool.warming[worker], pool.warm_credit[worker]
            continue
        credit = pool.warm_credit[worker] + warmth * often
        if credit >= 1.0:
            turns.add(worker)
            credit -= 1.0
        pool.warm_credit[worker] = min(credit, 1.0)
    cold = pool.warming
    return [worker for worker in choice if worker not in cold or worker in turns] or choice


def warmth(pool: PoolState, worker: int, now_s: float) -> float:
    """The share of its slots that a worker may be given in slow start; 1 for any other."""
    if not pool.warming:
        return 1.0
    began_s = pool.warming.get(worker)
    if began_s is None:
        return 1.0
    if began_s < 0.0:
        pool.warming[worker] = began_s = now_s
    share = (now_s - began_s) / WARM_UP_S
    if share >= 1.0:
        del pool.warming[worker], pool.warm_credit[worker]
    return min(share, 1.0)
