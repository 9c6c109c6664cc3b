"""Prefill time without a trained model: a linear cost model of the engine, learned online.

    t = s_0 + s_a active + s_u uncached + s_b min(backlog, knot) + s_e max(0, backlog - knot)
        + s_w max(0, active + 1 - slots)

s_0 is the step running when a request arrives, s_a the cost per active sequence, s_u the cost of
an uncached prompt token including its share of steps, s_b the same for the backlog up to the
knot, the amount that the gate lets through. With a gate, a dispatched request never waits for
more, so s_e starts at 0 and is learned only without a gate. s_w is the wait for a slot where an
engine runs no more sequences than `slots`: without it, one mean would have to serve requests
that start at once and requests that wait for an answer to end. The constants start at an engine's
typical values and are learned by recursive least squares on relative errors, clipped to limit
the effect of outliers.
"""

from collections.abc import Sequence
from math import isfinite
from operator import mul
from typing import Final

import msgspec

SIZE: Final = 6
QUANTILE_OVER_MEAN: Final = 2.0
"""Quantile over mean before the spread is known; calibration corrects it."""
NO_SLOTS: Final = 1 << 30
"""Slots of an engine whose number is not known: nothing is taken to wait for one."""
_SLOT_S: Final = 0.25
"""Typical wait for a slot, by sequence ahead."""
FLOOR_S: Final = 1e-4
"""Least prediction."""
_NOISE: Final = 0.1
"""Variance of a relative error."""
_FORGET: Final = 0.998
_DOWN: Final = -0.8
_UP: Final = 3.0
_MIN_SCALES: Final = (0.002, 0.0, 0.002, 0.0, 0.0, 0.0)
_MAX_SCALE: Final = 100.0
"""A constant stays between _MIN_SCALES and _MAX_SCALE times its starting value."""
_SETTLED: Final = 200
_EVERY: Final = 4
_SMOOTH: Final = 0.1
_DRIFT: Final = 0.7
"""Errors drift when their smoothed sum is above this share of their smoothed size."""
_CATCH_UP: Final = 0.3
"""Share of a drifting error by which all constants are scaled at once."""
_YOUNG: Final = 32
"""Observations before which every error may be the prior's own."""


class PriorRates(msgspec.Struct, frozen=True, kw_only=True):
    """Assumed cost of an engine's prefill before any observation.

    ValueError for values out of range.
    """

    prefill_tokens_per_s: float = 8000.0
    """Prefill rate including the time of its steps; >= 1."""
    step_s: float = 0.025
    """Duration of the step running when a request arrives; > 0."""
    step_s_per_sequence: float = 0.0004
    gate_tokens: int = 4096
    """Prefill that the gateway's gate allows a worker to have outstanding: the knot."""
    within_gate: float = 0.5
    """Share of the backlog up to the knot that a request waits for; the rest is done already."""
    beyond_gate: float = 0.0
    """Share of the backlog beyond the knot that a request waits for, without a gate."""

    def __post_init__(self) -> None:
        shares = (self.within_gate, self.beyond_gate)
        figures = (self.prefill_tokens_per_s, self.step_s, self.step_s_per_sequence, *shares)
        if not all(isfinite(figure) for figure in figures):
            raise ValueError("the rates of a prior must be finite numbers")
        if not 1 <= self.prefill_tokens_per_s <= 1e8:
            raise ValueError("prefill_tokens_per_s must be between 1 and 1e8")
        if not 1e-6 <= self.step_s <= 60 or not 0 <= self.step_s_per_sequence <= 60:
            raise ValueError("step_s must be between 1e-6 and 60, step_s_per_sequence 0 to 60")
        if not 1 <= self.gate_tokens <= 1 << 24:
            raise ValueError("gate_tokens must be between 1 and 2**24")
        if not all(0 <= share <= 10 for share in shares):
            raise ValueError("within_gate and beyond_gate must be between 0 and 10")

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Seconds for s_0, s_a, s_u, s_b, s_e, s_w."""
        per_token_s = 1.0 / self.prefill_tokens_per_s
        return (
            self.step_s,
            self.step_s_per_sequence,
            per_token_s,
            per_token_s * self.within_gate,
            per_token_s * self.beyond_gate,
            0.0,
        )


class Prior:
    """The learned constants, common to all workers of a pool (slowness 1)."""

    __slots__ = (
        "_cov",
        "_low",
        "_most",
        "_scale",
        "_size",
        "_trend",
        "_turn",
        "knot",
        "s",
        "seen",
        "slots",
    )

    def __init__(self, rates: PriorRates, slots: int = NO_SLOTS) -> None:
        self.knot = rates.gate_tokens
        self.slots = slots
        self.s = list(rates.coefficients)
        self.seen = 0
        """Number of observations."""
        per_token_s = self.s[2]
        least = (1e-5, 1e-6, 0.0, per_token_s / 8, per_token_s / 8, _SLOT_S)
        self._scale = [max(value, low) for value, low in zip(self.s, least, strict=True)]
        self._low = [share * v for share, v in zip(_MIN_SCALES, self._scale, strict=True)]
        self._most = [value * value for value in self._scale]
        self._cov = [[v if i == j else 0.0 for j in range(SIZE)] for i, v in enumerate(self._most)]
        self._turn = 0
        self._trend = 0.0
        self._size = 0.3

    @property
    def prefill_tokens_per_s(self) -> float:
        """1 / s_u."""
        return 1.0 / self.s[2]

    @property
    def rates(self) -> PriorRates:
        """The learned constants as the starting values of another prior."""
        s_0, s_a, s_u, s_b, s_e, _ = self.s
        return PriorRates(
            prefill_tokens_per_s=min(max(1.0 / s_u, 1.0), 1e8),
            step_s=min(max(s_0, 1e-6), 60.0),
            step_s_per_sequence=min(s_a, 60.0),
            gate_tokens=self.knot,
            within_gate=min(s_b / s_u, 10.0),
            beyond_gate=min(s_e / s_u, 10.0),
        )

    def mean_s(self, x: Sequence[float]) -> float:
        """Expected prefill time of x at slowness 1; at least FLOOR_S."""
        s = self.s
        backlog = x[2]
        t = s[0] + s[1] * x[3] + s[2] * x[1]
        if backlog:
            ahead = min(backlog, self.knot)
            t += s[3] * ahead + s[4] * (backlog - ahead)
        waiting = x[3] + 1 - self.slots
        if waiting > 0:
            t += s[5] * waiting
        return t if t > FLOOR_S else FLOOR_S  # noqa: FURB136 - max() would be a call

    def observe(self, x: Sequence[float], actual_s: float) -> float:
        """Learn from a prefill's time on a worker of slowness 1.

        Once settled, only every fourth prefill counts: an engine's constants change slowly, and
        this is the most expensive part of handling a first token. When errors drift, having one
        sign for a while, the constants are wrong as a whole, and are scaled as a whole: an engine
        that compiled its kernels under the first requests is some hundred times as fast after.

        Returns by which factor this changed the mean of x, if the error was the prior's own (it is
        young, or drifts); 1 otherwise.
        """
        self.seen += 1
        self._turn = (self._turn + 1) % _EVERY
        drifts = abs(self._trend) > _DRIFT * self._size
        if self.seen > _SETTLED and self._turn and not drifts:
            return 1.0
        mean_s = self.mean_s(x)
        backlog, knot = x[2], self.knot
        ahead = min(backlog, knot)
        phi = (
            1.0 / mean_s,
            x[3] / mean_s,
            x[1] / mean_s,
            ahead / mean_s,
            (backlog - ahead) / mean_s,
            max(0.0, x[3] + 1 - self.slots) / mean_s,
        )
        cov = self._cov
        along = [sum(map(mul, row, phi)) for row in cov]
        spread = _NOISE + sum(map(mul, phi, along))
        error = min(max(actual_s / mean_s - 1.0, _DOWN), _UP)
        self._trend += _SMOOTH * (error - self._trend)
        self._size += _SMOOTH * (abs(error) - self._size)
        # A clipped error says in which direction the truth is, not where: no certainty is gained.
        clipped = not _DOWN < error < _UP
        for i, (low, scale) in enumerate(zip(self._low, self._scale, strict=True)):
            gain = along[i] / spread
            self.s[i] = min(max(self.s[i] + gain * error, low), _MAX_SCALE * scale)
            if clipped:
                continue
            cov[i] = [(c - gain * a) / _FORGET for c, a in zip(cov[i], along, strict=True)]
        self._bound()
        if drifts:
            self.stretch(1.0 + _CATCH_UP * error)
        return self.mean_s(x) / mean_s if drifts or self.seen <= _YOUNG else 1.0

    def _bound(self) -> None:
        """Cap each constant's variance at its initial one, else unused constants diverge."""
        cov = self._cov
        for i, most in enumerate(self._most):
            if cov[i][i] > most:
                shrink = (most / cov[i][i]) ** 0.5
                for j in range(SIZE):
                    cov[i][j] *= shrink
                    cov[j][i] *= shrink

    def stretch(self, factor: float) -> None:
        """Scale all constants: all workers turned out slower by this factor."""
        for i, (low, scale) in enumerate(zip(self._low, self._scale, strict=True)):
            self.s[i] = min(max(self.s[i] * factor, low), _MAX_SCALE * scale)

    def adopt(self, s: Sequence[float], pull: float) -> None:
        """Move towards another replica's constants by the share `pull`, 0..1."""
        for i, (low, scale) in enumerate(zip(self._low, self._scale, strict=True)):
            self.s[i] += pull * (min(max(s[i], low), _MAX_SCALE * scale) - self.s[i])
