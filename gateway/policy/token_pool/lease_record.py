"""A lease as its token pool holds it. Times are Unix seconds of the store's clock."""

from msgspec import Struct


class Held(Struct, gc=False):
    """A lease in force."""

    id: str
    entitlement: str
    pool: int
    sequences: int
    estimate_tokens: int
    """Charged so far: the estimate, and what was streamed past it."""
    kv_bytes: int
    weight: float
    """w_e when it was issued (a spilled lease at most `SPILLED_WEIGHT`)."""
    issued_s: float
    expires_s: float
    funded: str
    """own, surplus or none: which bucket paid."""
    owner: str
    """The process that serves it."""
    would_deny: str
    """Observe mode: the reason it would have been denied for, or ""."""
    spilled: bool = False
    evicted: bool = False
