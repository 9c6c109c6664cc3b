"""How long the ranks' requests may still run, from how long others of their class ran.

L_g(h) = sum over its requests of (s + a + h) S(a + h) / S(a), where a is what was streamed so
far and S(a) = P(output > a) of the request's class: "A Universal Load Balancing Principle",
section 4, with survival in place of the published oracle. New requests are not expected to end
within the window.
"""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gateway.policy.bfio.load_forecast import middle_ages

Floats = NDArray[np.float64]

Survival = Callable[[Floats], Floats]
"""Ages in tokens, >= 0 -> share of outputs longer than that: from 1, never rising."""

HORIZON_SHARE: Final = 0.04
"""Of the mean output: where the H sweep has its optimum, .02 to .08."""
HORIZON_STEPS: Final = (2, 20)


def horizon_steps(mean_output_tokens: float) -> int:
    """H for a mean output: it follows that and is never a fixed number."""
    low, high = HORIZON_STEPS
    return min(high, max(low, round(HORIZON_SHARE * mean_output_tokens)))


def survival_of(shares: Sequence[float] | Floats) -> Survival:
    """A survival function from its values at ages 0, 1, 2, ...; beyond the last it stays."""
    values = np.asarray(shares, dtype=np.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError("survival is given as its values at ages 0, 1, 2, ...")
    last = len(values) - 1

    def survival(ages: Floats) -> Floats:
        found: Floats = values[np.minimum(ages, last).astype(np.int64)]
        return found

    return survival


def still_alive(survivals: Sequence[Survival], horizon: int, ages: Floats | None = None) -> Floats:
    """S(a + h) / S(a) for each class, age and h up to `horizon`: shape (classes, ages, H+1).

    `ages`: those that stand for the buckets of a LoadHistogram; None for its own. Where S(a) is
    0, nothing is known of requests that old, and they are not expected to end.
    """
    at = middle_ages() if ages is None else ages
    later = at[:, None] + np.arange(horizon + 1)
    found = np.ones((len(survivals), len(at), horizon + 1))
    for kind, survival in enumerate(survivals):
        shares = survival(later.ravel()).reshape(later.shape)
        known = shares[:, 0] > 0
        found[kind, known] = shares[known] / shares[known, :1]
    return found
