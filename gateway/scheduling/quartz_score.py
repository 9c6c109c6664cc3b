"""The score S = W-hat + Q-hat + psi: QUARTZ's parameters, and helpers.

Source: QUARTZ, section 3.3, equation 4. psi prices a cost beyond the job's own duration: an
uncached prefill evicts prefixes that other requests would have hit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, Literal

from gateway.scheduling.scheduler import Match

KvUsage = Callable[[int, float], float | None]
"""(worker, now) -> share of its KV cache in use; None when unknown or stale."""


@dataclass(frozen=True, kw_only=True)
class QuartzProfile:
    """Parameters of one pool's scheduler; times in seconds. ValueError when out of range.

    Those of the paper's Table 3, and those its text leaves open.
    """

    aging: float = 0.5
    """lambda, no unit (seconds of key per second of waiting), >= 0: only requests that arrive
    within (difference of the predicted sizes) / lambda can overtake a request."""
    patience_s: float = 15.0
    """A target time to first token below this moves a request ahead, as if it had arrived earlier
    by the difference; >= 0. So this is also how much later a request may come and overtake. 0:
    targets do not matter. Without the bound, patient requests miss their targets, too."""
    fairness_s_per_kilotoken: float = 0.1
    """beta, >= 0: seconds of key per kilotoken of the client's recent uncached prompts."""
    fairness_tau_s: float = 10.0
    """Time in which a client's recent service decays to 1/e; > 0."""
    locality_price: float = 8.0
    """mu, >= 0: cost of an uncached prefill in the score, as a multiple of its duration.
    Without it, spreading the load destroys the cache hits that keep the load small."""
    writes_tau_s: float = 10.0
    """`locality_price` is multiplied by the worker's share of recently assigned uncached tokens,
    relative to an even share; recent means about this time; > 0. Keeps caches equally full."""
    request_price_s: float = 0.02
    """Seconds of score for each request running on a worker, >= 0: each slows the others."""
    gate_s: float = 0.5
    """Seconds of prefill that may be sent behind the one in progress, >= 0; one request is always
    sent. Covers an engine's step and the round trip."""
    compared: int = 16
    """K: most workers compared for one job, >= 2. Smaller fleets are compared in full; in larger
    ones up to half of them are the holders of the longest prefix."""
    quantile: bool = True
    """False: scores and keys use the mean instead of the quantile (the paper's PointPred)."""
    order: Literal["size", "arrival"] = "size"
    """arrival: queues are first come, first served (the paper's routing-only ablation)."""
    locality: bool = True
    """False: ignores expected prefix hits (the paper's ablation)."""

    def __post_init__(self) -> None:
        if min(self.fairness_tau_s, self.writes_tau_s) <= 0:
            raise ValueError("fairness_tau_s and writes_tau_s must be above 0")
        prices = (self.fairness_s_per_kilotoken, self.locality_price, self.request_price_s)
        if self.compared < 2:
            raise ValueError("compared must be at least 2")
        if min(self.aging, self.gate_s, self.patience_s, *prices) < 0:
            raise ValueError("aging, gate, patience and prices must not be negative")


DEFAULT: Final = QuartzProfile()


def hits_of(match: Match, mask: int) -> dict[int, int]:
    """Longest expected prefix, in tokens, of each worker of the mask that has any."""
    hits: dict[int, int] = {}
    for tokens, holders in match:
        bits = holders & mask
        mask ^= bits
        while bits:
            low = bits & -bits
            hits[low.bit_length() - 1] = tokens
            bits ^= low
        if not mask:
            break
    return hits


def mask_of(workers: Sequence[int]) -> int:
    """A bit mask of workers."""
    mask = 0
    for worker in workers:
        mask |= 1 << worker
    return mask


def workers_of(mask: int, most: int) -> list[int]:
    """The first `most` workers of a mask."""
    workers = []
    while mask and most:
        low = mask & -mask
        workers.append(low.bit_length() - 1)
        mask ^= low
        most -= 1
    return workers


def seconds(value: object) -> float:
    """A duration reported by another replica; 0 for anything else."""
    if isinstance(value, int | float) and 0.0 < value < inf:
        return float(value)
    return 0.0
