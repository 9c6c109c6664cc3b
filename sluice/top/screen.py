"""Draws the figures of one moment as tables that fit the terminal."""

import time
from collections.abc import Mapping, Sequence
from textwrap import shorten
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sluice.fitted_table import fitted

Row = Mapping[str, Any]
_STYLES: Final = {
    **dict.fromkeys(("up", "bound", "ok"), "green"),
    **dict.fromkeys(("draining", "ejected", "pending", "refused", "suspended"), "yellow"),
    **dict.fromkeys(("down", "degraded", "upstream_error", "internal_error"), "red"),
}
_FIXED_LINES: Final = 8
"""Lines of a screen that are no rows of entitlements, workers or decisions, without the pools."""

_WRONG_LINES: Final = 3
_CAUSE: Final = 40
"""Characters of a worker's cause."""

_POOLS: Final = (
    *("pool", "model", "ready", "slots", "KV", "queue", "boundary", "want", "coverage"),
)
_WORKERS: Final = (
    *("worker", "pool", "state", "in flight", "tokens", "KV", "hits", "speed", "cause"),
)
_ENTITLEMENTS: Final = (
    *("entitlement", "class", "state", "in flight", "limit", "tokens/s", "debt", "priority"),
    *("SLO met", "refused", "most for"),
)
_DECISIONS: Final = (
    *("time", "request", "outcome", "reason", "entitlement", "pool", "worker", "queue", "TTFT"),
)
_NUMBERS: Final = frozenset(
    {
        *("slots", "KV", "queue", "boundary", "want", "coverage", "in flight", "tokens", "hits"),
        *("speed", "limit", "tokens/s", "debt", "priority", "SLO met", "refused", "TTFT"),
    }
)


def screen(
    figures: Mapping[str, Any], width: int, height: int | None, note: str = ""
) -> RenderableType:
    """All parts; `height` lines at most, or every row where it is None."""
    shared = figures["shared"]
    pools = shared["pools"]
    wrong = shared["wrong"][: None if height is None else _WRONG_LINES]
    lines = _FIXED_LINES + len(pools) + len(wrong)
    most = None if height is None else max(3, height - lines)
    workers, entitlements = figures["workers"], figures["entitlements"]
    few: dict[str, int | None] = {"workers": None, "entitlements": None, "decisions": None}
    if most is not None:
        few = _shares(most, len(workers["rows"]), len(entitlements["rows"]))
    parts: list[RenderableType] = [_head(shared, note)]
    for one in wrong:
        style = "bold red" if one["level"] == "bad" else "yellow"
        parts.append(Text(one["text"], style=style, no_wrap=True, overflow="ellipsis"))
    parts.append(_pools(pools, width))
    parts += _part(
        "entitlements",
        _entitlements(entitlements["rows"][: few["entitlements"]], width),
        entitlements,
    )
    parts += _part("workers", _workers(workers["rows"][: few["workers"]], width), workers)
    parts += [
        Text("last decisions", style="bold cyan"),
        _decisions(figures["decisions"][: few["decisions"]], width),
    ]
    return Group(*parts)


def _shares(most: int, workers: int, entitlements: int) -> dict[str, int | None]:
    """Rows of each table, so that a crowded one leaves room for the others."""
    third = max(1, most // 3)
    shown_entitlements = min(entitlements, third)
    shown_workers = min(workers, third)
    return {
        "entitlements": shown_entitlements,
        "workers": shown_workers,
        "decisions": max(1, most - shown_entitlements - shown_workers),
    }


def _head(shared: Row, note: str) -> Text:
    traffic = shared["traffic"]
    parts = [
        f"{_number(traffic['requests_per_s'], 1)} req/s",
        f"{_number(traffic['refused_per_s'], 1)} refused/s",
        f"{_number(traffic['output_tokens_per_s'])} tok/s",
        f"TTFT {_seconds(traffic['ttft_p50_s'])} / {_seconds(traffic['ttft_p99_s'])}",
        f"overhead {_seconds(traffic['overhead_p50_s'])}",
    ]
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f"{note}  " if note else "", style="yellow")
    text.append("  ".join(parts))
    return text


def _part(name: str, table: Table, page: Row) -> list[RenderableType]:
    found, total = page["found"], page["total"]
    count = f"{total}" if found == total else f"{found} of {total}"
    return [Text(f"{name} ({count})", style="bold cyan"), table]


def _pools(pools: Sequence[Row], width: int) -> Table:
    rows = [
        {
            "pool": pool["pool"] + " (decode)" * (pool.get("phase") == "decode"),
            "model": pool["model"],
            "ready": f"{pool['ready']}/{pool['workers']}",
            "slots": f"{pool['inflight']}/{pool['ready_slots']}",
            "KV": _share(admission.get("kv_bytes"), admission.get("kv_capacity_bytes")),
            "queue": _number(sum(pool["queue"] or ())),
            "boundary": _number(pool["b_short"]),
            "want": _number(admission.get("desired_replicas") or None),
            "coverage": _percent(pool["coverage"]),
        }
        for pool in pools
        for admission in [pool["admission"] or {}]
    ]
    return _fit(rows, _POOLS, width, ("coverage", "want", "model", "KV", "boundary"))


def _workers(workers: Sequence[Row], width: int) -> Table:
    rows = [
        {
            "worker": worker["id"],
            "pool": worker["pool"],
            "state": worker["state"],
            "in flight": f"{worker['active_sequences']}/{worker['slots']}",
            "tokens": _number(worker["reserved_tokens"]),
            "KV": _percent(worker["kv"]),
            "hits": _percent(worker["hit_rate"]),
            "speed": "-" if not worker["slowness"] else f"{1 / worker['slowness']:.2f}x",
            "cause": shorten(worker["not_ready"] or "-", _CAUSE, placeholder=" …"),
        }
        for worker in workers
    ]
    return _fit(rows, _WORKERS, width, ("tokens", "hits", "speed", "KV", "pool", "cause"))


def _entitlements(found: Sequence[Row], width: int) -> Table:
    rows = [
        {
            "entitlement": row["name"],
            "class": row["service_class"],
            "state": account.get("state", "-"),
            "in flight": _number(row["inflight"]),
            "limit": _number(row["limit"] or None),
            "tokens/s": _number(row["tokens_per_s"] or None),
            "debt": _number(account.get("debt"), 2),
            "priority": _number(account.get("weight"), 1),
            "SLO met": _percent(row["attainment"]),
            "refused": _number(sum(row["refused_by"].values())),
            "most for": max(row["refused_by"], key=row["refused_by"].get, default="-"),
        }
        for row in found
        for account in [row["account"] or {}]
    ]
    drop = ("tokens/s", "limit", "SLO met", "state", "debt", "most for", "priority", "class")
    return _fit(rows, _ENTITLEMENTS, width, drop)


def _decisions(decisions: Sequence[Row], width: int) -> Table:
    rows = [
        {
            "time": time.strftime("%H:%M:%S", time.localtime(one["time"])),
            "request": one["id"],
            "outcome": one["outcome"],
            "reason": one["reason"] or _fate(one),
            "entitlement": one["entitlement"] or "-",
            "pool": one["pool"] or "-",
            "worker": one["worker"] or "-",
            "queue": "-" if not one["queue_ms"] else _seconds(one["queue_ms"] / 1000),
            "TTFT": _seconds(one["ttft"]),
        }
        for one in decisions
    ]
    return _fit(rows, _DECISIONS, width, ("worker", "queue", "pool", "time", "TTFT", "reason"))


def _fate(one: Row) -> str:
    if one["compressed"] != "none":
        return f"compressed {one['compressed']}"
    return "spilled" if one["spilled"] else "-"


def _fit(
    rows: Sequence[Mapping[str, str]], columns: Sequence[str], width: int, drop: Sequence[str]
) -> Table:
    return fitted(rows, columns, width, drop=drop, right=_NUMBERS, styles=_STYLES)[0]


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _share(part: float | None, of: float | None) -> str:
    return _percent(part / of) if part is not None and of else "-"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1000:.0f} ms" if value >= 0.01 else f"{value * 1000:.2g} ms"
