"""Which worker of the pool: least (kv + queued_kv)/sum + (active + queued)/sum.

Score range [0, 2], lower is better; neutral value 0 (an idle pool); ties go round the
workers in order. Among independent replicas this equals or beats join-shortest-queue on
mean TPOT and cuts its p99 (docs/develop/benches/bfio.md). Counts are this gateway's own in-flight
work, which includes what waits in the engine's queue.
"""

from collections.abc import Collection

from gateway.policy.fleet import fleet
from gateway.policy.fleet.fleet import PoolState
from gateway.records.attempt import Binding

COMPARED = 64
"""Of more workers than this, so many are compared, the next ones at the next request: which is
least loaded of 64 is as good for the balance as of thousands, and costs the same for any fleet."""
CANDIDATES_KEPT = 8
"""How many candidates a decision record explains."""


def bind_least_loaded(
    pool_index: int, pool: PoolState, now_s: float, exclude: Collection[int] = ()
) -> Binding | None:
    """The worker with the least share of KV and of sequences; None when none is available.

    `exclude`: workers already tried for this request.
    """
    choice = fleet.available(pool, now_s)
    if exclude:
        choice = [i for i in choice if i not in exclude]
    if not choice:
        return None
    if len(choice) == 1:
        only = choice[0]
        return Binding(pool=pool_index, worker=only, score=0.0, candidates=())
    if len(choice) > COMPARED:
        start = pool.cursor * COMPARED % len(choice)
        choice = choice[start : start + COMPARED] + choice[: max(0, start + COMPARED - len(choice))]
    kv, active = pool.tokens, pool.active
    kv_unit = 1.0 / (pool.total_tokens or 1)
    active_unit = 1.0 / (pool.total_active or 1)
    scores = [kv[i] * kv_unit + active[i] * active_unit for i in choice]
    best = min(scores)
    ties = [i for i, score in zip(choice, scores, strict=True) if score <= best]
    worker = ties[pool.cursor % len(ties)]
    pool.cursor += 1
    return Binding(
        pool=pool_index,
        worker=worker,
        score=best,
        candidates=tuple(
            (pool.workers[i], score)
            for i, score in zip(choice[:CANDIDATES_KEPT], scores, strict=False)
        ),
    )
