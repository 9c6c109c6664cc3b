"""A plot of `bench quartz-live`: TTFT, violations and hit rate by system."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.quartz_live.load import SYSTEMS


def draw(found: Mapping[tuple[str, str], Sequence[Any]], folder: Path) -> None:
    """Write quartz-live.png: a row a workload, a bar a system, a dot a run."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figures: tuple[tuple[str, Callable[[Any], float]], ...] = (
        ("P50 TTFT, s", lambda run: run.p50_s),
        ("P99 TTFT, s", lambda run: run.p99_s),
        ("violations, %", lambda run: 100 * run.violations),
        ("prefix hit rate, %", lambda run: 100 * run.hit_rate),
    )
    workloads = list(dict.fromkeys(workload for workload, _ in found))
    figure, axes = plt.subplots(
        len(workloads), len(figures), squeeze=False, figsize=(14, 3.2 * len(workloads))
    )
    for row, workload in zip(axes, workloads, strict=True):
        names = [name for name in SYSTEMS if found.get((workload, name))]
        for axis, (label, of) in zip(row, figures, strict=True):
            for place, name in enumerate(names):
                runs = [run for run in found[workload, name] if not run.void]
                if not runs:
                    continue
                colour = "#2563eb" if name == "quartz" else "#94a3b8"
                axis.bar(place, median(of(run) for run in runs), color=colour, width=0.65)
                axis.plot([place] * len(runs), [of(run) for run in runs], "k.", markersize=5)
            axis.set_xticks(range(len(names)), names, rotation=25, ha="right")
            axis.set_title(f"{workload}: {label}", fontsize=10)
            axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "quartz-live.png", dpi=130)
    plt.close(figure)
