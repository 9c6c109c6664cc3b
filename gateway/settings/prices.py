"""What tokens of a model cost."""

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from gateway.records.usage import DECIMALS, TokenPrice, decimals_of, token_price
from gateway.settings.types import Section, reject, typed


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

    def per_token(self) -> TokenPrice:
        """The prices as settlement computes with them."""
        return token_price(self.input, self.output, self.cached_input)


def _ordered(price: PriceConfig) -> PriceConfig:
    if price.cached_input is not None and price.cached_input > price.input:
        reject(
            f"cached input costs more than other input ({price.cached_input:g} and "
            f"{price.input:g})",
            "give a `cached_input` of at most `input`, or leave it out",
        )
    return price


TokenPrices = Annotated[PriceConfig, AfterValidator(_ordered)]
