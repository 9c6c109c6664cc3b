"""A lease that this process holds, and its encoding in calls to Redis and in the answers."""

from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Final, cast

import msgspec

from gateway.admission.limit_book import Span, Spans
from gateway.admission.terms import AdmissionRequest, Denial, Grant, Terms
from gateway.admission.token_pool import TokenPool
from gateway.fleet.fleet import PoolState
from gateway.records.entitlement import Entitlement
from gateway.records.lease import Lease
from gateway.records.limit import Holding, Limit, LimitUse
from gateway.store.redis.link import Op
from gateway.store.redis.scripts import encode, grouped

_decode = msgspec.msgpack.decode
LOCAL_SUFFIX = "+"
"""Suffix of the key of a lease that was taken without Redis. It must differ from the plain id,
because an admission whose answer was lost may have taken that one and is being given back."""
AT_ONCE: Final = 16
"""Most leases of one limit that are supposed to begin within a few milliseconds."""
UNLIMITED: Final = 16
"""Fields of a grant without limits over all models."""
UNWINDOWED: Final = Span(0.0, inf, 0, 0)


class RedisLease(msgspec.Struct, eq=False):
    """A lease of this process."""

    lease: Lease
    key: str
    """Its lease id in Redis."""
    funded: str
    """The bucket that paid: own, surplus or none."""
    gives_way: bool
    held: tuple[Holding, ...] = ()
    """What it reserved of limits over all models."""
    pools: Sequence[PoolState] = ()
    """Those of the model when it was taken."""
    epoch: str = ""
    """Of the model in Redis that counted it; empty while none has."""
    estimate_tokens: int = 0
    kv_bytes: int = 0
    resizing: Op | None = None
    """Its last resize; a later one replaces it until it is sent."""

    def __post_init__(self) -> None:
        self.estimate_tokens, self.kv_bytes = self.lease.cost_tokens, self.lease.kv_bytes

    @property
    def nearly_full(self) -> bool:
        """Whether a limit may be reached while others still count this lease, which has ended."""
        lease, own = self.lease, self.lease.limits
        if own is not None and _nearly(own.sequences, own.sequences_free, lease.sequences):
            return True
        return any(
            _nearly(use.amount, use.amount - use.level, holding.amount)
            for use, holding in zip(lease.uses, self.held, strict=True)
            if holding.unit != "requests"
        )

    def record(self, limits_key: str) -> dict[str, Any]:
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
            "held": (limits_key, *self.held) if self.held else None,
            "epoch": self.epoch,
        }


def _nearly(amount: int, left: int, taken: int) -> bool:
    """Whether less than half is left of an amount, or less than what AT_ONCE such leases take."""
    return left < max(amount // 2, AT_ONCE * taken)


NOTHING: Final = AdmissionRequest(
    lease_id="", entitlement="", pool=0, estimate_tokens=0, sequences=0
)
"""Asks for the levels of limits alone."""


class LimitEncoder:
    """Encodes limits as `lua/limits.lua` takes them, each once in a slice of its window."""

    def __init__(self) -> None:
        self.spans = Spans()
        self._known: dict[str, tuple[Limit, Span, msgspec.Raw]] = {}

    def asked(
        self, limits: Sequence[Limit], wanted: AdmissionRequest, now_s: float, limits_key: str
    ) -> list[Any]:
        """A request's limits, and what it wants of them."""
        found: list[Any] = [limits_key]
        for limit in limits:
            known = self._known.get(limit.id)
            if (
                known is None
                or known[0] is not limit
                or not known[1].start_s <= now_s < known[1].next_s
            ):
                known = self._encoded(limit, now_s)
            found.append((wanted.wants(limit), known[2], wanted.reserves(limit)))
        return found

    def sweep(self, defined: Callable[[str], bool]) -> None:
        """Forget limits that nobody defines."""
        self._known = {i: known for i, known in self._known.items() if defined(i)}

    def _encoded(self, limit: Limit, now_s: float) -> tuple[Limit, Span, msgspec.Raw]:
        span = UNWINDOWED
        if limit.window:
            span = self.spans.at(limit.window, limit.zone, now_s)
        fields = (
            *(limit.id, limit.unit, limit.amount, span.step_s, span.start_s, span.next_s),
            *(span.kept_s, limit.warn, limit.spot),
        )
        known = self._known[limit.id] = (limit, span, msgspec.Raw(encode(fields)))
        return known


def admit_argument(
    ask: AdmissionRequest, owner: str, asked: list[Any] | None, *, observe: bool
) -> bytes:
    """The argument of `lua/admit.lua`."""
    return grouped(
        "admit",
        lease_id=ask.lease_id,
        owner=owner,
        observe=observe,
        entitlement=ask.entitlement,
        pool=ask.pool,
        alternates=ask.alternates,
        estimate_tokens=ask.estimate_tokens,
        kv_bytes=ask.kv_bytes,
        sequences=ask.sequences,
        asked=asked,
    )


def decision(answer: bytes) -> tuple[Grant | Denial, bool, float]:
    """Decode `lua/admit.lua`: decision, whether the lease is evictable, time of issue (Unix s)."""
    reported = _decode(answer)
    if not reported[0]:
        return denial(reported), False, 0.0
    held, uses = reported[16:] if len(reported) > UNLIMITED else ((), ())
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
        held=tuple(Holding(*each) for each in held[1:]),
        uses=tuple(LimitUse(*each) for each in uses),
    )
    return grant, reported[14], float(reported[15])


def moved(answer: bytes) -> tuple[Denial | None, bool]:
    """Decode `lua/transfer.lua`: denial if any, and whether the lease is evictable now."""
    reported = _decode(answer)
    return (None, reported[1]) if reported[0] else (denial(reported), False)


def denial(reported: list[Any]) -> Denial:
    """Decode a denial of the scripts."""
    _, reason, wait_s, limit, used, requested, unit, of_pool, *own = reported
    index, reserved, resets_s = own or (-1, 0.0, 0.0)
    return Denial(
        reason=cast("Any", reason),
        wait_s=float(wait_s),
        limit=float(limit),
        used=float(used),
        requested=float(requested),
        unit=unit,
        of_pool=of_pool,
        limit_index=index,
        reserved=float(reserved),
        resets_unix_s=float(resets_s),
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
