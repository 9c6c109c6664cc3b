"""Plots of `bench predictor`: coverage through each shift, and the trained predictor itself."""

from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.figure import Figure

from bench.predictor.judged import Judged
from bench.predictor.runs import NOMINAL_REQUESTS
from predictor.artifact import PoolSection
from sluice.train.plot import draw as draw_training

_BLUE, _ORANGE = "#0072B2", "#D55E00"
_EVERY: Final = 20
_WINDOW: Final = 200


def draw(folder: Path, found: dict[str, list[Judged]], section: PoolSection) -> list[Path]:
    """Write both; returns their files."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "predictor-coverage.png"
    _coverage(found).savefig(file, dpi=120)
    return [file, draw_training([section], folder / "predictor-training.png")]


def _coverage(found: dict[str, list[Judged]]) -> Figure:
    figure = Figure(figsize=(13, 6.5), layout="constrained")
    panels = figure.subplots(2, 3, sharex=True, sharey=True).ravel()
    for ax, (name, seeds) in zip(panels, found.items(), strict=True):
        for kind, colour, label in (
            ("rolling_raw", _ORANGE, "raw"),
            ("rolling", _BLUE, "calibrated"),
        ):
            length = min(len(getattr(j, kind)) for j in seeds)
            lines = np.array([getattr(j, kind)[:length] for j in seeds])
            at = _WINDOW + _EVERY * np.arange(length)
            ax.plot(at, lines.mean(axis=0), color=colour, lw=1.5, label=label)
            ax.fill_between(at, lines.min(axis=0), lines.max(axis=0), color=colour, alpha=0.2)
        ax.axhline(0.95, color="black", lw=0.8, ls="--")
        ax.axvline(NOMINAL_REQUESTS, color="black", lw=0.8, ls=":")
        ax.set(title=name, ylim=(0.3, 1.0))
        ax.grid(alpha=0.3)
    for ax in panels[3:]:
        ax.set_xlabel("requests; the shift begins at the dotted line")
    for ax in panels[::3]:
        ax.set_ylabel(f"coverage over {_WINDOW}")
    panels[0].legend(loc="lower left")
    return figure
