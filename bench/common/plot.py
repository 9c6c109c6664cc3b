"""Pictures of a bench: panels as data, drawn in one way (needs matplotlib, the extra `bench`)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#777777", "#E69F00", "#56B4E9")
Values = Sequence[float] | np.ndarray


class Line(msgspec.Struct, kw_only=True):
    """One series."""

    x: Values
    y: Values
    label: str = ""
    style: str = "-"
    """As matplotlib has it: "o-", "x", ":"."""
    colour: int = -1
    """Place in COLOURS; else the next one."""
    step: bool = False
    """Whether a value holds until the next."""
    notes: Sequence[str] = ()
    """A text at each point."""


class Panel(msgspec.Struct, kw_only=True):
    """One pair of axes."""

    title: str = ""
    xlabel: str = ""
    ylabel: str = ""
    lines: Sequence[Line] = ()
    stack: Mapping[str, Values] = {}
    """Label -> heights over `at`, one above the other."""
    at: Values = ()
    bars: Mapping[str, Mapping[str, Sequence[float]]] = {}
    """Label -> name -> values of runs: their mean, with a whisker from least to most."""
    log: str = ""
    """Axes with logarithmic scales: "x", "y", "xy"; "s" for one that has 0, too."""
    xlim: tuple[float | None, float | None] = (None, None)
    ylim: tuple[float | None, float | None] = (None, None)
    spans: Sequence[tuple[float, float]] = ()
    """Shaded ranges of x."""
    marks: Sequence[float] = ()
    """Dashed lines at these x."""
    levels: Sequence[float] = ()
    """Dotted lines at these y."""
    ticks: Mapping[float, str] = {}
    """Labels of x."""


def draw(
    folder: Path, name: str, panels: Sequence[Panel], columns: int = 2, *, share: bool = False
) -> str:
    """Write NAME.png with these panels, so many a row; its path. `share`: all have one scale."""
    from matplotlib.figure import Figure

    columns = min(columns, len(panels))
    lines = -(-len(panels) // columns)
    longest = max((len((p.bars and next(iter(p.bars.values()))) or ()) for p in panels), default=0)
    height = max(3.6, 0.32 * longest)
    figure = Figure(figsize=(max(8.0, 5.5 * columns), height * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False, sharex=share, sharey=share).ravel()
    for ax, panel in zip(axes, panels, strict=False):
        _panel(ax, panel)
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.png"
    figure.savefig(file, dpi=120)
    return str(file)


def _panel(ax: "Axes", panel: Panel) -> None:
    for number, line in enumerate(panel.lines):
        colour = COLOURS[(number if line.colour < 0 else line.colour) % len(COLOURS)]
        held = "steps-post" if line.step else "default"
        (drawn,) = ax.plot(line.x, line.y, line.style, color=colour, lw=1.4, ms=4)
        drawn.set(drawstyle=held, label=line.label)
        for x, y, text in zip(line.x, line.y, line.notes, strict=False):
            ax.annotate(text, (x, y), fontsize=8)
    if panel.stack:
        heights = list(panel.stack.values())
        ax.stackplot(panel.at, *heights, labels=list(panel.stack), colors=COLOURS, alpha=0.85)
    if panel.bars:
        _bars(ax, panel.bars)
    for low, high in panel.spans:
        ax.axvspan(low, high, color="black", alpha=0.07, lw=0)
    for x in panel.marks:
        ax.axvline(x, color="black", lw=0.8, ls="--", alpha=0.6)
    for y in panel.levels:
        ax.axhline(y, color="black", lw=0.8, ls=":")
    for axis in "xy":
        if axis in panel.log:
            threshold = {"linthresh": 1} if "s" in panel.log else {}
            getattr(ax, f"set_{axis}scale")("symlog" if threshold else "log", **threshold)
    if panel.ticks:
        ax.set_xticks(list(panel.ticks), list(panel.ticks.values()))
        ax.set_xticks([], minor=True)
    ax.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel)
    ax.set(xlim=panel.xlim, ylim=panel.ylim)
    ax.grid(alpha=0.3)
    if len(ax.get_legend_handles_labels()[1]) > 0:
        ax.legend(fontsize=8)


def _bars(ax: "Axes", bars: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    names = list(dict.fromkeys(name for group in bars.values() for name in group))
    width = 0.8 / len(bars)
    for number, (label, group) in enumerate(bars.items()):
        known = [(place, group[name]) for place, name in enumerate(names) if group.get(name)]
        if not known:
            continue
        at = [place + (number - (len(bars) - 1) / 2) * width for place, _ in known]
        means = [float(np.mean(values)) for _, values in known]
        most = [max(values) for _, values in known]
        least = [mean - min(values) for mean, (_, values) in zip(means, known, strict=True)]
        over = [top - mean for top, mean in zip(most, means, strict=True)]
        colour = COLOURS[number % len(COLOURS)]
        ax.barh(at, means, width * 0.95, color=colour, label=label, xerr=[least, over])
        for y, mean, top in zip(at, means, most, strict=True):
            ax.text(top, y, f" {mean:.3g}", va="center", fontsize=8)
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.margins(x=0.15)
