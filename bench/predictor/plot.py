"""Plots of `bench predictor`: coverage through each shift, and the trained predictor itself."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from bench.common.plot import Line, Panel, draw
from bench.predictor.judged import Judged
from bench.predictor.runs import NOMINAL_REQUESTS
from predictor.artifact import PoolSection
from sluice.train.plot import draw as draw_training

_EVERY: Final = 20
_WINDOW: Final = 200


def plots(folder: Path, found: dict[str, list[Judged]], section: PoolSection) -> list[str]:
    """Draw both; their files."""
    coverage = draw(folder, "predictor-coverage", list(_coverage(found)), 3, share=True)
    return [coverage, str(draw_training([section], folder / "predictor-training.png"))]


def _coverage(found: dict[str, list[Judged]]) -> Iterator[Panel]:
    for name, seeds in found.items():
        lines = []
        for label, kind in (("raw", "rolling_raw"), ("calibrated", "rolling")):
            length = min(len(getattr(j, kind)) for j in seeds)
            runs = np.array([getattr(j, kind)[:length] for j in seeds])
            at, band = _WINDOW + _EVERY * np.arange(length), (runs.min(axis=0), runs.max(axis=0))
            lines.append(Line(x=at, y=runs.mean(axis=0), label=label, band=band))
        yield Panel(
            title=f"{name}: coverage over {_WINDOW}",
            xlabel="requests; the shift begins at the dashed line",
            ylim=(0.3, 1.0),
            levels=(0.95,),
            marks=(NOMINAL_REQUESTS,),
            lines=lines,
        )
