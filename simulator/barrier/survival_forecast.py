"""Predicts how long the ranks' requests still run, from the output lengths of their class.

L_g(h) = sum over its requests of (s + a + h) S(a + h) / S(a), where s is the prompt, a the tokens
streamed so far and S(a) = P(output > a) of the request's class: "A Universal Load Balancing
Principle", section 4, with survival in place of the published oracle. New requests are not
expected to end within the window.
"""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

Survival = Callable[[Floats], Floats]
"""Ages in tokens, >= 0 -> share of longer outputs: starts at 1, never rises."""

HORIZON_SHARE: Final = 0.04
"""H as a share of the mean output; the H sweep has its optimum at .02 to .08."""
HORIZON_STEPS: Final = (2, 20)


def _edges(most: int = 65_536) -> tuple[int, ...]:
    """Ages at which a bucket begins: one each up to 4, then four buckets per doubling."""
    edges = [0, 1, 2, 3, 4]
    while edges[-1] < most:
        edges.append(edges[-1] + max(1, 1 << max(0, edges[-1].bit_length() - 3)))
    return tuple(edges)


AGE_EDGES: Final = _edges()
"""In tokens streamed; the last bucket has no end."""


def middle_ages(edges: Sequence[int] = AGE_EDGES) -> Floats:
    """The representative age of each bucket, in tokens."""
    ages = np.array(edges, dtype=np.float64)
    ages[:-1] += (np.diff(ages) - 1) / 2
    return ages


def horizon_steps(mean_output_tokens: float) -> int:
    """H, the look-ahead window in steps, in proportion to the mean output."""
    low, high = HORIZON_STEPS
    return min(high, max(low, round(HORIZON_SHARE * mean_output_tokens)))


def survival_of(shares: Sequence[float] | Floats) -> Survival:
    """A survival function from its values at ages 0, 1, 2, ...; constant beyond the last."""
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

    `ages`: representative ages of buckets of requests; None for those of AGE_EDGES. Where
    S(a) is 0 there is no data for requests that old, and they are not expected to end.
    """
    at = middle_ages() if ages is None else ages
    later = at[:, None] + np.arange(horizon + 1)
    found = np.ones((len(survivals), len(at), horizon + 1))
    for kind, survival in enumerate(survivals):
        shares = survival(later.ravel()).reshape(later.shape)
        known = shares[:, 0] > 0
        found[kind, known] = shares[known] / shares[known, :1]
    return found
