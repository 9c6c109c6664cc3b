"""Fields of LiteLLM's rows that Sluice does not take over, and why."""

from typing import Any, Final

from gateway.settings.problems import KeyPath
from sluice.imports.report import Report

_LEFT_OUT: Final = {
    "soft_budget": "give the budget `warn_at`",
    "budget_id": "limits of LiteLLM's budget table are not read: set them by hand",
    "organization_id": "models, limits and budgets of organizations are not read",
    "model_max_budget": "give the entitlement of that model its budgets",
    "model_rpm_limit": "requests a minute are limited for a key over all of its models",
    "model_tpm_limit": "give the entitlement of that model its tokens_per_second",
    "aliases": "aliases are the model's, for every key",
    "allowed_routes": "a key opens every route of its models",
    "guardrails": "Sluice does not judge contents",
    "auto_rotate": "keys are not renewed by themselves",
}
_BOOKKEEPING: Final = frozenset(
    {
        *("token", "key", "key_name", "key_alias", "team_id", "team_alias", "user_id", "models"),
        *("spend", "model_spend", "created_at", "created_by", "updated_at", "updated_by"),
        *("budget_duration", "budget_reset_at", "last_active", "members"),
        *("members_with_roles", "admins", "soft_budget_cooldown", "user"),
        *("user_email", "key_type", "rotation_count", "blocked"),
        *("expires", "tpm_limit", "rpm_limit", "max_parallel_requests", "max_budget", "duration"),
    }
)
"""Fields that another line speaks of, or that record LiteLLM's own past."""


def other_fields(path: KeyPath, row: dict[str, Any], report: Report) -> None:
    """Account for the fields of a row that become nothing; `Report.rest` has unknown ones."""
    metadata = row.get("metadata")
    notes = metadata if isinstance(metadata, dict) else {}
    for name, value in row.items():
        if name in _BOOKKEEPING:
            report.part_of((*path, name))
        elif name in _LEFT_OUT and value:
            report.left_out((*path, name), _LEFT_OUT[name])
    for name in notes:
        if name != "priority":
            why = _LEFT_OUT.get(name, "a note; see `labels` of tenants")
            report.left_out((*path, "metadata", name), why)
    if not notes and metadata:
        report.left_out((*path, "metadata"), "not an object")
