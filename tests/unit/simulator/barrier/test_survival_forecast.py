"""What survival says of requests that run, and how far to look ahead."""

import numpy as np
import pytest

from simulator.barrier.survival_forecast import (
    AGE_EDGES,
    Floats,
    horizon_steps,
    middle_ages,
    still_alive,
    survival_of,
)


def test_a_geometric_output_forgets_its_age() -> None:
    alive = still_alive([survival_of((0.99 ** np.arange(200_000)).tolist())], 5)
    young = alive[0, :40]
    assert np.allclose(young, 0.99 ** np.arange(6))


def test_who_outlived_all_that_is_known_is_not_expected_to_end() -> None:
    alive = still_alive([survival_of([1.0, 1.0, 0.0])], 3, np.array([0.0, 1.0, 2.0, 9.0]))
    assert alive[0].tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]


def test_a_survival_function_stays_at_its_last_value() -> None:
    survival = survival_of([1.0, 0.5])
    assert survival(np.array([0.0, 0.9, 1.0, 7.0])).tolist() == [1.0, 1.0, 0.5, 0.5]


@pytest.mark.parametrize("shares", [np.zeros(0), np.zeros((2, 2))])
def test_what_is_no_survival_function_is_refused(shares: Floats) -> None:
    with pytest.raises(ValueError, match="survival is given"):
        survival_of(shares)


@pytest.mark.parametrize(("mean", "steps"), [(10, 2), (100, 4), (250, 10), (3000, 20)])
def test_the_window_follows_the_mean_output(mean: float, steps: int) -> None:
    assert horizon_steps(mean) == steps


def test_age_buckets_follow_one_another_and_are_few() -> None:
    assert AGE_EDGES[:6] == (0, 1, 2, 3, 4, 5)
    assert list(AGE_EDGES) == sorted(set(AGE_EDGES))
    assert 65_536 in AGE_EDGES
    assert len(AGE_EDGES) < 80
    widths = np.diff(AGE_EDGES)
    assert (widths[8:] <= np.array(AGE_EDGES[8:-1]) / 4).all()


def test_the_middle_of_a_bucket_stands_for_it() -> None:
    assert middle_ages((0, 1, 4, 10)).tolist() == [0.0, 2.0, 6.5, 10.0]
