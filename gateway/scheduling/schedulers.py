"""Creates schedulers by the names used in configurations and benches."""

from collections.abc import Callable, Sequence
from math import inf
from typing import Final

from gateway.fleet.fleet import PoolState
from gateway.scheduling.baselines import Immediate, LeastLoaded, RoundRobin, Sticky
from gateway.scheduling.quartz import Quartz
from gateway.scheduling.quartz_score import DEFAULT, KvUsage, QuartzProfile
from gateway.scheduling.scheduler import Job, Scheduler
from predictor.online import PrefillPredictor

PER_S: Final = 200.0
BURST_S: Final = 1.0
"""So much of the allowance may be saved up."""


class Shadow(Quartz):
    """QUARTZ that only watches: `inner` decides, and no job ever waits here."""

    def __init__(
        self,
        inner: Immediate,
        pool: PoolState,
        predictor: PrefillPredictor,
        profile: QuartzProfile,
        *,
        kv_usage: KvUsage | None = None,
    ) -> None:
        super().__init__(pool, predictor, profile, kv_usage=kv_usage)
        self._inner = inner
        self._next_s = -inf
        """When the allowance permits another prediction."""

    def submit(self, job: Job, now_s: float) -> Sequence[Job]:
        ready = self._inner.submit(job, now_s)
        if ready:
            advise = self._next_s <= now_s
            if advise:
                self._next_s = max(self._next_s, now_s - BURST_S) + 1.0 / PER_S
            self.follow(job, now_s, advise=advise)
        return ready

    def first_token(
        self, job: Job, now_s: float, cached_tokens: int | None = None, *, assumed: bool = False
    ) -> Sequence[Job]:
        unseen = assumed or job.would_bind < 0
        return super().first_token(job, now_s, cached_tokens, assumed=unseen)


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
    predictor: PrefillPredictor | None = None,
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
    if inner is None:
        return Quartz(pool, predictor, profile, kv_usage=kv_usage)
    return Shadow(inner(pool), pool, predictor, profile, kv_usage=kv_usage)
