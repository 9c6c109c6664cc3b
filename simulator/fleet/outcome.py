"""Results of a simulated fleet's requests, and their summary per pool."""

from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from simulator.fleet.statistics import BATCHES, Interval, batch_means, batch_quantile
from simulator.fleet.traffic import Floats, Ints

DONE: Final = 0
REFUSED_LENGTH: Final = 1
"""No window fits the request."""
REFUSED_BY_GATE: Final = 2
UNAVAILABLE: Final = 3
"""No instance was in the rotation."""
BROKEN: Final = 4
"""Its instance failed after its first token, or on its last attempt."""

WARM_UP: Final = 0.2
"""Least share of the run that is left out as warm-up."""
HORIZON_SERVICES: Final = 10
"""A run should last this many of its longest services."""


class FleetOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Columns by request, in order of arrival; seconds, NaN for events that did not happen."""

    arrival_s: Floats
    start_s: Floats
    """Start of the first iteration that served it."""
    first_s: Floats
    """Its first token."""
    end_s: Floats
    """Its last token, or the time at which it broke."""
    prompt_tokens: Ints
    """Prompt tokens as sent to an engine, after compression."""
    output_tokens: Ints
    compressed: NDArray[np.bool_]
    planned: Ints
    """The pool that routing chose; -1 for none."""
    pool: Ints
    """The pool that took it; -1 for none."""
    worker: Ints
    status: NDArray[np.int8]
    preemptions: tuple[int, ...]
    """Preemptions by pool."""
    retried: int
    """Times that a request was sent again after an instance failed."""

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def wait_s(self) -> Floats:
        """Arrival to the start of service."""
        return self.start_s - self.arrival_s

    @property
    def ttft_s(self) -> Floats:
        """Arrival to the first token."""
        return self.first_s - self.arrival_s

    @property
    def tpot_s(self) -> Floats:
        """Mean time between two tokens of an answer; NaN for answers of one token."""
        gaps = (self.output_tokens - 1).astype(np.float64)
        gaps[gaps == 0] = np.nan
        return (self.end_s - self.first_s) / gaps

    def window_s(self, warm_up: float = WARM_UP) -> tuple[float, float]:
        """From the end of the warm-up to the last arrival; ValueError for less than WARM_UP."""
        if not WARM_UP <= warm_up < 1:
            raise ValueError(f"the warm-up is at least {WARM_UP:g} of the run, and below 1")
        last_s = float(self.arrival_s[-1])
        return warm_up * last_s, last_s


class Tail(msgspec.Struct, frozen=True, kw_only=True):
    """Mean and quantiles of a time, seconds."""

    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    mean: Interval | None = None
    """With 95 % bounds; None with too few requests."""
    p99: Interval | None = None


class PoolSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One pool after the warm-up; the whole fleet if `name` is empty."""

    name: str
    instances: int
    slots: int
    """Slots of one instance; 0 for a fleet whose pools differ."""
    requests: int
    """Requests that it took and served to their end."""
    rate_per_s: float
    """Rate of those arrivals."""
    utilisation: float
    """Share of slot-time in use, from admission to the last token."""
    kv_utilisation: float
    """Share of KV-token-time that final lengths fill; above the use where sequences grow."""
    running: float
    """Mean sequences in service, over all instances."""
    queue: float
    """Mean sequences waiting."""
    tokens_per_s: float
    """Prompt and answer tokens of requests that ended within the window, per second."""
    requests_per_s: float
    """Requests that ended within the window, per second."""
    wait: Tail
    ttft: Tail
    tpot: Tail
    preemptions: int
    """Over the whole run."""
    longest_service_s: float
    """From admission to the last token; 0 without requests."""
    drifting: bool
    """Whether waits rise or fall through the run: the figures then depend on its length."""
    short_run: bool
    """Whether the run is shorter than ten times its longest service."""


def tail(values: Floats) -> Tail:
    """Summarise values in order of arrival; NaN values are left out."""
    known = values[~np.isnan(values)]
    if not len(known):
        return Tail(mean_s=np.nan, p50_s=np.nan, p90_s=np.nan, p99_s=np.nan)
    p50, p90, p99 = (float(q) for q in np.quantile(known, (0.5, 0.9, 0.99)))
    enough = len(known) >= 100 * BATCHES
    return Tail(
        mean_s=float(known.mean()),
        p50_s=p50,
        p90_s=p90,
        p99_s=p99,
        mean=batch_means(known) if enough else None,
        p99=batch_quantile(known, 0.99) if enough else None,
    )


def busy_s(start_s: Floats, end_s: Floats, window_s: tuple[float, float]) -> Floats:
    """Seconds of each interval within the window; 0 for NaN."""
    low, high = window_s
    inside = np.minimum(end_s, high) - np.maximum(start_s, low)
    return np.asarray(np.nan_to_num(np.maximum(inside, 0.0)))


def present(start_s: Floats, end_s: Floats, at_s: Floats) -> Ints:
    """Number of intervals that contain each time; those without start or end do not count."""
    known = ~(np.isnan(start_s) | np.isnan(end_s))
    begun = np.searchsorted(np.sort(start_s[known]), at_s, side="right")
    ended = np.searchsorted(np.sort(end_s[known]), at_s, side="right")
    return np.asarray(begun - ended)
