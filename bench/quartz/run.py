"""`python -m bench quartz`: the QUARTZ paper's tables, measured on the shipped scheduler.

Schedulers, predictor and prefix index are those of the gateway; the engines are
`simulator.engine.engine`, in virtual time (simulator.experiments.scheduling). The predictor starts
untrained in every run. Figures are means over the seeds; each seed's requests are the same for
every policy. A worker process for each core is started, nothing else.
"""

from pathlib import Path
from typing import Final

from bench.common.report import Report
from bench.common.steps import bars, scaled
from bench.quartz import scenes
from bench.quartz.lab import POLICIES, Task, run_all
from bench.quartz.tables import other_rows, table_rows, target_rows
from bench.quartz.workloads import MOONCAKE_FILE

SEEDS: Final = scaled(8, 2)
"""Of Mixed and Mixed Bursty; the other workloads have `FEW`."""
FEW: Final = scaled(4, 2)
_MAIN: Final = (*POLICIES, "FIFO-P2C", "cache-aware", "TokenFair")
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
