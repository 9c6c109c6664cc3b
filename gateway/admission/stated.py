"""Limits as the file or an administrator states them -> limits that admission counts."""

from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Literal

from gateway.records.limit import Budget, KeyLimits, Limit, Scope
from gateway.records.usage import NANO


def budget_limits(
    scope: Scope, name: str, budgets: Sequence[Budget], currency: str
) -> tuple[Limit, ...]:
    """Budgets as admission counts them; `currency` is the label of money."""
    return tuple(_budget_limits(scope, name, budgets, currency))


def _budget_limits(
    scope: Scope, name: str, budgets: Sequence[Budget], currency: str
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


def key_limits(tenant: str, name: str, stated: KeyLimits, currency: str) -> tuple[Limit, ...]:
    """All limits of a tenant's key. They go by its name, so a rotated key counts on."""
    full = f"{tenant}/{name}"
    found: list[Limit] = []
    if stated.max_concurrency is not None:
        found.append(
            Limit(
                id=f"key:{full}:sequences",
                scope="key",
                name=full,
                unit="sequences",
                amount=stated.max_concurrency,
            )
        )
    if stated.requests_per_minute is not None:
        found.append(
            Limit(
                id=f"key:{full}:requests:minute",
                scope="key",
                name=full,
                unit="requests",
                amount=stated.requests_per_minute,
                window="minute",
            )
        )
    return (*found, *budget_limits("key", full, stated.budgets, currency))
