"""Helpers for the score S = W-hat + Q-hat + psi, and the predictor that QUARTZ needs.

Source: QUARTZ, section 3.3, equation 4. psi prices a cost beyond the job's own duration: an
uncached prefill evicts prefixes that other requests would have hit.
"""

from collections.abc import Callable
from math import inf
from typing import Protocol

from gateway.scheduling.scheduler import Match

Features = tuple[float, ...]
KvUsage = Callable[[int, float], float | None]
"""(worker, now) -> share of its KV cache in use; None when unknown or stale."""


class Predictor(Protocol):
    """The part of `predictor.online.PrefillPredictor` used here; times in seconds."""

    @property
    def coverage(self) -> float | None:
        """Share of recent prefills within their predicted quantile."""
        ...

    def predict_request(
        self,
        worker: int,
        prompt_tokens: int,
        hit_tokens: int,
        cap_tokens: int | None,
        output_tokens: int,
        active: int,
        backlog_tokens: int,
        kv_usage: float,
        stream: bool,  # noqa: FBT001 - by position far cheaper
    ) -> tuple[Features, float, float, int]:
        """Features, mean, calibrated quantile, and calibration bucket."""
        ...

    def observe(
        self,
        worker: int,
        x: Features,
        mean_s: float,
        quantile_s: float,
        bucket: int,
        actual_s: float,
        client: str = "",
    ) -> None:
        """Learn from a client's prefill: its prediction, and the time it took."""
        ...

    def prefill_tokens_per_s(self, worker: int) -> float:
        """A worker's prefill rate, > 0."""
        ...


def hits_of(match: Match, mask: int) -> dict[int, int]:
    """Longest expected prefix, in tokens, of each worker of the mask that has any."""
    hits: dict[int, int] = {}
    for tokens, holders in match:
        found = holders & mask
        mask ^= found
        while found:
            low = found & -found
            hits[low.bit_length() - 1] = tokens
            found ^= low
        if not mask:
            break
    return hits


def workers_of(mask: int, most: int) -> list[int]:
    """The first `most` workers of a mask."""
    found = []
    while mask and most:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
        most -= 1
    return found


def seconds(value: object) -> float:
    """A duration reported by another replica; 0 for anything else."""
    if isinstance(value, int | float) and 0.0 < value < inf:
        return float(value)
    return 0.0
