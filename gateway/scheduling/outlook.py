"""What a request of a pool may expect: its wait and its time to first token, as quantiles.

A scheduler forecasts both from what is ahead and from its predictions. How true that is is learned
from samples of requests: their forecast, and what came of them. A quantile is that of the samples
whose forecasts were most like the one asked about, each scaled by the forecasts' ratio; of n of
them, the .95 quantile is the ceil(.95 (n + 1))th smallest, as in a split conformal prediction.
Requests of each priority class are kept apart, as the queue keeps them.

A sample is noted at its first token: at the end of its answer it would tell of a queue that was.
A factor that follows how many quotes came true (adaptive conformal inference) was tried, and made
quotes worse while a queue grows, because what it hears is as old as the queue is long.
"""

from collections import deque
from collections.abc import Sequence
from heapq import nsmallest
from math import ceil, inf, log
from typing import Final, NamedTuple

from gateway.records.record import Record
from gateway.scheduling.scheduler import PRIORITY_CLASS_NAMES

KEPT: Final = 256
"""Samples of a class."""
ALIKE: Final = 59
LEAST: Final = 19
"""Samples that a .95 quantile takes at least."""
SAMPLED_PER_S: Final = 10
_FLOOR_S: Final = 0.02
"""Added to forecasts: below it their ratios say nothing."""


class Forecast(NamedTuple):
    """What a scheduler expects of a job that it was not given yet, in seconds."""

    priority_class: int
    wait_s: float
    """Until its prefill may begin."""
    prefill_s: float


class Quantiles(Record, frozen=True, kw_only=True):
    """In seconds; None where too little is known."""

    p50: float | None = None
    p95: float | None = None


UNKNOWN: Final = Quantiles()
Quoted = list[float | None]
"""Seconds by level; None where too little is known."""


class _Ended(NamedTuple):
    forecast: Forecast
    wait_s: float
    ttft_s: float | None


class Outlook:
    """Of one pool. Pure: times are arguments, in seconds."""

    def __init__(self, levels: Sequence[float] = (0.5, 0.95)) -> None:
        self._levels = tuple(levels)
        self._ended: tuple[deque[_Ended], ...] = tuple(
            [deque(maxlen=KEPT) for _ in PRIORITY_CLASS_NAMES]
        )
        self._until_s = -inf
        self._seen = 0
        self._every = 1

    def samples(self, now_s: float) -> bool:
        """Whether to sample this request: evenly, and about SAMPLED_PER_S a second at most.

        Samples with a pause between them would miss how requests fare that come right after others.
        """
        if now_s >= self._until_s:
            self._every = 1 + self._seen // SAMPLED_PER_S
            self._until_s, self._seen = int(now_s) + 1.0, 0
        self._seen += 1
        return self._seen % self._every == 0

    def note(self, forecast: Forecast, wait_s: float, ttft_s: float | None) -> None:
        """Learn what came of a request; inf where it was given up, None where it was not seen."""
        self._ended[forecast.priority_class].append(_Ended(forecast, wait_s, ttft_s))

    def expect(self, forecast: Forecast) -> tuple[Quoted, Quoted]:
        """Wait in the gateway, and time to first token as clients see it, by level."""
        ended = self._ended[forecast.priority_class]
        waits = [e.wait_s * _ratio(forecast, e.forecast) for e in _alike(forecast, ended)]
        seen = _alike(forecast, [e for e in ended if e.ttft_s is not None])
        firsts = [(e.ttft_s or 0.0) * _ratio(forecast, e.forecast) for e in seen]
        return self._quoted(waits), self._quoted(firsts)

    def _quoted(self, values: list[float]) -> Quoted:
        n = len(values)
        if n < LEAST:
            return [None] * len(self._levels)
        values.sort()
        found = [values[min(n, ceil(level * (n + 1))) - 1] for level in self._levels]
        return [value if value < inf else None for value in found]


def _alike(forecast: Forecast, ended: Sequence[_Ended]) -> Sequence[_Ended]:
    def distance(each: _Ended) -> float:
        pairs = zip(forecast[1:], each.forecast[1:], strict=True)
        return sum([abs(log((own + _FLOOR_S) / (other + _FLOOR_S))) for own, other in pairs])

    return nsmallest(ALIKE, ended, key=distance)


def _ratio(forecast: Forecast, other: Forecast) -> float:
    whole = forecast.wait_s + forecast.prefill_s + _FLOOR_S
    return whole / (other.wait_s + other.prefill_s + _FLOOR_S)
