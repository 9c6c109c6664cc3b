"""Plots of `bench pool-routing`: savings against the boundary, convergence of the ratio."""

from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.pool_routing.learning import AT, CATEGORIES, NOISE, Known, curve
from bench.pool_routing.model import AZURE, LMSYS, CdfWorkload, size

_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
_MARKS: Final = {"Azure": "x", "LMSYS": "+"}
_RUNS: Final = 40
_OBSERVATIONS: Final = 100
# Savings that the text states: (boundary, percent). The figure's other marks are unnumbered.
_PUBLISHED: Final = {"Azure": ((8192, 16.6), (32_768, 20.0)), "LMSYS": ((8192, 38.5),)}


def draw(folder: Path) -> list[Path]:
    """Write both plots; returns their files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "pool-routing-savings.png", folder / "pool-routing-convergence.png"]
    _savings().savefig(files[0], dpi=120)
    _convergence().savefig(files[1], dpi=120)
    return files


def _savings() -> Figure:
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for workload, colour in zip((AZURE, LMSYS), _COLOURS, strict=False):
        _savings_of(axes, workload, colour)
    axes.set_xscale("log", base=2)
    axes.set_xticks([2**k for k in range(10, 16)], [f"{2**k}K" for k in range(6)])
    axes.set(xlabel="boundary (tokens)", ylabel="instances saved (%)", ylim=(0, 45))
    axes.set_title("Savings of two pools over one at 1,000 requests/s")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _savings_of(axes: Axes, workload: CdfWorkload, colour: str) -> None:
    between = [round(b) for b in np.geomspace(1024, 32_768, 41)]
    ours = [100 * size(workload, b).savings for b in between]
    axes.plot(between, ours, color=colour, lw=1.5, label=f"{workload.name}, ours")
    marks = [2**k for k in range(10, 16)]
    axes.plot(marks, [100 * size(workload, b).savings for b in marks], "o", color=colour, ms=5)
    at, percent = zip(*_PUBLISHED[workload.name], strict=True)
    label = f"{workload.name}, published"
    axes.plot(at, percent, _MARKS[workload.name], color="black", ms=12, mew=2, label=label)


def _convergence() -> Figure:
    figure = Figure(figsize=(10, 5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, profile in ((left, "paper"), (right, "default")):
        for i, known in enumerate(CATEGORIES):
            _learning_of(axes, known, profile, _COLOURS[i], published_at=AT + 2 * i - 3)
        axes.axhline(0, color="black", lw=0.8)
        axes.set(title=f"profile {profile}", xlabel="observations of the category")
        axes.set(xlim=(0, _OBSERVATIONS), ylim=(-12, 30))
        axes.grid(alpha=0.3)
    left.set_ylabel("learned / true bytes per token - 1 (%)")
    right.plot([], [], "x", color="black", ms=9, mew=2, label="published, n = 50, side by side")
    right.legend(title=f"middle of {_RUNS} runs; band: 9 in 10")
    return figure


def _learning_of(axes: Axes, known: Known, profile: str, colour: str, published_at: float) -> None:
    runs = [curve(known, profile, _OBSERVATIONS, NOISE, seed) for seed in range(_RUNS)]
    off = 100 * (np.array(runs) / known.ratio - 1)
    low, middle, high = np.quantile(off, (0.05, 0.5, 0.95), axis=0)
    n = np.arange(_OBSERVATIONS + 1)
    axes.plot(n, middle, color=colour, lw=1.5, label=known.label)
    axes.fill_between(n, low, high, color=colour, alpha=0.15, lw=0)
    published = 100 * (known.learned / known.ratio - 1)
    axes.plot(published_at, published, "x", color=colour, ms=9, mew=2)
