"""Token buckets of entitlements, the shared surplus bucket, and each entitlement's ledger.

An entitlement's bucket refills at lambda_e up to its depth; the surplus bucket refills at the
token rate that the pool leaves unused (token-pools paper, section 4.3). Where pools state no rate
there is no such bucket, and the surplus is what slots and KV have free: a pool's rate is its slots
times the rate of a busy slot, so it is used up exactly when the slots are. When requests use more
than they reserved, a level goes below zero without bound, and the bucket admits again only after
the debt is paid in full. So in any period a bucket pays out at most its rate, its depth and the
tokens in flight. The ledger counts whole tokens: debited - refunded = used exactly, once nothing
is in flight.
"""

from gateway.policy.entitlements.entitlement import OVERDUE_WEIGHT, weight
from gateway.policy.token_pool.token_pool import Account, TokenPool

BUCKET_S = 10.0
"""A bucket holds at least this many seconds of its rate."""


def weight_now(token_pool: TokenPool, account: Account) -> float:
    """The current weight w_e of an entitlement."""
    if account.epoch != token_pool.epoch:
        _derive(token_pool, account)
    # Debt is at most 1, so `overdue_debt` of 1 turns this off.
    if account.debt > token_pool.terms.profile.overdue_debt and _is_out(account):
        return OVERDUE_WEIGHT
    return account.weight


def _is_out(account: Account) -> bool:
    """Whether it is elastic, has a baseline, and has nothing in flight."""
    terms = account.terms
    return not account.total and terms.service_class == "elastic" and sum(terms.baseline) > 0


def max_sequences(token_pool: TokenPool, account: Account) -> int:
    """r_e over all pools: the baseline of a guaranteed entitlement, else its limit or C."""
    if account.epoch != token_pool.epoch:
        _derive(token_pool, account)
    return account.most


def depth_tokens(token_pool: TokenPool, account: Account) -> float:
    """The depth of an entitlement's bucket, in tokens."""
    if account.epoch != token_pool.epoch:
        _derive(token_pool, account)
    return max(account.floor_tokens, account.most * account.mean_cost)


def _derive(token_pool: TokenPool, account: Account) -> None:
    """Recompute the derived values after terms, burst or debt changed."""
    terms = account.terms
    account.weight = weight(
        token_pool.terms.profile,
        terms.service_class,
        terms.slo_ms,
        token_pool.terms.mean_slo_ms,
        account.burst,
        account.debt,
    )
    if terms.service_class == "guaranteed":
        account.most = sum(terms.baseline)
    else:
        account.most = terms.limit or sum(token_pool.terms.slots)
    account.floor_tokens = max(
        BUCKET_S * terms.tokens_per_s, float(token_pool.terms.largest_tokens)
    )
    account.epoch = token_pool.epoch


def own_level(account: Account, depth: float, now_s: float) -> float:
    """The level of an entitlement's own bucket, refilled up to now."""
    passed_s = now_s - account.level_s
    if passed_s > 0:
        account.level += account.terms.tokens_per_s * passed_s
        account.level_s = now_s
    account.level = min(account.level, depth)
    return account.level


def surplus_depth(token_pool: TokenPool) -> float:
    """The depth of the surplus bucket, in tokens; 0 where no rate is enforced."""
    rate = token_pool.terms.tokens_per_s
    return max(BUCKET_S * rate, float(token_pool.terms.largest_tokens)) if rate > 0 else 0.0


def surplus_level(token_pool: TokenPool, now_s: float) -> float:
    """The level of the surplus bucket, refilled up to now."""
    gained = token_pool.surplus_per_s * max(0.0, now_s - token_pool.surplus_s)
    token_pool.surplus = min(surplus_depth(token_pool), token_pool.surplus + gained)
    token_pool.surplus_s = max(now_s, token_pool.surplus_s)
    return token_pool.surplus


def may_borrow(account: Account, tokens: int, now_s: float) -> bool:
    """Whether borrowing these tokens stays within the entitlement's `tokens_per_s_limit`."""
    terms = account.terms
    if terms.tokens_per_s_limit <= 0:
        return True
    rate = terms.tokens_per_s_limit - terms.tokens_per_s
    if rate <= 0:
        return False
    recent = recently_borrowed(account, now_s)
    return recent <= 0 or recent + tokens <= BUCKET_S * rate


def recently_borrowed(account: Account, now_s: float) -> float:
    """Tokens borrowed and not yet drained at `tokens_per_s_limit` - lambda_e."""
    rate = max(0.0, account.terms.tokens_per_s_limit - account.terms.tokens_per_s)
    return max(0.0, account.borrowed - rate * max(0.0, now_s - account.borrowed_s))


def pay(token_pool: TokenPool, account: Account, funded: str, tokens: int, now_s: float) -> None:
    """Take tokens from the bucket that funds a lease (negative: give back, up to its depth)."""
    if funded == "own":
        depth = depth_tokens(token_pool, account)
        level = own_level(account, depth, now_s) - tokens
        account.level = min(level, depth)
    elif funded == "surplus":
        if token_pool.terms.tokens_per_s > 0:
            level = surplus_level(token_pool, now_s) - tokens
            token_pool.surplus = min(level, surplus_depth(token_pool))
        if account.terms.tokens_per_s_limit > 0:
            account.borrowed = max(0.0, recently_borrowed(account, now_s) + tokens)
            account.borrowed_s = now_s


def correct(
    token_pool: TokenPool, account: Account, funded: str, estimate: int, used: int, now_s: float
) -> None:
    """Replace a reserved estimate by the actual usage, in bucket and ledger."""
    if used != estimate:
        pay(token_pool, account, funded, used - estimate, now_s)
    if used <= estimate:
        account.refunded += estimate - used
    else:
        account.debited += used - estimate
    account.used += used


def serve(token_pool: TokenPool, account: Account, pool: int, funded: str, tokens: int) -> None:
    """Count settled tokens for the tick, and as the pool's."""
    account.served += tokens
    token_pool.pools[pool].served_tokens += tokens
    if funded != "surplus":
        token_pool.own_served += tokens
    token_pool.active.add(account.terms.name)


def average(account: Account, now_s: float) -> None:
    """Extend the tick's integrals of sequences and KV up to now."""
    passed_s = now_s - account.since_s
    if passed_s <= 0:
        return
    if account.total:
        account.inflight_seconds += account.total * passed_s
        account.kv_seconds += account.kv_bytes * passed_s
    account.since_s = now_s
