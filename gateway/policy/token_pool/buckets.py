"""What an entitlement has and pays with: its own token bucket, the pool's surplus, its ledger.

The bucket of an entitlement fills at lambda_e up to its depth; the surplus fills at what the
pool's token rate leaves (token-pools paper, section 4.3). A level goes below zero when requests
use more than was reserved for them, as far as that is: the debt is paid in full before the bucket
admits again. So over any time a bucket pays out its rate, its depth and what is in flight at
most. The ledger beside them is in whole tokens: debited - refunded = used exactly, once nothing
is in flight.
"""

from gateway.policy.entitlements.entitlement import OVERDUE_WEIGHT, Entitlement, weight
from gateway.policy.token_pool.token_pool import Account, TokenPool

BUCKET_S = 10.0
"""A bucket holds at least this many seconds of its rate."""


def weight_now(book: TokenPool, account: Account) -> float:
    """w_e of an entitlement as it stands."""
    if account.epoch != book.epoch:
        _derive(book, account)
    # Debt is never above 1, which is why a profile that says 1 has nobody overdue.
    if account.debt > book.terms.profile.overdue_debt and _is_out(account):
        return OVERDUE_WEIGHT
    return account.weight


def _is_out(account: Account) -> bool:
    """Whether it is elastic, has a baseline, and nothing of it in flight."""
    terms = account.terms
    return not account.total and terms.service_class == "elastic" and sum(terms.baseline) > 0


def most_sequences(book: TokenPool, account: Account) -> int:
    """r_e over all pools: the baseline of a guaranteed entitlement, else its limit or C."""
    if account.epoch != book.epoch:
        _derive(book, account)
    return account.most


def depth_tokens(book: TokenPool, account: Account) -> float:
    """How much an entitlement's bucket holds."""
    if account.epoch != book.epoch:
        _derive(book, account)
    return max(account.floor_tokens, account.most * account.mean_cost)


def _derive(book: TokenPool, account: Account) -> None:
    """Follow changed terms, burst or debt."""
    terms = account.terms
    account.weight = weight(
        book.terms.profile,
        terms.service_class,
        terms.slo_ms,
        book.terms.mean_slo_ms,
        account.burst,
        account.debt,
    )
    if terms.service_class == "guaranteed":
        account.most = sum(terms.baseline)
    else:
        account.most = terms.limit or sum(book.terms.slots)
    account.floor_tokens = max(BUCKET_S * terms.tokens_per_s, float(book.terms.largest_tokens))
    account.epoch = book.epoch


def own_level(account: Account, depth: float, now_s: float) -> float:
    """An entitlement's own bucket, filled up to now."""
    passed_s = now_s - account.level_s
    if passed_s > 0:
        account.level += account.terms.tokens_per_s * passed_s
        account.level_s = now_s
    account.level = min(account.level, depth)
    return account.level


def surplus_depth(book: TokenPool) -> float:
    """How much the surplus bucket holds; 0 where no rate is enforced."""
    rate = book.terms.tokens_per_s
    return max(BUCKET_S * rate, float(book.terms.largest_tokens)) if rate > 0 else 0.0


def surplus_level(book: TokenPool, now_s: float) -> float:
    """The surplus bucket, filled up to now."""
    gained = book.surplus_per_s * max(0.0, now_s - book.surplus_s)
    book.surplus = min(surplus_depth(book), book.surplus + gained)
    book.surplus_s = max(now_s, book.surplus_s)
    return book.surplus


def may_borrow(terms: Entitlement, account: Account, tokens: int, now_s: float) -> bool:
    """Whether borrowing stays within the entitlement's own limit of it."""
    if terms.tokens_per_s_limit <= 0:
        return True
    rate = terms.tokens_per_s_limit - terms.tokens_per_s
    if rate <= 0:
        return False
    recent = max(0.0, account.borrowed - rate * max(0.0, now_s - account.borrowed_s))
    return recent <= 0 or recent + tokens <= BUCKET_S * rate


def pay(book: TokenPool, account: Account, funded: str, tokens: int, now_s: float) -> None:
    """Take tokens from the bucket that funds a lease (negative: give back, up to its depth)."""
    if funded == "own":
        depth = depth_tokens(book, account)
        level = own_level(account, depth, now_s) - tokens
        account.level = min(level, depth)
    elif funded == "surplus":
        depth = surplus_depth(book)
        level = surplus_level(book, now_s) - tokens
        book.surplus = min(level, depth)
        if account.terms.tokens_per_s_limit > 0:
            rate = account.terms.tokens_per_s_limit - account.terms.tokens_per_s
            drained = max(0.0, rate) * max(0.0, now_s - account.borrowed_s)
            account.borrowed = max(0.0, max(0.0, account.borrowed - drained) + tokens)
            account.borrowed_s = now_s


def correct(
    book: TokenPool, account: Account, funded: str, estimate: int, used: int, now_s: float
) -> None:
    """Replace a reserved estimate by what was used, in bucket and ledger."""
    if used != estimate:
        pay(book, account, funded, used - estimate, now_s)
    if used <= estimate:
        account.refunded += estimate - used
    else:
        account.debited += used - estimate
    account.used += used


def serve(book: TokenPool, account: Account, funded: str, tokens: int) -> None:
    """Count settled tokens for the tick."""
    account.served += tokens
    if funded != "surplus":
        book.own_served += tokens
    book.active.add(account.terms.name)


def average(account: Account, now_s: float) -> None:
    """Extend the tick's integrals of sequences and KV up to now."""
    passed_s = now_s - account.since_s
    if passed_s <= 0:
        return
    if account.total:
        account.inflight_seconds += account.total * passed_s
        account.kv_seconds += account.kv_bytes * passed_s
    account.since_s = now_s
