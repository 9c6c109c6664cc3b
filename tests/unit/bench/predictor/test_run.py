"""What bench predictor computes from rows, on made-up ones."""

import pytest

from bench.predictor.run import WORKERS, judged, learned_after
from predictor.online import PrefillPredictor
from predictor.train import train
from tests.unit.predictor import made

TRAINED = train(made.rows_of(3000, 1))


def test_a_shift_lowers_raw_coverage_and_calibration_restores_it() -> None:
    found = judged(
        TRAINED,
        made.rows_of(1000, 2),
        made.rows_of(3000, 3, slow=1.5),
        PrefillPredictor(TRAINED, workers=WORKERS),
    )
    assert found.raw < 0.8
    assert found.settled == pytest.approx(0.95, abs=0.02)
    assert found.short_raw_ms < 0
    assert found.pinball_s < found.pinball_raw_s


def test_a_slow_worker_is_known_at_the_end_of_its_first_right_20() -> None:
    rows = made.rows_of(1000, 4, slow=2.0, slow_worker="3")
    after = learned_after(rows, "3", PrefillPredictor(TRAINED, workers=WORKERS))
    assert after is not None
    assert 80 <= after <= 500
    even = learned_after(made.rows_of(1000, 4), "3", PrefillPredictor(TRAINED, workers=WORKERS))
    assert even is not None
    assert even == 80
