"""A calibration's plot: iterations measured against modelled, residuals, the held-out load."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from planner.calibration.check import TOLERANCE, Check
from sluice.calibrate.sweeps import Swept

_COLOURS = ("#0072B2", "#D55E00", "#009E73")


def draw(swept: Swept, checks: Sequence[Check], folder: Path) -> Path:
    """Write `calibration.png`; returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(13, 4), layout="constrained")
    fitted, residuals, held_out = figure.subplots(1, 3)
    _fit(fitted, swept)
    _residuals(residuals, swept)
    _held_out(held_out, checks)
    file = folder / "calibration.png"
    figure.savefig(file, dpi=120)
    return file


def _fit(axes: Axes, swept: Swept) -> None:
    fit = swept.fit
    kinds = (
        ("decode", swept.windows),
        ("with a prompt", swept.prompts),
    )
    top = 0.0
    for (label, windows), colour in zip(kinds, _COLOURS, strict=False):
        measured = [1e3 * w.iteration_s for w in windows]
        modelled = [1e3 * fit.seconds(w) / w.iterations for w in windows]
        axes.plot(modelled, measured, "o", ms=4, color=colour, label=label)
        top = max([top, *measured, *modelled])
    axes.plot([0, top], [0, top], color="grey", lw=1)
    axes.set(xlabel="modelled iteration (ms)", ylabel="measured (ms)")
    axes.set_title(f"t = W + {'H n' if fit.timing == 'slots' else 'h r'} + e p")
    axes.legend()
    axes.grid(alpha=0.3)


def _residuals(axes: Axes, swept: Swept) -> None:
    windows = [*swept.windows, *swept.prompts]
    running = np.array([w.sequences / w.iterations for w in windows])
    axes.plot(running, 100 * np.array(swept.fit.residuals), "o", ms=4, color=_COLOURS[0])
    axes.axhline(0, color="grey", lw=1)
    axes.set(xlabel="sequences running", ylabel="modelled - measured (%)", title="Residuals")
    axes.grid(alpha=0.3)


def _held_out(axes: Axes, checks: Sequence[Check]) -> None:
    names = [check.name.partition(" (")[0] for check in checks]
    colours = [_COLOURS[2] if check.holds else _COLOURS[1] for check in checks]
    axes.barh(names, [100 * check.off for check in checks], color=colours)
    for side in (-1, 1):
        axes.axvline(side * 100 * TOLERANCE, color="grey", ls="--", lw=1)
    axes.invert_yaxis()
    axes.set(xlabel="modelled - measured (%)", title="Held-out load")
