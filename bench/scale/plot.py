"""A plot of `bench scale`: cost by size, one panel per ladder, both axes logarithmic."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench.scale.rows import Point

_COLOURS: Final = ("#2563eb", "#0f766e", "#d97706", "#94a3b8")


def draw(points: Sequence[Point], folder: Path) -> Path:
    """Write scale.png to the folder; its path."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(12, 8))
    _decisions(axes[0][0], points)
    _stages(axes[0][1], points)
    _requests(axes[1][0], points)
    _holds(axes[1][1], points)
    for axis in axes.flat:
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=8, frameon=False)
    figure.tight_layout()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "scale.png"
    figure.savefig(file, dpi=130)
    plt.close(figure)
    return file


def _decisions(axis: Any, points: Sequence[Point]) -> None:
    found = [p for p in points if p.kind == "workers"]
    policies = dict.fromkeys(p.size.policy for p in found)
    for colour, policy in zip(_COLOURS, policies, strict=False):
        ladder = [p for p in found if p.size.policy == policy]
        sizes = [p.size.workers for p in ladder]
        axis.plot(sizes, _of(ladder, "bind_p50_us"), "o-", color=colour, label=f"{policy}, p50")
        axis.plot(sizes, _of(ladder, "bind_p99_us"), "--", color=colour, label=f"{policy}, p99")
    axis.set_title("bind + queue, CPU-us", fontsize=10)
    axis.set_xlabel("workers")


def _stages(axis: Any, points: Sequence[Point]) -> None:
    ladder = [p for p in points if p.kind == "workers" and p.size.policy == "quartz"]
    sizes = [p.size.workers for p in ladder]
    for part, label in (
        ("request_us", "all stages"),
        ("estimate_us", "read, estimate"),
        ("look_us", "prefix look-up"),
        ("admit_us", "admit"),
        ("bind_us", "bind + queue"),
        ("call_us", "call, prefix kept"),
        ("first_us", "first token"),
    ):
        axis.plot(sizes, _of(ladder, part), "o-", label=label, markersize=4)
    axis.set_title("quartz: CPU-us a request, means", fontsize=10)
    axis.set_xlabel("workers")


def _requests(axis: Any, points: Sequence[Point]) -> None:
    everyone = [p for p in points if p.size.active in (0, p.size.entitlements)]
    for kind, figure, label in (
        ("entitlements", "request_us", "embedded: authenticate, admit, settle"),
        ("redis", "own_us", "on Redis: admit, settle, the gateway's"),
        ("redis", "redis_us", "on Redis: Redis's"),
    ):
        ladder = [p for p in everyone if p.kind == kind]
        sizes = [p.size.entitlements for p in ladder]
        axis.plot(sizes, _of(ladder, figure), "o-", label=label)
    ladder = [p for p in points if p.kind == "leases"]
    sizes = [p.size.leases for p in ladder]
    axis.plot(sizes, _of(ladder, "request_us"), "s--", label="embedded, by open leases")
    axis.set_title("CPU-us a request", fontsize=10)
    axis.set_xlabel("entitlements, or open leases")


def _holds(axis: Any, points: Sequence[Point]) -> None:
    for kind, figure, label, scale in (
        ("entitlements", "tick_hold_ms", "tick, by entitlements", 1.0),
        ("entitlements", "survey_hold_ms", "survey, by entitlements", 1.0),
        ("entitlements", "page_ms", "/metrics, by entitlements", 1.0),
        ("leases", "admit_most_us", "an admission, by leases", 1e-3),
        ("upkeep", "probes_hold_ms", "a round of probes, by workers", 1.0),
        ("workers", "pause_ms", "collector, by workers", 1.0),
    ):
        ladder = [
            p
            for p in points
            if p.kind == kind
            and p.size.policy == "quartz"
            and p.size.active in (0, p.size.entitlements)
        ]
        name = {"entitlements": "entitlements", "leases": "leases"}.get(kind, "workers")
        sizes = [getattr(p.size, name) for p in ladder]
        axis.plot(sizes, [v * scale for v in _of(ladder, figure)], "o-", label=label, markersize=4)
    axis.set_title("longest hold of the event loop, ms", fontsize=10)
    axis.set_xlabel("workers, entitlements or leases")


def _of(points: Sequence[Point], figure: str) -> list[float]:
    return [point.figures[figure] for point in points]
