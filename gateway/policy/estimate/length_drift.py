"""Whether requests are still as long as planned: Kolmogorov-Smirnov, live against planned.

Rules:
- Lengths are totals, prompt and answer, of requests that were served to their end; a compressed
  one counts as it came.
- The plan is some dozens of (tokens, share) points. The two distributions are compared at these
  points alone, each moved to the edge of its bucket, so that what lies between them is never
  interpolated: a plan whose requests are all alike stays exact.
- Counts are in the logarithmic buckets of `gateway.policy.estimate.quantile`, some 200. Old
  requests fade: a request's weight halves with every HALF_LIFE further ones.
- Below TRUSTED requests nothing is said: the distance of n requests from their own distribution
  is 1.36/sqrt(n) at 95 %, 0.06 there.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from gateway.policy.estimate.quantile import MAX_TOKENS, bucket_of, upper_edge

ALARM: Final = 0.1
"""Distance from which on the plan is no longer this traffic's."""
CALM: Final = 0.08
"""Distance below which an alarm ends."""
HALF_LIFE: Final = 2000
TRUSTED: Final = 500

_GROWTH = 0.5 ** (-1 / HALF_LIFE)
_RESCALE = 1e12


class LengthDrift:
    """One model's live lengths beside the planned ones. Memory does not grow."""

    __slots__ = ("_alarm", "_counts", "_edges", "_planned", "_unit", "observations")

    def __init__(self, planned: Sequence[tuple[int, float]]) -> None:
        """`planned`: (tokens, share of requests up to that), both ascending."""
        by_edge = {bucket_of(min(tokens, MAX_TOKENS)): share for tokens, share in planned}
        self._edges = sorted(by_edge)
        self._planned = [by_edge[edge] for edge in self._edges]
        # One more for what is longer than all points.
        self._counts = [0.0] * (len(self._edges) + 1)
        self._unit = 1.0
        self._alarm = False
        self.observations = 0

    def add(self, tokens: int) -> None:
        """One request's total length."""
        bucket = bucket_of(min(max(tokens, 1), MAX_TOKENS))
        self._counts[bisect_left(self._edges, bucket)] += self._unit
        self.observations += 1
        self._unit *= _GROWTH
        if self._unit > _RESCALE:
            self._counts = [count / self._unit for count in self._counts]
            self._unit = 1.0

    @property
    def distance(self) -> float | None:
        """KS, 0 to 1; None while too few requests were seen."""
        if self.observations < TRUSTED:
            return None
        total = sum(self._counts)
        live = accumulate(self._counts[:-1])
        return max(
            abs(count / total - share) for count, share in zip(live, self._planned, strict=True)
        )

    @property
    def alarm(self) -> bool:
        """Whether it is above ALARM; once it is, until it is below CALM."""
        distance = self.distance
        if distance is not None:
            self._alarm = distance > (CALM if self._alarm else ALARM)
        return self._alarm


def plan_points(shares: Sequence[tuple[int, float]], most: int = 48) -> list[tuple[int, float]]:
    """The points that a plan carries, from shares at bucket edges: at most about `most`.

    A point is kept where the share has grown by 1/most since the last one, and before a jump,
    so that the distance is underestimated by 1/most at worst.
    """
    kept: list[tuple[int, float]] = []
    before: tuple[int, float] | None = None
    for tokens, share in shares:
        last = kept[-1][1] if kept else 0.0
        if share - last >= 1 / most or share >= 1:
            if before is not None and before[1] > last and share - before[1] >= 1 / most:
                kept.append(before)
            kept.append((tokens, share))
        if share >= 1:
            break
        before = (tokens, share)
    return kept


def bucket_edges() -> list[int]:
    """Upper edges of all buckets, ascending: where shares are asked for."""
    return sorted({upper_edge(bucket) for bucket in range(bucket_of(MAX_TOKENS) + 1)})
