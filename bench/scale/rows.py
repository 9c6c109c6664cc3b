"""Rows of `bench scale`: growth of costs, and long holds of the event loop."""

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from bench.common.report import Row, at_most
from bench.scale.redis import PACED_PER_S
from bench.scale.traffic import Size

BIND_TIMES: Final = 2.0
"""Bind and queue of 2,000 workers over that of 4, at the median."""
REQUEST_TIMES: Final = 1.5
EJECTED_TIMES: Final = 1.5
SHARE: Final = 0.05
"""Of a core, that reading pages or probing may take."""
REDIS_COSTS: Final = frozenset({10, 100_000})
"""Entitlements at which the cost of an admission and its settlement in Redis is told."""
_MIN_GROWTH: Final = 2
"""Points of a ladder below which nothing is said of growth."""


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """What one process measured."""

    kind: str
    size: Size
    figures: dict[str, float]


def rows_of(points: Sequence[Point]) -> list[Row]:
    """All rows."""
    rows: list[Row] = []
    for policy in dict.fromkeys(p.size.policy for p in points if p.kind == "workers"):
        rows += _worker_rows([p for p in points if p.kind == "workers" and p.size.policy == policy])
    rows += _upkeep_rows(_of(points, "upkeep"))
    rows += _entitlement_rows(_of(points, "entitlements"))
    rows += _redis_rows(_of(points, "redis"))
    rows += _lease_rows(_of(points, "leases"))
    rows += _memory_rows(points)
    return rows


def growth(points: Sequence[Point], figure: str) -> float | None:
    """A figure at the largest size over that at the smallest; None where it cannot be told."""
    if len(points) < _MIN_GROWTH or not points[0].figures[figure]:
        return None
    return points[-1].figures[figure] / points[0].figures[figure]


def hold(what: str, held_ms: float, note: str = "") -> Row:
    """A row on how long the event loop is kept at once."""
    metric = f"{what}: longest hold of the event loop, ms"
    return Row(metric=metric, measured=held_ms, note=note)


def _of(points: Iterable[Point], kind: str) -> list[Point]:
    return [point for point in points if point.kind == kind]


def _grown(name: str, points: Sequence[Point], figure: str, limit: float, note: str) -> list[Row]:
    times = growth(points, figure)
    return [] if times is None else [at_most(name, times, limit, note)]


def _worker_rows(points: Sequence[Point]) -> list[Row]:
    policy = points[0].size.policy
    rows = []
    for point in points:
        found = point.figures
        name = f"{policy}, {point.size.workers:,} workers: all stages, CPU-us a request"
        note = (
            f"bind + queue p50 {found['bind_p50_us']:.0f}, p99 {found['bind_p99_us']:.0f};"
            f" prefix look-up {found['look_us']:.0f}, admit {found['admit_us']:.0f}"
        )
        rows.append(Row(metric=name, measured=found["request_us"], note=note))
    first, last = points[0], points[-1]
    span = f"{policy}, {last.size.workers:,} workers over {first.size.workers:,}"
    for what, figure, limit in (
        ("bind + queue at the median", "bind_p50_us", BIND_TIMES),
        ("all stages at their medians", "request_p50_us", REQUEST_TIMES),
    ):
        both = f"{first.figures[figure]:.1f} and {last.figures[figure]:.1f} us"
        rows += _grown(f"{span}: {what}, times", points, figure, limit, both)
    return [*rows, *_most_rows(f"{policy}, {last.size.workers:,} workers", last.figures)]


def _most_rows(most: str, found: dict[str, float]) -> list[Row]:
    """Of the largest pool: one worker away, and what stands still."""
    collected = f"32 in flight at each; a full collection takes {found['collection_ms']:.0f} ms"
    return [
        at_most(
            f"{most}: bind + queue with one ejected over none, times",
            found["bind_ejected_p50_us"] / found["bind_p50_us"],
            EJECTED_TIMES,
            f"{found['bind_p50_us']:.0f} and {found['bind_ejected_p50_us']:.0f} us, medians",
        ),
        hold(f"{most}, collector", found["pause_ms"], collected),
        hold(f"{most}, one call of bind + queue", found["bind_most_us"] / 1e3),
        hold(f"{most}, /metrics", found["page_hold_ms"], _page(found)),
    ]


def _page(found: dict[str, float]) -> str:
    return f"{found['page_ms']:.0f} ms in all for {found['page_bytes'] / 1e3:,.0f} KB"


def _upkeep_rows(points: Sequence[Point]) -> list[Row]:
    if not points:
        return []
    last = points[-1]
    found, most = last.figures, f"{last.size.workers:,} workers"
    return [
        at_most(
            f"{most}: engines' pages, share of a core",
            found["pages_share"],
            SHARE,
            f"{found['page_us']:.0f} us each without sockets, {found['page_parse_us']:.0f} of "
            f"them parsing 45 KB; each every {found['page_interval_s']:.1f} s",
        ),
        at_most(
            f"{most}: health probes, share of a core",
            found["probes_share"],
            SHARE,
            f"{found['probe_us']:.0f} us each without sockets, every "
            f"{found['probe_interval_s']:g} s",
        ),
        hold(f"{most}, a round of probes", found["probes_hold_ms"]),
        hold(f"{most}, the scheduler's tick", found["tick_us"] / 1e3, "four times a second"),
        hold(f"{most}, notes for one other process", found["notes_ms"], "once a second"),
        hold(f"{most}, a worker goes or returns", found["flap_ms"]),
        hold(f"{most}, the keeper's step", found["keeper_ms"], "four times a second"),
    ]


def _entitlement_rows(points: Sequence[Point]) -> list[Row]:
    if not points:
        return []
    rows = [
        Row(
            metric=f"{_who(point.size)}: authenticate, admit, settle, CPU-us a request",
            measured=point.figures["request_us"],
            note=f"admit p50 {point.figures['admit_p50_us']:.1f}, "
            f"p99 {point.figures['admit_p99_us']:.1f}; a tick {point.figures['tick_ms']:.1f} ms",
        )
        for point in points
    ]
    for few in (False, True):
        ladder = [p for p in points if p is points[0] or _few(p.size) == few]
        name = f"{_who(ladder[-1].size)} over {ladder[0].size.entitlements}: a request, times"
        rows += _grown(name, ladder, "request_p50_us", REQUEST_TIMES, "sum of three medians")
    for point in points:
        if point.size.entitlements == points[-1].size.entitlements:
            rows += _chore_rows(_who(point.size), point.figures)
    return rows


def _chore_rows(who: str, found: dict[str, float]) -> list[Row]:
    page = f"{_page(found)}: labels are bounded"
    return [
        hold(f"{who}, tick", found["tick_hold_ms"], f"{found['tick_ms']:.0f} ms in all"),
        hold(f"{who}, survey", found["survey_hold_ms"], f"{found['survey_ms']:.0f} ms in all"),
        hold(f"{who}, poll", found["poll_hold_ms"]),
        hold(f"{who}, /metrics", found["page_hold_ms"], page),
        Row(
            metric=f"{who}: entered at start, ms",
            measured=found["enter_ms"],
            note=f"before anything is served; longest turn {found['enter_hold_ms']:.0f} ms",
        ),
    ]


def _redis_rows(points: Sequence[Point]) -> list[Row]:
    if not points:
        return []
    rows = [
        Row(
            metric=f"Redis, {_who(point.size)}: gateway, CPU-us an admission",
            measured=point.figures["own_us"],
            note=f"with its settlement; Redis {point.figures['redis_us']:.0f}; "
            f"a tick {point.figures['tick_redis_ms']:.0f} ms of Redis",
        )
        for point in points
    ]
    for point in points:
        if point.size.entitlements in REDIS_COSTS and not _few(point.size):
            rows += _redis_floors(f"Redis, {_who(point.size)}", point)
    ladder = [p for p in points if p is points[0] or not _few(p.size)]
    for side, figure in (("gateway", "own_us"), ("Redis", "redis_us")):
        name = f"Redis, {_who(ladder[-1].size)} over {ladder[0].size.entitlements}: {side}, times"
        rows += _grown(name, ladder, figure, REQUEST_TIMES, "an admission and its settlement")
    last = ladder[-1]
    rows.append(
        Row(
            metric=f"Redis, {_who(last.size)}: longest call of a tick, ms",
            measured=last.figures["tick_hold_ms"],
            note="Redis answers nobody else meanwhile; calls below 1 ms are not noted",
        )
    )
    return rows


def _redis_floors(who: str, point: Point) -> list[Row]:
    """What Redis costs and what it adds where calls share scripts, and where most do not."""
    found = point.figures
    rows = []
    for load, prefix in (("saturated", ""), (f"paced, {PACED_PER_S:g}/s", "paced_")):
        note = f"admit + settle, {found[f'{prefix}scripts']:.2f} scripts a request"
        if prefix:
            note += "; each wakes Redis and makes its functions anew"
        redis_us = found[f"{prefix}redis_us"]
        metric = f"{who}, {load}: Redis, CPU-us a request"
        rows.append(Row(metric=metric, measured=redis_us, note=note))
    note = (
        f"saturated {found['p50_ms']:.2f}, p99 {found['p99_ms']:.2f}, with the wait of 64 clients"
    )
    return [
        *rows,
        Row(metric=f"{who}, paced: p50 added, ms", measured=found["paced_p50_ms"], note=note),
        Row(metric=f"{who}, paced: p99 added, ms", measured=found["paced_p99_ms"]),
    ]


def _lease_rows(points: Sequence[Point]) -> list[Row]:
    if not points:
        return []
    rows = [
        Row(
            metric=f"{point.size.leases:,} open leases: authenticate, admit, settle, CPU-us",
            measured=point.figures["request_us"],
            note=f"renewing all {point.figures['renew_ms']:.1f} ms every 10 s, "
            f"reaping all {point.figures['reap_ms']:.0f} ms",
        )
        for point in points
    ]
    name = f"{points[-1].size.leases:,} open leases over {points[0].size.leases}: a request, times"
    rows += _grown(name, points, "request_p50_us", REQUEST_TIMES, "sum of three medians")
    found, most = points[-1].figures, f"{points[-1].size.leases:,} open leases"
    return [
        *rows,
        hold(f"{most}, one admission", found["admit_most_us"] / 1e3),
        hold(f"{most}, renewal", found["renew_hold_ms"]),
        hold(f"{most}, reaping", found["reap_hold_ms"]),
    ]


def _memory_rows(points: Sequence[Point]) -> list[Row]:
    rows = []
    quartz = [p for p in _of(points, "workers") if p.size.policy == "quartz"]
    if len(quartz) > 1:
        first, last = quartz[0], quartz[-1]
        more = last.size.workers - first.size.workers
        idle = (last.figures["idle_bytes"] - first.figures["idle_bytes"]) / more
        used = (last.figures["resident_bytes"] - first.figures["resident_bytes"]) / more
        note = f"{used / 1024:.0f} with 32 requests in flight and 8 conversations"
        rows.append(Row(metric="KiB a worker", measured=idle / 1024, note=note))
    for point in _of(points, "entitlements")[-1:]:
        each = point.figures["bytes_each"] / 1024
        rows.append(Row(metric="KiB an entitlement", measured=each, note="a key each"))
    for point in [p for p in _of(points, "redis") if not _few(p.size)][-1:]:
        each = point.figures["active_bytes_each"] / 1024
        rows.append(Row(metric="Redis, KiB an entitlement", measured=each))
    rows += [
        Row(metric="KiB an open lease", measured=point.figures["bytes_each"] / 1024)
        for point in _of(points, "leases")[-1:]
    ]
    for point in _of(points, "index"):
        name = f"prefix index, {point.size.workers:,} workers, bytes an entry"
        note = f"{point.figures['entries']:,.0f} entries of {point.size.requests:,} prompts"
        rows.append(Row(metric=name, measured=point.figures["bytes_each"], note=note))
    for point in _of(points, "file"):
        found = point.figures
        read = f"{found['text_bytes'] / 1e3:,.0f} KB"
        name = f"a file of {point.size.entitlements:,} entitlements: read and checked, ms"
        rows.append(Row(metric=name, measured=found["parse_ms"], note=read))
    return rows


def _few(size: Size) -> bool:
    return 0 < size.active < size.entitlements


def _who(size: Size) -> str:
    some = f", {size.active} active" if _few(size) else ""
    return f"{size.entitlements:,} entitlement{'s' * (size.entitlements > 1)}{some}"
