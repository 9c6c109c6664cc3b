"""Entitlements and their changes as tables for people, changes of settings in lines."""

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from textwrap import wrap
from typing import Any, Final

import typer
from rich.markup import escape
from rich.table import Table

from sluice.fitted_table import fitted
from sluice.terminal import table

_LIST = ("name", "tenant", "model", "class", "state", "in flight", "tokens/s", "debt", "keys")
_RIGHT = frozenset({"in flight", "tokens/s", "debt", "keys"})
_LEFT_OUT_FIRST = ("debt", "keys", "tokens/s", "model", "tenant", "in flight", "class")
_INTERNAL = frozenset({"key", "usage", "created", "revision"})
_WIDTH: Final = 100
_LINES: Final = 4
"""Of one value, at most."""


def listing(entitlements: Iterable[Mapping[str, Any]], width: int) -> tuple[Table, tuple[str, ...]]:
    """One row per entitlement, and the columns that were dropped to fit into `width`."""
    rows = [_row(entitlement) for entitlement in entitlements]
    return fitted(rows, _LIST, width, drop=_LEFT_OUT_FIRST, right=_RIGHT)


def _row(entitlement: Mapping[str, Any]) -> dict[str, str]:
    usage = entitlement["usage"] or {}
    return {
        "name": entitlement["name"],
        "tenant": entitlement["tenant"],
        "model": entitlement["model"],
        "class": entitlement["service_class"],
        "state": _state(entitlement),
        "in flight": _text(sum(usage["inflight"].values()) if usage else None),
        "tokens/s": _text(entitlement["tokens_per_second"]),
        "debt": _text(round(usage["debt"], 3) if usage else None),
        "keys": str(len(entitlement["keys"])),
    }


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The fields that a change set, one per line."""
    fields = [field for field in {**before, **after} if field not in _INTERNAL]
    return [
        f"{field}: {_text(before.get(field))} -> {_text(after.get(field))}"
        for field in fields
        if before.get(field) != after.get(field)
    ]


def card(entitlement: Mapping[str, Any]) -> Table:
    """One entitlement, a row per field."""
    found = table("field", "value")
    for field, value in entitlement.items():
        if field in {"key", "usage"} or value is None:
            continue
        found.add_row(field, escape(_text(value)))
    for field, value in (entitlement.get("usage") or {}).items():
        shown = f"{value:.4g}" if isinstance(value, float) else value
        found.add_row(field, escape(_text(shown)))
    return found


def tenant_table(found: Iterable[Mapping[str, Any]]) -> Table:
    """One row per tenant."""
    made = table("name", "display name", "state", "keys", "entitlements", "from")
    for row in found:
        made.add_row(
            row["name"],
            escape(row["display_name"] or ""),
            "suspended" if row["suspended"] else "",
            str(row["key_count"]),
            ", ".join(row["uses"]),
            row["origin"],
        )
    return made


def key_table(found: Iterable[Mapping[str, Any]]) -> Table:
    """One row per key."""
    made = table(
        *("key", "fingerprint", "state", "models", "entitlements", "limits", "expires", "from")
    )
    for row in found:
        made.add_row(
            row["name"] + (" (before its rotation)" if row["former"] else ""),
            row["fingerprint"],
            row["state"],
            escape("all" if row["models"] is None else ", ".join(row["models"])),
            "all" if row["entitlements"] is None else ", ".join(row["entitlements"]),
            ", ".join(_limits(row)),
            row["expires_at"] or "",
            row["origin"],
        )
    return made


def _limits(key: Mapping[str, Any]) -> Iterator[str]:
    """A key's own limits in a few words each."""
    if key["requests_per_minute"] is not None:
        yield f"{key['requests_per_minute']} requests a minute"
    if key["max_concurrency"] is not None:
        yield f"{key['max_concurrency']} at once"
    for budget in key["budgets"]:
        unit = "tokens" if "tokens" in budget else "money"
        yield f"{budget[unit]} {unit} per {budget['window']}"


def audit(records: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """A line per change, the newest first, and under it the fields that it set."""
    for record in records:
        at = datetime.fromtimestamp(record["time_unix_s"], UTC).strftime("%Y-%m-%d %H:%M:%SZ")
        of = record["entitlement"] or f"tenant {record['tenant']}"
        yield f"{at}  {record['what']} {of}  by {record['who']}"
        if record["what"] not in {"create", "delete"}:
            for line in changes(record["before"], record["after"]):
                yield from wrap(line, _WIDTH, initial_indent="  ", subsequent_indent="    ")


def _state(entitlement: Mapping[str, Any]) -> str:
    if entitlement["state"] is None:
        return "suspended" if entitlement["suspended"] else ""
    return str(entitlement["state"])


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={amount}" for name, amount in value.items())
    if isinstance(value, list):
        return ("; " if value and isinstance(value[0], Mapping) else ", ").join(map(_text, value))
    if isinstance(value, float):
        return f"{value:g}"
    # Also what comes from elsewhere, such as a cluster's reasons, leaves the terminal as it is.
    return "".join(c if c.isprintable() else " " for c in str(value))


def echo_changes(changes: Iterable[Mapping[str, Any]], none: str) -> None:
    """Print each change; `none` where there is none."""
    lines = [line for change in changes for line in change_lines(change)]
    for line in lines or [none]:
        typer.echo(line)


def change_lines(change: Mapping[str, Any]) -> Iterator[str]:
    """`path: before -> after` on one line, else a block."""
    late = " (after a restart)" if change.get("restart") else ""
    before, after = change["before"] or "none", change["after"] or "none"
    short = f"{change['path']}: {before} -> {after}{late}"
    if len(short) <= _WIDTH and "\n" not in short:
        yield short
        return
    yield f"{change['path']}:{late}"
    yield from _block("  - ", before)
    yield from _block("  + ", after)


def _block(sign: str, value: str) -> list[str]:
    return wrap(
        value,
        _WIDTH,
        initial_indent=sign,
        subsequent_indent="    ",
        max_lines=_LINES,
        placeholder=" … (all of it: --json)",
    )
