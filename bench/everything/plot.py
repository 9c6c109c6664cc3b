"""The plot of `bench everything`: attainment by tenant, P99 TTFT, workers needed."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from bench.everything.figures import RunFigures
from bench.everything.scene import TENANTS
from bench.everything.virtual import MAX_WORKERS

_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")


def draw(found: dict[str, RunFigures], needed: dict[str, int | None], folder: Path) -> Path:
    """Write everything.png."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(found)
    at = np.arange(len(names))
    figure = Figure(figsize=(11, 9), layout="constrained")
    top, middle, bottom = figure.subplots(3, 1, sharex=True)
    for index, tenant in enumerate(TENANTS):
        seen = [figures.tenants[index] for figures in found.values()]
        places = at + 0.2 * index - 0.3
        label = f"{tenant.name} ({tenant.service_class}, {tenant.slo_ms / 1000:g} s)"
        top.bar(places, [100 * one.attained for one in seen], 0.18, color=_COLOURS[index])
        p99_s = [one.p99_ttft_s for one in seen]
        middle.bar(places, p99_s, 0.18, color=_COLOURS[index], label=label)
    bottom.bar(at, [needed[name] or MAX_WORKERS for name in names], 0.5, color="#56B4E9")
    for place, name in zip(at, names, strict=True):
        text = str(needed[name] or f"> {MAX_WORKERS}")
        bottom.annotate(text, (place, needed[name] or MAX_WORKERS), ha="center", va="bottom")
    top.set(ylabel="first token within the SLO\n(% of all requests)", ylim=(0, 105))
    middle.set(ylabel="P99 time to first token\n(s, served requests)", yscale="log")
    middle.yaxis.set_major_formatter("{x:g}")
    bottom.set(ylabel="workers needed\n(simulated)", ylim=(0, MAX_WORKERS * 1.15))
    bottom.set_xticks(at, names, rotation=15)
    figure.legend(*middle.get_legend_handles_labels(), loc="outside upper center", ncols=4)
    for axes in (top, middle, bottom):
        axes.grid(axis="y", alpha=0.3)
    file = folder / "everything.png"
    figure.savefig(file, dpi=120)
    return file
