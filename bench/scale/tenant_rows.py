"""Rows of `bench scale` on tenants: start, memory, growth, holds."""

from collections.abc import Sequence
from typing import Final

from bench.common.report import Row, at_most
from bench.scale.rows import REQUEST_TIMES, Point, growth, hold

KEY_KIB: Final = 1.5


def tenant_rows(points: Sequence[Point]) -> list[Row]:
    """All rows on the points of kind `tenants`."""
    found = [point for point in points if point.kind == "tenants"]
    rows = [
        Row(
            metric=f"{_who(point)}: authenticate, admit, settle, CPU-us a request",
            measured=point.figures["request_p50_us"],
            note=f"medians; authenticate {point.figures['authenticate_p50_us']:.1f}, "
            f"p99 {point.figures['authenticate_p99_us']:.1f}",
        )
        for point in found
    ]
    ladder = [found[0], found[-1]] if len(found) > 1 else []
    times = growth(ladder, "request_p50_us")
    if times is not None:
        name = f"{_who(found[-1])} over {found[0].size.entitlements}: a request, times"
        rows.append(at_most(name, times, REQUEST_TIMES, "sum of three medians"))
    return rows + [row for point in found[-2:-1] for row in _most_rows(point)]


def _most_rows(point: Point) -> list[Row]:
    """Of the most tenants, all active."""
    found, who = point.figures, _who(point)
    start_s = found["rights_s"] + found["enter_s"]
    return [
        Row(
            metric=f"{who}: start, CPU-s",
            measured=start_s,
            note=f"{found['enter_s']:.1f} for tenants and keys, from SQLite, the rest for their "
            f"entitlements; longest turn {found['enter_hold_ms']:.0f} ms, before it serves",
        ),
        at_most(
            f"{who}: KiB a key",
            found["used_bytes_each"] / 1024,
            KEY_KIB,
            f"once each was used; {found['bytes_each'] / 1024:.2f} before. Its share of the "
            "tenant is counted in",
        ),
        hold(f"{who}, poll", found["poll_hold_ms"]),
    ]


def _who(point: Point) -> str:
    some = f", {point.size.active} active" if point.size.active else ""
    return f"{point.size.entitlements:,} tenants with 3 keys{some}"
