"""`python -m bench token-pools-replicas`: several gateways on one Redis, real processes.

1 Four gateways, 400 clients, 64 slots: limits hold, ledgers are exact (`sharing`).
2 One of four is killed while it holds 50 leases (`kill`).
3 Redis is away for 20 s, alone and as a cluster's node (`outage`).
4 Observe mode changes no body and refuses nobody (`observe`).
5 The store by itself: admissions a second, and their latency (`store`).
6 Redis is stopped and comes back empty; a master is killed and replaced (`outage`).
7 Three are restarted one after another under streams (`rolling`).
8 An older version (SLUICE_BENCH_OLD, its checkout) beside this one (`sharing`).

Only the figures of 5 need a quiet machine.
"""

import time
from collections.abc import Callable
from typing import Final

from rich.console import Console

from bench.common.redis_server import redis_program
from bench.common.report import Report, Row, equals
from bench.replicas import kill, observe, outage, rolling, sharing
from bench.replicas import store as redis_leases

CLIENTS: Final = 256
RUNS: Final = 3


def run() -> Report:
    """All of it; what goes on is told on stderr."""
    if redis_program() is None:
        row = Row(metric="redis-server", measured="missing", target="on PATH", holds=False)
        return Report(name="token-pools-replicas", rows=[row])
    console = Console(stderr=True)
    parts: dict[str, Callable[[], list[Row]]] = {
        "four gateways, 400 clients": sharing.rows,
        "a gateway is killed": kill.rows,
        "Redis hangs": outage.hanging_rows,
        "a cluster's node is killed": outage.cluster_rows,
        "Redis is stopped": outage.stopped_rows,
        "a master is killed": outage.sentinel_rows,
        "rolling restart": rolling.rows,
        "versions": sharing.version_rows,
        "observe": observe.rows,
        "the store": store,
    }
    rows: list[Row] = []
    for number, (name, part) in enumerate(parts.items(), start=1):
        began_s = time.monotonic()
        console.print(f"{number}/{len(parts)} {name} ...")
        rows += part()
        console.print(f"    {time.monotonic() - began_s:.0f} s")
    return Report(name="token-pools-replicas", rows=rows)


def store() -> list[Row]:
    """Part 5: the best of three short runs, because neighbours only ever take away."""
    full = [_store_run() for _ in range(RUNS)]
    best = max(full, key=lambda found: found.admissions_per_s)
    paced = [_store_run(rate=best.admissions_per_s / 2) for _ in range(RUNS)]
    half = min(paced, key=lambda found: found.p50_ms)
    rates = ", ".join(f"{found.admissions_per_s:,.0f}" for found in full)
    medians = ", ".join(f"{found.p50_ms:.2f}" for found in paced)
    return [
        Row(
            metric="store: admissions/s of one process",
            measured=round(best.admissions_per_s),
            note=f"aim: 5,000; {rates}; {CLIENTS} clients, each with its settlement; p50 "
            f"{best.p50_ms:.1f} ms; others had {best.others_share:.0%} of a core",
        ),
        Row(
            metric="store: Redis's CPU at that, us an admission and settlement",
            measured=best.redis_us,
            note=f"{best.redis_share:.0%} of a core; the process {best.own_us:.0f} us, "
            f"{best.own_share:.0%}",
        ),
        Row(
            metric="store: admission p50 at half of that, ms",
            measured=half.p50_ms,
            note=f"aim: 1; {medians}; {half.admissions_per_s:,.0f}/s at random times, p99 "
            f"{half.p99_ms:.1f} ms; Redis {half.redis_share:.0%} of a core, {half.redis_us:.0f} us "
            f"each; others {half.others_share:.0%}",
        ),
        equals("store: failed round trips", sum(found.failed for found in (*full, *paced)), 0),
    ]


def _store_run(rate: float = 0.0) -> redis_leases.StoreFigures:
    return redis_leases.measured(clients=CLIENTS, entitlements=100, seconds=2.0, rate=rate)
