"""Whether requests are still as long as planned: Kolmogorov-Smirnov distance of live and plan.

Rules:
- A length is prompt plus answer, in tokens, of a request that was served to its end; a
  compressed request counts with its original length.
- The plan is some dozens of (tokens, share) points. The two distributions are compared only at
  these points, each moved to the edge of its bucket. Nothing is interpolated between points, so
  a plan whose requests all have one length stays exact.
- Lengths are counted in the logarithmic buckets of `gateway.estimate.learners`, some 200.
  A request's weight halves with every HALF_LIFE further requests.
- Below TRUSTED requests there is no distance: n requests are 1.36/sqrt(n) away from their own
  distribution at 95 %, which is 0.06 at TRUSTED.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from gateway.estimate.learners import MAX_TOKENS, bucket_of, upper_edge

ALARM: Final = 0.1
"""Distance above which the plan no longer fits the traffic."""
CALM: Final = 0.08
"""Distance below which an alarm ends."""
HALF_LIFE: Final = 2000
TRUSTED: Final = 500

_GROWTH = 0.5 ** (-1 / HALF_LIFE)
_RESCALE = 1e12


class LengthDrift:
    """Compares one model's live lengths with the planned ones. Memory does not grow."""

    __slots__ = ("_alarm", "_counts", "_edges", "_planned", "_unit", "observations")

    def __init__(self, planned: Sequence[tuple[int, float]]) -> None:
        """`planned`: (tokens, share of requests up to that), both ascending."""
        by_edge = {bucket_of(min(tokens, MAX_TOKENS)): share for tokens, share in planned}
        self._edges = sorted(by_edge)
        self._planned = [by_edge[edge] for edge in self._edges]
        # The last count is for requests longer than all points.
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
    def planned(self) -> list[tuple[int, float]]:
        """The plan: (tokens, share of requests up to that), both ascending."""
        return [
            (upper_edge(edge), share)
            for edge, share in zip(self._edges, self._planned, strict=True)
        ]

    @property
    def distance(self) -> float | None:
        """The Kolmogorov-Smirnov distance, 0 to 1; None below TRUSTED requests."""
        if self.observations < TRUSTED:
            return None
        total = sum(self._counts)
        live = accumulate(self._counts[:-1])
        return max(
            abs(count / total - share) for count, share in zip(live, self._planned, strict=True)
        )

    @property
    def alarm(self) -> bool:
        """Whether the distance rose above ALARM and has not fallen to CALM since."""
        distance = self.distance
        if distance is not None:
            self._alarm = distance > (CALM if self._alarm else ALARM)
        return self._alarm
