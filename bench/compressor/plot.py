"""Plots of `bench compressor`: retention by reduction and by place, latency by size."""

from pathlib import Path

from bench.common.plot import Line, Panel, draw
from bench.compressor.trials import REDUCTIONS

_PERCENT = [100 * reduction for reduction in REDUCTIONS]


def plots(
    folder: Path,
    curves: dict[str, dict[str, list[float]]],
    places: dict[str, dict[str, float]],
    latencies: dict[str, list[tuple[int, float]]],
) -> list[str]:
    """Draw all; their files."""
    retention = [
        Panel(
            title=f"{kind}: gold sentences kept",
            xlabel="reduction, % of bytes",
            ylim=(0, 1.03),
            lines=[Line(x=_PERCENT, y=y, style="o-", label=m) for m, y in methods.items()],
        )
        for kind, methods in curves.items()
    ]
    bars = {m: {place: [kept] for place, kept in by.items()} for m, by in places.items()}
    by_place = Panel(title="answer kept by its place, 50 % reduction", bars=bars)
    by_size = Panel(
        title="best time on one core, ms",
        xlabel="prompt, kB",
        lines=[
            Line(x=[size / 1000 for size, _ in seen], y=[ms for _, ms in seen], style=".", label=n)
            for n, seen in latencies.items()
        ],
    )
    return [
        draw(folder, "compressor_retention", retention, 3, share=True),
        draw(folder, "compressor_places", [by_place]),
        draw(folder, "compressor_latency", [by_size]),
    ]
