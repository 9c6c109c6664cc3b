"""List prices: tokens of one request -> its cost, in whole nano-units of the currency.

One nano-unit is 1e-9 of the currency. Costs are integers, so sums are exact in any order. A price
of at most three decimals per million tokens makes every cost exact; with more decimals a request's
cost is rounded up to the next nano-unit.
"""

from decimal import Decimal
from typing import Final

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
