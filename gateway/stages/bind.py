"""Stage 7, bind: pool and load -> worker."""

from collections.abc import Collection

from gateway.domain import Binding
from gateway.errors import Unavailable
from gateway.policy import fleet
from gateway.policy.binding import bind_least_loaded
from gateway.policy.served import ServedModel


def bind(
    served: ServedModel,
    pools: Collection[int],
    tried: Collection[tuple[int, int]],
    now_s: float,
    home: tuple[int, int] | None = None,
) -> Binding:
    """The least loaded worker of the first pool that has one left to try.

    `tried`: (pool, worker) pairs that failed this request; they come again only when
    nothing else is left; `home`: the worker that holds the conversation's stored response.
    Raises Unavailable when no worker is in the rotation.
    """
    if home is not None and home not in tried:
        pool, worker = home
        if worker in fleet.available(served.pools[pool], now_s):
            return Binding(pool=pool, worker=worker, score=0.0)
    for again in (False, True):
        for pool in pools:
            exclude = () if again else [w for p, w in tried if p == pool]
            binding = bind_least_loaded(pool, served.pools[pool], now_s, exclude)
            if binding is not None:
                return binding
    raise Unavailable(
        f"No engine of the model '{served.name}' is ready. Try again shortly.",
        reason="no_worker_ready",
        code="no_worker_ready",
        retry_after_s=2.0,
    )
