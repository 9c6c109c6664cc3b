"""What a request of a pool may expect: its wait and its time to first token, as quantiles.

A scheduler forecasts both from what is ahead and from its predictions. How much truth there is in
that is learned: requests are sampled with their forecast, and what came of them. A quantile is that
of the sampled requests whose forecasts were most like the one asked about, each scaled by the
forecasts' ratio. Like a conformal prediction, the .95 quantile of n of them is the
ceil(.95 (n + 1))th smallest: so it is true of 95 % of requests that are like those sampled.
Requests of each priority class are kept apart, as the queue keeps them.
"""

from collections import deque
from collections.abc import Sequence
from heapq import nsmallest
from math import ceil, inf, log
from typing import Final, NamedTuple

from gateway.records.record import Record
from gateway.scheduling.scheduler import PRIORITY_CLASS_NAMES

KEPT: Final = 512
"""Samples of a class."""
ALIKE: Final = 79
LEAST: Final = 19
"""Samples that a .95 quantile takes at least."""
SAMPLED_PER_S: Final = 20
_FLOOR_S: Final = 0.02
"""Added to forecasts: below it their ratios say nothing."""
_MEMORY: Final = 50


class Forecast(NamedTuple):
    """What a scheduler expects of a job that it was not given yet, in seconds."""

    wait_s: float
    """Until its prefill may begin."""
    prefill_s: float


class Quantiles(Record, frozen=True, kw_only=True):
    """In seconds; None where too little is known."""

    p50: float | None = None
    p95: float | None = None


UNKNOWN: Final = Quantiles()


class _Sample(NamedTuple):
    forecast: Forecast
    wait_s: float
    ttft_s: float | None


class Outlook:
    """Of one pool. Pure: times are arguments, in seconds."""

    def __init__(self) -> None:
        self.answer_s = 0.0
        """Mean time of an answer at a worker; 0 before the first."""
        self._answers = 0
        self._samples: tuple[deque[_Sample], ...] = tuple(
            [deque[_Sample](maxlen=KEPT) for _ in PRIORITY_CLASS_NAMES]
        )
        self._second = -1
        self._seen = 0
        self._every = 1

    def samples(self, now_s: float) -> bool:
        """Whether to sample this request: evenly, and about SAMPLED_PER_S a second at most."""
        second = int(now_s)
        if second != self._second:
            self._every = 1 + self._seen // SAMPLED_PER_S
            self._second, self._seen = second, 0
        self._seen += 1
        return self._seen % self._every == 0

    def note(
        self, priority_class: int, forecast: Forecast, wait_s: float, ttft_s: float | None
    ) -> None:
        """Keep what came of a sampled request; inf for a wait that was given up."""
        self._samples[priority_class].append(_Sample(forecast, wait_s, ttft_s))

    def answered(self, took_s: float) -> None:
        """Learn from the time that an answer took at its worker."""
        self._answers += 1
        self.answer_s += (took_s - self.answer_s) / min(self._answers, _MEMORY)

    def expect(self, priority_class: int, forecast: Forecast) -> tuple[Quantiles, Quantiles]:
        """Wait in the gateway, and time to first token as clients see it."""
        kept = self._samples[priority_class]
        waits = _alike(forecast, kept)
        firsts = _alike(forecast, [sample for sample in kept if sample.ttft_s is not None])
        wait = [sample.wait_s * _ratio(forecast, sample.forecast) for sample in waits]
        first = [(s.ttft_s or 0.0) * _ratio(forecast, s.forecast) for s in firsts]
        return _quantiles(wait), _quantiles(first)


def _alike(forecast: Forecast, samples: Sequence[_Sample]) -> Sequence[_Sample]:
    wait, prefill = log(forecast.wait_s + _FLOOR_S), log(forecast.prefill_s + _FLOOR_S)

    def distance(sample: _Sample) -> float:
        other = sample.forecast
        off = abs(wait - log(other.wait_s + _FLOOR_S))
        return off + abs(prefill - log(other.prefill_s + _FLOOR_S))

    return nsmallest(ALIKE, samples, key=distance)


def _ratio(forecast: Forecast, other: Forecast) -> float:
    whole = forecast.wait_s + forecast.prefill_s + _FLOOR_S
    return whole / (other.wait_s + other.prefill_s + _FLOOR_S)


def _quantiles(values: list[float]) -> Quantiles:
    if len(values) < LEAST:
        return UNKNOWN
    values.sort()
    n = len(values)
    p50, p95 = values[ceil(0.5 * (n + 1)) - 1], values[ceil(0.95 * (n + 1)) - 1]
    return Quantiles(p50=p50 if p50 < inf else None, p95=p95 if p95 < inf else None)
