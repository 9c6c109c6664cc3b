"""Confidence intervals from one long run by batch means, and a test for drift.

A run is cut into equal batches in order of arrival; means (or quantiles) of batches are nearly
independent even though those of requests are not, and Student's t gives the interval (Law,
Simulation Modeling and Analysis, section 9.5.3).
"""

from collections.abc import Callable, Sequence
from math import comb, sqrt
from statistics import NormalDist
from typing import Final

import msgspec
import numpy as np

from simulator.fleet.traffic import Floats

BATCHES: Final = 20
CONFIDENCE: Final = 0.95
DRIFT_T: Final = 4.0
"""A trend counts if its slope is at least this many standard errors from 0 ..."""
DRIFT_SHARE: Final = 0.5
"""... and its rise over the run is at least this share of the mean ..."""
MIN_DRIFT_S: Final = 0.05
"""... and at least this many seconds."""


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """An estimate with its confidence bounds."""

    value: float
    low: float
    high: float

    def holds(self, truth: float) -> bool:
        """Whether it lies within the bounds."""
        return self.low <= truth <= self.high


def student_t(confidence: float, freedom: int) -> float:
    """Two-sided quantile of Student's t for >= 5 degrees of freedom, by Cornish-Fisher.

    Within .004 of the tables (Abramowitz and Stegun, 26.7.5).
    """
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    n = float(freedom)
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )


def batch_means(values: Floats) -> Interval:
    """The mean of a run's values, in order; ValueError with fewer values than batches."""
    return _interval(values, lambda part: float(part.mean()))


def batch_quantile(values: Floats, share: float) -> Interval:
    """A quantile of a run's values, in order; bounds from the spread of batch quantiles."""
    return _interval(values, lambda part: float(np.quantile(part, share)))


def quantile_bounds(values: Sequence[float], share: float) -> tuple[float, float]:
    """Bounds of a quantile of independent values, by order statistics; at most their extremes.

    The number of values below the quantile is binomial, whatever the distribution.
    """
    ordered = sorted(values)
    count, tail = len(ordered), (1 - CONFIDENCE) / 2
    low = high = 0
    below = 0.0
    for k in range(count + 1):
        chance = comb(count, k) * share**k * (1 - share) ** (count - k)
        if below + chance <= tail:
            low = k + 1
        if below < 1 - tail:
            high = k
        below += chance
    return ordered[max(0, low - 1)], ordered[min(high, count - 1)]


def drifts(values: Floats) -> bool:
    """Whether batch means of waits (seconds) rise or fall through the run: it has not settled.

    An overloaded queue rises in a straight line. A trend must be clear (DRIFT_T), large
    (DRIFT_SHARE) and relevant (MIN_DRIFT_S); weaker ones are noise of a busy queue.
    """
    if len(values) < 2 * BATCHES:
        return False
    means = np.array([part.mean() for part in np.array_split(values, BATCHES)])
    time = np.arange(BATCHES) - (BATCHES - 1) / 2
    slope = float(time @ means / (time @ time))
    residual = means - means.mean() - slope * time
    error = sqrt(float(residual @ residual) / (BATCHES - 2) / float(time @ time))
    rise = abs(slope) * (BATCHES - 1)
    clear = abs(slope) > DRIFT_T * error
    return clear and rise > DRIFT_SHARE * float(means.mean()) and rise > MIN_DRIFT_S


def _interval(values: Floats, estimate: Callable[[Floats], float]) -> Interval:
    if len(values) < BATCHES:
        raise ValueError(f"{BATCHES} batches need at least as many values, not {len(values)}")
    value = estimate(values)
    parts = np.array([estimate(part) for part in np.array_split(values, BATCHES)])
    half = student_t(CONFIDENCE, BATCHES - 1) * float(parts.std(ddof=1)) / sqrt(BATCHES)
    return Interval(value=value, low=value - half, high=value + half)
