"""`python -m bench bfio`: BF-IO's Table 1, Figures 4, 6 and 7, its theorems, and what is online.

Published figures: arXiv:2601.17855, "A Universal Load Balancing Principle and Its Application to
Large Language Model Serving". Ours come from the gateway's own solver
(gateway.scheduling.rank_solver) in a simulated group that steps behind a barrier
(simulator.barrier.group); nothing is started. The last rows send requests through the gateway's
scheduler for ranks (bench.bfio.ranks).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import Progress

from bench.bfio import online, solver, table, theory
from bench.bfio import ranks as bfio_ranks
from bench.bfio import traces as bfio_traces
from bench.common.report import Report, Row, at_least, equals

_GAIN: Final = 6.0
_ASKED: Final = ("least-KV, late", "round-robin")


def run(plot: Path | None = None, data: Path | None = None) -> Report:
    """All tables; `plot` is a folder for the plots, `data` one with the traces."""
    rows = solver.rows()
    with Progress(console=Console(stderr=True), transient=True) as progress:

        def bar(label: str, steps: int) -> Callable[[], None]:
            task = progress.add_task(label, total=steps)
            return lambda: progress.advance(task)

        rows += table.rows(bar("Table 1, Figures 4, 6, 7", table.RUNS))
        rows += theory.rows(bar("theorems", theory.RUNS))
        rows += online.rows(bar("online", online.RUNS))
        traces = bfio_traces.RUNS if data is not None else 0
        rows += bfio_traces.rows(data, bar("traces", traces))
        rows += ranks(bar("through the gateway's scheduler", len(bfio_ranks.SCHEDULERS)))
    detail: dict[str, Any] = {"source": "arXiv:2601.17855"}
    if plot is not None:
        from bench.bfio.plot import draw

        detail["plots"] = [str(file) for file in draw(plot)]
    return Report(name="bfio", rows=rows, detail=detail)


def ranks(advance: Callable[[], None]) -> list[Row]:
    """Eight ranks of 32 slots, saturated, by the schedulers that the gateway runs."""
    found = {}
    for name, make in bfio_ranks.SCHEDULERS.items():
        found[name] = bfio_ranks.measure(make, seed=0)
        advance()
    ours = found["bfio"]
    at = f"{bfio_ranks.RANKS} ranks through the gateway's scheduler"
    rows = []
    for name in list(found)[1:]:
        gain = 100 * (ours.tokens_per_s / found[name].tokens_per_s - 1)
        metric = f"{at}: tokens/s over {name}, %"
        asked = name in _ASKED
        rows.append(at_least(metric, gain, _GAIN) if asked else Row(metric, gain))
    wait = f"longest wait {ours.longest_wait_steps:.0f} steps"
    note = f"{ours.tokens_per_s:,.0f} tokens/s, {wait}, {ours.most_waiting} waiting at most"
    return [*rows, equals(f"{at}: requests lost", ours.lost, 0, note)]
