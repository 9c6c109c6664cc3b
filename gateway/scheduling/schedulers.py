"""Creates schedulers by the names used in configurations and benches."""

from collections.abc import Callable
from typing import Final

from gateway.fleet.fleet import PoolState
from gateway.scheduling.baselines import Immediate, LeastLoaded, RoundRobin, Sticky
from gateway.scheduling.quartz import Quartz
from gateway.scheduling.quartz_profile import DEFAULT, QuartzProfile
from gateway.scheduling.quartz_score import KvUsage, Predictor
from gateway.scheduling.quartz_shadow import Shadow
from gateway.scheduling.scheduler import Scheduler

NAMES: Final = ("least-loaded", "round-robin", "sticky", "quartz")
PREDICTING: Final = frozenset({"quartz"})
"""Schedulers that need a predictor."""
_SHADOWED: Final[dict[str, Callable[[PoolState], Immediate]]] = {
    "least-loaded": LeastLoaded,
    "round-robin": RoundRobin,
    "sticky": Sticky,
}
"""Schedulers beside which QUARTZ can predict."""
SHADOWED: Final = frozenset(_SHADOWED)
LOCAL: Final = frozenset({"sticky", "quartz"})
"""Schedulers that use `Job.match`."""


def make_scheduler(
    name: str,
    pool: PoolState,
    *,
    profile: QuartzProfile = DEFAULT,
    predictor: Predictor | None = None,
    kv_usage: KvUsage | None = None,
    shadow: bool = False,
) -> Scheduler:
    """A scheduler, by one of NAMES, for one pool of independent replicas.

    `shadow`: quartz predicts beside the other policies, too. ValueError for an unknown name, and
    for quartz without a predictor.
    """
    if name not in NAMES:
        raise ValueError(f"unknown scheduler {name!r}; there are: {', '.join(NAMES)}")
    inner = _SHADOWED.get(name)
    if inner is not None and not shadow:
        return inner(pool)
    if predictor is None:
        raise ValueError("quartz needs a predictor")
    quartz = Quartz(pool, predictor, profile, kv_usage=kv_usage)
    return quartz if inner is None else Shadow(inner(pool), quartz)
