"""Calibrates quantiles: one correction per regime, learned from every first token.

    q' = q exp(c_bucket + c_global)        e = 1[y > q'] - (1 - alpha)
    c_bucket += 0.05 e,  c_global += 0.02 e,  both within +-3

q is the predicted quantile, y the actual time. Each c is stationary when exactly 1 - alpha of the
prefills are above q'. Source: QUARTZ paper, sections 3.2 and 4.2 (a table by prompt, locality and
load, residual tracking); the step sizes are this project's. The alternative `AdaptiveConformal`:
Gibbs and Candes, "Adaptive Conformal Inference Under Distribution Shift" (2021), eq. 2, over the
last 200 residuals.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence
from math import ceil, exp, isfinite, log
from typing import Any, Final

from predictor.features import BACKLOG, LOCALITY, PROMPT
from predictor.tenants import CALIBRATION_PULL, Pulls, held

BUCKETS: Final = 27
PROMPT_EDGES: Final = (1024, 6144)
"""Prompts below the first, in tokens, are short, from the second on long."""
BACKLOG_EDGES: Final = (1, 4096)
"""Backlog in tokens: none; less than two steps' prefill; more."""
_MIDDLE, _LONG = PROMPT_EDGES
_SOME, _MUCH = BACKLOG_EDGES
BUCKET_STEP: Final = 0.05
GLOBAL_STEP: Final = 0.02
LIMIT: Final = 3.0
WINDOW: Final = 400
"""Number of recent requests in the coverage."""
_PULL: Final = 0.05
"""Share of the distance to the replicas' mean that each merge closes."""


def bucket_of(x: Sequence[float]) -> int:
    """The calibration bucket of x: prompt x locality x backlog, 0..26."""
    prompt, backlog = x[PROMPT], x[BACKLOG]
    bucket = 3 * int(x[LOCALITY])
    if prompt >= _MIDDLE:
        bucket += 9 if prompt < _LONG else 18
    if backlog >= _SOME:
        bucket += 1 if backlog < _MUCH else 2
    return bucket


def bucket_name(bucket: int) -> str:
    """A bucket in words, for reports."""
    prompt, rest = divmod(bucket, 9)
    locality, backlog = divmod(rest, 3)
    return "{} prompt, {} hit, {} backlog".format(
        ("short", "middle", "long")[prompt],
        ("no", "partial", "high")[locality],
        ("no", "some", "much")[backlog],
    )


class Bucketed:
    """The default calibration; predicted quantiles are multiplied by `factor`."""

    __slots__ = (
        "_factors",
        "_global",
        "_global_factor",
        "_heard",
        "_own",
        "buckets",
        "miss",
        "seen",
    )

    def __init__(self, alpha: float) -> None:
        self.miss = 1.0 - alpha
        self.seen = 0
        self.buckets = [0.0] * BUCKETS
        self._global = 0.0
        self._factors = [1.0] * BUCKETS
        self._global_factor = 1.0
        self._own = [0.0] * (BUCKETS + 1)  # total change by own observations
        self._heard: dict[str, list[float]] = {}  # replicas' `_own` at the last merge

    def factor(self, bucket: int) -> float:
        """exp(c_bucket + c_global), finite and above 0."""
        return self._factors[bucket] * self._global_factor

    def observe(
        self, bucket: int, quantile_s: float, actual_s: float, pulls: Pulls | None = None
    ) -> None:
        """Learn whether a prefill was within its predicted quantile.

        `pulls`: the tenant's total pull so far; None where the tenant is not bounded.
        """
        e = (1.0 if actual_s > quantile_s else 0.0) - self.miss
        self.seen += 1
        before, before_all = self.buckets[bucket], self._global
        step, step_all = BUCKET_STEP * e, GLOBAL_STEP * e
        if pulls is not None:
            most = CALIBRATION_PULL / (1 + len(self._heard))
            step = held(pulls, bucket, step, most)
            step_all = held(pulls, BUCKETS, step_all, most)
        self._set(bucket, before + step)
        self._set_global(before_all + step_all)
        moved, moved_all = self.buckets[bucket] - before, self._global - before_all
        self._own[bucket] += moved
        self._own[BUCKETS] += moved_all
        if pulls is not None:
            pulls[bucket] = pulls.get(bucket, 0.0) + moved
            pulls[BUCKETS] = pulls.get(BUCKETS, 0.0) + moved_all

    def state(self) -> dict[str, Any]:
        """Plain values for gossip: current corrections, and the part learned here."""
        return {"c": [*self.buckets, self._global], "own": list(self._own), "seen": self.seen}

    def merge(self, others: Mapping[str, Mapping[str, Any]]) -> None:
        """Add what other replicas have learned since the last merge.

        Each replica then moves as if it had seen every request. Each merge also closes a part of
        the remaining differences, which come from clamps and late joiners.
        """
        heard: dict[str, list[float]] = {}
        totals: list[list[float]] = []
        moved = [0.0] * (BUCKETS + 1)
        newest: tuple[int, list[float]] = (self.seen, [])
        for name, state in others.items():
            own, c = numbers(state.get("own"), BUCKETS + 1), numbers(state.get("c"), BUCKETS + 1)
            if own is None or c is None:
                continue
            before = self._heard.get(name, own)
            moved = [m + now - then for m, now, then in zip(moved, own, before, strict=True)]
            heard[name] = own
            totals.append(c)
            seen = state.get("seen")
            if not self._heard and isinstance(seen, int) and seen > newest[0]:
                newest = (seen, c)
        self._heard = heard
        if not totals:
            return
        start = newest[1] or [*self.buckets, self._global]
        count = len(totals) + 1
        drawn: list[float] = []
        for i, value_here in enumerate(start):
            value = value_here if newest[1] else value_here + moved[i]
            mean = (sum(c[i] for c in totals) + value) / count
            drawn.append(value + _PULL * (mean - value))
        for bucket in range(BUCKETS):
            self._set(bucket, drawn[bucket])
        self._set_global(drawn[BUCKETS])

    def _set(self, bucket: int, value: float) -> None:
        value = min(max(value, -LIMIT), LIMIT)
        self.buckets[bucket] = value
        self._factors[bucket] = exp(value)

    def _set_global(self, value: float) -> None:
        value = min(max(value, -LIMIT), LIMIT)
        self._global = value
        self._global_factor = exp(value)


class AdaptiveConformal:
    """q' = q exp(r), where r is a quantile of the last residuals, at an adapting level.

    Coverage under shifts is better than with `Bucketed`, but quantiles are wider. It has no
    buckets and is not merged between processes.
    """

    __slots__ = ("_factor", "_level", "_recent", "_sorted", "miss", "seen")

    GAMMA: Final = 0.005
    ROLLING: Final = 200

    def __init__(self, alpha: float) -> None:
        self.miss = 1.0 - alpha
        self.seen = 0
        self._level = self.miss
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []
        self._factor = 1.0

    def factor(self, bucket: int) -> float:
        """exp(r), the same for all buckets."""
        return self._factor

    def observe(self, bucket: int, quantile_s: float, actual_s: float, raw_s: float) -> None:
        """Learn from a prefill; `raw_s` is the uncalibrated quantile q, `quantile_s` is q'."""
        self.seen += 1
        e = (1.0 if actual_s > quantile_s else 0.0) - self.miss
        self._level = min(max(self._level - self.GAMMA * e, 0.001), 0.5)
        residual = min(max(log(actual_s / raw_s), -LIMIT), LIMIT)
        self._recent.append(residual)
        insort(self._sorted, residual)
        if len(self._recent) > self.ROLLING:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        count = len(self._sorted)
        if count >= 20:  # fewer residuals give no .95 quantile
            place = min(count - 1, ceil((1.0 - self._level) * (count + 1)) - 1)
            self._factor = exp(self._sorted[place])

    def state(self) -> dict[str, Any]:
        """Empty: nothing is shared."""
        return {}

    def merge(self, others: Mapping[str, Mapping[str, Any]]) -> None:
        """Does nothing: nothing is shared."""


class Misses:
    """Counts how many of the last WINDOW prefills were above their quantile."""

    __slots__ = ("_count", "_recent")

    def __init__(self) -> None:
        self._recent: deque[bool] = deque()
        self._count = 0

    def add(self, *, missed: bool) -> None:
        """Count one prefill, and drop the one that leaves the window."""
        self._recent.append(missed)
        self._count += missed
        if len(self._recent) > WINDOW:
            self._count -= self._recent.popleft()

    @property
    def coverage(self) -> float | None:
        """Share of prefills within their quantile; None before the first."""
        return 1.0 - self._count / len(self._recent) if self._recent else None


_NUMBERS: Final = frozenset({int, float})


def numbers(value: object, count: int) -> list[float] | None:
    """The value as a list of `count` finite floats; None for anything else."""
    if not isinstance(value, list | tuple) or len(value) != count:
        return None
    # Each check is a loop in C: a merge handles thousands of workers every second.
    if not _NUMBERS.issuperset(map(type, value)) or not all(map(isfinite, value)):
        return None
    return list(map(float, value))
