"""A limit of a key, an entitlement or a tenant: as stated, counted, held by a lease, reported."""

from collections.abc import Sequence
from decimal import Decimal
from typing import Final, Literal

from gateway.records.record import Record
from gateway.records.usage import NANO

Scope = Literal["key", "entitlement", "tenant"]
LimitUnit = Literal["sequences", "requests", "tokens", "money"]


class Budget(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A budget as the file or an administrator states it: in tokens, or in money."""

    tokens: int | None = None
    money: float | None = None
    """In units of the currency."""
    window: str = "month"
    """hour, day, week or month by the calendar, or the latest days as in `30d`."""
    timezone: str = "UTC"
    warn_at: float | None = None
    """Share of it from which answers warn, in (0, 1]."""
    on_exceed: Literal["refuse", "spot"] = "refuse"


class KeyLimits(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The limits of one key as the file or an administrator states them."""

    requests_per_minute: int | None = None
    max_concurrency: int | None = None
    budgets: tuple[Budget, ...] = ()


UNLIMITED: Final = KeyLimits()


class Limit(Record, frozen=True, kw_only=True):
    """Sequences in flight at most (`sequences`), or an amount of a unit in a window of time."""

    id: str
    """Names its counter in every store, and ends in ":" and the window or "sequences". A change of
    the amount keeps what was counted."""
    scope: Scope
    name: str
    """Whose it is: the entitlement, the tenant, or TENANT/KEY."""
    unit: LimitUnit
    amount: int
    window: str = ""
    """minute (of which any 60 s count), hour, day, week, month by the calendar, or the last days
    as in `30d`; empty for sequences."""
    zone: str = "UTC"
    """Time zone of the calendar."""
    warn: int = 0
    """Amount from which answers warn; 0 for never."""
    spot: bool = False
    """Beyond it requests are admitted to leftovers only, instead of refused."""
    currency: str = ""
    """Label of money."""

    @property
    def budget(self) -> bool:
        """Whether it is a budget, not a limit of requests or sequences."""
        return self.unit in ("tokens", "money")


def budget_limits(
    scope: Scope, name: str, budgets: Sequence[Budget], currency: str
) -> tuple[Limit, ...]:
    """Budgets as admission counts them; `currency` is the label of money."""
    limits = []
    for budget in budgets:
        money, unit = budget.money, "tokens" if budget.money is None else "money"
        amount = int(Decimal(repr(money)) * NANO) if money is not None else budget.tokens or 0
        limits.append(
            Limit(
                id=f"{scope}:{name}:{unit}:{budget.window}",
                scope=scope,
                name=name,
                unit="tokens" if money is None else "money",
                amount=amount,
                window=budget.window,
                zone=budget.timezone,
                warn=int(amount * budget.warn_at) if budget.warn_at is not None else 0,
                spot=budget.on_exceed == "spot",
                currency="" if money is None else currency,
            )
        )
    return tuple(limits)


def key_limits(tenant: str, name: str, stated: KeyLimits, currency: str) -> tuple[Limit, ...]:
    """All limits of a tenant's key. They go by its name, so a rotated key counts on."""
    full = f"{tenant}/{name}"
    most, each_minute = stated.max_concurrency, stated.requests_per_minute
    limits: list[Limit] = []
    if most is not None:
        sequences = f"key:{full}:sequences"
        limits.append(Limit(id=sequences, scope="key", name=full, unit="sequences", amount=most))
    if each_minute is not None:
        limits.append(
            Limit(
                id=f"key:{full}:requests:minute",
                scope="key",
                name=full,
                unit="requests",
                amount=each_minute,
                window="minute",
            )
        )
    return (*limits, *budget_limits("key", full, stated.budgets, currency))


class Holding(Record, frozen=True, kw_only=False, array_like=True):
    """What a lease has reserved of one limit."""

    id: str
    unit: LimitUnit
    slice_s: float
    """Start of the part of the window in which its use will be counted."""
    amount: int
    """Of a budget, the most that the request may use."""
    expected: int = 0
    """What a budget counts of a lease that expires."""


class Spent(Record, frozen=True, kw_only=False, array_like=True):
    """What a request used in the end, in the units of budgets; its place in a minute is used."""

    tokens: int
    money: int = 0


class LimitUse(Record, frozen=True, kw_only=False, array_like=True):
    """What a grant is told of a limit."""

    level: int
    """Used in its window with what this request is expected to use; of sequences, in flight."""
    amount: int
    """What may be used, with what an administrator added."""
    crossed: bool
    """This request was the first in its window to reach the level that warns."""


class LimitView(Record, frozen=True, kw_only=True, array_like=True):
    """A limit's counters, for administrators and tenants."""

    id: str
    used: int
    """In the current window, reservations included."""
    reserved: int
    """By requests in flight."""
    added: int
    """What an administrator added to the amount of this window."""
    resets_unix_s: float
    """When it is next counted from nothing, or, of the last days, when the oldest part ends."""
    total: int
    """Since the beginning, reservations included."""
