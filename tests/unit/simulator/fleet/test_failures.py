"""Failures: their means, and the order in which the fleet learns of them."""

from math import inf

import numpy as np
import pytest

from simulator.fleet.failures import Outage, changes_of, outages
from tests.unit.simulator.fleets import one_pool, second


def test_random_outages_have_their_means() -> None:
    spec = one_pool(second(), instances=50)
    found = outages(spec, 1e5, mtbf_s=900.0, repair_s=100.0, random=np.random.default_rng(0))
    assert len(found) / 50 == pytest.approx(1e5 / 1000.0, rel=0.05)
    away = sum(o.up_s - o.down_s for o in found) / 50 / 1e5
    assert away == pytest.approx(0.1, rel=0.05)
    with pytest.raises(ValueError, match="above 0"):
        outages(spec, 1.0, mtbf_s=0.0, repair_s=1.0, random=np.random.default_rng(0))


def test_changes_come_in_order_and_repairs_before_failures() -> None:
    found = changes_of(
        [
            Outage(pool=0, worker=1, down_s=5.0),
            Outage(pool=0, worker=0, down_s=1.0, up_s=5.0),
            Outage(pool=1, worker=0, down_s=1.0, up_s=inf),
        ]
    )
    assert found == [
        (1.0, 0, 0, False),
        (1.0, 1, 0, False),
        (5.0, 0, 0, True),
        (5.0, 0, 1, False),
    ]
