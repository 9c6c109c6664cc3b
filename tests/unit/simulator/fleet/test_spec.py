"""Fleets that make no sense are refused; the others are the gateway's routing table."""

import msgspec
import pytest

from simulator.fleet.spec import FleetSpec, PoolSpec
from tests.unit.simulator.fleets import second


def test_bad_fleets_are_refused() -> None:
    pool = PoolSpec(name="a", instances=1, profile=second())
    narrow = PoolSpec(name="b", instances=1, profile=second(max_model_len=100))
    with pytest.raises(ValueError, match="at least one pool"):
        FleetSpec(pools=())
    with pytest.raises(ValueError, match="ordered by window"):
        FleetSpec(pools=(msgspec.structs.replace(pool, boundary_tokens=5), narrow))
    with pytest.raises(ValueError, match="needs a boundary"):
        FleetSpec(pools=(narrow, pool))
    with pytest.raises(ValueError, match="at least one instance"):
        FleetSpec(pools=(msgspec.structs.replace(pool, instances=0),))
    with pytest.raises(ValueError, match="dispatch best is unknown"):
        FleetSpec(pools=(pool,), dispatch="best")
