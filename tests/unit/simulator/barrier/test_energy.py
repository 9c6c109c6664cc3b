"""The power model: eq. 11 and 58 of the paper."""

import numpy as np
import pytest

from simulator.barrier.summary import PowerModel


def test_power_goes_from_idle_to_peak_less_than_linearly() -> None:
    used = np.array([0.0, 0.25, 0.5, 1.0, 1.5])
    power = PowerModel().power_w(used)
    assert power.tolist() == pytest.approx([100, 213.68, 284.67, 400, 400], abs=0.01)
    assert (np.diff(power, 1)[:3] > 0).all()
    assert power[2] > (power[0] + power[3]) / 2


def test_the_same_work_in_less_time_at_more_power_may_take_less_energy() -> None:
    model = PowerModel()
    balanced, uneven = np.array([[75.0, 75.0]]), np.array([[100.0, 50.0]])
    assert model.group_power_w(balanced)[0] > model.group_power_w(uneven)[0]
    # A step's time follows the fullest worker.
    assert model.energy_j(balanced, np.array([0.75])) < model.energy_j(uneven, np.array([1.0]))
