"""Plot of `bench fleetopt`: a boundary that moves by itself after a step in traffic."""

from pathlib import Path
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.fleetopt.boundary import SCENARIO, WITHIN_S
from simulator.experiments.boundary_auto import run

_COLOURS: Final = ("#0072B2", "#D55E00")


def draw(folder: Path) -> Path:
    """Boundary and preemptions over time, with the controller and without; returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(9, 6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    labels = ("auto", "fixed")
    for active, label, colour in zip((True, False), labels, _COLOURS, strict=False):
        found = run(SCENARIO, active=active)
        at_min = [minute.at_s / 60 for minute in found.minutes]
        boundaries = [m.boundary for m in found.minutes]
        top.step(at_min, boundaries, where="post", color=colour, label=label)
        share = [100 * m.sample.preemptions / max(1.0, m.sample.finished) for m in found.minutes]
        bottom.plot(at_min, share, color=colour, lw=1.2, label=label)
    step_min = SCENARIO.step_s / 60
    _mark(top, step_min)
    _mark(bottom, step_min)
    bottom.axhline(1.0, color="black", lw=0.8, ls="--", label="1 %")
    top.set(ylabel="boundary (tokens)", ylim=(0, None))
    top.set_title("Two short nodes; the rate steps from 20 to 28 requests/s")
    bottom.set(xlabel="time (min)", ylabel="preemptions for 100 requests")
    bottom.set_yscale("symlog", linthresh=1.0)
    bottom.set(ylim=(0, 150), xlim=(0, SCENARIO.end_s / 60))
    bottom.yaxis.set_major_formatter("{x:g}")
    bottom.legend(loc="center right")
    file = folder / "boundary-auto.png"
    figure.savefig(file, dpi=120)
    return file


def _mark(axes: Axes, step_min: float) -> None:
    axes.axvspan(step_min, step_min + WITHIN_S / 60, color="black", alpha=0.07, lw=0)
    axes.axvline(step_min, color="black", lw=0.8, ls=":")
    axes.grid(alpha=0.3)
    axes.legend(loc="center right")
