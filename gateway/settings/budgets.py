"""Budgets of tenants, keys and entitlements, and limits of a key, as sections of the file."""

import re
from collections.abc import Sequence
from typing import Annotated, Final, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import AfterValidator, BeforeValidator, Field

from gateway.admission.windows import CALENDAR, days_of
from gateway.records.limit import Budget, KeyLimits
from gateway.settings.types import Count, Section, Text, reject, typed

MAX_DAYS: Final = 90
MAX_MONEY: Final = 9_000_000
_DAYS: Final = re.compile(r"[1-9][0-9]?d")
_WINDOWS: Final = f"write {', '.join(CALENDAR)}, or the last days as in 30d, {MAX_DAYS} at most"


def _window(value: str) -> str:
    days = _DAYS.fullmatch(value) is not None and days_of(value) <= MAX_DAYS
    if value not in CALENDAR and not days:
        reject("not a window of time", _WINDOWS)
    return value


def _zone(value: str) -> str:
    try:
        ZoneInfo(value)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        if value != "UTC":
            reject("not a time zone that this host knows", "write a name such as Europe/Berlin")
    return value


Money = Annotated[
    float,
    Field(strict=True, gt=0, le=MAX_MONEY, allow_inf_nan=False),
    BeforeValidator(typed),
]
"""In units of the currency."""
WarnAt = Annotated[
    float, Field(strict=True, gt=0, le=1, allow_inf_nan=False), BeforeValidator(typed)
]


class BudgetConfig(Section):
    """What may be used in a window of time, over all models: tokens, or money."""

    tokens: Count | None = None
    """Input and output tokens."""
    money: Money | None = None
    """In the gateway's `currency`, by the models' `price` or the pools' `gpu_hour`."""
    window: Annotated[Text, AfterValidator(_window)] = "month"
    """hour, day, week or month by the calendar, or the last days as in 30d."""
    timezone: Annotated[Text, AfterValidator(_zone)] = "UTC"
    """Time zone of the calendar, such as Europe/Berlin."""
    warn_at: WarnAt | None = None
    """Share of the budget from which answers and the audit warn."""
    on_exceed: Literal["refuse", "spot"] = "refuse"
    """spot: served from leftovers until the window ends, instead of refused."""


def _complete(budget: BudgetConfig) -> BudgetConfig:
    if (budget.tokens is None) == (budget.money is None):
        reject("a budget is in tokens or in money", "give one of `tokens` and `money`")
    return budget


def _distinct(budgets: tuple[BudgetConfig, ...]) -> tuple[BudgetConfig, ...]:
    kinds = [(budget.tokens is None, budget.window) for budget in budgets]
    if len(set(kinds)) < len(kinds):
        reject("two budgets of one kind in one window", "leave the smaller one")
    return budgets


Budgets = Annotated[
    tuple[Annotated[BudgetConfig, AfterValidator(_complete)], ...],
    Field(max_length=4),
    AfterValidator(_distinct),
]


class KeyLimitsConfig(Section):
    """What one key may use, over all models."""

    requests_per_minute: Count | None = None
    """Most requests admitted in any 60 seconds, over all models."""
    max_concurrency: Count | None = None
    """Most sequences in flight, over all models."""
    budgets: Budgets = ()
    """What this key may use, over all models."""


def stated_budgets(budgets: Sequence[BudgetConfig]) -> tuple[Budget, ...]:
    """Checked budgets as records."""
    return tuple(Budget(**budget.model_dump()) for budget in budgets)


def stated_limits(key: KeyLimitsConfig) -> KeyLimits:
    """A key's checked limits as a record."""
    return KeyLimits(
        requests_per_minute=key.requests_per_minute,
        max_concurrency=key.max_concurrency,
        budgets=stated_budgets(key.budgets),
    )
