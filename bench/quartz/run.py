"""`python -m bench quartz`: the QUARTZ paper's tables, measured on the shipped scheduler.

Schedulers, predictor and prefix index are those of the gateway; the engines are
`simulator.engine.engine`, in virtual time (simulator.experiments.scheduling). The predictor starts
untrained in every run. Figures are means over the seeds; each seed's requests are the same for
every policy. Two worker processes are started, nothing else.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import Progress

from bench.common.report import Report
from bench.quartz import cost, limits, scenes
from bench.quartz.lab import POLICIES, VARIANTS, Results, Task, run_all
from bench.quartz.tables import other_rows, table_rows, target_rows
from bench.quartz.workloads import MOONCAKE_FILE

SEEDS: Final = 8
"""Of Mixed and Mixed Bursty; the other workloads have `FEW`."""
FEW: Final = 4
_MAIN: Final = tuple(name for name in POLICIES if name not in {"QUARTZ, endless index", *VARIANTS})
_SHIFTS: Final = ("FIFO-LL", "PointPred", "No Calibration", "QUARTZ")
_PLAIN: Final = ("FIFO-LL", "Locality-aware", "cache-aware", "QUARTZ")
_WHICH: Final[dict[str, tuple[str, ...]]] = {
    "Chat": _PLAIN,
    "RAG": _PLAIN,
    "Structured Prefix-Reuse": _PLAIN,
    "More RAG": _SHIFTS,
    "Low Reuse": _SHIFTS,
    "Large Budget": _SHIFTS,
    "Mooncake": _PLAIN,
    "Agents": (*_PLAIN, "QUARTZ, endless index"),
}


def run(plot: Path | None = None, data: Path | None = None) -> Report:
    """All rows; `plot` is a folder for the plots, `data` one with the Mooncake trace."""
    tasks: list[Task] = [
        (workload, seed, _MAIN, None)
        for workload in ("Mixed", "Mixed Bursty")
        for seed in range(SEEDS)
    ]
    tasks += [(w, seed, which, data) for w, which in _WHICH.items() for seed in range(FEW)]
    rows = cost.cost_rows()  # first, while nothing else runs
    with Progress(console=Console(stderr=True), transient=True) as progress:

        def bar(label: str, steps: int) -> Callable[[], None]:
            task = progress.add_task(label, total=steps)
            return lambda: progress.advance(task)

        results = run_all(tasks, bar("workloads", len(tasks)))
        rows += target_rows(results)
        rows += scenes.gateway_rows(range(SEEDS), bar("gateways", 2 * SEEDS))
        rows += scenes.heavy_rows(range(FEW), bar("heavy client", 4))
        rows += scenes.trouble_rows(range(FEW), bar("trouble", 3))
        rows += limits.limit_rows(bar("slots and KV", limits.SCENES))
        rows += limits.shift_rows(range(FEW), bar("wrong predictions", 2))
        rows += limits.parameter_rows(range(FEW), bar("parameters", limits.PARAMETERS))
    rows += table_rows(results) + other_rows(results)
    return Report(name="quartz", rows=rows, detail=_detail(results, plot, data))


def _detail(results: Results, plot: Path | None, data: Path | None) -> dict[str, Any]:
    traced = data is not None and (data / MOONCAKE_FILE).is_file()
    detail: dict[str, Any] = {"seeds": SEEDS, "mooncake": "trace" if traced else "synthetic"}
    if plot is not None:
        from bench.quartz.plot import draw

        detail["plots"] = [str(file) for file in draw(results, plot)]
    return detail
