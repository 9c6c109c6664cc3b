"""LiteLLM's budgets -> budgets of tenants and keys."""

import re
from typing import Any, Final

from gateway.settings.problems import KeyPath
from gateway.settings.tenancy.budgets import MOST_DAYS
from sluice.imports.report import Report
from sluice.imports.sections import Row

_CALENDAR: Final = {
    **dict.fromkeys(("1h", "60m", "3600s"), "hour"),
    **dict.fromkeys(("1d", "24h", "86400s"), "day"),
    "7d": "week",
    **dict.fromkeys(("30d", "1mo"), "month"),
}
"""LiteLLM, too, resets these at the calendar's turns, in UTC."""


def budgets_of(path: KeyPath, row: dict[str, Any], report: Report) -> list[Row]:
    """The budget of a key or a team, as a list for `budgets`; empty without a usable one."""
    money, duration = row.get("max_budget"), row.get("budget_duration")
    where = (*path, "max_budget")
    if isinstance(money, bool) or not isinstance(money, int | float):
        return []
    if money <= 0:
        report.left_out(where, "a budget of nothing: suspend the key instead")
        return []
    window = _CALENDAR.get(str(duration))
    days = re.fullmatch(r"([1-9]\d?)d", str(duration))
    if window is None and days is not None and int(days[1]) <= MOST_DAYS:
        window = str(duration)
    if window is None:
        said = "that never resets" if duration is None else f"of {duration}"
        report.left_out(where, f"a budget {said}: give the budget a window")
        return []
    report.approximated(
        where,
        f"budgets: money {money:g} a window of {window}, counted from nothing, for models with "
        "a price",
    )
    return [Row(money=float(money), window=window)]
