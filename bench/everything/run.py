"""`python -m bench everything`: all five systems on against all off, and each one's part.

The same mixed trace with tenants goes through a real gateway before the same mock engines, once
for each configuration of `bench.everything.systems`, in real time. Off is round robin over one
pool without admission. The workers needed for the SLOs are found in virtual time, by the simulated
gateway with the same configuration; two of the live runs are held against it.
`SLUICE_BENCH_SECONDS` makes the trace shorter than 60 s.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.progress import Progress

from bench.common.report import Report, Row, at_least, at_most
from bench.everything.figures import RunFigures
from bench.everything.live import live
from bench.everything.scene import RANKS, REPLICAS, TENANTS, TraceRequest, trace
from bench.everything.systems import ALL, OFF, SYSTEMS
from bench.everything.virtual import MAX_WORKERS, simulated, workers_needed

SECONDS: Final = float(os.environ.get("SLUICE_BENCH_SECONDS", "60"))
ATTAINED: Final = 0.95
"""Share in time by which the workers needed are counted."""
_P99_WITHIN: Final = 0.30
_USE_WITHIN: Final = 0.05
_COMPARED: Final = (ALL, OFF)
_SEEDS: Final = range(9)


def run(plot: Path | None = None) -> Report:
    """Every system live, then in virtual time."""
    requests = trace(SECONDS)
    found: dict[str, RunFigures] = {}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("systems", total=2 * len(SYSTEMS))
        for name, switches in SYSTEMS.items():
            found[name] = live(switches, requests)
            progress.advance(bar)
        needed = {}
        for name, switches in SYSTEMS.items():
            needed[name] = workers_needed(switches, requests, ATTAINED)
            progress.advance(bar)
    rows = [
        *(row for name in SYSTEMS for row in _system(name, found[name], needed[name])),
        *_parts(found),
        *_agreement(requests, found),
    ]
    detail: dict[str, Any] = {
        "requests": len(requests),
        "workers": REPLICAS + RANKS,
        "systems": {name: msgspec.to_builtins(figures) for name, figures in found.items()},
        "needed": needed,
    }
    if plot is not None:
        from bench.everything.plot import draw

        detail["plots"] = [str(draw(found, needed, plot))]
    return Report(name="everything", rows=rows, detail=detail)


def _system(name: str, found: RunFigures, needed: int | None) -> Iterator[Row]:
    """One system's row of the table."""
    by_tenant = "; ".join(
        f"{tenant.name} {100 * seen.attained:.1f} % in time, P99 {seen.p99_ttft_s:.2f} s, "
        f"{100 * seen.refused:.0f} % refused"
        for tenant, seen in zip(TENANTS, found.tenants, strict=True)
    )
    yield Row(
        metric=f"{name}: attainment of the worst promised tenant, %",
        measured=100 * found.promised,
        note=by_tenant,
    )
    yield Row(metric=f"{name}: P99 TTFT of all, s", measured=found.p99_ttft_s)
    yield Row(
        metric=f"{name}: tokens/s",
        measured=found.tokens_per_s,
        note=f"{100 * found.utilisation:.0f} % of the slots in use, {found.compressed} compressed",
    )
    yield Row(
        metric=f"{name}: workers for {100 * ATTAINED:g} % of every promised tenant, simulated",
        measured=f"over {MAX_WORKERS}" if needed is None else float(needed),
    )


def _parts(found: dict[str, RunFigures]) -> Iterator[Row]:
    """What all together give over none, and each system's part in it."""
    on, off = found[ALL], found[OFF]
    gain = 100 * (on.promised - off.promised)
    yield at_least("all on over all off: attainment of the worst promised tenant, points", gain, 10)
    yield at_least(
        "all on over all off: chat's P99 TTFT, times lower",
        off.tenants[0].p99_ttft_s / on.tenants[0].p99_ttft_s,
        2,
    )
    for name, figures in found.items():
        if name not in {ALL, OFF}:
            points = ", ".join(
                f"{tenant.name} {100 * (a.attained - b.attained):+.1f}"
                for tenant, a, b in zip(TENANTS, on.tenants, figures.tenants, strict=True)
            )
            yield Row(
                metric=f"all on over {name}: worst promised tenant, points",
                measured=100 * (on.promised - figures.promised),
                note=points,
            )


def _agreement(requests: list[TraceRequest], found: dict[str, RunFigures]) -> Iterator[Row]:
    """Simulated against live: the median of runs that differ in what could be compressed.

    p_c is what the live run showed: what share of the prompts in the window the compressor cut.
    """
    for name in _COMPARED:
        seen, most = found[name], simulated(SYSTEMS[name], requests).compressed
        share = min(1.0, seen.compressed / most) if most else 1.0
        runs = [
            simulated(SYSTEMS[name], requests, compressible=share, seed=seed) for seed in _SEEDS
        ]
        p99_s = median(run.p99_ttft_s for run in runs)
        use = median(run.utilisation for run in runs)
        lag = f"engines at most {1000 * seen.lag_s:.0f} ms late; p_c {share:.2f}"
        yield at_most(
            f"{name}: P99 TTFT, simulated over live, off by",
            abs(p99_s / seen.p99_ttft_s - 1),
            _P99_WITHIN,
            f"{p99_s:.2f} s, live {seen.p99_ttft_s:.2f} s; {lag}",
        )
        yield at_most(
            f"{name}: use of slots, simulated over live, off by",
            abs(use / seen.utilisation - 1),
            _USE_WITHIN,
            f"{100 * use:.1f} %, live {100 * seen.utilisation:.1f} %",
        )
