"""Infer an engine's chunk size, slots and fixed overhead from timed prompts and plateaus."""

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from planner.calibration.fit import Fit, Floats, Window
from planner.calibration.traces import Injection, StreamTrace

_ROUND_TOKENS: Final = 64
_MIN_LENGTHS: Final = 4
"""Fewest distinct prompt lengths from which a chunk size is inferred."""
_NOISE: Final = 0.05
"""A round number this close to the estimate is taken as the configured chunk."""
_SLOPES_S: Final = np.linspace(0.0, 4e-6, 17)


def chunk_tokens(
    injections: Sequence[Injection], alone: Sequence[StreamTrace], fit: Fit
) -> int | None:
    """C, the prompt tokens of one iteration; None if no prompt was split.

    `alone` holds requests that met an idle engine. Their TTFT rises by one iteration at each
    further chunk, which gives a range for C. Within the range, the longest iterations beside a
    decoding stream are more precise if prompt tokens cost time; otherwise the roundest number wins.
    """
    longest = max((trace.prompt_tokens for trace in alone), default=0)
    if len({trace.prompt_tokens for trace in alone}) < _MIN_LENGTHS:
        return None
    low, high = _by_steps(alone, fit, longest)
    length = _by_length(injections, fit)
    if length is not None and not 0.75 * low <= length <= 1.33 * high:
        low, high = 0, longest - 1  # too noisy to narrow the range
    if length is not None and (1 - _NOISE) * low <= length <= (1 + _NOISE) * high:
        return _round(length, (1 - _NOISE) * length, (1 + _NOISE) * length)
    return None if high >= longest else _round((low + high) / 2, low, high)


def _by_steps(alone: Sequence[StreamTrace], fit: Fit, longest: int) -> tuple[int, int]:
    """The range of C for which the remaining TTFT is closest to a straight line."""
    fastest: dict[int, StreamTrace] = {}
    for trace in alone:  # noise only ever delays
        # Prompts of nearly the same length: lengths are only accurate to a few tokens.
        key = round(8 * float(np.log2(trace.prompt_tokens)))
        if key not in fastest or trace.ttft_s < fastest[key].ttft_s:
            fastest[key] = trace
    prompts = np.array([trace.prompt_tokens for trace in fastest.values()], dtype=np.float64)
    ttft_s = np.array([trace.ttft_s for trace in fastest.values()])
    candidates = np.arange(32, longest + 1)
    steps = np.ceil(prompts[:, None] / candidates)
    off = _line(prompts, ttft_s[:, None] - _engine_s(fit, prompts[:, None], steps))[2]
    best = np.flatnonzero(off <= off.min() * (1 + 1e-6) + 1e-9)
    return int(candidates[best[0]]), int(candidates[best[-1]])


def _engine_s(fit: Fit, prompts: Floats, steps: Floats) -> Floats:
    """Modelled time of an idle engine until the first token."""
    resident = prompts * (steps + 1) / 2
    each_s: Floats = (fit.w_s + fit.h_s) * steps + fit.h_s_per_token * resident
    return each_s + fit.prompt_s(prompts)


def _line(prompts: Floats, rest_s: Floats) -> tuple[Floats, Floats, Floats]:
    """Fit a line per column by least absolute deviations; returns intercept, slope, summed misfit.

    `rest_s` has shape (prompts, columns). Intercept and slope stand for parsing and tokenising, so
    slopes are searched from 0 to 4 us a token.
    """
    tilted = rest_s[..., None] - prompts[:, None, None] * _SLOPES_S
    middle = np.maximum(np.median(tilted, axis=0), 0.0)
    off = np.abs(tilted - middle).sum(axis=0)
    best = off.argmin(axis=1)
    rows = np.arange(len(best))
    return middle[rows, best], _SLOPES_S[best], off[rows, best]


def _by_length(injections: Sequence[Injection], fit: Fit) -> float | None:
    """Estimate C from iterations full of prompt tokens: all of a prompt's but the last."""
    full = []
    for injection in injections:
        prompt_s = float(fit.prompt_s(np.array(float(injection.prompt_tokens))))
        each_s = (fit.seconds(injection.window) - prompt_s) / injection.window.iterations
        # Usable only if clearly above noise: the prompt costs at least half an iteration.
        if prompt_s < 0.5 * each_s:
            continue
        extra = [gap_s - each_s for gap_s in injection.gaps_s]
        busy = [e for e in extra if e > 0.25 * max(extra)] if extra else []
        if not busy:
            continue
        # Time beyond that of the prompt's tokens, such as for its arrival, belongs to no chunk.
        other_s = max(0.0, sum(busy) - prompt_s) / len(busy)
        done, tokens = 0.0, []
        for extra_s in busy[:-1]:
            chunk = _tokens_of(fit, max(0.0, extra_s - other_s), done)
            done += chunk
            tokens.append(chunk + injection.background)
        full += [t for t in tokens if t > 0.5 * max(tokens)]
    return float(np.median(full)) if full else None


def _tokens_of(fit: Fit, seconds: float, done: float) -> float:
    """The prompt tokens that so many seconds compute, after `done` others of the prompt."""
    each_s = fit.prefill_s_per_token + fit.attention_s_per_pair * done
    root = (each_s * each_s + 2 * fit.attention_s_per_pair * seconds) ** 0.5
    return 2 * seconds / (each_s + root) if root else 0.0


def _round(value: float, low: float, high: float) -> int:
    """The power of two in the range, else a multiple of 64 in it, else the value itself."""
    power = 1 << round(float(np.log2(max(value, 1))))
    if low <= power <= high:
        return int(power)
    multiple = _ROUND_TOKENS * round(value / _ROUND_TOKENS)
    return int(multiple) if low <= multiple <= high and multiple else round(value)


def plateau(traces: Sequence[StreamTrace]) -> int | None:
    """The sequences that ran at once while others had to wait; None if none waited.

    `traces`: one run of requests submitted together.
    """
    ends = sorted(trace.last_s for trace in traces)
    waited = sum(trace.first_s > ends[0] for trace in traces)
    if waited < max(2, len(traces) // 16):
        return None
    starts = [trace.first_s for trace in traces]
    return max(sum(t.first_s <= at_s < t.last_s for t in traces) for at_s in starts)


class Overhead(msgspec.Struct, frozen=True, kw_only=True):
    """Time before the engine sees a request: network, parsing, tokenising."""

    fixed_s: float = 0.0
    per_token_s: float = 0.0
    """Seconds per prompt token."""

    def seconds(self, prompt_tokens: int) -> float:
        """Overhead of one request."""
        return self.fixed_s + self.per_token_s * prompt_tokens


def overhead(alone: Sequence[StreamTrace], fit: Fit, chunk: int | None) -> Overhead:
    """Fit a line to requests that met an idle engine; zeros without such requests."""
    if not alone:
        return Overhead()
    prompts = np.array([trace.prompt_tokens for trace in alone], dtype=np.float64)
    steps = np.ceil(prompts / chunk) if chunk else np.ones_like(prompts)
    rest_s = np.array([trace.ttft_s for trace in alone]) - _engine_s(fit, prompts, steps)
    fixed_s, slope_s, _ = _line(prompts, rest_s[:, None])
    return Overhead(fixed_s=float(fixed_s[0]), per_token_s=float(slope_s[0]))


def settled(injection: Injection, chunk: int | None) -> Window:
    """The injection's window, recounted with one iteration per chunk of the prompt."""
    window, prompt = injection.window, injection.prompt_tokens
    if chunk is None or chunk <= injection.background:
        return window
    steps = min(window.iterations, -(-prompt // (chunk - injection.background)))
    was = window.iterations - 1
    return msgspec.structs.replace(
        window,
        sequences=window.sequences - was + steps,
        resident_tokens=window.resident_tokens + prompt * (steps + 1 - window.iterations) / 2,
    )
