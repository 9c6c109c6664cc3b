"""Figures of the recent requests: times, lengths against the boundary, compression."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from math import log2
from typing import Any, Final

from gateway.dashboard.recent import Brief
from gateway.dashboard.totals import Totals
from gateway.fleet.model_runtime import ModelRuntime

WINDOW_S: Final = 60.0
"""Percentiles are of requests that arrived within this time."""
_FIRST_EDGE: Final = 64
_MAX_BUCKETS: Final = 48


def recent(briefs: Iterable[Brief], now_unix_s: float) -> list[Brief]:
    """Those of the last minute."""
    return [brief for brief in briefs if now_unix_s - brief.time_unix_s <= WINDOW_S]


def times(briefs: Iterable[Brief]) -> dict[str, Any]:
    """Percentiles of answers and of the gateway's own work."""
    ttft: list[float] = []
    overhead: list[float] = []
    for brief in briefs:
        if brief.timing.ttft_s is not None and brief.outcome == "ok":
            ttft.append(brief.timing.ttft_s)
        if brief.timing.overhead_ms is not None:
            overhead.append(brief.timing.overhead_ms / 1000)
    return {
        "ttft_p50_s": percentile(ttft, 0.5),
        "ttft_p99_s": percentile(ttft, 0.99),
        "overhead_p50_s": percentile(overhead, 0.5),
        "overhead_p99_s": percentile(overhead, 0.99),
        "sampled": len(ttft),
    }


def percentile(values: list[float], share: float) -> float | None:
    """The nearest-rank percentile; None of nothing."""
    if not values:
        return None
    values.sort()
    return values[min(len(values) - 1, int(share * len(values)))]


def lengths(served: ModelRuntime, briefs: Iterable[Brief]) -> dict[str, Any]:
    """Histogram of total tokens by pool, in half powers of two, with boundaries and plan."""
    shapes = served.routing.pools
    edges = _edges(shapes[-1].window_tokens)
    counts = {shape.name: [0] * (len(edges) + 1) for shape in shapes}
    for brief in briefs:
        if brief.model != served.name or brief.pool not in counts:
            continue
        tokens = brief.total_tokens
        if tokens:
            counts[brief.pool][bisect_left(edges, tokens)] += 1
    drift = None if served.watch is None else served.watch.drift
    return {
        "edges": edges,
        "pools": [{"name": name, "counts": row} for name, row in counts.items()],
        "boundaries": [s.boundary_tokens for s in shapes if s.boundary_tokens is not None],
        "planned": None if drift is None else _shares(drift.planned, edges),
        "drift": None if drift is None else drift.distance,
    }


def _edges(window_tokens: int) -> list[int]:
    steps = round(2 * log2(max(window_tokens, 2 * _FIRST_EDGE) / _FIRST_EDGE))
    return [round(_FIRST_EDGE * 2 ** (i / 2)) for i in range(min(steps, _MAX_BUCKETS) + 1)]


def _shares(planned: Sequence[tuple[int, float]], edges: Sequence[int]) -> list[float]:
    """The planned share of requests in each bucket; between two points it grows by the logarithm.

    Below the first point it grows from the lowest edge.
    """
    points = [(min(edges[0] / 2, planned[0][0] / 2), 0.0), *planned]

    def up_to(tokens: int) -> float:
        at = bisect_left(points, (tokens, 0.0))
        if at >= len(points):
            return points[-1][1]
        (low, share), (high, more) = points[max(at - 1, 0)], points[at]
        part = 1.0 if high == low else log2(tokens / low) / log2(high / low)
        return share + (more - share) * min(max(part, 0.0), 1.0)

    totals = [up_to(edge) for edge in edges]
    return [
        round(high - low, 6)
        for low, high in zip([0.0, *totals], [*totals, points[-1][1]], strict=True)
    ]


def compression(served: ModelRuntime, totals: Totals, briefs: Iterable[Brief]) -> dict[str, Any]:
    """How many prompts in the window were compressed, what was kept, and tokens saved."""
    results = {
        result: int(count)
        for (model, result), count in totals.compressions.items()
        if model == served.name
    }
    done = results.pop("compressed", 0)
    candidates = done + sum(results.values())
    saved = kept = recent = 0.0
    for brief in briefs:
        share = brief.compression.kept_share
        if share is not None and brief.model == served.name:
            before, _, after = brief.compression.compressed.partition("->")
            recent, kept, saved = recent + 1, kept + share, saved + int(before) - int(after)
    return {
        "enabled": served.compression is not None,
        "compressed": done,
        "candidates": candidates,
        "kept_ratio": kept / recent if recent else None,
        "saved_tokens": int(saved),
        "recent": int(recent),
        "not_compressed": dict(sorted(results.items(), key=lambda item: -item[1])[:8]),
    }
