"""Choose a pool's worker by the least (kv + queued_kv)/sum + (active + queued)/sum.

The score is in [0, 2], lower is better, and 0 in an idle pool; ties rotate over the workers in
order. For independent replicas this equals or beats join-shortest-queue on mean TPOT and cuts
its p99 (docs/develop/benches/bfio.md). Counts are this gateway's own in-flight work, including
requests that wait in the engine's queue.
"""

from collections.abc import Collection, Sequence

from gateway.fleet import fleet, members
from gateway.fleet.fleet import PoolState
from gateway.records.attempt import Binding

COMPARED = 64
"""Most workers compared per request; in a larger pool the next request compares the next ones.
The least loaded of 64 balances as well as that of thousands, at a fixed cost."""
RETAINED_CANDIDATES = 8
"""Most candidates with their scores in a decision record."""


def bind_least_loaded(
    pool_index: int, pool: PoolState, now_s: float, exclude: Collection[int] = ()
) -> Binding | None:
    """The worker with the least share of KV and of sequences; None if none is available.

    `exclude`: workers already tried for this request.
    """
    choice = fleet.available(pool, now_s)
    if pool.warming:
        choice = members.without_cold(pool, choice, now_s)
    if exclude:
        choice = [i for i in choice if i not in exclude]
    if not choice:
        return None
    if len(choice) == 1:
        only = choice[0]
        return Binding(pool=pool_index, worker=only, score=0.0, candidates=())
    worker, score, compared = least_loaded(pool, choice)
    names = pool.workers
    return Binding(
        pool=pool_index,
        worker=worker,
        score=score,
        candidates=tuple([(names[i], its_score) for i, its_score in compared]),
    )


def least_loaded(
    pool: PoolState, choice: Sequence[int]
) -> tuple[int, float, Sequence[tuple[int, float]]]:
    """The worker of the least score, that score, and some (worker, score) compared with it."""
    if len(choice) > COMPARED:
        at = pool.cursor * COMPARED % len(choice)
        choice = [*choice[at : at + COMPARED], *choice[: max(0, at + COMPARED - len(choice))]]
    kv, active = pool.tokens, pool.active
    kv_unit = 1.0 / (pool.total_tokens or 1)
    active_unit = 1.0 / (pool.total_active or 1)
    scores = [kv[i] * kv_unit + active[i] * active_unit for i in choice]
    least = min(scores)
    compared = tuple(zip(choice[:RETAINED_CANDIDATES], scores, strict=False))
    pool.cursor += 1
    if scores.count(least) == 1:
        return choice[scores.index(least)], least, compared
    ties = [i for i, score in zip(choice, scores, strict=True) if score <= least]
    return ties[(pool.cursor - 1) % len(ties)], least, compared
