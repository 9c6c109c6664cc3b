"""Fields of LiteLLM's rows that Sluice does not take over, and why.

A field that restricts a key, and that Sluice cannot say, suspends the key: without the field it
would open more than before.
"""

from typing import Any, Final

from gateway.settings.problems import KeyPath
from sluice.imports.litellm_rows import number
from sluice.imports.report import Report

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
