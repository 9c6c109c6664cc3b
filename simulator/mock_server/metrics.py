"""Prometheus text under vLLM's names, rendered by hand: recording a value is cheap."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Final

_SECONDS: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_LONG_SECONDS: Final = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
    240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_LAG_SECONDS: Final = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)
_LAG_WINDOW: Final = 4096


def token_buckets(max_model_len: int) -> tuple[float, ...]:
    """The 1-2-5 buckets of vLLM up to the window."""
    out: list[float] = []
    scale = 1
    while True:
        for mantissa in (1, 2, 5):
            if mantissa * scale > max_model_len:
                return tuple(out)
            out.append(float(mantissa * scale))
        scale *= 10


class MockHistogram:
    """Counts of observations at or below each bound, and their sum."""

    __slots__ = ("bounds", "counts", "help", "name", "sum")

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.help = text
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def named(self, name: str, text: str) -> "MockHistogram":
        """The same as of now under another name."""
        other = MockHistogram(name, text, self.bounds)
        other.counts, other.sum = list(self.counts), self.sum
        return other

    def lines(self, labels: str) -> Iterable[str]:
        """Sample lines, buckets cumulative."""
        total = 0
        for bound, number in zip((*self.bounds, None), self.counts, strict=True):
            total += number
            le = "+Inf" if bound is None else f"{bound:g}" if bound != int(bound) else f"{bound}"
            yield f'{self.name}_bucket{{{labels},le="{le}"}} {total}'
        yield f"{self.name}_sum{{{labels}}} {self.sum}"
        yield f"{self.name}_count{{{labels}}} {total}"


class RankMetrics:
    """Measurements of one rank's requests."""

    def __init__(self, max_model_len: int) -> None:
        tokens = token_buckets(max_model_len)
        self.ttft_s = MockHistogram(
            "vllm:time_to_first_token_seconds", "Time to first token.", _SECONDS
        )
        self.queue_s = MockHistogram(
            "vllm:request_queue_time_seconds", "Time in the waiting phase.", _LONG_SECONDS
        )
        self.prefill_s = MockHistogram(
            "vllm:request_prefill_time_seconds", "Time in the prefill phase.", _LONG_SECONDS
        )
        self.decode_s = MockHistogram(
            "vllm:request_decode_time_seconds", "Time in the decode phase.", _LONG_SECONDS
        )
        self.e2e_s = MockHistogram(
            "vllm:e2e_request_latency_seconds", "End to end request latency.", _LONG_SECONDS
        )
        self.tpot_s = MockHistogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time per output token after the first.",
            _SECONDS,
        )
        self.prompt_tokens = MockHistogram(
            "vllm:request_prompt_tokens", "Prefill tokens processed.", tokens
        )
        self.generation_tokens = MockHistogram(
            "vllm:request_generation_tokens", "Generation tokens processed.", tokens
        )
        self.max_tokens = MockHistogram(
            "vllm:request_params_max_tokens", "The max_tokens request parameter.", tokens
        )
        self.success = {"stop": 0, "length": 0, "abort": 0}

    @property
    def histograms(self) -> tuple[MockHistogram, ...]:
        """All histograms, in the order they are shown."""
        return (
            self.ttft_s,
            self.queue_s,
            self.prefill_s,
            self.decode_s,
            self.e2e_s,
            self.tpot_s,
            self.prompt_tokens,
            self.generation_tokens,
            self.max_tokens,
        )


class Lag:
    """Delay of written tokens against their iteration's deadline, seconds."""

    def __init__(self) -> None:
        self.histogram = MockHistogram(
            "mock_lag_seconds", "Lateness of written tokens against their deadline.", _LAG_SECONDS
        )
        self._recent = [0.0] * _LAG_WINDOW
        self._count = 0

    def observe(self, lag_s: float) -> None:
        """Count one write."""
        self.histogram.observe(lag_s)
        self._recent[self._count % _LAG_WINDOW] = lag_s
        self._count += 1

    def quantiles(self) -> tuple[float, float]:
        """(p50, p99) of the last 4,096 writes; zeros before the first."""
        recent = sorted(self._recent[: min(self._count, _LAG_WINDOW)])
        if not recent:
            return 0.0, 0.0
        last = len(recent) - 1
        return recent[last // 2], recent[int(last * 0.99)]


class Exposition:
    """Builds the text: each metric's help and type once, then its samples."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, name: str, kind: str, text: str, samples: Iterable[tuple[str, float]]) -> None:
        """A counter or gauge; `samples` are (labels without braces, value)."""
        self._head(name, kind, text)
        for labels, value in samples:
            self._lines.append(f"{name}{{{labels}}} {value}" if labels else f"{name} {value}")

    def add_histogram(self, histograms: Sequence[tuple[str, MockHistogram]]) -> None:
        """One histogram, with its labels for each rank."""
        first = histograms[0][1]
        self._head(first.name, "histogram", first.help)
        for labels, histogram in histograms:
            self._lines.extend(histogram.lines(labels))

    def render(self) -> bytes:
        """The whole text."""
        return ("\n".join(self._lines) + "\n").encode()

    def _head(self, name: str, kind: str, text: str) -> None:
        self._lines.append(f"# HELP {name} {text}")
        self._lines.append(f"# TYPE {name} {kind}")
