"""Plots of `bench fleetopt`: nodes by model, and cost over B x gamma of the paged model."""

from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.figure import Figure

from bench.fleetopt.columns import GAMMAS, fleet_sizes
from planner.goals import Goals
from planner.plan import make_plan
from planner.records import Question
from planner.search import Mode
from planner.workload.library import SHIPPED
from planner.workload.moments import prepare
from sluice.plan.plot import draw as draw_plan

_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
_MODES: Final[tuple[Mode, ...]] = ("exact", "mix", "corrected", "paged")


def draw(folder: Path) -> list[Path]:
    """Write all plots; returns their files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "fleetopt-nodes.png"]
    _nodes().savefig(files[0], dpi=120)
    for name, shipped in SHIPPED.items():
        question = Question(
            workload=shipped.workload,
            goals=Goals(rate_per_s=1000.0, ttft_s=5.0),
            compressible=shipped.compressible,
        )
        files += draw_plan(make_plan(question), folder / f"fleetopt-{name}")
    return files


def _nodes() -> Figure:
    """One pool, and two at each gamma, relative to one pool by slots (`corrected`)."""
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    for axes, shipped in zip(figure.subplots(1, 3), SHIPPED.values(), strict=True):
        sums = prepare(shipped.workload, boundaries=(shipped.b_short,), gammas=GAMMAS)
        labels = ["one pool", *(f"gamma {g:g}" for g in GAMMAS)]
        for i, mode in enumerate(_MODES):
            one, cells = fleet_sizes(sums, mode, shipped.compressible)
            heights = [one, *(sum(map(int, cell.split(" + "))) for cell in cells)]
            at = np.arange(len(labels)) + 0.2 * (i - 1.5)
            axes.bar(at, heights, 0.19, color=_COLOURS[i], label=mode)
        axes.set_xticks(range(len(labels)), labels)
        axes.set_title(f"{shipped.workload.name}, B = {shipped.b_short:,}")
        axes.set_ylabel("nodes at 1,000 requests/s")
        axes.grid(axis="y", alpha=0.3)
    figure.axes[0].legend()
    return figure
