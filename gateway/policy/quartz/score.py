"""The parts of the score S = W-hat + Q-hat + psi, and what QUARTZ asks of a predictor.

Source: QUARTZ, section 3.3, equation 4. psi prices what the own duration does not: an uncached
prefill evicts what others would have hit.
"""

from collections.abc import Callable
from math import inf
from typing import Protocol

from gateway.policy.scheduling.scheduler import Match

Features = tuple[float, ...]
KvUsage = Callable[[int, float], float | None]
"""Worker and time to the share of its KV cache in use; None when not known or stale."""


class Predictor(Protocol):
    """Of `predictor.online.PrefillPredictor`, what is used here; times in seconds."""

    @property
    def coverage(self) -> float | None:
        """Share of recent prefills at most their quantile."""
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
        """What it predicts from, mean, calibrated quantile, and bucket of calibration."""
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
        """A client's prefill took this long, which was predicted so."""
        ...

    def prefill_tokens_per_s(self, worker: int) -> float:
        """How fast a worker prefills, > 0."""
        ...


def hit_tokens(match: Match, worker: int) -> int:
    """Longest prefix that a worker is expected to hold, in tokens."""
    bit = 1 << worker
    for tokens, mask in match:
        if mask & bit:
            return tokens
    return 0


def hits_of(match: Match, mask: int) -> dict[int, int]:
    """Longest expected prefix of each worker of the mask that has any."""
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
    """The first workers of a mask."""
    found = []
    while mask and most:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
        most -= 1
    return found


def seconds(value: object) -> float:
    """A duration that another replica tells; 0 for what is none."""
    if isinstance(value, int | float) and 0.0 < value < inf:
        return float(value)
    return 0.0
