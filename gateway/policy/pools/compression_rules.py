"""Which prompts above a boundary may be compressed, and one that is to be."""

from gateway.records.record import Record


class CompressionRules(Record, frozen=True, kw_only=True):
    """A model's."""

    gamma: float = 1.5
    max_cut: float = 0.5
    tokenizer: str | None = None
    """Path of its tokenizer.json; exact counts then."""


class Band(Record, frozen=True, kw_only=True):
    """A request that may be compressed: the pool it is made to fit, and T_c."""

    pool: int
    budget_tokens: int
