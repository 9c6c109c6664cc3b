"""Fit of two coefficients by recursive least squares: fixed template tokens, media tokens.

For chat templates y = t0 x prompts + t1 x messages; for media y = a x parts + b x guessed
tokens. The fit is a Kalman filter with a random walk. Each observation has its noise variance,
so small prompts teach much and long ones next to nothing. A residual beyond 4 standard
deviations is weighed down (Huber). When such residuals on one side become the majority, the
filter resets its covariance and follows them.
"""

from collections.abc import Sequence
from typing import Final

from gateway.policy.estimate.by_tenant import median
from gateway.policy.estimate.merge import PartState
from gateway.policy.estimate.ratio import SidedOutliers

_HUBER = 4.0
_SLACK = 1 + 1e-6  # for rounding


class TwoTermFit:
    """Coefficients (a, b) of y = a u + b v, clamped to [0, limit]."""

    __slots__ = ("_limits", "_outliers", "_p", "_start", "_walk", "a", "b", "observations")

    def __init__(
        self,
        prior: tuple[float, float],
        deviation: tuple[float, float],
        limits: tuple[float, float],
    ) -> None:
        """`deviation` is the prior's standard deviation, by coefficient."""
        self.a, self.b = prior
        self._limits: Final = limits
        self._start: Final = (deviation[0] ** 2, 0.0, deviation[1] ** 2)
        # The walk's variance reaches the prior's in 10,000 observations.
        self._walk: Final = (self._start[0] * 1e-4, self._start[2] * 1e-4)
        self._p = self._start
        self._outliers = SidedOutliers()
        self.observations = 0

    def value(self, u: float, v: float) -> float:
        """The fitted a u + b v."""
        return self.a * u + self.b * v

    def add(self, u: float, v: float, y: float, variance: float) -> None:
        """Learn from y = a u + b v + noise of the given variance."""
        paa, pab, pbb = self._p
        paa = min(paa + self._walk[0], self._start[0])
        pbb = min(pbb + self._walk[1], self._start[2])
        gu, gv = paa * u + pab * v, pab * u + pbb * v
        total = gu * u + gv * v + variance
        residual = y - self.a * u - self.b * v
        z = residual / total**0.5
        self.observations += 1
        if self._outliers.add(0 if abs(z) <= _HUBER else 1 if z > 0 else -1):
            self._p = self._start
            return
        if abs(z) > _HUBER:
            residual *= _HUBER / abs(z)
        ka, kb = gu / total, gv / total
        self.a = min(max(self.a + ka * residual, 0.0), self._limits[0])
        self.b = min(max(self.b + kb * residual, 0.0), self._limits[1])
        self._p = (paa - ka * gu, pab - ka * gv, pbb - kb * gv)

    def agree(self, others: Sequence["TwoTermFit"]) -> None:
        """Set the coefficients to the medians of the others'."""
        self.a = median([other.a for other in others])
        self.b = median([other.b for other in others])

    def learned(self) -> PartState:
        """See Part: the coefficients and their covariance, which average like sums."""
        paa, pab, pbb = self._p
        return PartState(
            epoch=0,
            n=self.observations,
            sums={"a": self.a, "b": self.b, "paa": paa, "pab": pab, "pbb": pbb},
        )

    def accepts(self, state: PartState) -> bool:
        """See Part: coefficients within their limits, and a valid covariance."""
        found = state.sums
        if found.keys() != {"a", "b", "paa", "pab", "pbb"}:
            return False
        paa, pab, pbb = found["paa"], found["pab"], found["pbb"]
        return (
            0 <= found["a"] <= self._limits[0]
            and 0 <= found["b"] <= self._limits[1]
            and 0 <= paa <= self._start[0] * _SLACK
            and 0 <= pbb <= self._start[2] * _SLACK
            and pab * pab <= paa * pbb * _SLACK + 1e-12
        )

    def adopt(self, state: PartState) -> None:
        """See Part."""
        found = state.sums
        self.a, self.b = found["a"], found["b"]
        self._p = (found["paa"], found["pab"], found["pbb"])
        self.observations = state.n
