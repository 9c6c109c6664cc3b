"""Evaluates a trained predictor on held-out rows, and compares it with simpler ones."""

import warnings
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import QuantileRegressor

from predictor.artifact import PoolSection
from predictor.calibrate import BUCKETS, bucket_name
from predictor.features import HIT, LOCALITY
from predictor.online import PrefillPredictor
from predictor.rows import PrefillRow

PRIOR: Final = "prior, learned online"
"""Name in a report of the untrained prior, which starts with the held-out rows like the tree."""
_LINEAR_ROWS: Final = 4000
_POINTS: Final = 2000

Floats = NDArray[np.float64]


def pinball(actual: Floats, quantile: Floats, alpha: float) -> float:
    """Mean pinball loss at alpha, in seconds; the alpha quantile minimises it."""
    error = actual - quantile
    return float(np.maximum(alpha * error, (alpha - 1) * error).mean())


def judge(
    section: PoolSection, learned: Sequence[PrefillRow], held_out: Sequence[PrefillRow]
) -> dict[str, Any]:
    """A report: pinball losses, raw and calibrated coverage in all and by bucket, plot points.

    Calibration runs as online: each row is predicted before it is learned from.
    """
    actual, mean, raw, calibrated, bucket = replay(section, held_out)
    alpha = section.alpha
    report: dict[str, Any] = {
        "rows": len(learned),
        "held_out": len(held_out),
        "pinball_s": {
            "tree": pinball(actual, raw, alpha),
            "calibrated": pinball(actual, calibrated, alpha),
            **_baselines(section, learned, held_out),
        },
        "coverage": {
            "raw": float((actual <= raw).mean()),
            "calibrated": float((actual <= calibrated).mean()),
        },
        "mean_over_actual": float(mean.sum() / actual.sum()),
        "buckets": [],
    }
    for b in range(BUCKETS):
        inside = bucket == b
        if inside.any():
            report["buckets"].append(
                {
                    "bucket": bucket_name(b),
                    "rows": int(inside.sum()),
                    "raw": float((actual <= raw)[inside].mean()),
                    "calibrated": float((actual <= calibrated)[inside].mean()),
                }
            )
    step = max(1, len(actual) // _POINTS)
    report["points"] = [
        [round(float(q), 4), round(float(a), 4)]
        for q, a in zip(calibrated[::step], actual[::step], strict=True)
    ]
    return report


def beats_prior(report: dict[str, Any]) -> bool:
    """Whether a section judged so predicts the held-out rows better than no training would."""
    losses = report["pinball_s"]
    return bool(losses["calibrated"] < losses[PRIOR])


def replay(
    section: PoolSection | None,
    rows: Sequence[PrefillRow],
    predictor: PrefillPredictor | None = None,
) -> tuple[Floats, Floats, Floats, Floats, NDArray[np.int64]]:
    """Predict and learn the rows in order: actual, mean, raw and calibrated quantile, bucket.

    Arrays of shape (rows,), seconds but for the bucket. `predictor`: one to continue with.
    """
    index: dict[str, int] = {}
    for row in rows:
        index.setdefault(row.worker, len(index))
    alpha = section.alpha if section else 0.95
    predictor = predictor or PrefillPredictor(section, workers=len(index), alpha=alpha)
    results = np.empty((len(rows), 5))
    for i, row in enumerate(rows):
        worker = index[row.worker]
        _, raw_s = predictor.raw(row.x)
        mean_s, quantile_s, bucket = predictor.predict(worker, row.x)
        predictor.observe(worker, row.x, mean_s, quantile_s, bucket, row.prefill_s)
        results[i] = row.prefill_s, mean_s, raw_s, quantile_s, bucket
    actual, mean, raw, calibrated, buckets = results.T
    return actual, mean, raw, calibrated, buckets.astype(np.int64)


def _baselines(
    section: PoolSection, learned: Sequence[PrefillRow], held_out: Sequence[PrefillRow]
) -> dict[str, float]:
    """Losses of a constant quantile, of a linear quantile regression, and of the prior."""
    alpha = section.alpha
    y = np.array([row.prefill_s for row in learned])
    actual = np.array([row.prefill_s for row in held_out])
    workers = len({row.worker for row in held_out})
    prior = PrefillPredictor(None, workers=workers, alpha=alpha)
    _, _, _, online, _ = replay(None, held_out, prior)
    losses = {
        "constant": pinball(actual, np.full(len(actual), np.quantile(y, alpha)), alpha),
        PRIOR: pinball(actual, online, alpha),
    }
    guessed = _linear(learned, held_out, alpha)
    if guessed is not None:
        losses["linear"] = pinball(actual, guessed, alpha)
    return losses


def _linear(
    learned: Sequence[PrefillRow], held_out: Sequence[PrefillRow], alpha: float
) -> Floats | None:
    """Predictions of a linear quantile regression; None when it does not converge."""
    x, y = np.array([row.x for row in learned]), np.array([row.prefill_s for row in learned])
    spread = x.std(axis=0)
    # Dropped as redundant: hits = prompt - uncached; the class follows from the share.
    used = [i for i in range(x.shape[1]) if spread[i] > 0 and i not in {HIT, LOCALITY}]
    scale = spread[used]
    chosen = np.random.default_rng(0).permutation(len(x))[:_LINEAR_ROWS]
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        try:
            model = QuantileRegressor(quantile=alpha, alpha=0)
            model.fit((x[:, used] / scale)[chosen], y[chosen])
        except ConvergenceWarning:
            return None
    guessed: Floats = model.predict(np.array([row.x for row in held_out])[:, used] / scale)
    return np.maximum(guessed, 0.0)
