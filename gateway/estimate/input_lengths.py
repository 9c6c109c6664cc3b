"""The lengths of one tenant's prompts, learned from usage: bytes per token, and fixed tokens.

Bytes per token (`Ratio`), of one category of texts: a bias-corrected mean and its spread.
- mean: EMA of c_obs with decay beta, divided by the weights' own EMA, so that the first
  observation replaces the prior instead of being averaged with it. (Uncorrected, a 4.0
  start leaves text of 2.0 bytes/token 7.6 % off after 50 observations.)
- Each observation weighs tokens / (tokens + HALF_WEIGHT_TOKENS): an error of the template
  fit or of rounding is a large share of a short prompt and a negligible one of a long prompt.
- spread: a standard deviation (token-budget paper, eq. 5), estimated as 1.25 times the EMA of
  |c_obs - c| with c the mean before the update; outliers move it less than an EMA of squares.
  (Algorithm 1, and so the uncorrected profile, omits the 1.25: twice as many requests near a
  boundary then go to the smaller pool although they do not fit.) It starts at COLD_SPREAD of
  the mean and fades to the observed spread within COLD_OBSERVATIONS.
- Once warm, an observation beyond 5 spreads and a quarter of the mean is an outlier. It moves
  the mean no more than an observation 3 % off would, so a lying worker cannot steer a ratio.
  When outliers on one side become the majority, the traffic has changed: the average restarts
  from them (about 20 observations after a full change).

Fixed tokens (`TwoTermFit`), of a chat template or of media: two coefficients by recursive least
squares. For templates y = t0 x prompts + t1 x messages; for media y = a x parts + b x guessed
tokens.
- The fit is a Kalman filter with a random walk. Each observation has its noise variance, so
  small prompts teach much and long ones next to nothing.
- A residual beyond 4 standard deviations is weighed down (Huber). When such residuals on one
  side become the majority, the filter resets its covariance and follows them.
"""

from collections.abc import Sequence
from typing import Any, Final

from gateway.estimate.by_tenant import TAUGHT as WARM_OBSERVATIONS
from gateway.estimate.by_tenant import median
from gateway.estimate.merge import PartState

COLD_SPREAD: Final = 0.10
COLD_OBSERVATIONS: Final = 10
LOWEST_RATIO: Final = 0.5
HIGHEST_RATIO: Final = 16.0
HALF_WEIGHT_TOKENS: Final = 1000
COLD_HIGHEST_RATIO: Final = 8.0
"""Bytes per token assumed when a cold estimate must not refuse what may fit."""

_OUTLIER_SPREADS = 5.0
_OUTLIER_SHARE = 0.25
_DAMPED_SHARE = 0.03
_MAX_WEIGHT = 1 + 1e-6
# Standard deviation by the mean and by the median absolute deviation of a normal distribution.
_STANDARD = 1.2533
_STANDARD_OF_MEDIAN = 1.4826


class SidedOutliers:
    """The side of recent outliers: an EMA of -1, 0, +1; beyond MAJORITY the traffic has changed."""

    MAJORITY: Final = 0.6
    __slots__ = ("balance",)
    _DECAY = 0.95

    def __init__(self) -> None:
        self.balance = 0.0

    def add(self, side: int) -> bool:
        """Take one observation's side (0: no outlier); True if the traffic has changed."""
        self.balance = self._DECAY * self.balance + (1 - self._DECAY) * side
        if abs(self.balance) < self.MAJORITY:
            return False
        self.balance = 0.0
        return True


MIN_DOUBT: Final = 0.1
"""Least spread, as a share of the mean, assumed when refusing a prompt without an engine."""


class Ratio:
    """One tenant's ratio in one category, as plain floats that can be merged by weight."""

    __slots__ = (
        "_beta",
        "_corrected",
        "_gamma",
        "_outlier_total",
        "_outlier_weight",
        "_outliers",
        "_prior",
        "conservative",
        "epoch",
        "mean",
        "observations",
        "plausible",
        "spread",
        "spread_total",
        "spread_weight",
        "total",
        "weight",
    )

    def __init__(self, prior: float, *, beta: float, gamma: float, corrected: bool) -> None:
        self._beta = beta
        self._gamma = gamma
        self._corrected = corrected
        self._prior = prior
        self.observations = 0
        self.epoch = 0
        self.plausible = COLD_HIGHEST_RATIO
        self._restart()
        if not corrected:
            # The paper's EMA: starts at its prior with full weight, and with no spread.
            self.total, self.weight, self.spread_weight = prior, 1.0, 1.0
        self._outliers = SidedOutliers()
        self._refresh()

    def _restart(self) -> None:
        self.total = 0.0
        self.weight = 0.0
        self.spread_total = 0.0
        self.spread_weight = 0.0
        self._outlier_total = 0.0
        self._outlier_weight = 0.0

    def add(self, observed: float, tokens: float) -> None:
        """Take one observation within [LOWEST_RATIO, HIGHEST_RATIO] of a prompt's length."""
        if not self._corrected:
            self._blend(observed, 1.0)
            self._blend_spread(abs(observed - self.total))
        elif self.observations < WARM_OBSERVATIONS:
            self._accept(observed, tokens / (tokens + HALF_WEIGHT_TOKENS))
        else:
            self._guard(observed, tokens / (tokens + HALF_WEIGHT_TOKENS))
        self.observations += 1
        self._refresh()

    def _accept(self, observed: float, weight: float) -> None:
        if self.weight:
            self._blend_spread(abs(observed - self.mean))
        self._blend(observed, weight)

    def _guard(self, observed: float, weight: float) -> None:
        off = observed - self.mean
        if abs(off) <= max(_OUTLIER_SPREADS * self.spread, _OUTLIER_SHARE * self.mean):
            self._outliers.add(0)
            self._accept(observed, weight)
            return
        beta = self._beta
        self._outlier_total = beta * self._outlier_total + (1 - beta) * weight * observed
        self._outlier_weight = beta * self._outlier_weight + (1 - beta) * weight
        if self._outliers.add(1 if off > 0 else -1):
            total, weight = self._outlier_total, self._outlier_weight
            self._restart()
            self.total, self.weight = total, weight
            self.observations = 0
            self.epoch += 1
            return
        step = min(_DAMPED_SHARE * self.mean, 3 * self.spread)
        # Capped weight: an outlier that claims a long prompt must not weigh more than others.
        self._blend(self.mean + (step if off > 0 else -step), min(weight, self.weight))

    def _blend(self, observed: float, weight: float) -> None:
        beta = self._beta
        self.total = beta * self.total + (1 - beta) * weight * observed
        self.weight = beta * self.weight + (1 - beta) * weight

    def _blend_spread(self, off: float) -> None:
        beta = self._beta
        self.spread_total = beta * self.spread_total + (1 - beta) * off
        self.spread_weight = beta * self.spread_weight + (1 - beta)

    def _refresh(self) -> None:
        """Compute derived figures while learning, so that estimating only reads them."""
        self.mean = self.total / self.weight if self.weight else self._prior
        spread = self.spread_total / self.spread_weight if self.spread_weight else 0.0
        if self._corrected:
            cold = max(0.0, 1 - self.observations / COLD_OBSERVATIONS)
            spread = max(_STANDARD * spread, COLD_SPREAD * cold * self.mean)
        self._derive(spread)

    def agree(self, others: Sequence["Ratio"]) -> None:
        """Set this ratio to the median of the others'. Refusing stays as careful as when cold.

        The spread is that of the others' means, and at least the median of their spreads.
        """
        self.mean = median([other.mean for other in others])
        apart = _STANDARD_OF_MEDIAN * median([abs(other.mean - self.mean) for other in others])
        self.observations = WARM_OBSERVATIONS
        self._derive(max(apart, median([other.spread for other in others])))
        self.plausible = max(self.plausible, COLD_HIGHEST_RATIO)

    def _derive(self, spread: float) -> None:
        self.spread = spread
        self.conservative = max(self.mean - self._gamma * spread, LOWEST_RATIO)
        self.plausible = (
            COLD_HIGHEST_RATIO
            if self.observations < WARM_OBSERVATIONS
            # The next prompt may differ from all earlier ones.
            else self.mean + 3 * max(spread, MIN_DOUBT * self.mean)
        )

    def state(self) -> dict[str, Any]:
        """Mean, spread and count, and the sums they come from."""
        return {
            "mean": self.mean,
            "sigma": self.spread,
            "n": self.observations,
            "conservative": self.conservative,
            "total": self.total,
            "weight": self.weight,
            "spread_total": self.spread_total,
            "spread_weight": self.spread_weight,
        }

    def learned(self) -> PartState:
        return PartState(
            epoch=self.epoch,
            n=self.observations,
            sums={
                "total": self.total,
                "weight": self.weight,
                "spread_total": self.spread_total,
                "spread_weight": self.spread_weight,
            },
        )

    def accepts(self, state: PartState) -> bool:
        """See Part: a mean within the allowed range, and weights of at most 1."""
        found = state.sums
        weight, spread_weight = found.get("weight", 0.0), found.get("spread_weight", -1.0)
        return (
            0 < weight <= _MAX_WEIGHT
            and 0 <= spread_weight <= _MAX_WEIGHT
            and LOWEST_RATIO * weight <= found.get("total", 0.0) * _MAX_WEIGHT
            and found.get("total", 0.0) <= HIGHEST_RATIO * weight * _MAX_WEIGHT
            and 0 <= found.get("spread_total", -1.0) <= HIGHEST_RATIO * spread_weight
        )

    def adopt(self, state: PartState) -> None:
        found = state.sums
        if state.epoch != self.epoch:
            self._restart()
            self._outliers = SidedOutliers()
            self.epoch = state.epoch
        self.total, self.weight = found["total"], found["weight"]
        self.spread_total, self.spread_weight = found["spread_total"], found["spread_weight"]
        self.observations = state.n
        self._refresh()


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
        found = state.sums
        self.a, self.b = found["a"], found["b"]
        self._p = (found["paa"], found["pab"], found["pbb"])
        self.observations = state.n
