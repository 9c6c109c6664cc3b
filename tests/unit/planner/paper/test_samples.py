"""Mode paper equals FleetOpt's Table 3; `bench fleetopt` has all other published cells."""

import pytest

from planner.paper import samples
from planner.profile import PAPER_A100
from planner.workload.distribution import Cdf
from planner.workload.library import SHIPPED

WINDOW = 65_536


def cdf_of(name: str) -> Cdf:
    cdf = SHIPPED[name].workload.cdf
    assert cdf is not None
    return cdf


def cell(name: str, gamma: float, rate: float = 1000.0) -> samples.Cell:
    shipped = SHIPPED[name]
    found = samples.two_pools(
        cdf_of(name),
        b_short=shipped.b_short,
        gamma=gamma,
        compressible=shipped.compressible,
        window=WINDOW,
        profile=PAPER_A100,
        rate=rate,
        slo_s=0.5,
    )
    assert found is not None
    return found


def one(name: str, rate: float = 1000.0) -> int:
    return samples.homogeneous(cdf_of(name), WINDOW, PAPER_A100, rate, 0.5).nodes


@pytest.mark.parametrize(("name", "nodes"), [("azure", 284), ("lmsys", 139), ("agent-heavy", 2397)])
def test_table_3_homogeneous(name: str, nodes: int) -> None:
    assert one(name) == nodes


@pytest.mark.parametrize(
    ("name", "gamma", "short", "long"),
    [
        ("azure", 1.0, 43, 131),
        ("azure", 1.5, 47, 45),
        ("azure", 2.0, 48, 2),
        ("lmsys", 1.0, 7, 74),
        ("lmsys", 1.5, 7, 65),
        ("lmsys", 2.0, 7, 52),
        ("agent-heavy", 1.0, 229, 2037),
        ("agent-heavy", 1.5, 255, 1981),
        ("agent-heavy", 2.0, 270, 1982),
    ],
)
def test_table_3_pools(name: str, gamma: float, short: int, long: int) -> None:
    found = cell(name, gamma)
    assert (found.short.nodes, found.long.nodes) == (short, long)


def test_a_tail_without_lengths_is_infeasible() -> None:
    cdf = Cdf((1024, 4096), (0.5, 1.0))
    found = samples.two_pools(
        cdf,
        b_short=2100,
        gamma=2.0,
        compressible=0.75,
        window=WINDOW,
        profile=PAPER_A100,
        rate=100.0,
        slo_s=0.5,
    )
    assert found is None
