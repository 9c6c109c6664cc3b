"""Arrival processes: rates, dispersion, and what is refused."""

import numpy as np
import pytest

from simulator.fleet import arrivals


def gaps(times: np.ndarray) -> np.ndarray:
    return np.diff(times)


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_gamma_has_its_rate_and_its_variation(cv: float) -> None:
    found = gaps(arrivals.gamma(5.0, cv, 200_000, np.random.default_rng(1)))
    assert found.mean() == pytest.approx(0.2, rel=0.03)
    assert found.std() / found.mean() == pytest.approx(cv, rel=0.03)


def test_bursts_keep_the_mean_rate_and_come_in_clumps() -> None:
    found = arrivals.bursty(20.0, 400_000, np.random.default_rng(2), peak=4.0, share=0.2, burst_s=5)
    assert len(found) == 400_000
    assert (gaps(found) >= 0).all()
    assert len(found) / found[-1] == pytest.approx(20.0, rel=0.05)
    counts = np.histogram(found, bins=np.arange(0.0, found[-1], 1.0))[0]
    # A Poisson process has an index of dispersion of 1.
    assert counts.var() / counts.mean() > 5
    assert np.quantile(counts, 0.95) > 3 * 20


def test_a_recording_starts_at_0_and_takes_another_rate() -> None:
    assert arrivals.recorded(np.array([7.0, 5.0, 9.0])).tolist() == [0.0, 2.0, 4.0]
    assert arrivals.recorded(np.array([7.0, 5.0, 9.0]), rate_per_s=1.0).tolist() == [0.0, 1.0, 2.0]


def test_bad_input_is_refused() -> None:
    random = np.random.default_rng(0)
    with pytest.raises(ValueError, match="rate"):
        arrivals.poisson(0.0, 10, random)
    with pytest.raises(ValueError, match="at least one"):
        arrivals.poisson(1.0, 0, random)
    with pytest.raises(ValueError, match="variation"):
        arrivals.gamma(1.0, 0.0, 10, random)
    for bad in ({"peak": 6.0}, {"share": 0.0}, {"burst_s": 0.0}, {"peak": 0.5}):
        with pytest.raises(ValueError, match="bursts"):
            arrivals.bursty(1.0, 10, random, **bad)
    with pytest.raises(ValueError, match="empty"):
        arrivals.recorded(np.array([]))
    with pytest.raises(ValueError, match="rate"):
        arrivals.recorded(np.array([1.0, 1.0]), rate_per_s=2.0)
