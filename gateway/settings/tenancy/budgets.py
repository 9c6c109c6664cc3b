"""Budgets of tenants, keys and entitlements, and limits of a key, as sections of the file."""

import re
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Annotated, Final, Literal, Protocol
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import AfterValidator, BeforeValidator, Field

from gateway.policy.budgets.windows import CALENDAR, days_of
from gateway.policy.prices import NANO
from gateway.records.limit import Limit, Scope
from gateway.settings.types import Count, Section, Text, reject, typed

MOST_DAYS: Final = 90
_DAYS: Final = re.compile(r"[1-9][0-9]?d")
_WINDOWS: Final = f"write {', '.join(CALENDAR)}, or the last days as in 30d, {MOST_DAYS} at most"


def _window(value: str) -> str:
    days = _DAYS.fullmatch(value) is not None and days_of(value) <= MOST_DAYS
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
    Field(strict=True, gt=0, le=9_000_000, allow_inf_nan=False),
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
    """In the gateway's `currency`, by the models' `price`."""
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


class Budgeted(Protocol):
    """A section that has budgets."""

    @property
    def budgets(self) -> tuple[BudgetConfig, ...]:
        """Its budgets."""


class LimitedKey(Budgeted, Protocol):
    """A key that may have limits of its own."""

    @property
    def requests_per_minute(self) -> int | None:
        """Requests admitted in any 60 s."""

    @property
    def max_concurrency(self) -> int | None:
        """Sequences in flight."""


def budget_limits(
    scope: Scope, name: str, budgets: Sequence[BudgetConfig], currency: str
) -> tuple[Limit, ...]:
    """Budgets as admission counts them."""
    return tuple(_budget_limits(scope, name, budgets, currency))


def _budget_limits(
    scope: Scope, name: str, budgets: Sequence[BudgetConfig], currency: str
) -> Iterator[Limit]:
    for budget in budgets:
        money = budget.money
        amount = int(Decimal(repr(money)) * NANO) if money is not None else budget.tokens or 0
        unit: Literal["money", "tokens"] = "tokens" if money is None else "money"
        yield Limit(
            id=f"{scope}:{name}:{unit}:{budget.window}",
            scope=scope,
            name=name,
            unit=unit,
            amount=amount,
            window=budget.window,
            zone=budget.timezone,
            warn=int(amount * budget.warn_at) if budget.warn_at is not None else 0,
            spot=budget.on_exceed == "spot",
            currency=currency if unit == "money" else "",
        )


def key_limits(tenant: str, name: str, key: LimitedKey, currency: str) -> tuple[Limit, ...]:
    """All limits of a tenant's key."""
    full = f"{tenant}/{name}"
    found: list[Limit] = []
    if key.max_concurrency is not None:
        found.append(
            Limit(
                id=f"key:{full}:sequences",
                scope="key",
                name=full,
                unit="sequences",
                amount=key.max_concurrency,
            )
        )
    if key.requests_per_minute is not None:
        found.append(
            Limit(
                id=f"key:{full}:requests:minute",
                scope="key",
                name=full,
                unit="requests",
                amount=key.requests_per_minute,
                window="minute",
            )
        )
    return (*found, *budget_limits("key", full, key.budgets, currency))
