"""Plots of `bench pool-routing`: savings against the boundary, convergence of the ratio."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from bench.common.plot import Line, Panel, draw
from bench.pool_routing.learning import AT, CATEGORIES, NOISE, curve
from bench.pool_routing.model import AZURE, LMSYS, size

_RUNS: Final = 40
_OBSERVATIONS: Final = 100
# Savings that the text states: (boundary, percent). The figure's other marks are unnumbered.
_PUBLISHED: Final = {"Azure": ((8192, 16.6), (32_768, 20.0)), "LMSYS": ((8192, 38.5),)}


def plots(folder: Path) -> list[str]:
    """Draw both; their files."""
    return [
        draw(folder, "pool-routing-savings", [_savings()]),
        draw(folder, "pool-routing-convergence", list(_convergence()), share=True),
    ]


def _savings() -> Panel:
    """Figure 6."""
    lines = []
    at = [round(b) for b in np.geomspace(1024, 32_768, 41)]
    marks = [2**k for k in range(10, 16)]
    for n, workload in enumerate((AZURE, LMSYS)):
        for style, label, boundaries in (("-", f"{workload.name}, ours", at), ("o", "", marks)):
            y = [100 * size(workload, b).savings for b in boundaries]
            lines.append(Line(x=boundaries, y=y, style=style, label=label, colour=n))
        x, percent = zip(*_PUBLISHED[workload.name], strict=True)
        lines.append(
            Line(x=x, y=percent, style="x+"[n], label=f"{workload.name}, published", colour=4)
        )
    return Panel(
        title="Instances saved by two pools over one at 1,000 requests/s, %",
        xlabel="boundary (tokens)",
        log="x",
        ylim=(0, 45),
        ticks={b: f"{b // 1024}K" for b in marks},
        lines=lines,
    )


def _convergence() -> Iterator[Panel]:
    for profile in ("paper", "default"):
        lines = []
        for i, known in enumerate(CATEGORIES):
            runs = [curve(known, profile, _OBSERVATIONS, NOISE, seed) for seed in range(_RUNS)]
            off = 100 * (np.array(runs) / known.ratio - 1)
            low, middle, high = np.quantile(off, (0.05, 0.5, 0.95), axis=0)
            n = np.arange(_OBSERVATIONS + 1)
            lines.append(Line(x=n, y=middle, label=known.label, colour=i, band=(low, high)))
            published = 100 * (known.learned / known.ratio - 1)
            lines.append(Line(x=[AT + 2 * i - 3], y=[published], style="x", colour=i))
        yield Panel(
            title=f"profile {profile}: learned / true bytes per token - 1, %",
            xlabel=f"observations; middle of {_RUNS} runs, band 9 in 10; x: published at {AT}",
            levels=(0,),
            xlim=(0, _OBSERVATIONS),
            ylim=(-12, 30),
            lines=lines,
        )
