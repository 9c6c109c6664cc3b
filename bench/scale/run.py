"""`python -m bench scale`: growth of cost with workers, entitlements and leases, without a fleet.

The shipped stages, policies and chores are called in process, with workers that are names only;
each point of a ladder runs in a process of its own (`bench.scale.points`). A row does not hold if
its cost grows with the size, or if it keeps the event loop from requests for more than 5 ms.
SLUICE_BENCH_MOST leaves out larger sizes.
"""

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from bench.common.fleet import redis_program
from bench.common.report import Report, Row, at_most, scaled, tracked
from bench.scale.traffic import Size

# -- rows of `bench scale`: what each point costs, how costs grow, what the largest keeps waiting


BIND_TIMES: Final = 2.0
"""Bind and queue of 2,000 workers over that of 4, at the median."""
REQUEST_TIMES: Final = 1.5


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """What one process measured."""

    kind: str
    size: Size
    figures: dict[str, float]


class Told(NamedTuple):
    """One figure, as it is told."""

    text: str
    figure: str
    note: str = ""
    limit: float | None = None
    scale: float = 1.0


def _hold(what: str, figure: str, note: str = "", scale: float = 1.0) -> Told:
    return Told(f"{what}: longest hold of the event loop, ms", figure, note, scale=scale)


_KIB: Final = 1 / 1024
_ASKED: Final = "authenticate, admit, settle, CPU-us a request"
_PAGE: Final = "{page_ms:.0f} ms in all for {page_bytes:,.0f} bytes"
EACH: Final[dict[str, tuple[Told, ...]]] = {
    "workers": (
        Told(
            "all stages, CPU-us a request",
            "request_us",
            "bind + queue p50 {bind_p50_us:.0f}, p99 {bind_p99_us:.0f}; prefix look-up "
            "{look_us:.0f}, admit {admit_us:.0f}, first token {first_us:.0f}",
        ),
    ),
    "entitlements": (
        Told(
            _ASKED,
            "request_us",
            "admit p50 {admit_p50_us:.1f}, p99 {admit_p99_us:.1f}; a tick {tick_ms:.1f} ms",
        ),
    ),
    "redis": (
        Told(
            "64 clients by turns: CPU-us of the gateway, an admission and settlement",
            "own_us",
            "Redis {redis_us:.0f}; {per_s:,.0f} a second, p50 {p50_ms:.2f} ms; {scripts:.2f} "
            "scripts each; a tick {tick_redis_ms:.0f} ms of Redis",
        ),
        Told(
            "500 a second: CPU-us of Redis, an admission and settlement",
            "paced_redis_us",
            "p50 added {paced_p50_ms:.2f} ms, p99 {paced_p99_ms:.2f}; {paced_scripts:.2f} scripts "
            "each, which wake Redis",
        ),
    ),
    "leases": (
        Told(
            _ASKED,
            "request_us",
            "renewing all {renew_ms:.1f} ms every 10 s, reaping all {reap_ms:.0f} ms",
        ),
    ),
    "tenants": (
        Told(
            _ASKED,
            "request_p50_us",
            "medians; authenticate {authenticate_p50_us:.1f}, p99 {authenticate_p99_us:.1f}",
        ),
    ),
    "index": (Told("prefix index, bytes an entry", "bytes_each", "{entries:,.0f} entries"),),
}
LARGEST: Final[dict[str, tuple[Told, ...]]] = {
    "workers": (
        Told(
            "bind + queue with one ejected over none, times",
            "ejected_times",
            "{bind_p50_us:.0f} and {bind_ejected_p50_us:.0f} us, medians",
            1.5,
        ),
        _hold("collector", "pause_ms", "a full collection takes {collection_ms:.0f} ms"),
        _hold("one call of bind + queue", "bind_most_us", scale=1e-3),
        _hold("/metrics", "page_hold_ms", _PAGE),
        Told(
            "KiB a worker",
            "idle_bytes_each",
            "{used_kib:.0f} with 32 requests in flight and 8 conversations",
            scale=_KIB,
        ),
    ),
    "entitlements": (
        _hold("tick", "tick_hold_ms", "{tick_ms:.0f} ms in all"),
        _hold("survey", "survey_hold_ms", "{survey_ms:.0f} ms in all"),
        _hold("poll", "poll_hold_ms"),
        _hold("/metrics", "page_hold_ms", f"{_PAGE}: labels are bounded"),
        Told(
            "entered at start, ms",
            "enter_ms",
            "before anything is served; longest turn {enter_hold_ms:.0f} ms",
        ),
        Told("KiB an entitlement", "bytes_each", "a key each", scale=_KIB),
    ),
    "redis": (
        Told(
            "longest call of a tick, ms",
            "tick_hold_ms",
            "Redis answers nobody else meanwhile; calls below 1 ms are not noted",
        ),
        Told("KiB an entitlement", "active_bytes_each", scale=_KIB),
        Told("round trips that failed", "failed", "", 0),
    ),
    "leases": (
        _hold("one admission", "admit_most_us", scale=1e-3),
        _hold("renewal", "renew_hold_ms"),
        _hold("reaping", "reap_hold_ms"),
        Told("KiB an open lease", "bytes_each", scale=_KIB),
    ),
    "tenants": (
        Told(
            "start, CPU-s",
            "start_s",
            "{enter_s:.1f} for tenants and keys, from SQLite, the rest for their entitlements; "
            "longest turn {enter_hold_ms:.0f} ms, before it serves",
        ),
        Told(
            "KiB a key",
            "used_bytes_each",
            "once each was used; {bytes_each:.0f} bytes before. Its share of the tenant is counted",
            2.5,
            _KIB,
        ),
        _hold("poll", "poll_hold_ms"),
    ),
}
"""Of the largest point at which all are active."""
GROWTH: Final[dict[str, tuple[Told, ...]]] = {
    "workers": (
        Told("bind + queue at the median", "bind_p50_us", limit=BIND_TIMES),
        Told("all stages at their medians", "request_p50_us", limit=REQUEST_TIMES),
    ),
    "entitlements": (Told("a request", "request_p50_us", limit=REQUEST_TIMES),),
    "redis": (
        Told("the gateway's CPU", "own_us", limit=REQUEST_TIMES),
        Told("Redis's CPU", "redis_us", limit=REQUEST_TIMES),
    ),
    "leases": (Told("a request", "request_p50_us", limit=REQUEST_TIMES),),
    "tenants": (Told("a request", "request_p50_us", limit=REQUEST_TIMES),),
}
"""Times as much as at the smallest point."""


def rows_of(points: Sequence[Point]) -> list[Row]:
    """All rows, ladder by ladder."""
    return [row for ladder in ladders_of(points) for row in _ladder(ladder)]


def ladders_of(points: Sequence[Point]) -> list[list[Point]]:
    """Points that differ in one size alone, smallest first: all active, then few of them."""
    ladders: dict[tuple[str, str, bool], list[Point]] = {}
    for point in points:
        key = (point.kind, point.size.policy, is_few(point.size))
        ladders.setdefault(key, []).append(point)
    for (kind, policy, few), ladder in ladders.items():
        if few and (all_active := ladders.get((kind, policy, False))):
            ladder.insert(0, all_active[0])
    return list(ladders.values())


def growth(points: Sequence[Point], figure: str) -> float | None:
    """A figure at the largest size over that at the smallest; None where it cannot be told."""
    if len(points) < 2 or not points[0].figures[figure]:
        return None
    return points[-1].figures[figure] / points[0].figures[figure]


def _ladder(points: list[Point]) -> Iterator[Row]:
    first, last = points[0], points[-1]
    few = is_few(last.size)
    for point in points[1:] if few else points:
        yield from (_row(told, point) for told in EACH.get(point.kind, ()))
    for told in GROWTH.get(last.kind, ()):
        if last.kind == "tenants" and not few:
            continue  # no processor's cache holds 300,000 keys in turn
        times = growth(points, told.figure)
        if times is not None and told.limit is not None:
            both = f"{first.figures[told.figure]:.1f} and {last.figures[told.figure]:.1f} us"
            metric = f"{who(last)} over {who(first)}: {told.text}, times"
            yield at_most(metric, times, told.limit, both)
    if not few:
        yield from (_row(told, last) for told in LARGEST.get(last.kind, ()))


def _row(told: Told, point: Point) -> Row:
    metric, note = f"{who(point)}: {told.text}", told.note.format(**point.figures)
    measured = told.scale * point.figures[told.figure]
    return (
        Row(metric, measured, note)
        if told.limit is None
        else at_most(metric, measured, told.limit, note)
    )


def is_few(size: Size) -> bool:
    """Whether not all of them ask."""
    return 0 < size.active < size.entitlements


def counted(point: Point) -> int:
    """The size that its ladder changes."""
    size = point.size
    by = {"workers": size.workers, "index": size.workers, "leases": size.leases}
    return by.get(point.kind, size.entitlements)


def who(point: Point) -> str:
    """A point in words."""
    what = {
        "workers": f"{point.size.policy}, {{}} workers",
        "index": "{} workers",
        "leases": "{} open leases",
        "tenants": "{} tenants with 3 keys",
        "redis": "Redis, {} entitlements",
    }.get(point.kind, "{} entitlements")
    some = f", {point.size.active} active" if is_few(point.size) else ""
    return what.format(f"{counted(point):,}") + some


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
