"""`python -m bench everything`: all five systems on against all off, and each one's part.

The same mixed trace with tenants goes through a real gateway before the same mock engines, once
for each configuration of `bench.everything.systems`, in real time. Off is round robin over one
pool without admission. The workers needed for the SLOs are found in virtual time, by the simulated
gateway with the same configuration; two of the live runs are held against it.
"""

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec

from bench.common.plot import Panel, draw
from bench.common.report import Report, Row, at_least, at_most
from bench.common.steps import scaled_s, tracked
from bench.everything.live import live
from bench.everything.scene import RANKS, REPLICAS, TENANTS, RunFigures, TraceRequest, trace
from bench.everything.systems import ALL, OFF, SYSTEMS
from bench.everything.virtual import MAX_WORKERS, simulated, workers_needed

SECONDS: Final = scaled_s(60.0, 15.0)
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
    for name in tracked(SYSTEMS, "live"):
        found[name] = live(SYSTEMS[name], requests)
    needed = {
        name: workers_needed(SYSTEMS[name], requests, ATTAINED)
        for name in tracked(SYSTEMS, "workers needed")
    }
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
        detail["plots"] = [draw(plot, "everything", _panels(found, needed), 3)]
    return Report(name="everything", rows=rows, detail=detail)


def _panels(found: dict[str, RunFigures], needed: dict[str, int | None]) -> list[Panel]:
    """Attainment by tenant, P99 TTFT, workers needed."""
    attained: dict[str, dict[str, list[float]]] = {}
    tails: dict[str, dict[str, list[float]]] = {}
    for index, tenant in enumerate(TENANTS):
        label = f"{tenant.name} ({tenant.service_class}, {tenant.slo_ms / 1000:g} s)"
        seen = {name: figures.tenants[index] for name, figures in found.items()}
        attained[label] = {name: [100 * one.attained] for name, one in seen.items()}
        tails[label] = {name: [one.p99_ttft_s] for name, one in seen.items()}
    workers = {name: [float(count or MAX_WORKERS)] for name, count in needed.items()}
    return [
        Panel(title="first token within the SLO, % of all requests", bars=attained),
        Panel(title="P99 time to first token, s, served requests", bars=tails, log="x"),
        Panel(title="workers needed, simulated", bars={"": workers}),
    ]


def _system(name: str, found: RunFigures, needed: int | None) -> Iterator[Row]:
    """One system's row of the table."""
    by_tenant = "; ".join(
        f"{tenant.name} {100 * seen.attained:.1f} % in time, P99 {seen.p99_ttft_s:.2f} s, "
        f"{100 * seen.refused:.0f} % refused"
        for tenant, seen in zip(TENANTS, found.tenants, strict=True)
    )
    yield Row(
        f"{name}: attainment of the worst promised tenant, %", 100 * found.promised, by_tenant
    )
    yield Row(f"{name}: P99 TTFT of all, s", found.p99_ttft_s)
    yield Row(
        f"{name}: tokens/s",
        found.tokens_per_s,
        f"{100 * found.utilisation:.0f} % of the slots in use, {found.compressed} compressed",
    )
    yield Row(
        f"{name}: workers for {100 * ATTAINED:g} % of every promised tenant, simulated",
        f"over {MAX_WORKERS}" if needed is None else float(needed),
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
                f"all on over {name}: worst promised tenant, points",
                100 * (on.promised - figures.promised),
                points,
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
