"""Tenants, their keys and entitlements; prices and budgets of what they use."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from gateway.admission.limit_book import CALENDAR, days_of
from gateway.records.limit import Budget, KeyLimits
from gateway.records.usage import DECIMALS, TokenPrice, decimals_of, token_price
from gateway.settings.types import (
    Amount,
    Count,
    Flag,
    Gib,
    Instant,
    Label,
    Milliseconds,
    ModelName,
    Money,
    Natural,
    Section,
    Text,
    WarnAt,
    reject,
    typed,
)


def _exact(price: float) -> float:
    if decimals_of(price) > DECIMALS:
        reject(
            f"more than {DECIMALS} decimals",
            "round it; prices of tokens are for a million of them, not for one",
        )
    return price


Price = Annotated[
    float,
    Field(strict=True, ge=0, le=1_000_000, allow_inf_nan=False),
    BeforeValidator(typed),
    AfterValidator(_exact),
]
"""In units of the currency."""


class PriceConfig(Section):
    """List price of a model's tokens, per million, in the gateway's `currency`."""

    input: Price
    """A million input tokens."""
    cached_input: Price | None = None
    """A million input tokens that the engine's prefix cache held; default: as `input`."""
    output: Price
    """A million output tokens."""

    @model_validator(mode="after")
    def _ordered(self) -> "PriceConfig":
        if self.cached_input is not None and self.cached_input > self.input:
            costs = f"{self.cached_input:g} and {self.input:g}"
            reject(
                f"cached input costs more than other input ({costs})",
                "give a `cached_input` of at most `input`, or leave it out",
            )
        return self

    def per_token(self) -> TokenPrice:
        """The prices as settlement computes with them."""
        return token_price(self.input, self.output, self.cached_input)


MAX_DAYS: Final = 90
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

    @model_validator(mode="after")
    def _complete(self) -> "BudgetConfig":
        if (self.tokens is None) == (self.money is None):
            reject("a budget is in tokens or in money", "give one of `tokens` and `money`")
        return self


def _distinct(budgets: tuple[BudgetConfig, ...]) -> tuple[BudgetConfig, ...]:
    kinds = [(budget.tokens is None, budget.window) for budget in budgets]
    if len(set(kinds)) < len(kinds):
        reject("two budgets of one kind in one window", "leave the smaller one")
    return budgets


Budgets = Annotated[tuple[BudgetConfig, ...], Field(max_length=4), AfterValidator(_distinct)]


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
    given = {name: getattr(key, name) for name in ("requests_per_minute", "max_concurrency")}
    return KeyLimits(**given, budgets=stated_budgets(key.budgets))


_HASH_FIX = "make one with `sluice hash-key`, which prints `sha256:` and 64 hex digits"


def _digest(value: str) -> str:
    digits = value.removeprefix("sha256:").lower()
    if len(digits) != 64 or not set(digits) <= set("0123456789abcdef"):
        reject("not the hash of a key", _HASH_FIX)
    return f"sha256:{digits}"


KeyHash = Annotated[
    str,
    AfterValidator(lambda value: _digest(value if value.startswith("sha256:") else "")),
    Field(json_schema_extra={"pattern": "^sha256:[0-9a-fA-F]{64}$"}),
]
KeyDigest = Annotated[
    str,
    AfterValidator(_digest),
    Field(json_schema_extra={"pattern": "^(sha256:)?[0-9a-fA-F]{64}$"}),
]
"""The same, or the 64 hex digits alone, as other gateways store them."""


class TenantKeyConfig(KeyLimitsConfig):
    """A key of a tenant. It opens every model that its entitlements are for."""

    name: Label
    """Unique in its tenant; shown in the request log and the usage export."""
    sha256: KeyDigest = Field(repr=False)
    """Hash of the key, from `sluice hash-key`; 64 hex digits, with or without `sha256:`."""
    models: tuple[ModelName, ...] | None = None
    """The only models that it opens; absent: all of its entitlements'."""
    entitlements: tuple[Label, ...] | None = None
    """Entitlements that it uses; the first for the requested model counts. Absent: the tenant's."""
    expires_at: Instant | None = None
    """After this the key answers 403; UTC unless an offset is given."""
    suspended: Flag = False
    """The key answers 403 while this is true."""
    queue_status: Flag = False
    """Its streams say how long they wait, without the header `x-sluice-queue-status`."""


class TenantConfig(Section):
    """A customer or a team: any number of keys over the entitlements that name it."""

    name: Label
    """Unique; `tenant` of its entitlements."""
    display_name: Text | None = None
    """Its name for people."""
    labels: Mapping[Label, Text] = {}
    """Notes of your own, such as a cost centre; `sluice check --json` shows them."""
    entitlements: tuple[Label, ...] | None = None
    """Entitlements of keys that list none, in order of preference. Absent: all that name this
    tenant, in the order of the file."""
    keys: tuple[TenantKeyConfig, ...] = ()
    """Its keys, any number."""
    budgets: Budgets = ()
    """What all of its keys may use together, over all models."""
    suspended: Flag = False
    """All of its keys and tokens answer 403 while this is true."""


Concurrency = Annotated[
    Annotated[Natural, Tag("total")] | Annotated[Mapping[Label, Natural], Tag("by_pool")],
    Discriminator(lambda value: "by_pool" if isinstance(value, dict) else "total"),
]


class EntitlementConfig(Section):
    """A tenant's right to use a model, and the API keys for it."""

    name: Label
    """Unique; shown in metrics and admin paths."""
    tenant: Label
    """The tenant that owns it."""
    model: ModelName
    """The model's name (not an alias)."""
    service_class: Literal["dedicated", "guaranteed", "elastic", "spot", "preemptible"] = "elastic"
    """dedicated and guaranteed reserve their baseline; the other classes share the rest."""
    slo_target_ms: Milliseconds | None = None
    """Time to first token that the tenant expects, in milliseconds."""
    slo_tpot_ms: Milliseconds | None = None
    """Time per further token of a stream that the tenant expects, in milliseconds: measured, not
    scheduled by."""
    tokens_per_second: Amount | None = None
    """Baseline of input and output tokens per second. Absent: what other entitlements leave."""
    max_tokens_per_second: Amount | None = None
    """Limit with what others leave unused; at least the baseline. dedicated, elastic and spot
    only. Default: no limit."""
    kv_cache_gib: Gib | None = None
    """Baseline of the KV cache of requests in flight, in GiB."""
    max_kv_cache_gib: Gib | None = None
    """Limit of that KV cache, in GiB; at least the baseline. Default: the pools' KV cache. For
    guaranteed it is the baseline."""
    concurrency: Concurrency | None = None
    """Baseline of sequences in flight: one number, or one per pool."""
    max_concurrency: Count | None = None
    """Limit of sequences in flight; at least the baseline. Default: the pools' slots. For
    guaranteed it is always the baseline."""
    mode: Literal["enforce", "observe"] = "enforce"
    """observe: refusals are computed, logged and counted, never applied."""
    compression: Literal["allow", "refuse"] = "allow"
    """refuse: this tenant's prompts are never compressed, whatever the model says."""
    trusted_usage: Flag = False
    """Usage that another proxy reports (POST /admission/usage) teaches this tenant's estimates."""
    api_keys: Annotated[tuple[KeyHash, ...], Field(max_length=2)] = Field(default=(), repr=False)
    """`sha256:` hashes of the keys; two keys may be valid at once, to allow rotation."""
    expires_at: Instant | None = None
    """After this the keys answer 403; UTC unless an offset is given."""
    budgets: Budgets = ()
    """What may be used by this entitlement."""

    @property
    def baseline(self) -> int:
        """Sequences of `concurrency` over all pools; 0 when absent."""
        given = self.concurrency
        if given is None:
            return 0
        return given if isinstance(given, int) else sum(given.values())

    @property
    def reserves(self) -> bool:
        """Whether its baseline is reserved."""
        return self.service_class in {"dedicated", "guaranteed"}
