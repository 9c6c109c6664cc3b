"""Plots of a simulated fleet: time to first token and use of slots, over time."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from simulator.fleet.fleet import FleetSpec
from simulator.fleet.outcome import WARM_UP, FleetOutcome
from simulator.fleet.summary import Series, series

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def draw(spec: FleetSpec, outcome: FleetOutcome, folder: Path, slo_s: float) -> list[Path]:
    """Draw both plots; returns their files."""
    folder.mkdir(parents=True, exist_ok=True)
    found = series(spec, outcome)
    files = [folder / "simulate-ttft.png", folder / "simulate-utilisation.png"]
    _ttft(found, slo_s).savefig(files[0], dpi=120)
    _use(found).savefig(files[1], dpi=120)
    return files


def _ttft(found: tuple[Series, ...], slo_s: float) -> Figure:
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    for pool, colour in zip(found, _COLOURS * len(found), strict=False):
        axes.plot(pool.at_s, 1000 * pool.ttft_p50_s, color=colour, lw=1, ls=":")
        # Points too: a pool of few requests has gaps, where no line is drawn.
        label = f"{pool.name}: P99 (dotted: P50)"
        axes.plot(pool.at_s, 1000 * pool.ttft_p99_s, color=colour, lw=1.5, marker=".", label=label)
    axes.axhline(1000 * slo_s, color="black", lw=1, ls="--", label="SLO")
    axes.set(xlabel="arrival (s)", ylabel="time to first token (ms)", yscale="log")
    axes.set_title("Time to first token of requests that arrived then")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    _finish(axes, found)
    return figure


def _use(found: tuple[Series, ...]) -> Figure:
    figure = Figure(figsize=(9, 6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    for pool, colour in zip(found, _COLOURS * len(found), strict=False):
        top.plot(pool.at_s, 100 * pool.utilisation, color=colour, lw=1.5, label=pool.name)
        bottom.plot(pool.at_s, pool.waiting, color=colour, lw=1.5, label=pool.name)
    top.set(ylabel="slots in use (%)", ylim=(0, 102))
    top.set_title("Use of slots, and requests that wait for one")
    bottom.set(xlabel="time (s)", ylabel="waiting requests", ylim=(0, None))
    _finish(top, found)
    _finish(bottom, found)
    return figure


def _finish(axes: Axes, found: tuple[Series, ...]) -> None:
    axes.axvspan(0, WARM_UP * float(found[0].at_s[-1]), color="black", alpha=0.06, lw=0)
    axes.set_xlim(0, float(found[0].at_s[-1]))
    axes.grid(alpha=0.3)
    axes.legend()
