"""A lease that this process holds, and its encoding in calls to Redis and in the answers."""

from typing import Any, cast

import msgspec

from gateway.adapters.store.redis.scripts import grouped
from gateway.adapters.store.redis.wire import Op
from gateway.policy.admission.admission import Denial, Grant
from gateway.policy.entitlements.entitlement import Entitlement
from gateway.policy.token_pool.terms import Terms
from gateway.policy.token_pool.token_pool import TokenPool
from gateway.records.lease import Ask, Lease

_decode = msgspec.msgpack.decode
LOCAL_SUFFIX = "+"
"""Suffix of the key of a lease that was taken without Redis. It must differ from the plain id,
because an admission whose answer was lost may have taken that one and is being given back."""


class RedisLease:
    """A lease of this process."""

    __slots__ = (
        "estimate_tokens",
        "funded",
        "gives_way",
        "key",
        "kv_bytes",
        "lease",
        "resizing",
    )

    def __init__(self, lease: Lease, key: str, *, funded: str, gives_way: bool) -> None:
        self.lease = lease
        self.key = key
        """Its lease id in Redis."""
        self.funded = funded
        """The bucket that paid: own, surplus or none."""
        self.gives_way = gives_way
        self.estimate_tokens = lease.cost_tokens
        self.kv_bytes = lease.kv_bytes
        self.resizing: Op | None = None
        """Its last resize; a later one replaces it until it is sent."""

    def record(self) -> dict[str, Any]:
        """The lease in the form that `lua/adopt.lua` takes."""
        return {
            "id": self.key,
            "entitlement": self.lease.entitlement,
            "pool": self.lease.pool,
            "sequences": self.lease.sequences,
            "estimate_tokens": self.estimate_tokens,
            "kv_bytes": self.kv_bytes,
            "weight": self.lease.weight,
            "spilled": self.lease.spilled,
            "issued_unix_s": self.lease.issued_unix_s,
        }


def admit_argument(ask: Ask, owner: str, *, observe: bool) -> bytes:
    """The argument of `lua/admit.lua`."""
    return grouped(
        "admit",
        lease_id=ask.lease_id,
        owner=owner,
        observe=observe,
        entitlement=ask.entitlement,
        pool=ask.pool,
        alternates=ask.alternates,
        estimate_tokens=ask.cost_tokens,
        kv_bytes=ask.kv_bytes,
        sequences=ask.sequences,
    )


def decision(answer: bytes) -> tuple[Grant | Denial, bool, float]:
    """Decode `lua/admit.lua`: decision, whether the lease is evictable, time of issue (Unix s)."""
    reported = _decode(answer)
    if not reported[0]:
        return denial(reported), False, 0.0
    grant = Grant(
        pool=reported[1],
        weight=float(reported[2]),
        spilled=reported[3],
        contended=reported[4],
        protected=reported[5],
        funded=reported[6],
        would_deny=reported[7],
        limit_sequences=reported[8],
        inflight_sequences=reported[9],
        depth_tokens=float(reported[10]),
        level_tokens=float(reported[11]),
        rate_tokens_per_s=float(reported[12]),
        service_s=float(reported[13]),
    )
    return grant, reported[14], float(reported[15])


def moved(answer: bytes) -> tuple[Denial | None, bool]:
    """Decode `lua/transfer.lua`: denial if any, and whether the lease is evictable now."""
    reported = _decode(answer)
    return (None, reported[1]) if reported[0] else (denial(reported), False)


def denial(reported: list[Any]) -> Denial:
    """Decode a denial of the scripts."""
    _, reason, wait_s, limit, used, requested, unit, of_pool = reported
    return Denial(
        reason=cast("Any", reason),
        wait_s=float(wait_s),
        limit=float(limit),
        used=float(used),
        requested=float(requested),
        unit=unit,
        of_pool=of_pool,
    )


def token_pool_of(answer: list[bytes]) -> TokenPool:
    """Decode `lua/view.lua`: a token pool with its counters and the requested accounts."""
    terms = _decode(answer[0], type=Terms)
    state = _decode(answer[1])
    seen = TokenPool(terms)
    for index, pool in enumerate(seen.pools):
        for field, value in state["pools"][index].items():
            _put(pool, field, value)
    for field in ("surplus", "surplus_s", "surplus_per_s", "ticked_s"):
        setattr(seen, field, float(state[field]))
    for field in ("own_served", "priority_denials", "settled", "refunds"):
        setattr(seen, field, state[field])
    idle = [pool.idle_dedicated for pool in seen.pools]
    for defined, counters in zip(answer[2::2], answer[3::2], strict=True):
        if defined:
            account = seen.define(_decode(defined, type=Entitlement))
            for field, value in (_decode(counters) if counters else {}).items():
                _put(account, field, value)
    for pool, unused in zip(seen.pools, idle, strict=True):
        pool.idle_dedicated = unused  # `define` changed it
    return seen


def _put(record: Any, field: str, value: Any) -> None:
    """Set a field, converted to its present type: Lua does not distinguish 1 from 1.0."""
    current = getattr(record, field)
    setattr(record, field, value if isinstance(current, list) else type(current)(value))
