"""The histograms of OpenTelemetry's conventions for generative AI.

Counted here instead of by the SDK's instruments, which take some microseconds a value; only what
is exported is made of the SDK's classes. Values are counted on the event loop and read by the
exporting thread: what it reads may be one value apart between count and sum.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    HistogramDataPoint,
    Metric,
)
from opentelemetry.sdk.metrics.export import Histogram as HistogramData

from gateway.metrics import MAX_SERIES
from gateway.records.decision import DecisionRecord
from gateway.telemetry.spans import PROVIDER, error_type, operation

_DURATION: Final = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92,
)  # fmt: skip
_FIRST: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
_PER_TOKEN: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
)  # fmt: skip
_TOKENS: Final = tuple(float(4**power) for power in range(14))

Labels = tuple[str, ...]


class _Series:
    """Counts by bucket, and what else a point states."""

    __slots__ = ("_bounds", "counts", "largest", "smallest", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.smallest = float("inf")
        self.largest = float("-inf")

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value
        # Not min() and max(), which take longer than all else here.
        if value < self.smallest:  # noqa: PLR1730
            self.smallest = value
        if value > self.largest:  # noqa: PLR1730
            self.largest = value


class _Family:
    """One histogram by label values."""

    def __init__(
        self, name: str, unit: str, text: str, labels: Labels, bounds: Sequence[float]
    ) -> None:
        self._about = (name, text, unit)
        self._labels = labels
        self._bounds = bounds
        self._series: dict[Labels, _Series] = {}

    def series(self, labels: Labels) -> _Series:
        """The series of these values; of those beyond MAX_SERIES one that nobody exports."""
        own = self._series.get(labels)
        if own is None:
            own = _Series(self._bounds)
            if len(self._series) < MAX_SERIES:
                self._series[labels] = own
        return own

    def metric(self, start_ns: int, now_ns: int) -> Metric | None:
        """All series as the SDK exports them; None without any."""
        points = []
        for values, series in list(self._series.items()):
            counts = list(series.counts)
            if not any(counts):
                continue
            named = zip(self._labels, values, strict=True)
            points.append(
                HistogramDataPoint(
                    attributes={name: value for name, value in named if value},
                    start_time_unix_nano=start_ns,
                    time_unix_nano=now_ns,
                    count=sum(counts),
                    sum=series.total,
                    bucket_counts=counts,
                    explicit_bounds=self._bounds,
                    min=series.smallest,
                    max=series.largest,
                )
            )
        if not points:
            return None
        return Metric(*self._about, HistogramData(points, AggregationTemporality.CUMULATIVE))


_OF: Final = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model")
_ANSWERED: Final = (*_OF, "gen_ai.response.model")
_FAMILIES: Final = (
    (
        "gen_ai.server.request.duration",
        "s",
        "Generative AI server request duration such as time-to-last byte or last output token.",
        (*_OF, "error.type"),
        _DURATION,
    ),
    (
        "gen_ai.server.time_to_first_token",
        "s",
        "Time to generate first token for successful responses.",
        _ANSWERED,
        _FIRST,
    ),
    (
        "gen_ai.server.time_per_output_token",
        "s",
        "Time per output token generated after the first token for successful responses.",
        _ANSWERED,
        _PER_TOKEN,
    ),
    (
        "gen_ai.client.token.usage",
        "{token}",
        "Number of input and output tokens used.",
        (*_ANSWERED, "gen_ai.token.type"),
        _TOKENS,
    ),
)


class GenAiMetrics:
    """What the records of a process add up to. Models go by the configuration's names."""

    def __init__(self, start_ns: int) -> None:
        """`start_ns`: Unix time from which is counted."""
        self._start_ns = start_ns
        self._families = tuple(_Family(*about) for about in _FAMILIES)
        self._kinds: dict[tuple[str, str | None, str | None], tuple[_Series, ...]] = {}
        """By endpoint, model and error, the series that differ in their values only, so that
        counting looks up once."""

    def count(self, record: DecisionRecord) -> None:
        """Add one finished request."""
        of = (record.endpoint, record.model, error_type(record))
        kind = self._kinds.get(of)
        if kind is None:
            about = (operation(record), PROVIDER, record.model or "")
            answered = (*about, record.model or "")
            durations, firsts, per_tokens, tokens = self._families
            kind = (
                durations.series((*about, error_type(record) or "")),
                firsts.series(answered),
                per_tokens.series(answered),
                tokens.series((*answered, "input")),
                tokens.series((*answered, "output")),
            )
            if len(self._kinds) < MAX_SERIES:
                self._kinds[of] = kind
        duration, first, per_token, prompt, answer = kind
        timing, usage = record.timing, record.usage
        if timing.duration_s is not None:
            duration.observe(timing.duration_s)
        if record.stream and record.outcome == "ok":
            if timing.ttft_s is not None:
                first.observe(timing.ttft_s)
            if timing.tpot_s is not None:
                per_token.observe(timing.tpot_s)
        if usage.prompt_tokens is not None:
            prompt.observe(usage.prompt_tokens)
        if usage.completion_tokens:
            answer.observe(usage.completion_tokens)

    def collect(self, now_ns: int) -> list[Metric]:
        """Every histogram that has values."""
        made = (family.metric(self._start_ns, now_ns) for family in self._families)
        return [metric for metric in made if metric is not None]
