"""What is wrong now, worst first, in words: for the page's and `sluice top`'s first lines."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

from gateway.web.dashboard.fleet_rows import Row
from gateway.web.dashboard.recent import Brief

_WORKERS: Final = 5
"""Workers and entitlements that are named one by one."""
_BUDGET: Final = frozenset({"budget", "budget_reserved"})
_STORE: Final = (
    "The state store is away: gateways know neither each other's traffic nor newly revoked keys. "
    "Have it answer again; they return by themselves."
)


def wrong_now(
    pools: Sequence[Row], workers: Iterable[Row], recent: Iterable[Brief], *, store_up: bool
) -> list[dict[str, str]]:
    """Each thing that is wrong, with its cause; nothing only if nothing is.

    `recent` are the requests of the last minute.
    """
    found = [] if store_up else [_item("bad", _STORE)]
    out = [row for row in workers if row["state"] in ("down", "ejected")]
    for pool in pools:
        place = (pool["model"], pool["pool"])
        if not pool["ready"]:
            mine = [row["why"] for row in out if (row["model"], row["pool"]) == place]
            why = next(filter(None, mine), "its workers are ejected or draining, or it has none")
            text = f"Model {place[0]}: no worker of pool {place[1]} serves ({why})."
            found.append(_item("bad", text))
    for row in out[:_WORKERS]:
        why = row["why"] or "it failed or asked for a pause; it is tried again by itself"
        text = f"Worker {row['worker']} of {row['model']}/{row['pool']} is {row['state']}: {why}."
        found.append(_item("warn", text))
    if len(out) > _WORKERS:
        found.append(_item("warn", f"{len(out) - _WORKERS} more workers are out."))
    spent: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    for brief in recent:
        if brief.reason in _BUDGET:
            spent[brief.entitlement or brief.tenant or "?"] += 1
        elif brief.outcome in ("upstream_error", "internal_error"):
            failed[brief.model or "?"] += 1
    for who, n in spent.most_common(_WORKERS):
        found.append(_item("warn", f"{n} requests of {who} met a spent budget."))
    for name, n in failed.most_common(_WORKERS):
        found.append(_item("warn", f"{n} requests to {name} failed."))
    return found


def _item(level: str, text: str) -> dict[str, Any]:
    return {"level": level, "text": text}
