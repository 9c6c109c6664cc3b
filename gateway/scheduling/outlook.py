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


Quoted = list[float | None]
"""Seconds by level; None where too little is known."""


class _Sample(NamedTuple):
    wait: float
    prefill: float
    """Logarithms of the forecast's parts."""
    whole_s: float
    """The forecast in all."""
    took_s: float


class Outlook:
    """Of one pool. Pure: times are arguments, in seconds."""

    def __init__(self, levels: Sequence[float] = (0.5, 0.95)) -> None:
        self._levels = tuple(levels)
        classes = range(len(PRIORITY_CLASS_NAMES))
        self._waits: list[deque[_Sample]] = [deque(maxlen=KEPT) for _ in classes]
        self._firsts: list[deque[_Sample]] = [deque(maxlen=KEPT) for _ in classes]
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
        self._waits[forecast.priority_class].append(_sample(forecast, wait_s))
        if ttft_s is not None:
            self._firsts[forecast.priority_class].append(_sample(forecast, ttft_s))

    def expect(self, forecast: Forecast) -> tuple[Quoted, Quoted]:
        """Wait in the gateway, and time to first token as clients see it, by level."""
        own = _sample(forecast, 0.0)
        waits, firsts = (of[forecast.priority_class] for of in (self._waits, self._firsts))
        return self._quoted(own, waits), self._quoted(own, firsts)

    def _quoted(self, own: _Sample, samples: Sequence[_Sample]) -> Quoted:
        if len(samples) < LEAST:
            return [None] * len(self._levels)

        def distance(other: _Sample) -> float:
            return abs(own.wait - other.wait) + abs(own.prefill - other.prefill)

        alike = nsmallest(ALIKE, samples, key=distance)
        times_s = sorted([other.took_s * own.whole_s / other.whole_s for other in alike])
        n = len(times_s)
        quantiles = [times_s[min(n, ceil(level * (n + 1))) - 1] for level in self._levels]
        return [time_s if time_s < inf else None for time_s in quantiles]


def _sample(forecast: Forecast, took_s: float) -> _Sample:
    wait_s, prefill_s = forecast.wait_s + _FLOOR_S, forecast.prefill_s + _FLOOR_S
    return _Sample(log(wait_s), log(prefill_s), wait_s + forecast.prefill_s, took_s)
