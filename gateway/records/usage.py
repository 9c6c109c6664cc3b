"""Usage for billing, and what it costs by list prices, in whole nano-units of the currency.

One nano-unit is 1e-9 of the currency. Costs are integers, so sums are exact in any order. A price
of at most three decimals per million tokens makes every cost exact; with more decimals a request's
cost is rounded up to the next nano-unit.
"""

from collections.abc import Mapping
from decimal import Decimal
from typing import Final, NamedTuple

from gateway.records.record import Record

NANO: Final = 1_000_000_000
"""Nano-units in one unit of the currency."""
DECIMALS: Final = 6
"""Most decimals of a price per million tokens."""
_PICO_A_NANO: Final = 1000


class TokenPrice(Record, frozen=True, kw_only=True):
    """Prices of one model's tokens, in pico-units (1e-12 of the currency) a token."""

    input_pico: int
    cached_input_pico: int
    output_pico: int


def token_price(
    input_per_million: float, output_per_million: float, cached_input_per_million: float | None
) -> TokenPrice:
    """Prices as people write them, in units of the currency per million tokens.

    Cached input costs as much as other input unless it has a price.
    """
    cached = input_per_million if cached_input_per_million is None else cached_input_per_million
    return TokenPrice(
        input_pico=_pico(input_per_million),
        cached_input_pico=_pico(cached),
        output_pico=_pico(output_per_million),
    )


def decimals_of(price: float) -> int:
    """Decimals that a price was written with."""
    exponent = Decimal(repr(price)).normalize().as_tuple().exponent
    return max(0, -int(exponent))


def cost_nano(
    price: TokenPrice, prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0
) -> int:
    """The cost of one request's tokens; cached tokens are a part of the prompt's."""
    cached = min(cached_tokens, prompt_tokens)
    pico = (
        (prompt_tokens - cached) * price.input_pico
        + cached * price.cached_input_pico
        + completion_tokens * price.output_pico
    )
    return -(-pico // _PICO_A_NANO)


def in_units(nano: int) -> str:
    """An amount in units of the currency, exactly, with at least two decimals."""
    whole, part = divmod(abs(nano), NANO)
    decimals = f"{part:09d}".rstrip("0").ljust(2, "0")
    return f"{'-' if nano < 0 else ''}{whole}.{decimals}"


def _pico(per_million: float) -> int:
    # repr() has the digits that the file had; the float itself may be just below them.
    return int((Decimal(repr(per_million)) * 10**DECIMALS).to_integral_value())


class UsageLine(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Usage and cost of one request. Cached input is part of the input."""

    id: str
    time_unix_s: float
    """When it was settled."""
    tenant: str
    entitlement: str
    key: str
    """The key's name, or its fingerprint where it has none; empty without a key."""
    model: str
    endpoint: str
    input_tokens: int
    cached_input_tokens: int
    output_tokens: int
    charge_tokens: int
    """Tokens that the entitlement's bucket paid, by the weights of the model's profile."""
    source: str
    """Source of the usage: engine (reported), counted (by the gateway) or proxy (reported)."""
    status: str
    """The outcome, as in the request log."""
    cost_nano: int | None = None
    """Cost in 1e-9 of the currency; None where the model has no prices."""
    currency: str = ""


class UsageSums(NamedTuple):
    """Usage of several requests."""

    requests: int = 0
    input_tokens: int = 0
    cached_input_tokens: int = 0
    output_tokens: int = 0
    charge_tokens: int = 0
    cost_nano: int = 0


class UsageQuery(Record, frozen=True, kw_only=True):
    """What a usage report shall show; `gateway.usage.report` checks it."""

    by: tuple[str, ...]
    """Columns that tell rows apart."""
    first_day: str
    """YYYY-MM-DD, by UTC; this and `last_day` are included."""
    last_day: str
    tenant: str | None = None
    """The only tenant; None for all, and what of the fleet was idle."""


class UsageReport(Record, frozen=True, kw_only=True):
    """Usage by row, each named by its values of the query's columns."""

    query: UsageQuery
    rows: Mapping[tuple[str, ...], UsageSums]
    idle_nano: Mapping[tuple[str, ...], int] = {}
    """What workers with a price by the hour cost beyond the requests' shares; named likewise, with
    `IDLE` for tenant, entitlement and key."""
    currency: str = ""
    """Of its costs; several, joined by a comma, where the sources differ."""
