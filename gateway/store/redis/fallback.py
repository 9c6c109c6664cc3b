"""Decides for one model while Redis is away, over this process's share of the token pool.

The share is a copy of the model's token pool. Capacity, limits and baselines are divided by the
last known number of replicas; nonzero values stay at least 1. The share starts with the leases that
this process holds, which are already paid for, and with its part of the last known bucket levels.
It tracks everything until Redis is back; then only its bucket levels are kept. `model` posts what
Redis must learn.
"""

from collections.abc import Callable, Iterable

import msgspec

from gateway.admission import admission, debt
from gateway.admission.admission import Denial, Grant
from gateway.admission.limit_book import LimitBook
from gateway.admission.terms import AdmissionRequest, LeaseRecord, Terms
from gateway.admission.token_pool import LEASE_TTL_S, TokenPool
from gateway.records.entitlement import Entitlement
from gateway.records.lease import Lease
from gateway.records.limit import Spent
from gateway.store.redis.bucket_levels import lend, take_back
from gateway.store.redis.known_limits import KnownLimits
from gateway.store.redis.lease_codec import RedisLease


class LocalFallback:
    """Holds the share while there is one. Without a share, most methods do nothing."""

    def __init__(
        self, token_pool: TokenPool, wall_clock: Callable[[], float], limits: KnownLimits
    ) -> None:
        """`token_pool` tracks the bucket levels; `wall_clock` gives Unix seconds."""
        self._limits = limits
        self._token_pool = token_pool
        self._now_s = wall_clock
        self._replicas = 1
        self.share: TokenPool | None = None

    def begin(self, kept: Iterable[RedisLease], replicas: int) -> TokenPool:
        """Return the present share, or create one for one of `replicas` replicas."""
        if self.share is None:
            self._replicas = replicas
            leases = list(kept)
            limits = self._limits.begin(id(self), leases, replicas)
            self.share = share_of(self._token_pool, leases, replicas, self._now_s(), limits)
        return self.share

    def end(self) -> None:
        """End the share: Redis decides again."""
        if self.share is not None:
            take_back(self._token_pool, self.share, self._replicas)
            self._limits.end(id(self))
            self.share = None

    def admit(
        self, share: TokenPool, ask: AdmissionRequest, *, observe: bool
    ) -> tuple[Grant | Denial, bool]:
        """The share's decision, and whether the lease is evictable."""
        found = admission.admit(share, ask, self._now_s(), observe=observe)
        record = share.leases.get(ask.lease_id)
        return found, record is not None and record.id in share.pools[record.pool].evictable

    def refused(self, share: TokenPool, lease_id: str, pool: int) -> Denial | None:
        """Move a lease if admissible; returns None, or the reason why it may not move."""
        return admission.transfer(share, lease_id, pool, self._now_s(), force=False)

    def moved(self, lease_id: str, pool: int) -> None:
        """Note that a lease moved to another pool."""
        if self.share is not None:
            admission.transfer(self.share, lease_id, pool, self._now_s(), force=True)

    def resized(self, lease_id: str, cost_tokens: int, kv_bytes: int) -> None:
        """Note a lease's new reservation."""
        if self.share is not None:
            admission.resize(self.share, lease_id, cost_tokens, kv_bytes, self._now_s())

    def settled(self, lease_id: str, charge: int | None, spent: Spent | None) -> None:
        """Note that a lease ended."""
        if self.share is not None:
            admission.settle(self.share, lease_id, charge, self._now_s(), spent)

    def victims(self, lease: Lease) -> list[str]:
        """Ids of the leases to evict for this one."""
        record = None if self.share is None else self.share.leases.get(lease.id)
        if self.share is None or record is None:
            return []
        return [v.id for v in admission.evict(self.share, record.pool, lease.sequences)]

    def define(self, terms: Entitlement) -> None:
        """Apply an entitlement's terms."""
        if self.share is not None:
            self.share.define(_entitlement_share(terms, self._replicas))

    def change(self, terms: Terms) -> None:
        """Apply capacity and rules."""
        if self.share is not None:
            self.share.change(_terms_share(terms, self._replicas))

    def renew(self, lease_ids: Iterable[str]) -> None:
        if self.share is not None:
            for lease_id in lease_ids:
                admission.renew(self.share, lease_id, self._now_s())

    def tick(self) -> None:
        """Run the tick if it is due."""
        share, now_s = self.share, self._now_s()
        if share is None:
            return
        elapsed_s = now_s - share.ticked_s
        if elapsed_s >= share.terms.profile.tick_s:
            debt.tick(share, list(share.active), elapsed_s, now_s)
            debt.close(share, elapsed_s, now_s)


def share_of(
    token_pool: TokenPool,
    kept: Iterable[RedisLease],
    replicas: int,
    now_s: float,
    limits: LimitBook | None = None,
) -> TokenPool:
    """One replica's share of a token pool, with the leases that it holds."""
    share = TokenPool(_terms_share(token_pool.terms, replicas), limits)
    share.ticked_s = now_s
    for account in token_pool.accounts.values():
        share.define(_entitlement_share(account.terms, replicas))
    lend(token_pool, share, replicas, now_s)
    for one in kept:
        holder = share.accounts.get(one.lease.entitlement)
        if holder is None or one.lease.pool >= len(share.pools):
            continue
        record = LeaseRecord(
            one.lease.id,
            one.lease.entitlement,
            one.lease.pool,
            one.lease.sequences,
            one.estimate_tokens,
            one.kv_bytes,
            one.lease.weight,
            one.lease.issued_unix_s,
            now_s + LEASE_TTL_S,
            one.funded,
            "",
            one.lease.would_deny,
            spilled=one.lease.spilled,
            held=one.held,
        )
        share.move(holder, record.pool, record.sequences, record.kv_bytes)
        holder.debited += record.estimate_tokens
        share.hold(holder, record)
    return share


def _terms_share(terms: Terms, replicas: int) -> Terms:
    """Capacity for one of `replicas` replicas. The largest request still fits."""
    return msgspec.structs.replace(
        terms,
        slots=tuple(_part(n, replicas) for n in terms.slots),
        kv_bytes=tuple(_part(n, replicas) for n in terms.kv_bytes),
        tokens_per_s=terms.tokens_per_s / max(1, replicas),
    )


def _entitlement_share(terms: Entitlement, replicas: int) -> Entitlement:
    """An entitlement's limits for one of `replicas` replicas."""
    return msgspec.structs.replace(
        terms,
        baseline=tuple(_part(n, replicas) for n in terms.baseline),
        limit=_part(terms.limit, replicas),
        tokens_per_s=terms.tokens_per_s / max(1, replicas),
        tokens_per_s_limit=terms.tokens_per_s_limit / max(1, replicas),
        kv_bytes=_part(terms.kv_bytes, replicas),
        kv_bytes_limit=_part(terms.kv_bytes_limit, replicas),
    )


def _part(whole: int, replicas: int) -> int:
    return max(1, whole // max(1, replicas)) if whole > 0 else 0
