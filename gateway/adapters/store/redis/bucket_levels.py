"""What this process knows of the buckets in Redis, so that its share begins where they stood.

A model's own book holds no leases while Redis decides; of its counters the buckets alone follow
what is heard: each answer to an admission says what is left, and what this process pays back or
takes more of is known before Redis says so. A bucket that was never heard of counts as full. When
Redis goes away the share takes its part of them (`redis_share`), and what it leaves is kept for
the next time: a Redis that flaps fills nobody's bucket.
"""

from gateway.adapters.store.redis.lease_codec import Kept
from gateway.policy.admission.admission import Denial, Grant
from gateway.policy.token_pool.buckets import depth_tokens, own_level, pay, surplus_level
from gateway.policy.token_pool.token_pool import TokenPool


def told(book: TokenPool, name: str, tokens: int, found: Grant | Denial, now_s: float) -> None:
    """Redis has decided over a request of so many tokens."""
    account = book.accounts.get(name)
    if account is None:
        return
    if isinstance(found, Denial):
        if found.reason == "tokens" and account.terms.tokens_per_s > 0:
            account.level, account.level_s = found.limit - found.used, now_s
        return
    if account.terms.tokens_per_s > 0 and found.funded != "none":
        account.level, account.level_s = found.level_tokens, now_s
    if found.funded == "surplus":
        pay(book, account, "surplus", tokens, now_s)


def paid(book: TokenPool, kept: Kept, tokens: int, now_s: float) -> None:
    """A lease costs so many tokens now, or has cost them."""
    account = book.accounts.get(kept.lease.entitlement)
    if account is not None:
        pay(book, account, kept.funded, tokens - kept.estimate_tokens, now_s)


def seen(book: TokenPool, view: TokenPool, server_s: float, now_s: float) -> None:
    """Counters were read in Redis, where it is `server_s` at least."""
    book.surplus, book.surplus_s = surplus_level(view, server_s), now_s
    book.surplus_per_s = view.surplus_per_s
    for name, theirs in view.accounts.items():
        account = book.accounts.get(name)
        if account is not None and theirs.level_s > 0:
            account.level = own_level(theirs, depth_tokens(view, theirs), server_s)
            account.level_s = now_s
            account.mean_cost = theirs.mean_cost


def lend(book: TokenPool, share: TokenPool, replicas: int, now_s: float) -> None:
    """Give a new share its part of every bucket."""
    parts = max(1, replicas)
    share.surplus, share.surplus_s = surplus_level(book, now_s) / parts, now_s
    share.surplus_per_s = book.surplus_per_s / parts
    for name, account in share.accounts.items():
        whole = book.accounts[name]
        account.level = own_level(whole, depth_tokens(book, whole), now_s) / parts
        account.level_s = now_s
        account.mean_cost = whole.mean_cost
        # What this process borrowed; nobody told it of the others.
        account.borrowed, account.borrowed_s = whole.borrowed, whole.borrowed_s


def take_back(book: TokenPool, share: TokenPool, replicas: int) -> None:
    """Keep what a share leaves; what it never used stays as it was heard."""
    parts = max(1, replicas)
    book.surplus, book.surplus_s = share.surplus * parts, share.surplus_s
    for name, account in share.accounts.items():
        whole = book.accounts.get(name)
        if whole is not None and account.debited:
            whole.level, whole.level_s = account.level * parts, account.level_s
            whole.borrowed, whole.borrowed_s = account.borrowed, account.borrowed_s
