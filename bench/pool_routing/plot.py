"""Figure 6 of `bench pool-routing`: savings against the boundary."""

from pathlib import Path
from typing import Final

import numpy as np

from bench.common.plot import Line, Panel, draw
from bench.pool_routing.model import AZURE, LMSYS, size

# Savings that the text states: (boundary, percent). The figure's other marks are unnumbered.
_PUBLISHED: Final = {"Azure": ((8192, 16.6), (32_768, 20.0)), "LMSYS": ((8192, 38.5),)}


def plots(folder: Path) -> list[str]:
    """Draw it; its file."""
    return [draw(folder, "pool-routing-savings", [_savings()])]


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
