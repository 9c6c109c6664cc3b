"""A gateway's share of every limit, over which it decides alone while Redis is away.

The share is a copy of the model's token pool. Capacity, limits and baselines are divided by the
last known number of replicas; nonzero values stay at least 1. The share starts with the leases
that this process holds, which are already paid for, and with its part of the last known bucket
levels.
"""

from collections.abc import Iterable

import msgspec

from gateway.adapters.store.redis.bucket_levels import lend
from gateway.adapters.store.redis.lease_codec import RedisLease
from gateway.policy.budgets.limit_book import LimitBook
from gateway.policy.entitlements.entitlement import Entitlement
from gateway.policy.token_pool.terms import LeaseRecord, Terms
from gateway.policy.token_pool.token_pool import LEASE_TTL_S, TokenPool


def share_of(
    token_pool: TokenPool,
    kept: Iterable[RedisLease],
    replicas: int,
    now_s: float,
    limits: LimitBook | None = None,
) -> TokenPool:
    """One replica's share of a token pool, with the leases that it holds."""
    share = TokenPool(terms_share(token_pool.terms, replicas), limits)
    share.ticked_s = now_s
    for account in token_pool.accounts.values():
        share.define(entitlement_share(account.terms, replicas))
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


def terms_share(terms: Terms, replicas: int) -> Terms:
    """Capacity for one of `replicas` replicas. The largest request still fits."""
    return msgspec.structs.replace(
        terms,
        slots=tuple(_part(n, replicas) for n in terms.slots),
        kv_bytes=tuple(_part(n, replicas) for n in terms.kv_bytes),
        tokens_per_s=terms.tokens_per_s / max(1, replicas),
    )


def entitlement_share(terms: Entitlement, replicas: int) -> Entitlement:
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
