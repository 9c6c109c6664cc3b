"""`python -m bench scale`: growth of cost with workers, entitlements and leases, without a fleet.

The shipped stages, policies and chores are called in process, with workers that are names only;
each point of a ladder runs in a process of its own (`bench.scale.points`). A row does not hold if
its cost grows with the size, or if it keeps the event loop from requests for more than 5 ms.
SLUICE_BENCH_MOST leaves out larger sizes.
"""

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from bench.common.redis_server import redis_program
from bench.common.report import Report, Row
from bench.common.steps import scaled, tracked
from bench.scale.rows import Point, rows_of
from bench.scale.traffic import Size

POLICIES: Final = ("quartz", "least-loaded", "sticky")
WORKERS: Final = (4, 16, 64, 256, 1_024, 2_000)
ENTITLEMENTS: Final = (1, 10, 100, 10_000, 100_000)
LEASES: Final = (100, 1_000, 10_000)
TENANTS: Final = (10, 100_000)
FEW: Final = 100
"""Active ones, where not all are."""
_PROMPTS: Final = 40_000
_POINT_S: Final = 900.0


def run() -> Report:
    """All ladders."""
    most = int(os.environ.get("SLUICE_BENCH_MOST", "1000000"))
    asked = list(ladders(most, scaled(4000, 200), redis=redis_program() is not None))
    points = [
        Point(kind=kind, size=size, figures=_figures(kind, size))
        for kind, size in tracked(asked, "points")
    ]
    rows = rows_of(points)
    if redis_program() is None:
        note = "not measured: redis-server is not on PATH"
        rows.append(Row("Redis: entitlements 1 to 100,000", None, note))
    return Report(name="scale", rows=rows, detail={"points": msgspec.to_builtins(points)})


def ladders(most: int, requests: int, *, redis: bool) -> Iterator[tuple[str, Size]]:
    """(kind, size) of every point, sizes up to `most`."""
    for workers in _up_to(most, WORKERS):
        for policy in POLICIES:
            yield "workers", Size(workers=workers, policy=policy, requests=requests)
    for entitlements in _up_to(most, ENTITLEMENTS):
        for active in (entitlements, FEW) if entitlements > FEW else (entitlements,):
            size = Size(entitlements=entitlements, active=active, requests=requests)
            yield "entitlements", size
            if redis:
                yield "redis", size
    for leases in _up_to(most, LEASES):
        yield "leases", Size(leases=leases, requests=requests)
    for tenants in _up_to(most, TENANTS):
        yield "tenants", Size(entitlements=tenants, requests=requests)
        if tenants > FEW:
            yield "tenants", Size(entitlements=tenants, active=FEW, requests=requests)
    for workers in _up_to(most, (WORKERS[0], WORKERS[-1])):
        yield "index", Size(workers=workers, requests=min(_PROMPTS, 10 * requests))


def _up_to(most: int, sizes: Iterable[int]) -> list[int]:
    return [size for size in sizes if size <= most]


def _figures(kind: str, size: Size) -> dict[str, float]:
    """One point, in a process of its own."""
    command = [sys.executable, "-m", "bench.scale.points", kind, msgspec.json.encode(size).decode()]
    done = subprocess.run(command, capture_output=True, timeout=_POINT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{kind} {size} failed: {done.stderr.decode()[-2_000:]}")
    return msgspec.json.decode(done.stdout, type=dict[str, float])
