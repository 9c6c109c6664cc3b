"""Simulated figures by entitlement, as a table and as JSON."""

from collections.abc import Sequence
from math import isnan
from typing import Any

from rich.markup import escape
from rich.table import Table

from simulator.fleet.outcome import Tail
from simulator.pipeline.tenants import TenantSummary
from sluice.simulated.fleet import plain

_COLUMNS = ("entitlement", "class", "requests", "SLO", "attained", "TTFT P50", "P99", "refused")

MAX_ROWS = 50
"""Entitlements shown to people; the JSON has all."""


def tenants_table(found: Sequence[TenantSummary]) -> Table:
    """One row for each entitlement."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for column in _COLUMNS:
        left = column in {"entitlement", "class", "refused"}
        table.add_column(column, justify="left" if left else "right", no_wrap=column != "refused")
    for one in found[:MAX_ROWS]:
        refused = ", ".join(f"{count} {reason}" for reason, count in one.refused.items())
        colour = "red" if one.faults else "green"
        attained = "" if isnan(one.attainment) else f"{100 * one.attainment:.1f} %"
        table.add_row(
            escape(one.name),
            one.service_class,
            f"{one.requests:,}",
            time_text(one.slo_s),
            f"[{colour}]{attained}[/]",
            time_text(one.ttft.p50_s),
            time_text(one.ttft.p99_s),
            refused,
        )
    if len(found) > MAX_ROWS:
        table.add_row(f"and {len(found) - MAX_ROWS} more")
    return table


def tenants_json(found: Sequence[TenantSummary]) -> list[dict[str, Any]]:
    """Every entitlement; times in seconds, null where nothing was served."""
    return [
        {
            "name": one.name,
            "service_class": one.service_class,
            "requests": one.requests,
            "served": one.served,
            "refused": one.refused,
            "slo_s": one.slo_s,
            "attainment": plain(one.attainment),
            "ttft_s": _tail(one.ttft),
            "tpot_s": _tail(one.tpot),
            "faults": list(one.faults),
        }
        for one in found
    ]


def _tail(found: Tail) -> object:
    return plain({"mean": found.mean_s, "p50": found.p50_s, "p90": found.p90_s, "p99": found.p99_s})


def time_text(value_s: float) -> str:
    """Milliseconds, or seconds from one on; nothing for NaN."""
    if isnan(value_s):
        return ""
    return f"{value_s:.2f} s" if value_s >= 1 else f"{1000 * value_s:.3g} ms"
