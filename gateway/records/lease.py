"""What admission is asked for and gives."""

from gateway.records.record import Record


class Ask(Record, frozen=True, kw_only=True):
    """What admission is asked for, in one atomic call."""

    lease_id: str
    """The gateway's own, never a client's: two requests may bear one request id."""
    model: str
    entitlement: str
    pool: int
    alternates: tuple[int, ...]
    cost_tokens: int
    sequences: int
    kv_bytes: int = 0
    """What `cost_tokens` take of the engines' KV cache."""


class Limits(Record, frozen=True, kw_only=True):
    """What an entitlement may still do, for x-ratelimit-*; `requests` there are sequences."""

    sequences: int
    sequences_free: int
    sequences_reset_s: float
    tokens: int
    """Depth of the token bucket; 0 where no rate is set."""
    tokens_free: int
    tokens_reset_s: float


class Lease(Record, frozen=True, kw_only=True):
    """The one lease of a request; settled exactly once."""

    id: str
    model: str
    entitlement: str
    pool: int
    spilled: bool
    cost_tokens: int
    sequences: int
    kv_bytes: int = 0
    weight: float = 0.0
    """w_e when it was issued; 0 where nothing is managed."""
    contended: bool = False
    """Its pool was full: an engine will queue it."""
    protected: bool = False
    """Within a reserved baseline: others give way when it waits."""
    would_deny: str = ""
    """Observe mode: what it would have been refused for."""
    limits: Limits | None = None
    issued_unix_s: float = 0.0
    """By the store's clock."""
