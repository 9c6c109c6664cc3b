"""The schedulers by the names that configurations and benches use."""

from collections.abc import Callable
from typing import Final

import msgspec

from gateway.policy.fleet import PoolState
from gateway.policy.immediate import LeastLoaded, RoundRobin, Sticky, TwoChoices
from gateway.policy.quartz import KvUsage, Quartz
from gateway.policy.quartz_profile import PROFILES, QuartzProfile
from gateway.policy.quartz_score import Predictor
from gateway.policy.quartz_unseen import FirstTokens
from gateway.policy.scheduling import Scheduler
from gateway.policy.token_fair import TokenFair

NAMES: Final = (
    "least-loaded",
    "mix",
    "round-robin",
    "p2c",
    "sticky",
    "token-fair",
    "point",
    "quartz",
)
"""`mix` is `least-loaded`: the share of KV plus the share of sequences is what that goes by."""
PREDICTING: Final = frozenset({"point", "quartz"})
"""Those that need a predictor."""
LOCAL: Final = frozenset({"sticky", "point", "quartz"})
"""Those that look at `Job.match`."""


def make_scheduler(
    name: str,
    pool: PoolState,
    *,
    profile: QuartzProfile | None = None,
    predictor: Predictor | None = None,
    kv_usage: KvUsage | None = None,
    first_tokens: FirstTokens | None = None,
    seed: int = 0,
) -> Scheduler:
    """A scheduler of NAMES for one pool of independent replicas.

    `profile` (default: `default` of PROFILES), `kv_usage`, `first_tokens` and `predictor` serve
    those with queues. ValueError for another name, and for one of PREDICTING without a predictor.
    """
    simple: dict[str, Callable[[PoolState], Scheduler]] = {
        "least-loaded": LeastLoaded,
        "mix": LeastLoaded,
        "round-robin": RoundRobin,
        "sticky": Sticky,
    }
    if name in simple:
        return simple[name](pool)
    if name == "p2c":
        return TwoChoices(pool, seed=seed)
    profile = PROFILES["default"] if profile is None else profile
    if name == "token-fair":
        return TokenFair(pool, profile)
    if name not in PREDICTING:
        raise ValueError(f"unknown scheduler {name!r}; there are: {', '.join(NAMES)}")
    if predictor is None:
        raise ValueError(f"scheduler {name!r} needs a predictor")
    if name == "point":
        profile = msgspec.structs.replace(profile, quantile=False)
    return Quartz(pool, predictor, profile, kv_usage=kv_usage, first_tokens=first_tokens, seed=seed)
