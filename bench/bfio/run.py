"""`python -m bench bfio`: BF-IO's Table 1, Figures 4, 6 and 7, its theorems, and what is online.

Published figures: arXiv:2601.17855, "A Universal Load Balancing Principle and Its Application to
Large Language Model Serving". Ours come from the gateway's own solver
(gateway.scheduling.rank_solver) in a simulated group that steps behind a barrier
(simulator.barrier.group); nothing is started. The last rows send requests through the gateway's
scheduler for ranks (bench.bfio.ranks).
"""

from pathlib import Path
from typing import Final

from bench.bfio import online, solver, table, theory, traces
from bench.bfio import ranks as of_ranks
from bench.common.report import Bar, Report, Row, at_least, bars, equals

_GAIN: Final = 6.0
_ASKED: Final = ("least-KV, late", "round-robin")


def run(data: Path | None = None) -> Report:
    """All tables; `data` is a folder with the traces."""
    with bars() as bar:
        rows = [*solver.rows(), *table.rows(bar), *theory.rows(bar), *online.rows(bar)]
        rows += [*traces.rows(data, bar), *ranks(bar)]
    return Report(name="bfio", rows=rows, detail={"source": "arXiv:2601.17855"})


def ranks(bar: Bar) -> list[Row]:
    """Eight ranks of 32 slots, saturated, by the schedulers that the gateway runs."""
    found = {}
    step = bar("through the gateway's scheduler", len(of_ranks.SCHEDULERS))
    for name, make in of_ranks.SCHEDULERS.items():
        found[name] = of_ranks.measure(make, seed=0)
        step()
    ours = found["bfio"]
    at = f"{of_ranks.RANKS} ranks through the gateway's scheduler"
    rows = []
    for name in list(found)[1:]:
        gain = 100 * (ours.tokens_per_s / found[name].tokens_per_s - 1)
        metric = f"{at}: tokens/s over {name}, %"
        asked = name in _ASKED
        rows.append(at_least(metric, gain, _GAIN) if asked else Row(metric, gain))
    wait = f"longest wait {ours.longest_wait_steps:.0f} steps"
    note = f"{ours.tokens_per_s:,.0f} tokens/s, {wait}, {ours.most_waiting} waiting at most"
    return [*rows, equals(f"{at}: requests lost", ours.lost, 0, note)]
