"""Plot of a replay: time to first token over time and as a distribution, by pool."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from sluice.replay.run import Replayed

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def draw(done: Replayed, folder: Path, slo_s: float) -> Path:
    """Draw the plot; returns its file."""
    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2), sharey=True)
    served = [a for a in done.answers if a.ttft_s is not None]
    names = sorted({a.pool or "" for a in served})
    for name, colour in zip(names, _COLOURS * len(names), strict=False):
        own = [a for a in served if (a.pool or "") == name]
        at_s = [a.due_s - done.started_s for a in own]
        first = np.array([1000 * (a.ttft_s or 0.0) for a in own])
        left.plot(at_s, first, ".", color=colour, ms=3, alpha=0.6, label=name or "all")
        right.plot(np.arange(1, len(own) + 1) / len(own), np.sort(first), color=colour, lw=1.5)
    failed = [a.due_s - done.started_s for a in done.answers if a.error]
    if failed:
        top = max(2000 * slo_s, *(1000 * (a.ttft_s or 0.0) for a in served), 1.0)
        left.plot(failed, [top] * len(failed), "x", color="black", ms=4, label="failed")
    for axes in (left, right):
        axes.axhline(1000 * slo_s, color="black", lw=1, ls="--", label="SLO")
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
    left.set(xlabel="due (s)", ylabel="time to first token (ms)")
    right.set(xlabel="share of requests", xlim=(0, 1))
    right.axvline(0.99, color="black", lw=0.8, ls=":")
    left.yaxis.set_major_formatter("{x:g}")
    left.legend(loc="upper left")
    figure.suptitle("Replayed requests: time to first token")
    file = folder / "replay.png"
    figure.savefig(file, dpi=120)
    return file
