"""Tracks the levels of the token buckets in Redis, so that a local share starts from them.

While Redis decides, the model's token pool in this process holds no leases; only its buckets are
kept current. Each answer to an admission reports the level, and this process applies its own
corrections before Redis reports them. A bucket that was never reported counts as full. When Redis
goes away, the share takes its part of each bucket (`fallback`). The levels that it leaves are
kept for the next time, so that a flapping Redis refills no bucket.
"""

from gateway.admission.admission import Denial, Grant
from gateway.admission.token_pool import (
    TokenPool,
    depth_tokens,
    own_level,
    pay,
    surplus_level,
)
from gateway.store.redis.lease_codec import RedisLease


def note_decision(
    token_pool: TokenPool, name: str, tokens: int, found: Grant | Denial, now_s: float
) -> None:
    """Apply Redis's decision on a request of `tokens` tokens."""
    account = token_pool.accounts.get(name)
    if account is None:
        return
    if isinstance(found, Denial):
        if found.reason == "tokens" and account.terms.tokens_per_s > 0:
            account.level, account.level_s = found.limit - found.used, now_s
        return
    if account.terms.tokens_per_s > 0 and found.funded != "none":
        account.level, account.level_s = found.level_tokens, now_s
    if found.funded == "surplus":
        pay(token_pool, account, "surplus", tokens, now_s)


def note_charge(token_pool: TokenPool, redis_lease: RedisLease, tokens: int, now_s: float) -> None:
    """Apply a lease's corrected or final cost."""
    account = token_pool.accounts.get(redis_lease.lease.entitlement)
    if account is not None:
        pay(token_pool, account, redis_lease.funded, tokens - redis_lease.estimate_tokens, now_s)


def note_view(token_pool: TokenPool, view: TokenPool, server_s: float, now_s: float) -> None:
    """Apply counters that were read from Redis, whose time is at least `server_s`."""
    token_pool.surplus, token_pool.surplus_s = surplus_level(view, server_s), now_s
    token_pool.surplus_per_s = view.surplus_per_s
    for name, theirs in view.accounts.items():
        account = token_pool.accounts.get(name)
        if account is not None and theirs.level_s > 0:
            account.level = own_level(theirs, depth_tokens(view, theirs), server_s)
            account.level_s = now_s
            account.mean_cost = theirs.mean_cost


def lend(token_pool: TokenPool, share: TokenPool, replicas: int, now_s: float) -> None:
    """Give a new local share its part of every bucket."""
    parts = max(1, replicas)
    share.surplus, share.surplus_s = surplus_level(token_pool, now_s) / parts, now_s
    share.surplus_per_s = token_pool.surplus_per_s / parts
    for name, account in share.accounts.items():
        whole = token_pool.accounts[name]
        account.level = own_level(whole, depth_tokens(token_pool, whole), now_s) / parts
        account.level_s = now_s
        account.mean_cost = whole.mean_cost
        # This process's own borrowing; it does not know the other replicas'.
        account.borrowed, account.borrowed_s = whole.borrowed, whole.borrowed_s


def take_back(token_pool: TokenPool, share: TokenPool, replicas: int) -> None:
    """Keep the levels that a share leaves; buckets that it never used keep their reported level."""
    parts = max(1, replicas)
    token_pool.surplus, token_pool.surplus_s = share.surplus * parts, share.surplus_s
    for name, account in share.accounts.items():
        whole = token_pool.accounts.get(name)
        if whole is not None and account.debited:
            whole.level, whole.level_s = account.level * parts, account.level_s
            whole.borrowed, whole.borrowed_s = account.borrowed, account.borrowed_s
