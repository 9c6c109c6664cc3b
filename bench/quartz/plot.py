"""Plots of bench quartz: tails and violations by policy, and the ablations."""

from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.quartz.lab import Results

_COLOURS: Final = ("#0072B2", "#D55E00")
_POLICIES: Final = (
    "FIFO-LL",
    "TokenFair",
    "Locality-aware",
    "cache-aware",
    "PointPred",
    "QUARTZ",
)
_ABLATIONS: Final = (
    "FIFO-LL",
    "No Locality Feature",
    "Queueing-only",
    "Routing-only",
    "No Calibration",
    "No Fairness",
    "QUARTZ",
)
_WORKLOADS: Final = ("Mixed", "Mixed Bursty")


def draw(results: Results, folder: Path) -> list[Path]:
    """Write all plots; returns their files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "quartz-policies.png", folder / "quartz-ablations.png"]
    for file, policies in zip(files, (_POLICIES, _ABLATIONS), strict=True):
        figure = Figure(figsize=(11, 4.6), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        _bars(left, results, policies, "p99_s", 1.0, "P99 TTFT, s")
        _bars(right, results, policies, "violations", 100.0, "SLO violations, % of requests")
        left.set_yticks(range(len(policies)), policies)
        left.invert_yaxis()
        left.legend(loc="lower right")
        figure.savefig(file, dpi=120)
    return files


def _bars(
    axes: Axes, results: Results, policies: tuple[str, ...], field: str, scale: float, label: str
) -> None:
    """Means over the seeds, with a line from the least to the most."""
    most = 0.0
    for i, workload in enumerate(_WORKLOADS):
        values = [[scale * getattr(f, field) for f in results[workload, p]] for p in policies]
        means = [float(np.mean(v)) for v in values]
        spread = [[m - min(v) for m, v in zip(means, values, strict=True)]]
        spread.append([max(v) - m for m, v in zip(means, values, strict=True)])
        at = np.arange(len(policies)) + 0.38 * (i - 0.5)
        axes.barh(at, means, 0.36, color=_COLOURS[i], label=workload)
        axes.errorbar(means, at, xerr=spread, fmt="none", ecolor="#444444", lw=1)
        top = max(max(v) for v in values)
        for y, mean, v in zip(at, means, values, strict=True):
            axes.text(max(v) + 0.015 * top, y, f"{mean:.1f}", va="center", fontsize=8)
        most = max(most, top)
    axes.set_xlabel(label)
    axes.set_xlim(0, 1.12 * most)
    axes.grid(axis="x", alpha=0.3)
