"""What bench predictor computes from rows, on made-up ones."""

import pytest

from bench.predictor.judged import judged, learned_after
from bench.predictor.run import pinball_rows
from bench.predictor.runs import WORKERS, rows_of, shape_of, slower
from predictor.online import PrefillPredictor
from predictor.train import train
from simulator.experiments.scheduling import WORKER
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


def test_rows_of_a_run_are_its_prefills() -> None:
    rows = rows_of(shape_of(rate=8.0), WORKER, 200, 1)
    assert len(rows) == 200
    assert all(row.prefill_s > WORKER.w_s for row in rows)
    assert len({row.worker for row in rows}) == WORKERS
    late = rows_of(shape_of(rate=8.0), slower(WORKER, 3.0), 200, 1)
    assert sum(r.prefill_s for r in late) > 2 * sum(r.prefill_s for r in rows)


def test_the_tree_is_held_against_the_constant() -> None:
    rows = {row.metric: row for row in pinball_rows(TRAINED, TRAINED)}
    assert rows["held-out pinball: tree, ms"].holds is not None
    assert "held-out pinball: one constant, ms" in rows
