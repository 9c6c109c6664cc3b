"""Routing and compression: the gateway's plan for each total."""

import numpy as np
import pytest

from gateway.routing.routing import PoolShape, Routing
from simulator.fleet.routing import REFUSED, RoutedTraffic, route

TWO = Routing(
    pools=(
        PoolShape(name="short", window_tokens=100, boundary_tokens=80),
        PoolShape(name="long", window_tokens=1000, boundary_tokens=None),
    )
)


def routed(
    *lengths: tuple[int, int], gamma: float = 1.0, compressible: float = 1.0
) -> RoutedTraffic:
    prompts, outputs = (np.array(column) for column in zip(*lengths, strict=True))
    return route(
        TWO,
        prompts,
        outputs,
        gamma=gamma,
        compressible=compressible,
        random=np.random.default_rng(0),
    )


def test_the_boundary_and_the_windows_decide() -> None:
    found = routed((70, 10), (70, 11), (95, 10), (990, 10), (991, 10))
    assert found.pool.tolist() == [0, 1, 1, 1, REFUSED]
    # A total above the boundary may still go to the short pool when its window holds it.
    assert found.alternates == [(1,), (0,), (), (), ()]
    assert not found.compressed.any()


def test_the_band_is_compressed_to_the_boundary() -> None:
    found = routed((80, 1), (110, 10), (111, 10), (10, 79), (10, 80), (30, 10), gamma=1.5)
    assert found.compressed.tolist() == [True, True, False, True, False, False]
    assert found.prompt_tokens.tolist() == [79, 70, 111, 1, 10, 30]
    assert found.pool.tolist() == [0, 0, 1, 0, 1, 0]


def test_no_more_than_the_largest_cut_is_taken_out() -> None:
    lengths = np.array([(80, 10), (100, 10), (101, 10)])
    found = route(
        TWO,
        lengths[:, 0],
        lengths[:, 1],
        gamma=2.0,
        max_cut=0.3,
        random=np.random.default_rng(0),
    )
    # 70 of 80, 70 of 100, 70 of 101: the last loses 31.
    assert found.compressed.tolist() == [True, True, False]
    assert found.prompt_tokens.tolist() == [70, 70, 101]


@pytest.mark.parametrize("bad", [{"gamma": 0.9}, {"compressible": 1.1}, {"compressible": -0.1}])
def test_bad_bands_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="gamma"):
        routed((1, 1), **bad)
