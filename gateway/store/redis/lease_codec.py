"""A lease that this process holds, and what calls to Redis and their answers look like."""

from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Final, NamedTuple

import msgspec

from gateway.admission.limit_book import Span, Spans
from gateway.admission.terms import AdmissionRequest, Denial, Grant, LeaseRecord, Terms
from gateway.admission.token_pool import TokenPool
from gateway.fleet.fleet import PoolState
from gateway.records.entitlement import Entitlement
from gateway.records.lease import Lease
from gateway.records.limit import Limit, LimitView
from gateway.store.redis.link import Op
from gateway.store.redis.scripts import encode

_decode = msgspec.msgpack.decode
LOCAL_SUFFIX = "+"
"""Suffix of the key of a lease that was taken without Redis. It must differ from the plain id,
because an admission whose answer was lost may have taken that one and is being given back."""
AT_ONCE: Final = 16
"""Most leases of one limit that are supposed to begin within a few milliseconds."""
_VIEWED: Final = (
    *("surplus", "surplus_s", "surplus_per_s", "ticked_s"),
    *("own_served", "priority_denials", "settled", "refunds"),
)
UNWINDOWED: Final = Span(0.0, inf, 0, 0)


class RedisLease(msgspec.Struct, eq=False):
    """A lease of this process."""

    lease: Lease
    """As the request knows it."""
    record: LeaseRecord
    """As it is counted, under its id in Redis, which alone knows its expiry."""
    gives_way: bool
    pools: Sequence[PoolState] = ()
    """Those of the model when it was taken."""
    epoch: str = ""
    """Of the model in Redis that counted it; empty while none has."""
    resizing: Op | None = None
    """Its last resize; a later one replaces it until it is sent."""

    @property
    def nearly_full(self) -> bool:
        """Whether a limit may be reached while others still count this lease, which has ended.

        So it is where less than half of an amount is left, or than AT_ONCE such leases take.
        """
        lease, own = self.lease, self.lease.limits
        counted = [
            (use.amount, use.amount - use.level, holding.amount)
            for use, holding in zip(lease.uses, self.record.held, strict=True)
            if holding.unit != "requests"
        ]
        if own is not None:
            counted.append((own.sequences, own.sequences_free, lease.sequences))
        return any(left < max(amount // 2, AT_ONCE * taken) for amount, left, taken in counted)


NOTHING: Final = AdmissionRequest(
    lease_id="", entitlement="", pool=0, estimate_tokens=0, sequences=0
)
"""Asks for the levels of limits alone."""


class LimitEncoder:
    """Encodes limits as `lua/limits.lua` takes them, each once in a slice of its window."""

    def __init__(self) -> None:
        self.spans = Spans()
        self._encoded: dict[str, tuple[Limit, Span, msgspec.Raw]] = {}

    def asked(
        self, limits: Sequence[Limit], wanted: AdmissionRequest, now_s: float, limits_key: str
    ) -> list[Any]:
        """A request's limits, and what it wants of them."""
        asked: list[Any] = [limits_key]
        for limit in limits:
            encoded = self._encoded.get(limit.id)
            if (
                encoded is None
                or encoded[0] is not limit
                or not encoded[1].start_s <= now_s < encoded[1].next_s
            ):
                span = UNWINDOWED
                if limit.window:
                    span = self.spans.at(limit.window, limit.zone, now_s)
                fields = (
                    *(limit.id, limit.unit, limit.amount, span.step_s, span.start_s, span.next_s),
                    *(span.kept_s, limit.warn, limit.spot),
                )
                encoded = self._encoded[limit.id] = (limit, span, msgspec.Raw(encode(fields)))
            asked.append((wanted.wants(limit), encoded[2], wanted.reserves(limit)))
        return asked

    def sweep(self, defined: Callable[[str], bool]) -> None:
        """Forget limits that nobody defines."""
        self._encoded = {i: encoded for i, encoded in self._encoded.items() if defined(i)}


decision: Final = msgspec.msgpack.Decoder(tuple[Grant | Denial, bool, float]).decode
"""Decodes `lua/admit.lua`: decision, whether the lease is evictable, time of issue (Unix s)."""


limit_views: Final = msgspec.msgpack.Decoder(list[LimitView]).decode
"""Decodes `lua/budget.lua`."""


class Moved(NamedTuple):
    """What `lua/transfer.lua` returns."""

    gives_way: bool
    """Whether the lease is evictable now."""
    denied: Denial | None = None


moved: Final = msgspec.msgpack.Decoder(Moved).decode


def token_pool_of(answer: list[bytes]) -> TokenPool:
    """Decode `lua/view.lua`: a token pool with its counters and the requested accounts."""
    state = _decode(answer[1])
    token_pool = TokenPool(_decode(answer[0], type=Terms))
    for pool, counters in zip(token_pool.pools, state["pools"], strict=False):
        _put(pool, counters)
    _put(token_pool, {field: state[field] for field in _VIEWED})
    idle = [pool.idle_dedicated for pool in token_pool.pools]
    for defined, counters in zip(answer[2::2], answer[3::2], strict=True):
        if defined:
            account = token_pool.define(_decode(defined, type=Entitlement))
            _put(account, _decode(counters) if counters else {})
    for pool, unused in zip(token_pool.pools, idle, strict=True):
        pool.idle_dedicated = unused  # `define` changed it
    return token_pool


def _put(record: Any, fields: dict[str, Any]) -> None:
    """Set fields, converted to their present types: Lua does not distinguish 1 from 1.0."""
    for field, value in fields.items():
        current = getattr(record, field)
        setattr(record, field, value if isinstance(current, list) else type(current)(value))
