"""What admission is asked and what it answers."""

from typing import Literal

from gateway.records.record import Record

DenialReason = Literal[
    "entitlement_unknown",
    "entitlement_pending",
    "entitlement_degraded",
    "entitlement_expired",
    "entitlement_suspended",
    "exceeds_entitlement",
    "concurrency",
    "tokens",
    "kv",
    "priority",
]
Unit = Literal["sequences", "tokens", "bytes of KV cache"]


class Request(Record, frozen=True, kw_only=True):
    """What admission needs to know of a request."""

    lease_id: str
    entitlement: str
    pool: int
    alternates: tuple[int, ...] = ()
    estimate_tokens: int
    """L_in + min(cap, q_out), all sequences."""
    kv_bytes: int = 0
    """The same in KV bytes."""
    sequences: int = 1
    owner: str = ""
    """The process that asks."""


class Grant(Record, frozen=True, kw_only=True):
    """Come in. The figures are for the client's rate-limit headers, after this grant."""

    pool: int
    weight: float
    spilled: bool
    contended: bool
    """The engines will queue it: protected traffic may have others evicted."""
    protected: bool
    """Within a reserved baseline."""
    funded: str
    would_deny: str
    limit_sequences: int
    inflight_sequences: int
    depth_tokens: float
    level_tokens: float
    rate_tokens_per_s: float
    service_s: float


class Denial(Record, frozen=True, kw_only=True):
    """Not now, or never. `wait_s` before jitter; 0 where waiting does not help."""

    reason: DenialReason
    wait_s: float = 0.0
    limit: float = 0.0
    used: float = 0.0
    requested: float = 0.0
    unit: Unit = "sequences"
    of_pool: bool = False
    """For the pool's sake, not for the entitlement's own limits."""


class Place(Record, frozen=True, kw_only=False):
    """Where a request goes, or that it does not: `denied` says why."""

    pool: int
    contended: bool = False
    spilled: bool = False
    denied: Literal["", "priority", "kv"] = ""
