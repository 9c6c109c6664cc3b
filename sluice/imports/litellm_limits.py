"""LiteLLM's limits and budgets -> limits and budgets of tenants, keys and entitlements.

A field that restricts a key, and that Sluice cannot say, suspends the key: without the field it
would open more than before.
"""

import math
import re
from typing import Any, Final

from gateway.settings.source import KeyPath
from gateway.settings.tenants import MAX_DAYS
from gateway.settings.types import MAX_MONEY
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
RESUME: Final = "suspended until you look at it"
_OF_MEMBERS: Final = "limits of a team's members are not read"
_RESTRICTING: Final = {
    "organization_id": "models, limits and budgets of organizations are not read",
    "model_max_budget": "give the entitlement of that model its budgets",
    "model_rpm_limit": "requests a minute are limited for a key over all of its models",
    "model_tpm_limit": "give the entitlement of that model its tokens_per_second",
    "allowed_routes": "a key opens every route of its models",
    "guardrails": "Sluice does not judge contents",
    "budget_limits": "only max_budget with budget_duration is read",
    "budget_id": "limits of LiteLLM's budget table are not read",
    "team_member_budget_id": _OF_MEMBERS,
    "team_member_budget": _OF_MEMBERS,
    "team_member_rpm_limit": _OF_MEMBERS,
    "team_member_tpm_limit": _OF_MEMBERS,
}
_LEFT_OUT: Final = {
    "soft_budget": "give the budget `warn_at`",
    "aliases": "aliases are the model's, for every key",
    "auto_rotate": "keys are not renewed by themselves",
}
_BOOKKEEPING: Final = frozenset(
    {
        *("token", "key", "key_name", "key_alias", "team_id", "team_alias", "user_id", "models"),
        *("spend", "model_spend", "created_at", "created_by", "updated_at", "updated_by"),
        *("budget_duration", "budget_reset_at", "last_active", "members", "litellm_budget_table"),
        *("members_with_roles", "admins", "soft_budget_cooldown", "user", "user_alias"),
        *("user_email", "user_role", "key_type", "rotation_count", "blocked", "key_count"),
        *("expires", "tpm_limit", "rpm_limit", "max_parallel_requests", "max_budget", "duration"),
        *("organization_memberships", "teams", "sso_user_id", "password"),
    }
)
"""Fields that another line speaks of, or that record LiteLLM's own past."""
_ANY_MODEL: Final = "llm_api_routes"
"""LiteLLM's name of the routes that serve models."""
_OF_BUDGETS: Final = (
    *("max_budget", "tpm_limit", "rpm_limit", "max_parallel_requests", "model_max_budget"),
)


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


def restricted(path: KeyPath, row: dict[str, Any], report: Report) -> bool:
    """Whether a row says what no setting can say; the report names it."""
    found = False
    for where, name, value in _said(path, row):
        if name in _RESTRICTING and value and _binds(name, value, row):
            report.left_out((*where, name), f"{RESUME}: {_RESTRICTING[name]}")
            found = True
    return found


def _said(path: KeyPath, row: dict[str, Any]) -> list[tuple[KeyPath, str, object]]:
    """(where, name, value) of the fields of a row, and of its notes."""
    metadata = row.get("metadata")
    notes = metadata if isinstance(metadata, dict) else {}
    return [
        *((path, name, value) for name, value in row.items()),
        *(((*path, "metadata"), name, value) for name, value in notes.items()),
    ]


def _binds(name: str, value: object, row: dict[str, Any]) -> bool:
    table = row.get("litellm_budget_table")
    if name == "budget_id" and isinstance(table, dict):  # a soft budget has a row there, too
        return any(table.get(limit) not in (None, {}) for limit in _OF_BUDGETS)
    return not (name == "allowed_routes" and isinstance(value, list) and _ANY_MODEL in value)


def other_fields(path: KeyPath, row: dict[str, Any], report: Report) -> None:
    """Account for the fields of a row that become nothing; `Report.rest` has unknown ones."""
    metadata = row.get("metadata")
    for where, name, value in _said(path, row):
        if name in _RESTRICTING and value and not _binds(name, value, row):
            report.part_of((*where, name))
        elif name in _RESTRICTING and value:
            continue
        elif where == path and name in _BOOKKEEPING:
            report.part_of((*where, name))
        elif name in _LEFT_OUT and value:
            report.left_out((*where, name), _LEFT_OUT[name])
        elif where != path and name != "priority":
            report.left_out((*where, name), "a note; see `labels` of tenants")
    if metadata and not isinstance(metadata, dict):
        report.left_out((*path, "metadata"), "not an object")


def spent(row: dict[str, Any]) -> float:
    """What a row has spent in its window, as LiteLLM counted it."""
    return max(0.0, number(row.get("spend")) or 0.0)
