"""A model's routing table: its pools and their boundaries."""

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
