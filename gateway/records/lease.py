"""What admission gives: a lease, and the limits that remain."""

from gateway.records.limit import Limit, LimitUse
from gateway.records.record import Record


class Limits(Record, frozen=True, kw_only=True):
    """An entitlement's remaining limits, for x-ratelimit-* (whose `requests` count sequences)."""

    sequences: int
    sequences_free: int
    sequences_reset_s: float
    tokens: int
    """Depth of the token bucket; 0 if no rate is set."""
    tokens_free: int
    tokens_reset_s: float


class Lease(Record, frozen=True, kw_only=True):
    """A request's only lease; settled exactly once."""

    id: str
    model: str
    entitlement: str
    pool: int
    spilled: bool
    cost_tokens: int
    sequences: int
    kv_bytes: int = 0
    weight: float = 0.0
    """Weight w_e at issue; 0 for models that are not managed."""
    contended: bool = False
    """The pool was full, so an engine will queue the request."""
    protected: bool = False
    """Within a reserved baseline; other requests give way while this one waits."""
    would_deny: str = ""
    """Observe mode: the reason for which admission would have refused."""
    limits: Limits | None = None
    issued_unix_s: float = 0.0
    """By the store's clock."""
    asked: tuple[Limit, ...] = ()
    """Its request's limits over all models."""
    uses: tuple[LimitUse, ...] = ()
    """Their levels once it was taken, in their order."""
