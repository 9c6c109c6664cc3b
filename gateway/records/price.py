"""What a model's tokens cost."""

from gateway.records.record import Record


class TokenPrice(Record, frozen=True, kw_only=True):
    """Prices of one model's tokens, in pico-units (1e-12 of the currency) a token."""

    input_pico: int
    cached_input_pico: int
    output_pico: int
