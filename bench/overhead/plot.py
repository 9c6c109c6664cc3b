"""`bench overhead --plot`: one PNG of the sections that were measured."""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bench.common.tools import Figures
from bench.overhead.contenders import EMBEDDED, GATEWAYS, ON_REDIS, ROUTER
from bench.overhead.rounds import CHUNKS, RATE_PER_S, Round
from bench.overhead.rounds import counting as main_counting
from bench.overhead.variants import Seen
from bench.overhead.variants import counting as variant_counting

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS, OTHERS = "#c2410c", "#64748b"
SHADES: Final = {EMBEDDED: OURS, ON_REDIS: "#fb923c", ROUTER: OTHERS}
PANELS: Final = (
    ("whole_cpu_us", "CPU per whole answer, us"),
    ("stream_cpu_us", f"CPU per {CHUNKS}-chunk stream, us"),
    ("added_whole_p50_us", f"Added first byte at {RATE_PER_S}/s, p50, us"),
)


def plot(rounds: list[Round], seen: Seen, rate: Mapping[str, Figures], folder: Path) -> None:
    """Write overhead.png: main rounds above, variants and chunks/s per core below."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    figure = plt.figure(figsize=(15, 10))
    grid = figure.add_gridspec(2, 3)
    for column, (metric, title) in enumerate(PANELS):
        _bars(figure.add_subplot(grid[0, column]), _medians(rounds, metric), title, "%.0f")
    _ratios(figure.add_subplot(grid[1, :2]), seen)
    per_core = {name: f["chunks_per_s"] / f["cores"] / 1000 for name, f in rate.items()}
    _bars(figure.add_subplot(grid[1, 2]), per_core, "Thousand chunks/s per core", "%.1f")
    figure.tight_layout()
    figure.savefig(folder / "overhead.png", dpi=110)
    plt.close(figure)


def _medians(rounds: list[Round], metric: str) -> dict[str, float]:
    found = {}
    for name in rounds[0] if rounds else ():
        counted = main_counting(rounds, name, metric)
        if counted:
            found[name] = statistics.median(figures[name][metric] for figures in counted)
    return found


def _bars(axis: "Axes", values: Mapping[str, float], title: str, form: str) -> None:
    axis.set_title(title)
    if not values:
        _nothing(axis)
        return
    names = list(values)
    colours = [OURS if name in GATEWAYS else OTHERS for name in names]
    bars = axis.barh(names, list(values.values()), color=colours)
    axis.bar_label(bars, fmt=form, padding=3)
    if min(values.values()) > 0 and max(values.values()) > 20 * min(values.values()):
        axis.set_xscale("log")
    axis.invert_yaxis()
    axis.margins(x=0.25)


def _ratios(axis: "Axes", seen: Seen) -> None:
    """CPU over sglang-router's, by variant; 0 and so named where no round counts."""
    axis.set_title(f"Variants: CPU, times {ROUTER}'s in the same rounds")
    names = [name for name in (EMBEDDED, ON_REDIS) if any(name in r[0] for r in seen.values() if r)]
    shown = {v.label: rounds for v, rounds in seen.items() if rounds and ROUTER in rounds[0]}
    if not shown or not names:
        _nothing(axis)
        return
    height = 0.8 / len(names)
    for number, name in enumerate(names):
        values = [_ratio(seen, label, name) for label in shown]
        places = [k + (number - (len(names) - 1) / 2) * height for k in range(len(shown))]
        bars = axis.barh(places, values, height=height, color=SHADES[name], label=name)
        labels = [f"{value:.2f}" if value else "not saturated" for value in values]
        axis.bar_label(bars, labels=labels, padding=3, fontsize=8)
    axis.axvline(1.0, color=OTHERS, linewidth=1)
    axis.set_yticks(range(len(shown)), list(shown))
    axis.invert_yaxis()
    axis.margins(x=0.1)
    axis.legend()


def _ratio(seen: Seen, label: str, name: str) -> float:
    variant = next(variant for variant in seen if variant.label == label)
    counted = [r for r in variant_counting(variant, seen[variant], name) if ROUTER in r]
    if not counted:
        return 0.0
    return statistics.median(r[name]["cpu_us"] / r[ROUTER]["cpu_us"] for r in counted)


def _nothing(axis: Any) -> None:
    axis.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axis.transAxes)
    axis.set_axis_off()
