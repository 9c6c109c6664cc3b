"""The rate that a trace's times state."""

import numpy as np
import pytest

from planner.errors import PlanError
from planner.workload.rate import rate_of


def hours(*rates: float) -> np.ndarray:
    """An hour of evenly spaced requests at each rate."""
    parts = [3600 * i + np.arange(0, 3600, 1 / rate) for i, rate in enumerate(rates) if rate]
    return np.concatenate(parts)


def test_idle_time_is_not_averaged_in() -> None:
    # Eight busy hours and a night of sixteen.
    times = np.concatenate([hours(*[2.0] * 8), [24 * 3600.0]])
    found = rate_of(times)
    assert found.per_s == pytest.approx(2.0, rel=0.02)
    assert "97 busy five-minute windows of 288" in found.said


def test_a_quantile_of_the_windows_finds_the_busy_hour() -> None:
    times = hours(1.0, 1.0, 1.0, 5.0)
    assert rate_of(times).per_s == pytest.approx(2.0, rel=0.01)
    found = rate_of(times, 0.95)
    assert found.per_s == pytest.approx(5.0, rel=0.02)
    assert found.said.startswith("the 0.95 quantile of 48 busy")


def test_a_trace_shorter_than_a_window_has_its_own_mean() -> None:
    found = rate_of(np.array([0.0, 1.0, 2.0]))
    assert found.per_s == pytest.approx(1.0)
    assert found.said == "the mean over 2 s"


@pytest.mark.parametrize("quantile", [0.0, 1.5])
def test_a_quantile_outside_its_range_is_refused(quantile: float) -> None:
    with pytest.raises(PlanError, match="rate quantile"):
        rate_of(np.array([0.0, 1.0]), quantile)
