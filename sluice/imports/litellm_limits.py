"""LiteLLM's limits and budgets -> limits and budgets of tenants, keys and entitlements."""

import re
from typing import Any, Final

from gateway.settings.problems import KeyPath
from gateway.settings.tenancy.budgets import MAX_DAYS, MAX_MONEY
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


def unreadable(path: KeyPath, row: dict[str, Any], report: Report) -> None:
    """Leave out limits that are no numbers."""
    for name in (*LIMITS, "max_budget"):
        value = row.get(name)
        if value not in (None, "", False) and number(value) is None:
            report.left_out((*path, name), "not a number that can be used: set the limit by hand")


def key_limits(path: KeyPath, row: dict[str, Any], key: Row, report: Report) -> None:
    """Limits of a key over all of its models."""
    requests, sequences = (whole(row.get(n)) or 0 for n in ("rpm_limit", "max_parallel_requests"))
    if requests > 0:
        key["requests_per_minute"] = requests
        report.taken((*path, "rpm_limit"), "requests_per_minute of the key")
    if sequences > 0:
        key["max_concurrency"] = sequences
        report.approximated((*path, "max_parallel_requests"), f"the key's {SEQUENCES}")
    if budgets := budgets_of(path, row, report):
        key["budgets"] = budgets


def budgets_of(path: KeyPath, row: dict[str, Any], report: Report) -> list[Row]:
    """The budget of a key or a team, as a list for `budgets`; empty without a usable one."""
    money, duration = number(row.get("max_budget")), row.get("budget_duration")
    where = (*path, "max_budget")
    if money is None or money <= 0:
        return []
    window = _CALENDAR.get(str(duration))
    days = re.fullmatch(r"([1-9]\d?)d", str(duration))
    if window is None and days is not None and int(days[1]) <= MAX_DAYS:
        window = str(duration)
    if window is None:
        said = f"of {duration}" if duration else "that never resets"
        report.left_out(where, f"a budget {said}: give the budget a window")
        return []
    if money > MAX_MONEY:
        report.left_out(where, f"a budget of more than {MAX_MONEY}")
        return []
    report.approximated(
        where,
        f"budgets: money {money:g} a window of {window}, counted from nothing, for models with "
        "a price",
    )
    return [Row(money=money, window=window)]
