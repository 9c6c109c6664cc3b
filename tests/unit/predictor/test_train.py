import pytest

from predictor.online import PrefillPredictor
from predictor.train import MIN_ROWS, TooFewRows, train
from tests.unit.predictor.made import rows_of


@pytest.mark.parametrize("boosted", [False, True])
def test_a_trained_predictor_beats_the_constant_on_rows_it_has_not_seen(*, boosted: bool) -> None:
    report = train(rows_of(6000, 1), boosted=boosted).report
    losses = report["pinball_s"]
    assert report["held_out"] == 1500
    assert losses["tree"] < 0.5 * losses["constant"]
    assert losses["calibrated"] < 0.55 * losses["constant"]
    assert report["coverage"]["raw"] == pytest.approx(0.95, abs=0.03)
    assert report["coverage"]["calibrated"] == pytest.approx(0.95, abs=0.02)
    assert report["mean_over_actual"] == pytest.approx(1.0, abs=0.05)
    assert sum(bucket["rows"] for bucket in report["buckets"]) == 1500


def test_the_leaves_hold_quantiles_at_alpha() -> None:
    rows = rows_of(4000, 3)
    for alpha in (0.5, 0.9):
        artifact = train(rows, alpha=alpha)
        raw = PrefillPredictor(artifact, workers=1, alpha=alpha).raw
        within = sum(row.prefill_s <= raw(row.x)[1] for row in rows[:3000]) / 3000
        assert within == pytest.approx(alpha, abs=0.02)


def test_a_slow_worker_does_not_slow_the_others_predictions() -> None:
    report = train(rows_of(6000, 4, slow=2.0, slow_worker="3")).report
    slow = report["slowness"]
    assert slow["3"] == pytest.approx(2.0, rel=0.15)
    assert all(slow[name] == pytest.approx(1.0, rel=0.1) for name in "012")


def test_few_rows_are_too_few() -> None:
    with pytest.raises(TooFewRows, match=f"{MIN_ROWS}"):
        train(rows_of(MIN_ROWS - 1, 5))
    assert train(rows_of(MIN_ROWS, 5)).rows == 750
