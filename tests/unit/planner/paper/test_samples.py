"""Mode paper equals every published cell: FleetOpt Tables 2, 3, 5, 6 and section 7.4."""

import pytest

from planner.paper import samples
from planner.profile import PAPER_A100
from planner.workload.closed_form import shape_of
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


@pytest.mark.parametrize(
    ("name", "alpha", "beta", "rho"),
    [
        ("azure", 0.898, 0.078, 16),
        ("lmsys", 0.909, 0.046, 42),
        ("agent-heavy", 0.740, 0.112, 8),
    ],
)
def test_table_2(name: str, alpha: float, beta: float, rho: int) -> None:
    shipped = SHIPPED[name]
    shape = shape_of(shipped.workload, shipped.b_short, 1.5)
    assert (round(shape.alpha, 3), round(shape.beta, 3)) == (alpha, beta)
    assert PAPER_A100.window_slots(shipped.b_short) // PAPER_A100.window_slots(WINDOW) == rho


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


@pytest.mark.parametrize(
    ("name", "short", "long"),
    [("azure", 0.848, 0.845), ("lmsys", 0.771, 0.845), ("agent-heavy", 0.848, 0.850)],
)
def test_table_5(name: str, short: float, long: float) -> None:
    found = cell(name, 1.0)
    assert (round(found.short.utilisation, 3), round(found.long.utilisation, 3)) == (short, long)


@pytest.mark.parametrize(
    ("rate", "homogeneous", "routed", "best", "gamma"),
    [
        (100, 240, 227, 225, 1.2),
        (200, 480, 454, 448, 1.5),
        (500, 1199, 1134, 1119, 1.5),
        (1000, 2397, 2266, 2236, 1.5),
        (2000, 4794, 4531, 4470, 1.5),
    ],
)
def test_table_6(rate: float, homogeneous: int, routed: int, best: int, gamma: float) -> None:
    cells = [cell("agent-heavy", round(1 + i / 10, 1), rate) for i in range(11)]
    cheapest = min(cells, key=lambda c: c.nodes)
    assert (one("agent-heavy", rate), cells[0].nodes) == (homogeneous, routed)
    assert (cheapest.nodes, cheapest.gamma) == (best, gamma)


@pytest.mark.parametrize(
    ("name", "short_ms", "long_ms"),
    [("azure", 20.2, 80.1), ("lmsys", 10.9, 48.0), ("agent-heavy", 47.4, 219.7)],
)
def test_section_7_4(name: str, short_ms: float, long_ms: float) -> None:
    found = cell(name, 1.0)
    assert round(1000 * found.short.ttft_s, 1) == short_ms
    assert round(1000 * found.long.ttft_s, 1) == long_ms


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


def test_everything_compressed_leaves_no_long_pool() -> None:
    cdf = Cdf((1024, 4096), (0.5, 1.0))
    found = samples.two_pools(
        cdf,
        b_short=2100,
        gamma=2.0,
        compressible=1.0,
        window=WINDOW,
        profile=PAPER_A100,
        rate=100.0,
        slo_s=0.5,
    )
    assert found is not None
    assert found.long.nodes == 0
