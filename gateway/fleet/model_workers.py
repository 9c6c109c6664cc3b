"""An engine joins or leaves one pool of a model: every part that counts workers follows.

`gateway.fleet.members` says what a place is and when it is used again.
"""

from collections.abc import Collection, Iterator, Sequence

from gateway.fleet import engine_telemetry, members
from gateway.fleet.model_runtime import ModelRuntime
from gateway.records.attempt import WorkerAddress


def join(
    served: ModelRuntime,
    pool: int,
    addresses: Sequence[WorkerAddress],
    now_s: float,
    *,
    up: bool = False,
) -> tuple[int, ...]:
    """Add an engine, with an address for each rank; returns their places.

    It starts with the pool's learned speed, no prefixes, and in slow start if others serve.
    """
    state, known = served.fleet.pools[pool], served.fleet.workers[pool]
    ranks = members.join(state, [address.id for address in addresses], now_s, up=up)
    scheduling = served.scheduling
    for rank, address in zip(ranks, addresses, strict=True):
        if rank == len(known):
            known.append(address)
        known[rank] = address
        if served.fleet.telemetry:
            engine_telemetry.join(served.fleet.telemetry[pool], rank)
        if scheduling.predictors and (predictor := scheduling.predictors[pool]) is not None:
            predictor.join(rank)
        if scheduling.prefixes and (prefixes := scheduling.prefixes[pool]) is not None:
            prefixes.joined(rank)
        scheduling.schedulers[pool].joined(rank)
    return ranks


def finished(served: ModelRuntime, pool: int, workers: Collection[int]) -> Iterator[int]:
    """Those of leaving workers whose engines serve nothing and for which nothing waits."""
    if not workers:
        return
    state, scheduling = served.fleet.pools[pool], served.scheduling
    scheduler = scheduling.schedulers[pool]
    awaited = {job.worker for job, where in scheduling.queued.items() if where is scheduler}
    for worker in workers:
        if members.finished(state, worker) and awaited.isdisjoint(state.siblings[worker]):
            yield worker


def vacate(served: ModelRuntime, pool: int, workers: Collection[int], now_s: float) -> None:
    """Remove workers' engines that have `finished`, with all that is known of them."""
    state, scheduling = served.fleet.pools[pool], served.scheduling
    ranks = {rank for worker in workers for rank in state.siblings[worker]}
    for worker in workers:
        members.vacate(state, worker, now_s)
    served.fleet.response_affinity.left(pool, ranks)
    for rank in ranks:
        if served.fleet.telemetry:
            engine_telemetry.forget(served.fleet.telemetry[pool], rank)
        if scheduling.prefixes and (prefixes := scheduling.prefixes[pool]) is not None:
            prefixes.left(rank)
        scheduling.reports_cached.discard((pool, rank))
        served.adapters.forget(pool, rank)
