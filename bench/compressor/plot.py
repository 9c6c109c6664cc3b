"""Plots of `bench compressor`."""

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from bench.compressor.trials import REDUCTIONS

_PERCENT = [100 * reduction for reduction in REDUCTIONS]


def draw(
    folder: Path,
    curves: dict[str, dict[str, list[float]]],
    places: dict[str, dict[str, float]],
    latencies: dict[str, list[tuple[int, float]]],
) -> list[Path]:
    """Retention by reduction and by place, and latency by size; the files written."""
    folder.mkdir(parents=True, exist_ok=True)
    return [
        _retention(folder, curves),
        _places(folder, places),
        _latency(folder, latencies),
    ]


def _retention(folder: Path, curves: dict[str, dict[str, list[float]]]) -> Path:
    figure, axes = plt.subplots(1, len(curves), figsize=(13, 4), sharey=True)
    for axis, (kind, methods) in zip(axes, curves.items(), strict=True):
        for method, shares in methods.items():
            axis.plot(_PERCENT, shares, marker="o", label=method)
        axis.set(title=kind, xlabel="reduction, % of bytes", ylim=(0, 1.03))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("gold sentences kept")
    axes[0].legend()
    return _saved(figure, folder / "compressor_retention.png")


def _places(folder: Path, places: dict[str, dict[str, float]]) -> Path:
    figure, axis = plt.subplots(figsize=(7, 4))
    width = 0.8 / len(places)
    for index, (method, shares) in enumerate(places.items()):
        at = [place + index * width for place in range(len(shares))]
        axis.bar(at, list(shares.values()), width, label=method)
    labels = list(next(iter(places.values())))
    axis.set_xticks([place + 0.4 - width / 2 for place in range(len(labels))], labels)
    axis.set(ylabel="answer sentence kept", title="by place of the answer, 50 % reduction")
    axis.legend()
    return _saved(figure, folder / "compressor_places.png")


def _latency(folder: Path, latencies: dict[str, list[tuple[int, float]]]) -> Path:
    figure, axis = plt.subplots(figsize=(7, 4))
    for name, points in latencies.items():
        axis.scatter([size / 1000 for size, _ in points], [ms for _, ms in points], s=8, label=name)
    axis.set(xlabel="prompt, kB", ylabel="best time, ms", title="one core")
    axis.legend(fontsize=7)
    axis.grid(alpha=0.3)
    return _saved(figure, folder / "compressor_latency.png")


def _saved(figure: Figure, file: Path) -> Path:
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)
    return file
