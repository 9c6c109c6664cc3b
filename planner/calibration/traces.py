"""Cut streams as a client saw them into windows of even work.

Sequences that run together each get one token per iteration, so any of their streams is a clock
that counts iterations. A window is the time between two changes of the batch.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import msgspec
import numpy as np

from planner.calibration.fit import Window

_MIN_ITERATIONS: Final = 8
"""Shorter windows measure the network more than the engine."""
_MIN_CHUNKS: Final = 8
"""Shorter streams are not judged for bursts."""
_DECODE_SHARE: Final = 0.1
"""Least share of a short prompt's stream, alone in the engine, that decoding takes."""
_BURST_SHARE: Final = 0.1
"""Share of a run's streams that may come in bursts."""


class StreamTrace(msgspec.Struct, frozen=True, kw_only=True):
    """One streamed request; times are seconds on one clock per run."""

    submit_s: float
    times_s: tuple[float, ...]
    """Arrival time of each chunk that has tokens, ascending."""
    tokens: tuple[int, ...]
    """Cumulative output tokens at each of these times."""
    prompt_tokens: int
    """Prompt tokens that were not found in the prefix cache."""
    ended: bool = True
    """False if the client left before the end."""

    @property
    def first_s(self) -> float:
        """When the first token arrived."""
        return self.times_s[0]

    @property
    def last_s(self) -> float:
        """When the last token arrived."""
        return self.times_s[-1]

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.first_s - self.submit_s

    @property
    def output_tokens(self) -> int:
        """All output tokens received."""
        return self.tokens[-1]

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first chunk; 0 if there is none."""
        more = self.output_tokens - self.tokens[0]
        return (self.last_s - self.first_s) / more if more else 0.0

    @property
    def gap_s(self) -> float:
        """Median time between two chunks; 0 with too few of them to tell."""
        return float(np.median(np.diff(self.times_s))) if self.judged else 0.0

    @property
    def judged(self) -> bool:
        """Whether it has chunks enough to tell bursts."""
        return len(self.times_s) >= _MIN_CHUNKS

    def tokens_at(self, when_s: float) -> int:
        """Output tokens received by `when_s`."""
        index = bisect_right(self.times_s, when_s)
        return self.tokens[index - 1] if index else 0


class Injection(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt prefilled beside decoding streams."""

    window: Window
    background: int
    """Sequences that decoded meanwhile."""
    gaps_s: tuple[float, ...]
    """Length of each iteration in the window; empty unless every one could be seen."""

    @property
    def prompt_tokens(self) -> int:
        """Computed tokens of the prompt."""
        return round(self.window.prefill_tokens)


def held_back(alone: StreamTrace) -> bool:
    """Whether a stream of a short prompt, alone in the engine, came nearly all at once.

    Something between engine and client collected its tokens, such as a proxy that buffers.
    """
    decode_s = alone.last_s - alone.first_s
    whole_s = alone.last_s - alone.submit_s
    return alone.judged and decode_s < _DECODE_SHARE * whole_s


def in_bursts(traces: Sequence[StreamTrace], alone_gap_s: float) -> bool:
    """Whether chunks came in less than half of `alone_gap_s`, the gap of a stream alone.

    No engine is that fast. Something held the chunks back, such as an API server without a free
    core, so their times do not count.
    """
    judged = [trace for trace in traces if trace.judged]
    fast = sum(trace.gap_s < alone_gap_s / 2 for trace in judged)
    return fast > _BURST_SHARE * len(judged)


def decode_windows(traces: Sequence[StreamTrace]) -> list[Window]:
    """The spans of one run in which no request waited, entered or left.

    `traces`: all requests that the engine had in the run.
    """
    marks = sorted({t for trace in traces for t in (trace.submit_s, trace.first_s, trace.last_s)})
    windows = []
    for start_s, end_s in pairwise(marks):
        middle_s = (start_s + end_s) / 2
        if any(trace.submit_s <= middle_s < trace.first_s for trace in traces):
            continue
        batch = [trace for trace in traces if trace.first_s <= middle_s < trace.last_s]
        window = _even(batch, start_s, end_s) if batch else None
        if window is not None:
            windows.append(window)
    return windows


def _even(batch: Sequence[StreamTrace], start_s: float, end_s: float) -> Window | None:
    """The batch's work between two times, by the median of its streams' clocks."""
    counts, lengths = [], []
    resident = 0.0
    for trace in batch:
        low = bisect_left(trace.times_s, start_s)
        high = bisect_right(trace.times_s, end_s) - 1
        if high <= low:
            return None
        counts.append(trace.tokens[high] - trace.tokens[low])
        lengths.append(trace.times_s[high] - trace.times_s[low])
        resident += trace.prompt_tokens + (trace.tokens[high] + trace.tokens[low]) / 2
    iterations = round(float(np.median(counts)))
    if iterations < _MIN_ITERATIONS:
        return None
    each_s = float(np.median(np.array(lengths) / np.array(counts)))
    return Window(
        duration_s=each_s * iterations,
        iterations=iterations,
        sequences=iterations * len(batch),
        resident_tokens=iterations * resident,
    )


def injection(background: Sequence[StreamTrace], injected: StreamTrace) -> Injection | None:
    """The prefill of one prompt, timed by a stream that decoded throughout.

    None if no stream did, or none of its tokens arrived in between.
    """
    clock = background[0] if background else None
    if clock is None or not clock.first_s < injected.submit_s < injected.first_s < clock.last_s:
        return None
    low = bisect_right(clock.times_s, injected.submit_s) - 1
    high = _nearest(clock.times_s, injected.first_s)
    iterations = clock.tokens[high] - clock.tokens[low]
    if iterations < 1:
        return None
    prompt = injected.prompt_tokens
    resident = sum(
        trace.prompt_tokens
        + (trace.tokens_at(clock.times_s[low]) + trace.tokens_at(clock.times_s[high])) / 2
        for trace in background
    )
    every = high - low == iterations
    gaps_s = np.diff(clock.times_s[low : high + 1]) if every else np.array([])
    # The iteration in progress at submission ran without the prompt, which then grows to its full
    # length chunk by chunk.
    window = Window(
        duration_s=clock.times_s[high] - clock.times_s[low],
        iterations=iterations,
        sequences=iterations * len(background) + iterations - 1,
        resident_tokens=iterations * resident + prompt * iterations / 2,
        prefill_tokens=prompt,
        attention_pairs=prompt * prompt / 2,
    )
    return Injection(window=window, background=len(background), gaps_s=tuple(map(float, gaps_s)))


def _nearest(times_s: Sequence[float], when_s: float) -> int:
    index = bisect_left(times_s, when_s)
    if index == len(times_s):
        return index - 1
    return index - 1 if index and when_s - times_s[index - 1] < times_s[index] - when_s else index
