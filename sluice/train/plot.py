"""A predictor's plot, a row a pool: predicted quantile against actual, coverage by regime."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from predictor.artifact import PoolSection

_BLUE, _ORANGE, _GREY = "#0072B2", "#D55E00", "#777777"
_FEW = 20
"""Fewest rows for a meaningful coverage of a regime."""


def draw(sections: Sequence[PoolSection], file: Path) -> Path:
    """Draw one PNG; returns the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(12, 5 * len(sections)), layout="constrained")
    rows = figure.subplots(len(sections), 2, squeeze=False)
    for section, (points, bars) in zip(sections, rows, strict=True):
        _points(points, section)
        _bars(bars, section)
    figure.savefig(file, dpi=120)
    return file


def _points(axes: Axes, section: PoolSection) -> None:
    found = np.array(section.report["points"])
    quantile, actual = found.T
    above = actual > quantile
    axes.plot(quantile[~above], actual[~above], ".", ms=3, color=_BLUE, alpha=0.5, label="within")
    share = f"above ({above.mean():.1%})"
    axes.plot(quantile[above], actual[above], ".", ms=4, color=_ORANGE, alpha=0.9, label=share)
    low, high = max(1e-3, float(found.min())) / 1.3, float(found.max()) * 1.3
    axes.plot([low, high], [low, high], color=_GREY, lw=1)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    axes.set(xlabel=f"predicted {section.alpha:g} quantile, calibrated (s)", ylabel="actual (s)")
    axes.set_title(f"{section.name}: prefill, dispatch to first token")
    axes.legend(loc="upper left")
    axes.grid(alpha=0.3)


def _bars(axes: Axes, section: PoolSection) -> None:
    report = section.report
    rows = [row for row in report["buckets"] if row["rows"] >= _FEW]
    rows.append({"bucket": "all", "rows": report["held_out"], **report["coverage"]})
    at = np.arange(len(rows))
    for offset, (kind, colour) in zip(
        (-0.2, 0.2), (("raw", _ORANGE), ("calibrated", _BLUE)), strict=True
    ):
        axes.barh(at + offset, [row[kind] for row in rows], 0.38, color=colour, label=kind)
    axes.axvline(section.alpha, color="black", lw=1, ls="--")
    axes.set_yticks(at, [f"{row['bucket']} ({row['rows']:,})" for row in rows], fontsize=8)
    lowest = min(min(row["raw"], row["calibrated"]) for row in rows)
    axes.set(xlim=(max(0.0, min(0.8, lowest - 0.05)), 1.0), xlabel="share within the quantile")
    axes.set_title("Coverage by regime (rows)")
    axes.invert_yaxis()
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2, frameon=False)
    axes.grid(axis="x", alpha=0.3)
