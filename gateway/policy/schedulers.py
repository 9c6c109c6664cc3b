"""Creates schedulers by the names used in configurations and benches."""

from typing import Final

from gateway.policy.fleet.fleet import PoolState
from gateway.policy.quartz.profile import DEFAULT, QuartzProfile
from gateway.policy.quartz.quartz import Quartz
from gateway.policy.quartz.score import KvUsage, Predictor
from gateway.policy.scheduling.baselines import LeastLoaded, RoundRobin, Sticky
from gateway.policy.scheduling.scheduler import Scheduler

NAMES: Final = ("least-loaded", "round-robin", "sticky", "quartz")
PREDICTING: Final = frozenset({"quartz"})
"""Schedulers that need a predictor."""
LOCAL: Final = frozenset({"sticky", "quartz"})
"""Schedulers that use `Job.match`."""


def make_scheduler(
    name: str,
    pool: PoolState,
    *,
    profile: QuartzProfile = DEFAULT,
    predictor: Predictor | None = None,
    kv_usage: KvUsage | None = None,
) -> Scheduler:
    """A scheduler, by one of NAMES, for one pool of independent replicas.

    Only quartz uses `profile`, `predictor` and `kv_usage`. ValueError for an unknown name, and
    for quartz without a predictor.
    """
    if name == "least-loaded":
        return LeastLoaded(pool)
    if name == "round-robin":
        return RoundRobin(pool)
    if name == "sticky":
        return Sticky(pool)
    if name != "quartz":
        raise ValueError(f"unknown scheduler {name!r}; there are: {', '.join(NAMES)}")
    if predictor is None:
        raise ValueError("quartz needs a predictor")
    return Quartz(pool, predictor, profile, kv_usage=kv_usage)
