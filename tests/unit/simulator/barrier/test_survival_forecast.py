"""What survival says of requests that run, and how far to look ahead."""

import numpy as np
import pytest

from simulator.barrier.survival_forecast import (
    horizon_steps,
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


@pytest.mark.parametrize(("mean", "steps"), [(10, 2), (100, 4), (250, 10), (3000, 20)])
def test_the_window_follows_the_mean_output(mean: float, steps: int) -> None:
    assert horizon_steps(mean) == steps
