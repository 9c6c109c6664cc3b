"""Plots of bench quartz-loads: a figure a workload, TTFT and hits over load, by fleet."""

from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.figure import Figure

from bench.quartz_loads.run import DEFAULT, OTHERS, Found, LoadCell

_COLOURS: Final = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7")
_FIELDS: Final = (
    ("p50_s", "P50 TTFT, s"),
    ("p99_s", "P99 TTFT, s"),
    ("violations", "SLO violations, %"),
    ("hits", "cached prompt tokens, %"),
)


def draw(found: Found, folder: Path) -> list[Path]:
    """Write all plots; returns their files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for scene in sorted({cell.scene for cell, _ in found}):
        fleets = sorted({cell.workers for cell, _ in found if cell.scene == scene})
        figure = Figure(figsize=(14, 3.2 * len(fleets)), layout="constrained")
        axes = figure.subplots(len(fleets), len(_FIELDS), squeeze=False)
        for row, workers in zip(axes, fleets, strict=True):
            loads = sorted({c.load for c, _ in found if (c.scene, c.workers) == (scene, workers)})
            for axis, (field, label) in zip(row, _FIELDS, strict=True):
                for policy, colour in zip((DEFAULT, *OTHERS), _COLOURS, strict=True):
                    cells = [LoadCell(scene=scene, workers=workers, load=x) for x in loads]
                    values = [
                        float(np.mean([getattr(seen, field) for seen in found[cell, policy]]))
                        for cell in cells
                    ]
                    width = 2.5 if policy == DEFAULT else 1.2
                    axis.plot(loads, values, "o-", color=colour, lw=width, ms=3, label=policy)
                if field.endswith("_s"):
                    axis.set_yscale("log")
                axis.set_title(f"{workers} workers: {label}", fontsize=9)
                axis.set_xticks(loads)
                axis.grid(alpha=0.3)
        axes[0][0].legend(fontsize=8)
        figure.suptitle(f"{scene}: over load, as a share of the knee")
        files.append(folder / f"quartz-loads-{scene.lower().replace(' ', '-')}.png")
        figure.savefig(files[-1], dpi=100)
    return files
