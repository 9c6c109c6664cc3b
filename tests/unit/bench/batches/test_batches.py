"""The bench of batches: its demand is the published one, and its runner loses no item."""

import numpy as np
import pytest

from bench.batches import calibration, demand
from bench.batches.runner import Batch, BatchRun
from gateway.batches.promise import Profile


@pytest.mark.parametrize("name", ["code", "conversation"])
def test_days_have_the_published_peaks_and_weekends(name: demand.Scenario) -> None:
    days = [demand._day(name, weekday) for weekday in range(7)]
    ratios = [float(day.max() / day.min()) for day in days]
    assert ratios == pytest.approx(demand.PEAK_TO_TROUGH[name])
    weekend, weekday = (np.mean([day.mean() for day in some]) for some in (days[5:], days[:5]))
    assert weekend / weekday == pytest.approx(demand.WEEKEND[name])
    assert {int(day.argmin()) for day in days} == {demand.TROUGH_HOUR}


def test_batches_of_a_day_are_promised_run_on_leftovers_and_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs: list[BatchRun] = []

    class Watched(BatchRun):
        def judge(self, batch: Batch) -> None:
            runs.append(self)
            super().judge(batch)

    monkeypatch.setattr(calibration, "BatchRun", Watched)
    monkeypatch.setattr(calibration, "NEEDS_S", (200.0, 900.0))
    monkeypatch.setattr(calibration, "PEAK", 3.0)
    batches, profile = calibration.day(("young", 1, Profile()))
    assert len(batches) == calibration.BATCHES
    for batch in batches:
        assert len(batch.ends_s) == batch.items
        assert batch.p50_s <= batch.p95_s <= batch.by_s - batch.at_s
        assert batch.left_slot_s(batch.at_s + 1) <= batch.used_slot_s
    reasons = runs[0].serving.columns.reasons
    assert set(reasons[batches[0].first :]) == {""}
    # Every promise kept here was one that an oracle keeps, too, but for the step of its minutes.
    assert all(b.oracle_keeps for b in batches if not b.refused and b.took_s < 0.9 * b.window_s)
    assert len(profile.hours) > 24 * calibration.YOUNG_DAYS
    assert profile.used_slot_s > 0
