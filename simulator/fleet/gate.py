"""Admission to a simulated fleet, and the pool of a request: open, spillover, token pools."""

from collections.abc import Sequence
from typing import Protocol

from gateway.policy.admission import admission, debt
from gateway.policy.admission.admission import AdmissionRequest, Denial
from gateway.policy.fleet import fleet
from gateway.policy.fleet.fleet import PoolState
from gateway.policy.token_pool.token_pool import RENEW_EVERY_S, TokenPool

DENIED = -1


class Gate(Protocol):
    """Called once for each request; callers report the end of an admitted one through `leave`."""

    def enter(self, request: int, pool: int, alternates: Sequence[int], now_s: float) -> int:
        """The pool that takes it: the planned one, an alternate, or DENIED."""
        ...

    def leave(self, request: int, used_tokens: int, now_s: float) -> None:
        """The request ended, or was lost, having used so many tokens."""
        ...


class OpenGate:
    """Admits every request to its planned pool."""

    def enter(self, request: int, pool: int, alternates: Sequence[int], now_s: float) -> int:
        return pool

    def leave(self, request: int, used_tokens: int, now_s: float) -> None:
        """See Gate."""


class SpillGate:
    """Sends a full pool's requests to the first alternate with room (gateway, unmanaged)."""

    def __init__(self, pools: Sequence[PoolState], spill_queue: int) -> None:
        self._pools = pools
        self._spill_queue = spill_queue

    def enter(self, request: int, pool: int, alternates: Sequence[int], now_s: float) -> int:
        if fleet.overloaded(self._pools[pool], self._spill_queue, now_s):
            for other in alternates:
                if not fleet.overloaded(self._pools[other], self._spill_queue, now_s):
                    return other
        return pool

    def leave(self, request: int, used_tokens: int, now_s: float) -> None:
        """See Gate."""


class TokenPoolGate:
    """Admission by the gateway's token pools, on a token pool that the caller provides.

    Time 0 is the token pool's epoch. Leases are renewed and debts ticked at the gateway's
    intervals, but only when the next request comes or goes.
    """

    def __init__(
        self,
        token_pool: TokenPool,
        entitlements: Sequence[str],
        tokens: Sequence[int],
        kv_bytes_per_token: int = 0,
    ) -> None:
        """`entitlements` and `tokens` (reserved, whole) are by request."""
        self._token_pool = token_pool
        self._entitlements = entitlements
        self._tokens = tokens
        self._kv_bytes = kv_bytes_per_token
        self._live: set[int] = set()
        self._ticked_s = self._renewed_s = 0.0

    def enter(self, request: int, pool: int, alternates: Sequence[int], now_s: float) -> int:
        self._upkeep(now_s)
        tokens = self._tokens[request]
        asked = AdmissionRequest(
            lease_id=str(request),
            entitlement=self._entitlements[request],
            pool=pool,
            alternates=tuple(alternates),
            estimate_tokens=tokens,
            kv_bytes=tokens * self._kv_bytes,
        )
        found = admission.admit(self._token_pool, asked, now_s, observe=False)
        if isinstance(found, Denial):
            return DENIED
        self._live.add(request)
        return found.pool

    def leave(self, request: int, used_tokens: int, now_s: float) -> None:
        self._upkeep(now_s)
        self._live.discard(request)
        admission.settle(self._token_pool, str(request), used_tokens, now_s)

    def _upkeep(self, now_s: float) -> None:
        token_pool = self._token_pool
        tick_s = token_pool.terms.profile.tick_s
        while now_s - self._ticked_s >= tick_s:
            self._ticked_s += tick_s
            debt.tick(token_pool, list(token_pool.active), tick_s, self._ticked_s)
            debt.close(token_pool, tick_s, self._ticked_s)
        while now_s - self._renewed_s >= RENEW_EVERY_S:
            self._renewed_s += RENEW_EVERY_S
            for request in sorted(self._live):
                admission.renew(token_pool, str(request), self._renewed_s)
