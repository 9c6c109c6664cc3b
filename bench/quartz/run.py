"""`python -m bench quartz`: the QUARTZ paper's tables, measured on the shipped scheduler.

Schedulers, predictor and prefix index are those of the gateway; the engines are
`simulator.engine.engine`, in virtual time (simulator.experiments.scheduling). The predictor starts
untrained in every run. Figures are means over the seeds; each seed's requests are the same for
every policy. A worker process for each core is started, nothing else.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from bench.common.report import Report, Row, at_least, bars, beside, between, judged, scaled
from bench.quartz import scenes
from bench.quartz.lab import POLICIES, Results, Task, mean_of, paired, run_all
from bench.quartz.workloads import MOONCAKE_FILE

# -- rows of bench quartz beside the paper's tables, and the targets on Mixed and Mixed Bursty


# P95 ms, P99 ms, violations %, tokens/s.
_TABLE_4: Final[dict[str, tuple[float, float, float, float]]] = {
    "FIFO-LL": (2861, 4547, 26.4, 61_742),
    "PointPred": (2418, 3698, 19.7, 62_118),
    "QUARTZ": (2137, 3216, 15.8, 62_463),
}
# P99 ms, violations %, Jain.
_TABLE_5: Final[dict[str, tuple[float, float, float]]] = {
    "PointPred": (3698, 19.7, 0.931),
    "Routing-only": (3576, 18.4, 0.938),
    "Queueing-only": (3471, 17.8, 0.942),
    "No Calibration": (3294, 16.5, 0.946),
    "No Fairness": (3107, 15.0, 0.842),
    "No Locality Feature": (3409, 17.2, 0.934),
    "QUARTZ": (3216, 15.8, 0.952),
}
_TABLE_6: Final[dict[str, float]] = {
    "Mixed": 0.944,
    "More RAG": 0.925,
    "Low Reuse": 0.909,
    "Large Budget": 0.915,
}
# SLO success %.
_TABLE_7: Final = {
    "Mixed": {"FIFO-LL": 74.1, "PointPred": 80.8, "No Calibration": 83.5, "QUARTZ": 84.4},
    "More RAG": {"FIFO-LL": 61.8, "PointPred": 67.4, "No Calibration": 68.7, "QUARTZ": 75.9},
    "Low Reuse": {"FIFO-LL": 58.7, "PointPred": 64.3, "No Calibration": 65.7, "QUARTZ": 73.1},
    "Large Budget": {"FIFO-LL": 56.1, "PointPred": 62.6, "No Calibration": 63.4, "QUARTZ": 69.8},
}
# Jain, max wait s, long slowdown.
_TABLE_8: Final[dict[str, dict[str, tuple[float, float, float]]]] = {
    "Mixed": {
        "FIFO-LL": (0.919, 9.57, 2.11),
        "TokenFair": (0.944, 8.08, 1.66),
        "QUARTZ": (0.952, 7.43, 1.49),
    },
    "Mixed Bursty": {
        "FIFO-LL": (0.907, 11.24, 2.43),
        "No Fairness": (0.842, 13.61, 3.07),
        "QUARTZ": (0.946, 8.73, 1.58),
    },
}
_SECTION_5_4: Final = {
    workload: {"FIFO-LL": (before,), "QUARTZ": (after,)}
    for workload, before, after in (
        *(("Chat", 2517, 2214), ("RAG", 4928, 3847)),
        ("Mixed Bursty", 5413, 3688),
    )
}


Column = tuple[str, str, float]
"""What is told, the figure, its unit."""
_P95, _P99, _JAIN = (
    ("P95 TTFT, ms", "p95_s", 1e3),
    ("P99 TTFT, ms", "p99_s", 1e3),
    ("Jain", "jain", 1.0),
)
_LATE: Final = ("violations, %", "violations", 100.0)
_FAIR: Final = (_JAIN, ("max wait, s", "max_wait_s", 1.0), ("long slowdown", "long_slowdown", 1.0))
_CELLS: Final[tuple[tuple[str, str, Mapping[str, Sequence[float]], Sequence[Column]], ...]] = (
    ("Table 4", "Mixed", _TABLE_4, (_P95, _P99, _LATE, ("tokens/s", "tokens_per_s", 1.0))),
    *(("Section 5.4", workload, cells, (_P99,)) for workload, cells in _SECTION_5_4.items()),
    ("Table 5", "Mixed", _TABLE_5, (_P99, _LATE, _JAIN)),
    *(("Table 8", workload, cells, _FAIR) for workload, cells in _TABLE_8.items()),
)
"""Table, workload, published figures by policy, columns."""


def table_rows(results: Results) -> list[Row]:
    """Tables 4 to 8 and the P99s of section 5.4."""

    def of(workload: str, policy: str, field: str) -> float:
        return mean_of(results, workload, policy, field)

    rows = [
        Row(f"{workload}, FIFO-P2C: P99 TTFT, ms", 1000 * of(workload, "FIFO-P2C", "p99_s"))
        for workload in ("Mixed", "Mixed Bursty")
    ]
    for table, workload, cells, columns in _CELLS:
        for policy, published in cells.items():
            for column, value in zip(columns, published, strict=True):
                text, figure, scale = column
                measured = scale * of(workload, policy, figure)
                rows.append(beside(f"{table}, {workload}, {policy}: {text}", measured, value))
    for workload, covered in _TABLE_6.items():
        share = of(workload, "QUARTZ", "coverage")
        low, high = (0.93, 0.96) if workload == "Mixed" else (0.90, 1.0)
        metric = f"Table 6, {workload}: calibrated coverage at .95, after 1,000 requests"
        rows.append(between(metric, share, low, high, published=covered))
    for workload, met in _TABLE_7.items():
        for policy, published_met in met.items():
            measured = 100 - 100 * of(workload, policy, "violations")
            metric = f"Table 7, {workload}, {policy}: SLO met, %"
            rows.append(beside(metric, measured, published_met))
    return rows


def target_rows(results: Results) -> list[Row]:
    """QUARTZ against the others over paired seeds, on Mixed and Mixed Bursty."""
    rows = []
    for workload in ("Mixed", "Mixed Bursty"):
        for field, text, least in (
            ("p99_s", "P99 TTFT", 0.30),
            ("violations", "violations", 0.50),
            ("max_wait_s", "max wait", 0.0),
        ):
            before = mean_of(results, workload, "FIFO-LL", field)
            after = mean_of(results, workload, "QUARTZ", field)
            cut = 1 - after / before
            _, _, high = paired(results, workload, "QUARTZ", "FIFO-LL", field)
            metric = f"{workload}: {text} below FIFO-LL's, %"
            target = f">= {100 * least:g}, the interval of the difference below 0"
            holds = cut >= least and cut > 0 and high < 0
            rows.append(judged(metric, 100 * cut, target, holds, f"{before:.3g} to {after:.3g}"))
        rows += [
            _not_worse(results, workload, other) for other in ("Locality-aware", "cache-aware")
        ]
        middle, low, high = paired(results, workload, "QUARTZ", "PointPred", "p99_s")
        interval = f"{1000 * low:.0f} to {1000 * high:.0f}"
        note = f"difference {1000 * middle:.0f} ms, 95 % interval {interval}"
        ours = 1000 * mean_of(results, workload, "QUARTZ", "p99_s")
        rows.append(Row(f"{workload}: P99 TTFT against PointPred, ms", ours, note))
    return rows


def _not_worse(results: Results, workload: str, other: str) -> Row:
    middle, low, high = paired(results, workload, "QUARTZ", other, "violations")
    theirs = 100 * mean_of(results, workload, other, "violations")
    return judged(
        f"{workload}: violations less {other}'s, points",
        100 * middle,
        "95 % interval of the paired difference includes 0 or is below",
        low <= 0,
        f"theirs {theirs:.2f} %; interval {100 * low:.2f} to {100 * high:.2f}",
    )


def other_rows(results: Results) -> list[Row]:
    """The other workloads, and how much of an endless index's hits is found."""
    rows = []
    for workload in ("Structured Prefix-Reuse", "Mooncake", "Agents"):
        for policy in ("FIFO-LL", "Locality-aware", "cache-aware", "QUARTZ"):
            late = 100 * mean_of(results, workload, policy, "violations")
            hit = 100 * mean_of(results, workload, policy, "hit")
            note = f"violations {late:.1f} %, {hit:.1f} % of prompt tokens cached"
            p99_s = mean_of(results, workload, policy, "p99_s")
            rows.append(Row(f"{workload}, {policy}: P99 TTFT, s", p99_s, note))
    rows += _trained_rows(results)
    rows += [_not_worse(results, "Agents", other) for other in ("Locality-aware", "cache-aware")]
    found = mean_of(results, "Agents", "QUARTZ", "hit")
    endless = mean_of(results, "Agents", "QUARTZ, endless index", "hit")
    metric = "Agents: cache hits, share of those with an endless index"
    note = f"{100 * found:.1f} and {100 * endless:.1f} % of prompt tokens"
    rows.append(at_least(metric, found / endless, 0.9, note))
    return rows


def _trained_rows(results: Results) -> list[Row]:
    """QUARTZ with the prior that is learned online, and with a tree trained on another run."""
    rows = []
    for workload in ("Mixed", "Mixed Bursty"):
        for policy, name in (("QUARTZ", "prior"), ("QUARTZ, trained", "trained tree")):
            late = 100 * mean_of(results, workload, policy, "violations")
            covered = mean_of(results, workload, policy, "coverage")
            metric = f"{workload}, predictions of the {name}: P99 TTFT, ms"
            note = f"violations {late:.2f} %, coverage {covered:.3f}"
            rows.append(Row(metric, 1000 * mean_of(results, workload, policy, "p99_s"), note))
        middle, low, high = paired(results, workload, "QUARTZ, trained", "QUARTZ", "p99_s")
        metric = f"{workload}: P99 TTFT with the tree less that with the prior, ms"
        interval = f"95 % interval {1000 * low:.0f} to {1000 * high:.0f}"
        rows.append(Row(metric, 1000 * middle, interval))
    return rows


SEEDS: Final = scaled(8, 2)
"""Of Mixed and Mixed Bursty; the other workloads have `FEW`."""
FEW: Final = scaled(4, 2)
_MAIN: Final = (*POLICIES, "FIFO-P2C", "TokenFair", "cache-aware")
_SHIFTS: Final = ("FIFO-LL", "PointPred", "No Calibration", "QUARTZ")
_PLAIN: Final = ("FIFO-LL", "Locality-aware", "cache-aware", "QUARTZ")
_WHICH: Final[dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(("Chat", "RAG", "Structured Prefix-Reuse", "Mooncake"), _PLAIN),
    **dict.fromkeys(("More RAG", "Low Reuse", "Large Budget"), _SHIFTS),
    "Agents": (*_PLAIN, "QUARTZ, endless index"),
}


def run(data: Path | None = None) -> Report:
    """All rows; `data` is a folder with the Mooncake trace."""
    tasks: list[Task] = [
        (workload, seed, _MAIN, None)
        for workload in ("Mixed", "Mixed Bursty")
        for seed in range(SEEDS)
    ]
    tasks += [(w, seed, which, data) for w, which in _WHICH.items() for seed in range(FEW)]
    with bars() as bar:
        results = run_all(tasks, bar("workloads", len(tasks)))
        rows = [*target_rows(results), *scenes.rows(SEEDS, FEW, bar)]
    rows += [*table_rows(results), *other_rows(results)]
    traced = data is not None and (data / MOONCAKE_FILE).is_file()
    detail: dict[str, object] = {"seeds": SEEDS, "mooncake": "trace" if traced else "synthetic"}
    return Report(name="quartz", rows=rows, detail=detail)
