"""Plots of `bench bfio`: load by worker, imbalance, the H sweep, throughput, power."""

from pathlib import Path
from typing import Final

import numpy as np

from bench.bfio.runs import POLICIES, SEEDS, history, summary
from bench.bfio.table import OPTIMUM, WARM_UP, sweep
from bench.common.plot import Line, Panel, draw
from simulator.barrier.records import Floats
from simulator.barrier.summary import PowerModel
from simulator.barrier.work import OUTPUT_MEAN

_SHOWN: Final = ("FCFS", "JSQ", "BF-IO H=0", "BF-IO H=20")


def plots(folder: Path) -> list[str]:
    """Draw all; their files."""
    return [
        draw(folder, "bfio-loads", [_loads(name) for name in _SHOWN], share=True),
        draw(folder, "bfio-imbalance", [_imbalance()]),
        draw(folder, "bfio-sweep", [_sweep()]),
        draw(folder, "bfio-throughput", [_throughput()]),
        draw(folder, "bfio-power", [_power()]),
    ]


def _loads(name: str) -> Panel:
    """Figure 6: each worker's tokens."""
    load = history(name, SEEDS[0]).load / 1000
    steps = np.arange(0, len(load), 5)
    lines = [Line(x=steps, y=load[::5, worker]) for worker in range(load.shape[1])]
    title = f"{name}: tokens on each worker, thousands"
    return Panel(title=title, xlabel="step", ylim=(0, None), marks=(WARM_UP,), lines=lines)


def _imbalance() -> Panel:
    lines = []
    for name in _SHOWN:
        load = history(name, SEEDS[0]).load
        gaps = load.max(axis=1) * load.shape[1] - load.sum(axis=1)
        steps, smooth = _smoothed(gaps)
        lines.append(Line(x=steps, y=smooth / 1e4, label=name))
    title = "Imbalance, 1e4 tokens, mean of 50 steps"
    return Panel(title=title, xlabel="step", ylim=(0, None), marks=(WARM_UP,), lines=lines)


def _smoothed(values: Floats, steps: int = 50) -> tuple[Floats, Floats]:
    cut: Floats = values[: len(values) // steps * steps].reshape(-1, steps).mean(axis=1)
    at: Floats = (np.arange(len(cut), dtype=np.float64) + 0.5) * steps
    return at, cut


def _sweep() -> Panel:
    """Figure 4."""
    found = sweep()
    best = min(found, key=lambda horizon: found[horizon])
    y = [value / 1e4 for value in found.values()]
    notes = [f"H = {h}: {found[h] / 1e4:.2f}" if h == best else "" for h in found]
    return Panel(
        title="Imbalance, 1e4 tokens, by look-ahead (shaded: .02 to .08 of the mean output)",
        xlabel="H, steps",
        log="xs",
        xlim=(-0.2, 700),
        ylim=(0, None),
        spans=[(OPTIMUM[0] * OUTPUT_MEAN, OPTIMUM[1] * OUTPUT_MEAN)],
        ticks={horizon: str(horizon) for horizon in found},
        lines=[Line(x=list(found), y=y, style="o-", notes=notes)],
    )


def _throughput() -> Panel:
    values = {name: [summary(name, seed).throughput / 1e4 for seed in SEEDS] for name in POLICIES}
    title = "Throughput, saturated, 1e4 tokens/s (whiskers: range of seeds)"
    return Panel(title=title, bars={"": values})


def _power() -> Panel:
    """Figure 7."""
    lines = []
    for name in ("FCFS", "BF-IO H=20"):
        run = history(name, SEEDS[0])
        steps, smooth = _smoothed(PowerModel().group_power_w(run.load) / run.load.shape[1], 10)
        lines.append(Line(x=run.at_s[steps.astype(int)], y=smooth, label=name))
    title = "Power of a worker, W, mean of 10 steps"
    return Panel(title=title, xlabel="seconds", ylim=(280, 405), lines=lines)
