"""Table 3 of token-budget pool routing by the fleet simulator, as published and in longer runs.

Ten seconds of 1,000 requests/s give figures near the published ones. Ten seconds are a fraction
of one long service, so the same fleets are also run for longer, with the paper's one chunk per
iteration for all prompts and with a chunk for each.
"""

from typing import Final, Literal

from bench.common.report import Row, beside
from bench.pool_routing.model import AZURE, Sizing
from simulator.experiments.token_budget_latency import Latency, latencies

REQUESTS: Final = 10_000
LONG_REQUESTS: Final = 200_000
RATE: Final = 1000.0
TTFT_SLO_S: Final = 2.0
TPOT_SLO_S: Final = 0.080

# TTFT P50 and P99, seconds; TPOT P50 and P99, milliseconds.
_PUBLISHED: Final = {
    "homogeneous": (0.02, 0.91, 12.0, 13.0),
    "token-budget": (0.09, 1.60, 25.0, 29.0),
}
_FIGURES: Final = ("TTFT P50, s", "TTFT P99, s", "TPOT P50, ms", "TPOT P99, ms")
_NEAR: Final = 0.25
"""A figure is said to reproduce when it is within so much."""


def table_3(azure: Sizing) -> list[Row]:
    """All rows: the published run, then the longer ones."""
    rows = []
    runs = _run(azure, REQUESTS, "shared")
    for (name, published), run in zip(_PUBLISHED.items(), runs, strict=True):
        for figure, ours, wanted in zip(_FIGURES, _figures(run), published, strict=True):
            rows.append(beside(f"Table 3, {name}: {figure}", ours, wanted, _gap(ours, wanted)))
    chunks: tuple[tuple[Literal["shared", "independent"], str], ...] = (
        ("shared", "one chunk for all prompts"),
        ("independent", "a chunk for each prompt"),
    )
    for prefill, what in chunks:
        for name, run in zip(_PUBLISHED, _run(azure, LONG_REQUESTS, prefill), strict=True):
            rows.append(_longer(f"Table 3, {name}: {LONG_REQUESTS:,} requests, {what}", run))
    return rows


def _run(
    azure: Sizing, requests: int, prefill: Literal["shared", "independent"]
) -> tuple[Latency, Latency]:
    return latencies(
        AZURE.breakpoints,
        output_mean=AZURE.output_mean,
        output_std=AZURE.output_std,
        one=azure.one,
        short=azure.short,
        long=azure.long,
        rate_per_s=RATE,
        requests=requests,
        prefill=prefill,
    )


def _figures(run: Latency) -> tuple[float, float, float, float]:
    return (run.ttft_p50_s, run.ttft_p99_s, 1000 * run.tpot_p50_s, 1000 * run.tpot_p99_s)


def _gap(ours: float, published: float) -> str:
    off = ours / published - 1
    said = f"{100 * off:+.0f} %"
    # Published with two digits: .02 may be .025.
    if abs(off) > _NEAR and abs(ours - published) > 0.01:
        return f"{said}: does not reproduce"
    return f"{said}; ten seconds, the first two left out"


def _longer(metric: str, run: Latency) -> Row:
    meets = run.ttft_p99_s <= TTFT_SLO_S and run.tpot_p99_s <= TPOT_SLO_S and not run.drifting
    waits = ", ".join(f"{name} {wait:.2g} s" for name, wait in run.wait_p99_s.items())
    state = f"; rising in pool {' and '.join(run.drifting)}" if run.drifting else ""
    return Row(
        metric,
        "holds its SLO" if meets else "does not",
        published="holds its SLO",
        note=f"P99 TTFT {run.ttft_p99_s:.2f} s (2), TPOT {1000 * run.tpot_p99_s:.1f} ms (80), "
        f"waits {waits}{state}",
    )
