"""Fit an engine's iteration time to its recorded streams.

An iteration takes t = W + H n + e p + q a (`slots`) or W + h r + e p + q a (`kv`): n sequences run,
r tokens are resident, p prompt tokens are computed, and attend to a tokens before them in their
prompts (FleetOpt, arXiv:2603.16514, section 3, states W and H; e is the inverse of its prefill
rate, q is this project's). The residuals decide which of the two an engine follows.
"""

import math
from collections.abc import Sequence
from typing import Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from planner.errors import PlanError

Timing = Literal["slots", "kv"]
Floats = NDArray[np.float64]

_CLOCK_S: Final = 0.0005
"""Noise of a window's start and end times as a client sees them, seconds."""
_RELATIVE: Final = 0.01
"""Further noise, relative to the window's length."""
_MIN_WINDOWS: Final = 6
_CLEARLY: Final = 4.0
"""Lead in log-likelihood that `kv` needs over `slots`, and a q above 0 over none, to be chosen."""


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """Successive iterations of an engine; sums are over all of them."""

    duration_s: float
    iterations: int
    sequences: float
    """Running sequences, summed over iterations."""
    resident_tokens: float
    """Resident tokens, summed over iterations."""
    prefill_tokens: float = 0.0
    """Prompt tokens computed."""
    attention_pairs: float = 0.0
    """Pairs of such a token and one before it: half a whole prompt's length, squared."""

    @property
    def iteration_s(self) -> float:
        """Mean length of an iteration."""
        return self.duration_s / self.iterations


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """The fitted constants and their quality."""

    timing: Timing
    w_s: float
    h_s: float
    """H, seconds per running sequence; 0 under `kv`."""
    h_s_per_token: float
    """h, seconds per resident token; 0 under `slots`."""
    prefill_s_per_token: float
    attention_s_per_pair: float
    """q, seconds per pair of a prompt token and one before it."""
    errors: tuple[float, float, float, float]
    """Standard errors of W, of H or h, of e and of q, in their units; NaN where unknown."""
    residuals: tuple[float, ...]
    """(modelled - measured) / measured, window by window, in order."""
    other_residual: float
    """Median absolute residual of the timing that was not chosen."""

    def seconds(self, window: Window) -> float:
        """The modelled duration of a window."""
        return (
            self.w_s * window.iterations
            + self.h_s * window.sequences
            + self.h_s_per_token * window.resident_tokens
            + self.prefill_s_per_token * window.prefill_tokens
            + self.attention_s_per_pair * window.attention_pairs
        )

    def prompt_s(self, tokens: Floats) -> Floats:
        """Seconds that prompts of so many tokens add to their iterations."""
        seconds: Floats = tokens * (
            self.prefill_s_per_token + self.attention_s_per_pair * tokens / 2
        )
        return seconds

    @property
    def median_residual(self) -> float:
        """Median of the absolute residuals."""
        return float(np.median(np.abs(self.residuals)))

    @property
    def p95_residual(self) -> float:
        """95th percentile of the absolute residuals."""
        return float(np.quantile(np.abs(self.residuals), 0.95))


def fit_windows(windows: Sequence[Window]) -> Fit:
    """Fit the better of the two timings by robust least squares (soft L1); all constants >= 0.

    q stays 0 unless it explains the windows clearly better: it would take its part of e's noise.

    Raises PlanError with fewer than six windows, or when all ran the same number of sequences.
    """
    if len(windows) < _MIN_WINDOWS:
        raise PlanError(
            f"{len(windows)} windows of even decoding, {_MIN_WINDOWS} are needed",
            "give a larger --budget-s, or an engine that nobody else uses",
        )
    mean = [w.sequences / w.iterations for w in windows]
    if max(mean) < 1.5 * min(mean):
        raise PlanError("every window ran as many sequences", "give a larger --most-concurrency")
    straight, straight_cost = _better(windows, attention=False)
    if not any(window.attention_pairs for window in windows):
        return straight
    curved, curved_cost = _better(windows, attention=True)
    return curved if curved_cost + _CLEARLY < straight_cost else straight


def _better(windows: Sequence[Window], *, attention: bool) -> tuple[Fit, float]:
    """The better timing, and its cost."""
    slots, kv = (_solve(windows, timing, attention=attention) for timing in ("slots", "kv"))
    # Both have as many constants, so their likelihoods compare directly. W + H n is the published
    # form and wins a tie.
    chosen, other = (kv, slots) if kv[1] + _CLEARLY < slots[1] else (slots, kv)
    fit = msgspec.structs.replace(chosen[0], other_residual=other[0].median_residual)
    return fit, chosen[1]


def _solve(windows: Sequence[Window], timing: Timing, *, attention: bool) -> tuple[Fit, float]:
    """Fit one timing, with q or without; returns the fit and its cost."""
    load = [w.sequences if timing == "slots" else w.resident_tokens for w in windows]
    design = np.array(
        [
            (w.iterations, number, w.prefill_tokens, w.attention_pairs)
            for w, number in zip(windows, load, strict=True)
        ],
        dtype=np.float64,
    )
    if not attention:
        design = design[:, :-1]
    measured = np.array([w.duration_s for w in windows])
    noise = _CLOCK_S + _RELATIVE * measured
    # Scaled so that every constant is of order one: otherwise the solver's steps are uneven.
    scale = np.maximum(design.max(axis=0), 1.0) / measured.max()
    scaled = design / scale / noise[:, None]
    start = np.maximum(np.linalg.lstsq(scaled, measured / noise, rcond=None)[0], 0.0)
    solution = least_squares(
        lambda x: scaled @ x - measured / noise,
        start + 1e-6,
        jac=lambda _: scaled,
        bounds=(0.0, math.inf),
        loss="soft_l1",
        xtol=1e-12,
        ftol=1e-12,
    )
    constants = solution.x / scale
    errors = _errors(scaled, solution.fun) / scale
    w_s, load_s, prefill_s, attention_s = (*map(float, constants), 0.0)[:4]
    w_error, load_error, prefill_error, attention_error = (*map(float, errors), math.nan)[:4]
    fit = Fit(
        timing=timing,
        w_s=w_s,
        h_s=load_s if timing == "slots" else 0.0,
        h_s_per_token=load_s if timing == "kv" else 0.0,
        prefill_s_per_token=prefill_s,
        attention_s_per_pair=attention_s,
        errors=(w_error, load_error, prefill_error, attention_error),
        residuals=tuple(float(r) for r in (design @ constants - measured) / measured),
        other_residual=0.0,
    )
    return fit, float(solution.cost)


def _errors(scaled: Floats, misfit: Floats) -> Floats:
    """Robust standard errors; NaN for a constant that no window exercised."""
    spread = 1.4826 * float(np.median(np.abs(misfit)))
    try:
        covariance = np.linalg.inv(scaled.T @ scaled)
    except np.linalg.LinAlgError:
        return np.full(scaled.shape[1], math.nan)
    return spread * np.sqrt(np.maximum(np.diag(covariance), 0.0))
