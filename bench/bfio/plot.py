"""Plots of `bench bfio`: load by worker, imbalance, the H sweep, throughput, power."""

from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.figure import Figure

from bench.bfio.runs import POLICIES, SEEDS, history, summary
from bench.bfio.table import WARM_UP, sweep
from simulator.barrier.records import Floats
from simulator.barrier.summary import PowerModel
from simulator.barrier.work import OUTPUT_MEAN

_BLUE, _ORANGE, _GREEN, _GREY = "#0072B2", "#D55E00", "#009E73", "#777777"
_COLOUR: Final = {
    "FCFS": _ORANGE,
    "JSQ": _GREY,
    "BF-IO H=0": _BLUE,
    "BF-IO H=20": _GREEN,
}
_OPTIMUM: Final = (0.02, 0.08)


def draw(folder: Path) -> list[Path]:
    """Write all; returns their files."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = {
        "loads": _loads(),
        "imbalance": _imbalance(),
        "sweep": _sweep(),
        "throughput": _throughput(),
        "power": _power(),
    }
    files = []
    for name, figure in figures.items():
        files.append(folder / f"bfio-{name}.png")
        figure.savefig(files[-1], dpi=120)
    return files


def _loads() -> Figure:
    """Figure 6: each worker's tokens."""
    figure = Figure(figsize=(11, 7), layout="constrained")
    grid = figure.subplots(2, 2, sharex=True, sharey=True)
    most = max(float(history(name, SEEDS[0]).load.max()) for name in _COLOUR) / 1000
    for ax, name in zip(grid.flat, _COLOUR, strict=True):
        load = history(name, SEEDS[0]).load / 1000
        steps = np.arange(0, len(load), 5)
        ax.plot(steps, load[::5], lw=0.5, alpha=0.8)
        ax.axvline(WARM_UP, color="black", lw=0.8, ls="--", alpha=0.6)
        ax.set(title=name, ylim=(0, 1.05 * most), xlim=(0, len(load)))
        ax.grid(alpha=0.3)
    for ax in grid[:, 0]:
        ax.set_ylabel("tokens on each worker, thousands")
    for ax in grid[1]:
        ax.set_xlabel("step (dashed: the figures' warm-up)")
    return figure


def _imbalance() -> Figure:
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    ax = figure.add_subplot()
    for name, colour in _COLOUR.items():
        load = history(name, SEEDS[0]).load
        gaps = load.max(axis=1) * load.shape[1] - load.sum(axis=1)
        steps, smooth = _smoothed(gaps)
        ax.plot(steps, smooth / 1e4, color=colour, lw=1.3, label=name)
    ax.axvline(WARM_UP, color="black", lw=0.8, ls="--", alpha=0.6)
    ax.set(title="Imbalance, mean of 50 steps", xlabel="step", ylabel="tokens, 1e4")
    ax.set(ylim=(0, None), xlim=(0, None))
    ax.grid(alpha=0.3)
    ax.legend(loc="upper right", ncols=2)
    return figure


def _smoothed(values: Floats, steps: int = 50) -> tuple[Floats, Floats]:
    cut: Floats = values[: len(values) // steps * steps].reshape(-1, steps).mean(axis=1)
    at: Floats = (np.arange(len(cut), dtype=np.float64) + 0.5) * steps
    return at, cut


def _sweep() -> Figure:
    """Figure 4."""
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    ax = figure.add_subplot()
    found = sweep()
    ax.axvspan(*(s * OUTPUT_MEAN for s in _OPTIMUM), color=_GREEN, alpha=0.15, lw=0)
    ax.plot(list(found), [v / 1e4 for v in found.values()], "o-", color=_BLUE)
    best = min(found, key=lambda horizon: found[horizon])
    ax.annotate(
        f"H = {best}: {found[best] / 1e4:.2f}",
        (best, found[best] / 1e4),
        xytext=(best, found[best] / 1e4 + 6),
        ha="center",
        arrowprops={"arrowstyle": "->", "color": "black"},
    )
    ax.set_xscale("symlog", linthresh=1)
    ax.set_xticks(list(found), [str(horizon) for horizon in found])
    ax.set_xticks([], minor=True)
    ax.set(title="Look-ahead (shaded: .02 to .08 of the mean output)", xlabel="H, steps")
    ax.set(ylabel="imbalance, 1e4 tokens", ylim=(0, None), xlim=(-0.2, 700))
    ax.grid(alpha=0.3)
    return figure


def _throughput() -> Figure:
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    ax = figure.add_subplot()
    names = list(POLICIES)
    values = np.array([[summary(name, seed).throughput for seed in SEEDS] for name in names]) / 1e4
    middle = values.mean(axis=1)
    spread = np.array([middle - values.min(axis=1), values.max(axis=1) - middle])
    colours = [_COLOUR.get(name, _GREY) for name in names]
    bars = ax.bar(names, middle, yerr=spread, color=colours, capsize=3)
    ax.bar_label(bars, [f"{value:.2f}" for value in middle], padding=4)
    ax.set(title="Throughput, saturated (whiskers: range of seeds)", ylabel="1e4 tokens/s")
    ax.set_ylim(0, float(values.max()) * 1.15)
    ax.grid(axis="y", alpha=0.3)
    ax.set_axisbelow(True)
    return figure


def _power() -> Figure:
    """Figure 7."""
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    ax = figure.add_subplot()
    for name in ("FCFS", "BF-IO H=20"):
        run = history(name, SEEDS[0])
        power = PowerModel().group_power_w(run.load) / run.load.shape[1]
        steps, smooth = _smoothed(power, 10)
        at_s = run.at_s[steps.astype(int)]
        ax.plot(at_s, smooth, color=_COLOUR[name], lw=1, label=name)
    ax.set(title="Power of a worker, mean of 10 steps", xlabel="seconds", ylabel="W")
    ax.set(ylim=(280, 405), xlim=(0, None))
    ax.grid(alpha=0.3)
    ax.legend(loc="lower right")
    return figure
