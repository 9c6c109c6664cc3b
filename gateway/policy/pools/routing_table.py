"""Records of pool choice: the table of boundaries, which prompts above one may be compressed."""

from gateway.records.record import Record


class PoolShape(Record, frozen=True, kw_only=True):
    """What routing needs to know of a pool. Pools are ordered by `window_tokens`."""

    name: str
    window_tokens: int
    """max_model_len of its engines."""
    boundary_tokens: int | None
    """b_short of this pool: expected totals up to it belong here; None for the last."""


class Routing(Record, frozen=True, kw_only=True):
    """A model's routing table. `observe` computes the boundary and does not apply it."""

    pools: tuple[PoolShape, ...]
    default_max_tokens: int | None = None
    observe: bool = False


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
