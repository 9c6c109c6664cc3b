"""Admission's input (Ask) and output (Lease, Limits)."""

from typing import Any

from gateway.records.limit import Limit, LimitUse
from gateway.records.record import Record


class Ask(Record, frozen=True, kw_only=True):
    """One request for a lease; the store decides it in one atomic call."""

    lease_id: str
    """Made by the gateway: clients may send one request id twice."""
    model: str
    entitlement: str
    pool: int
    alternates: tuple[int, ...]
    pools: tuple[Any, ...] = ()
    """States of the pools that these indices are of, to count the lease in: a reload may replace
    the model meanwhile. () for those of the model that has the name now."""
    cost_tokens: int
    sequences: int
    kv_bytes: int = 0
    """KV cache that `cost_tokens` occupy on the engines."""
    limits: tuple[Limit, ...] = ()
    """Of the key, the entitlement and the tenant, over all models."""
    money: int = 0
    """Cost of `cost_tokens` in nano-units; 0 where no budget is in money."""
    most_tokens: int = 0
    """What it can use at most, whatever was learned; budgets reserve it. 0: `cost_tokens`."""
    most_money: int = 0


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
