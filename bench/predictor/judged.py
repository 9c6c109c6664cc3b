"""Targets of `bench predictor`: coverage under shifts, recovery, a slow worker."""

import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from predictor.artifact import PoolSection
from predictor.judge import Floats, pinball, replay
from predictor.online import PrefillPredictor
from predictor.rows import PrefillRow

SETTLED: Final = 1_000
"""Requests of a shift after which coverage is asked for."""
_CALLS: Final = 20_000


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """A predictor on the rows of one shift, after nominal rows."""

    raw: float
    """Coverage of the trained quantiles by themselves."""
    calibrated: float
    """Over all rows of the shift."""
    early: float
    """Calibrated, over the first SETTLED."""
    settled: float
    """Calibrated, after them."""
    short_raw_ms: float
    """By how much the quantile was missed where it was, on average; negative."""
    short_calibrated_ms: float
    pinball_raw_s: float
    pinball_s: float
    wide: float
    """Calibrated quantile over actual, both summed: what coverage costs."""


def judged(
    section: PoolSection | None,
    before: Sequence[PrefillRow],
    shifted: Sequence[PrefillRow],
    predictor: PrefillPredictor,
) -> Judged:
    """Calibrate on `before`, then judge on `shifted`."""
    replay(section, before, predictor)
    actual, _, raw, quantile, _ = replay(section, shifted, predictor)
    within, within_raw = actual <= quantile, actual <= raw
    return Judged(
        raw=float(within_raw.mean()),
        calibrated=float(within.mean()),
        early=float(within[:SETTLED].mean()),
        settled=float(within[SETTLED:].mean()),
        short_raw_ms=_short_ms(actual, raw),
        short_calibrated_ms=_short_ms(actual, quantile),
        pinball_raw_s=pinball(actual, raw, predictor.alpha),
        pinball_s=pinball(actual, quantile, predictor.alpha),
        wide=float(quantile.sum() / actual.sum()),
    )


def learned_after(rows: Sequence[PrefillRow], slow: str, predictor: PrefillPredictor) -> int | None:
    """Requests of all workers until a slow one is known; None if it never is.

    It is at the end of the first 20 of its own whose prefills, summed, are within 20 % of what
    was predicted of them.
    """
    index: dict[str, int] = {}
    for row in rows:
        index.setdefault(row.worker, len(index))
    own: list[tuple[int, float, float]] = []
    for place, row in enumerate(rows):
        worker = index[row.worker]
        mean_s, quantile_s, bucket = predictor.predict(worker, row.x)
        predictor.observe(worker, row.x, mean_s, quantile_s, bucket, row.prefill_s)
        if row.worker == slow:
            own.append((place, mean_s, row.prefill_s))
    for start in range(0, len(own) - 20, 5):
        block = own[start : start + 20]
        if abs(sum(m for _, m, _ in block) / sum(a for *_, a in block) - 1) <= 0.2:
            return block[-1][0] + 1
    return None


def cpu_us(call: Callable[[], object]) -> float:
    """CPU of one call, best of seven runs of many."""
    best = float("inf")
    for _ in range(7):
        start_s = time.process_time()
        for _ in range(_CALLS):
            call()
        best = min(best, time.process_time() - start_s)
    return best / _CALLS * 1e6


def _short_ms(actual: Floats, quantile: Floats) -> float:
    missed = actual > quantile
    return float((quantile - actual)[missed].mean() * 1000) if missed.any() else 0.0
