"""CPU per request of one process and of two, by offered load, as a picture."""

import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.workers_rounds import Point, Seen

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {"1": "#64748b", "2": "#c2410c", "1+1": "#cbd5e1"}
_NAMES = {"1": "one worker", "2": "two workers", "1+1": "two gateways apart"}


def plot_points(rounds: Mapping[Point, Sequence[Mapping[str, Seen]]], folder: Path) -> None:
    """Write workers.png: a group of bars for each load, with the range of the rounds."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    kinds = {
        kind: {point: found for point, found in rounds.items() if point.kind == kind}
        for kind in dict.fromkeys(point.kind for point in rounds)
    }
    widths = [len(of_kind) for of_kind in kinds.values()]
    figure, axes = plt.subplots(
        1, len(kinds), figsize=(12, 4.5), width_ratios=widths, squeeze=False, layout="constrained"
    )
    for axis, of_kind in zip(axes[0], kinds.values(), strict=True):
        _bars(axis, of_kind)
    axes[0][0].set_ylabel("CPU per request, us")
    axes[0][0].legend()
    figure.suptitle("The same offered load on one process and on two")
    figure.savefig(folder / "workers.png", dpi=110)
    plt.close(figure)


def _bars(axis: "Axes", rounds: Mapping[Point, Sequence[Mapping[str, Seen]]]) -> None:
    for number, name in enumerate(_NAMES):
        values = [[seen[name].cpu_us for seen in found] for found in rounds.values()]
        middle = [statistics.median(each) for each in values]
        spread = [
            [m - min(each) for m, each in zip(middle, values, strict=True)],
            [max(each) - m for m, each in zip(middle, values, strict=True)],
        ]
        places = [place + 0.27 * (number - 1) for place in range(len(values))]
        bars = axis.bar(places, middle, 0.25, yerr=spread, capsize=3, color=_COLOURS[name])
        bars.set_label(_NAMES[name])
        axis.bar_label(bars, fmt="%.0f", fontsize=7, padding=2)
    axis.set_xticks(range(len(rounds)), [textwrap.fill(str(point), 14) for point in rounds])
