"""Entitlements and their changes as tables for people."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from rich.markup import escape
from rich.table import Table

_LIST = ("name", "tenant", "model", "class", "state", "in flight", "tokens/s", "debt", "keys")
_RIGHT = frozenset({"in flight", "tokens/s", "debt", "keys"})


def listing(entitlements: Iterable[Mapping[str, Any]]) -> Table:
    """One row an entitlement."""
    table = _table(*_LIST)
    for e in entitlements:
        usage = e["usage"] or {}
        inflight = sum(usage["inflight"].values()) if usage else None
        table.add_row(
            escape(e["name"]),
            escape(e["tenant"]),
            escape(e["model"]),
            e["service_class"],
            _state(e),
            _text(inflight),
            _text(e["tokens_per_second"]),
            _text(round(usage["debt"], 3) if usage else None),
            str(len(e["keys"])),
        )
    return table


def card(entitlement: Mapping[str, Any]) -> Table:
    """One entitlement, a row a field."""
    table = _table("field", "value")
    for field, value in entitlement.items():
        if field in {"key", "usage"} or value is None:
            continue
        table.add_row(field, escape(_text(value)))
    for field, value in (entitlement["usage"] or {}).items():
        shown = f"{value:.4g}" if isinstance(value, float) else value
        table.add_row(field, escape(_text(shown)))
    return table


def audit(records: Iterable[Mapping[str, Any]]) -> Table:
    """One row a change, the newest first."""
    table = _table("time", "who", "what", "entitlement", "change")
    for record in records:
        at = datetime.fromtimestamp(record["time_unix_s"], UTC)
        before, after = record["before"], record["after"]
        changed = [
            f"{f}: {_text(before.get(f))} -> {_text(after.get(f))}" for f in {**before, **after}
        ]
        table.add_row(
            at.strftime("%Y-%m-%d %H:%M:%SZ"),
            record["who"],
            record["what"],
            escape(record["entitlement"]),
            escape("\n".join(changed) if record["what"] not in {"create", "delete"} else ""),
        )
    return table


def _state(entitlement: Mapping[str, Any]) -> str:
    if entitlement["state"] is None:
        return "suspended" if entitlement["suspended"] else ""
    return str(entitlement["state"])


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={amount}" for name, amount in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in _RIGHT else "left", overflow="fold")
    return table
