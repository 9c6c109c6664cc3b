"""LiteLLM's limits and budgets -> limits and budgets of tenants, keys and entitlements."""

import math
import re
from typing import Any, Final

from gateway.settings.problems import KeyPath
from gateway.settings.tenancy.budgets import MAX_DAYS, MAX_MONEY
from sluice.imports.litellm_fields import RESUME, spent
from sluice.imports.litellm_rows import number, whole
from sluice.imports.report import Report
from sluice.imports.sections import Row

LIMITS: Final = ("rpm_limit", "tpm_limit", "max_parallel_requests")
SEQUENCES: Final = "max_concurrency, which counts sequences: prompts times `n`"
_CALENDAR: Final = {
    **dict.fromkeys(("1h", "60m", "3600s"), "hour"),
    **dict.fromkeys(("1d", "24h", "86400s"), "day"),
    "7d": "week",
    **dict.fromkeys(("30d", "1mo"), "month"),
}
"""LiteLLM, too, resets these at the calendar's turns, in UTC."""


def limits_of(row: dict[str, Any]) -> dict[str, Any]:
    """What a row limits or prefers, as far as entitlements can say it."""
    found: dict[str, Any] = {
        name: value
        for name in ("tpm_limit", "max_parallel_requests")
        if (value := whole(row.get(name))) is not None and value > 0
    }
    metadata = row.get("metadata")
    priority = metadata.get("priority") if isinstance(metadata, dict) else None
    return found | ({"priority": str(priority)} if priority else {})


def refusing(row: dict[str, Any]) -> str | None:
    """The limit of nothing for which LiteLLM refuses every request; None without one."""
    for name in LIMITS:
        if (limit := whole(row.get(name))) is not None and limit <= 0:
            return name
    money = number(row.get("max_budget"))
    return "max_budget" if money is not None and money <= 0 else None


def unreadable(path: KeyPath, row: dict[str, Any], report: Report) -> bool:
    """Whether a limit is no number; the report names it."""
    found = False
    for name in (*LIMITS, "max_budget"):
        value = row.get(name)
        if value not in (None, "", False) and number(value) is None:
            report.left_out((*path, name), f"{RESUME}: not a number that can be used")
            found = True
    return found


def over_models(path: KeyPath, row: dict[str, Any], report: Report) -> dict[str, Any]:
    """`limits_of` a row, whose numbers the report tells."""
    limits = limits_of(row)
    if "tpm_limit" in limits:
        report.approximated(
            (*path, "tpm_limit"),
            "tokens_per_second, a sixtieth and no more, in equal parts for each model, and of a "
            "team for each key with limits of its own; a bucket of 10 s of it, or of the widest "
            "window's tokens",
        )
    if "priority" in limits:
        report.approximated(
            (*path, "metadata", "priority"), "a class and a baseline: see priority_reservation"
        )
    return limits


def key_limits(path: KeyPath, row: dict[str, Any], key: Row, report: Report) -> bool:
    """Set limits of a key over all of its models; False if its budget must suspend it."""
    requests, sequences = (whole(row.get(n)) or 0 for n in ("rpm_limit", "max_parallel_requests"))
    if requests > 0:
        key["requests_per_minute"] = requests
        report.taken((*path, "rpm_limit"), "requests_per_minute of the key")
    if sequences > 0:
        key["max_concurrency"] = sequences
        report.approximated((*path, "max_parallel_requests"), f"the key's {SEQUENCES}")
    budgets = budgets_of(path, row, report)
    if budgets:
        key["budgets"] = budgets
    return budgets is not None


def budgets_of(path: KeyPath, row: dict[str, Any], report: Report) -> list[Row] | None:
    """What is left of the budget of a row, as a list for `budgets`, empty without one.

    None where nothing is left, or where no window of Sluice's is as long.
    """
    money, duration = number(row.get("max_budget")), row.get("budget_duration")
    where = (*path, "max_budget")
    if money is None or money <= 0:
        return []
    left = math.floor(min(money - spent(row), MAX_MONEY) * 1e6) / 1e6
    if left <= 0:
        report.left_out(where, f"{RESUME}: the budget is spent, and windows begin at nothing")
        return None
    window = _CALENDAR.get(str(duration))
    days = re.fullmatch(r"([1-9]\d?)d", str(duration))
    if window is None and days is not None and int(days[1]) <= MAX_DAYS:
        window = str(duration)
    if window is None:
        said = f"of {duration}" if duration else "that never resets"
        report.left_out(where, f"{RESUME}: a budget {said}; give the budget a window")
        return None
    rest = f" ({money:g} less what was spent; raise it when the window turns)"
    report.approximated(
        where,
        f"budgets: money {left:g}{rest if left < money else ''} a window of {window}, for models "
        "with a price",
    )
    return [Row(money=left, window=window)]
