"""`python -m bench fleetopt`: FleetOpt's Tables 2, 3, 5, 6 and section 7.4, checked.

Published figures: arXiv:2603.16514, CC BY 4.0. Mode `paper` is the published model; its rows
hold when they equal the printed figures. The columns `exact`, `mix`, `corrected` and `paged` are
our models (docs/plan/planner.md); their targets are derived independently of the planner, by
exact sums over whole lengths. Then fleets are simulated (bench.fleetopt.simulated) in two
processes. Nothing else is started; traces come by --data.
"""

from pathlib import Path
from typing import Any, Final

from bench.common.report import Report, Row, rounds, same
from bench.fleetopt.boundary import boundary_rows
from bench.fleetopt.columns import columns, pairs_columns, timing
from bench.fleetopt.replanned import replanned_rows
from bench.fleetopt.simulated import NAMES, paged_rows, speed, verdict_rows
from planner.paper import samples
from planner.profile import HOURS_PER_YEAR, PAPER_A100
from planner.readers.traces import read_workload
from planner.workload.closed_form import shape_of
from planner.workload.library import SHIPPED, Shipped
from planner.workload.workload import Workload, from_lengths

RATE: Final = 1000.0
SLO_S: Final = 0.5
WINDOW: Final = 65_536
AZURE_FILES: Final = ("AzureLLMInferenceTrace_code.csv", "AzureLLMInferenceTrace_conv.csv")

# alpha, beta at gamma 1.5, rho.
_TABLE_2: Final = {
    "azure": (0.898, 0.078, 16),
    "lmsys": (0.909, 0.046, 42),
    "agent-heavy": (0.740, 0.112, 8),
}
# Homogeneous; then gamma -> (nodes, K$ a year, savings in %).
_TABLE_3: Final[dict[str, tuple[int, float, dict[float, tuple[str, float, float]]]]] = {
    "azure": (
        284,
        5498,
        {
            1.0: ("43 + 131", 3369, 38.7),
            1.5: ("47 + 45", 1781, 67.6),
            2.0: ("48 + 2", 968, 82.4),
        },
    ),
    "lmsys": (
        139,
        2691,
        {1.0: ("7 + 74", 1568, 41.7), 1.5: ("7 + 65", 1394, 48.2), 2.0: ("7 + 52", 1142, 57.6)},
    ),
    "agent-heavy": (
        2397,
        46_405,
        {1.0: ("229 + 2037", 43_869, 5.5), 1.5: ("255 + 1981", 43_288, 6.7)},
    ),
}
_TABLE_5: Final = {
    "azure": (0.848, 0.845),
    "lmsys": (0.771, 0.845),
    "agent-heavy": (0.848, 0.850),
}
# Rate -> homogeneous, pool routing, FleetOpt and its gamma.
_TABLE_6: Final = {
    100: (240, 227, 225, 1.2),
    200: (480, 454, 448, 1.5),
    500: (1199, 1134, 1119, 1.5),
    1000: (2397, 2266, 2236, 1.5),
    2000: (4794, 4531, 4470, 1.5),
}
_SECTION_7_4: Final = {"azure": (20, 80), "lmsys": (11, 48), "agent-heavy": (47, 220)}


def run(data: Path | None = None) -> Report:
    """All tables; `data` is a folder with the Azure 2023 traces."""
    pairs = azure_pairs(data)
    rows = [*_table_2(), *_table_3(), *_table_5(), *_table_6(), *_section_7_4()]
    for shipped in SHIPPED.values():
        rows += columns(shipped, NAMES[shipped.workload.name])
    rows += pairs_columns(pairs) if pairs else [_not_measured()]
    rows += timing(pairs)
    rows += simulated()
    detail: dict[str, Any] = {"source": "arXiv:2603.16514, CC BY 4.0"}
    return Report(name="fleetopt", rows=rows, detail=detail)


def simulated() -> list[Row]:
    """All that the simulator says; the speed first, while nothing else runs."""
    return [speed(), *verdict_rows(), *paged_rows(), *boundary_rows(), *replanned_rows()]


def azure_pairs(data: Path | None) -> Workload | None:
    """The Azure 2023 traces, both together; None where the folder has them not."""
    if data is None or not all((data / name).is_file() for name in AZURE_FILES):
        return None
    parts = [
        read_workload((data / name).read_text("utf-8"), name=name).pairs for name in AZURE_FILES
    ]
    prompts = [p for part in parts if part is not None for p in part.prompts]
    answers = [a for part in parts if part is not None for a in part.answers]
    return from_lengths(prompts, answers, name="azure-pairs", source="Azure 2023, CC BY 4.0")


def _not_measured() -> Row:
    return Row("Azure pairs", "not measured", f"needs --data with {' and '.join(AZURE_FILES)}")


def _cell(shipped: Shipped, gamma: float, rate: float = RATE) -> samples.Cell | None:
    cdf = shipped.workload.cdf
    assert cdf is not None
    return samples.two_pools(
        cdf,
        b_short=shipped.b_short,
        gamma=gamma,
        compressible=shipped.compressible,
        window=WINDOW,
        profile=PAPER_A100,
        rate=rate,
        slo_s=SLO_S,
    )


def _one(shipped: Shipped, rate: float = RATE) -> int:
    cdf = shipped.workload.cdf
    assert cdf is not None
    return samples.homogeneous(cdf, WINDOW, PAPER_A100, rate, SLO_S).nodes


def _table_2() -> list[Row]:
    rows = []
    for key, (alpha, beta, rho) in _TABLE_2.items():
        shipped = SHIPPED[key]
        shape = shape_of(shipped.workload, shipped.b_short, 1.5)
        cliff = PAPER_A100.window_slots(shipped.b_short) // PAPER_A100.window_slots(WINDOW)
        name = f"Table 2, {NAMES[key]}"
        rows += [
            rounds(f"{name}: alpha", shape.alpha, alpha, 3),
            rounds(f"{name}: beta at gamma 1.5", shape.beta, beta, 3),
            same(f"{name}: cliff", cliff, rho),
        ]
    return rows


def _table_3() -> list[Row]:
    rows = []
    for key, (homogeneous, one_cost, cells) in _TABLE_3.items():
        shipped, name = SHIPPED[key], f"Table 3, {NAMES[key]}"
        one = _one(shipped)
        rows.append(same(f"{name}: homogeneous", one, homogeneous))
        rows.append(rounds(f"{name}: homogeneous, K$/year", _cost(one), one_cost, 0))
        for gamma, (nodes, cost, percent) in cells.items():
            cell = _cell(shipped, gamma)
            assert cell is not None
            at = f"{name}, gamma {gamma:g}"
            stated = f"p_c {shipped.compressible:g}" if gamma > 1 else ""
            rows += [
                same(f"{at}: nodes", f"{cell.short.nodes} + {cell.long.nodes}", nodes, stated),
                rounds(f"{at}: K$/year", _cost(cell.nodes), cost, 0),
                rounds(f"{at}: savings, %", 100 * (1 - cell.nodes / one), percent, 1),
            ]
    note = "the tables bill a node of eight GPUs as one GPU: real cost is eight times as much"
    return [*rows, Row("Table 3: $ per node-hour", 2.21, note)]


def _cost(nodes: int) -> float:
    return nodes * PAPER_A100.usd_per_gpu_hour * HOURS_PER_YEAR / 1000


def _table_5() -> list[Row]:
    rows = []
    for key, published in _TABLE_5.items():
        cell = _cell(SHIPPED[key], 1.0)
        assert cell is not None
        for pool, value, wanted in zip(
            ("short", "long"), (cell.short, cell.long), published, strict=True
        ):
            metric = f"Table 5, {NAMES[key]}: rho_ana, {pool}"
            rows.append(rounds(metric, value.utilisation, wanted, 3))
    return rows


def _table_6() -> list[Row]:
    rows, shipped = [], SHIPPED["agent-heavy"]
    for rate, (one, routed, best, gamma) in _TABLE_6.items():
        cells = [_cell(shipped, round(1 + i / 10, 1), rate) for i in range(11)]
        found = min((c for c in cells if c is not None), key=lambda c: c.nodes)
        name = f"Table 6, {rate} req/s"
        plain = cells[0]
        assert plain is not None
        rows += [
            same(f"{name}: homogeneous", _one(shipped, rate), one),
            same(f"{name}: pool routing", plain.nodes, routed),
            same(f"{name}: FleetOpt", found.nodes, best, f"p_c {shipped.compressible:g}"),
            same(f"{name}: gamma", f"{found.gamma:g}", f"{gamma:g}"),
        ]
    return rows


def _section_7_4() -> list[Row]:
    rows = []
    for key, published in _SECTION_7_4.items():
        cell = _cell(SHIPPED[key], 1.0)
        assert cell is not None
        for pool, value, wanted in zip(
            ("short", "long"), (cell.short, cell.long), published, strict=True
        ):
            metric = f"Section 7.4, {NAMES[key]}: TTFT, {pool}, ms"
            note = "called P99; it is the mean prefill at 8.65 ms an iteration"
            rows.append(rounds(metric, 1000 * value.ttft_s, wanted, 0, note))
    return rows
