"""The case of nearly every request, decided by comparisons alone: it simply comes in.

One sequence of an entitlement in force with a rate of its own, whose bucket pays, within all its
limits, and a pool with room beyond the headroom. Checks 1 to 8 of
`gateway.policy.admission.admission` then grant the asked pool, uncontended, and `own` pays. They
are a dozen functions, which say why somebody has to wait or may not enter; here nobody has to be
told anything.
"""

from gateway.policy.admission.decision import Request
from gateway.policy.entitlements.entitlement import RESERVING
from gateway.policy.token_pool.buckets import own_level
from gateway.policy.token_pool.token_pool import Account, TokenPool


def comes_in(book: TokenPool, account: Account, request: Request, now_s: float) -> bool:
    """Whether the checks would surely grant this; False says nothing.

    It leaves the entitlement's bucket as they do: filled up to now, if they would look at it.
    What is derived of the account must be up to date (`buckets.weight_now` sees to that).
    """
    terms, pool, most = account.terms, request.pool, account.most
    if (
        terms.tokens_per_s <= 0
        or request.sequences != 1
        or terms.suspended
        or 0 < terms.expires_unix_s <= now_s
        or (most and account.total >= most)
    ):
        return False
    if terms.service_class in RESERVING:
        bound_until = book.terms.bound_until
        if pool < len(bound_until) and terms.created > bound_until[pool]:
            return False
        if terms.service_class == "guaranteed":
            baseline = terms.baseline
            if pool >= len(baseline) or account.inflight[pool] >= baseline[pool]:
                return False
    limit = terms.kv_bytes_limit or terms.kv_bytes
    if 0 < limit < account.kv_bytes + request.kv_bytes or not _has_room(book, request):
        return False
    depth, floor = most * account.mean_cost, account.floor_tokens
    depth = floor if floor > depth else depth  # noqa: FURB136 - max() would be a call
    tokens = request.estimate_tokens
    # What a full bucket does not hold is refused before the bucket is looked at.
    return tokens <= depth and own_level(account, depth, now_s) >= tokens


def _has_room(book: TokenPool, request: Request) -> bool:
    """Whether a pool takes one sequence more and keeps its headroom."""
    whole, pool = book.terms, request.pool
    state = book.pools[pool]
    if state.idle_dedicated or state.inflight >= whole.slots[pool] - whole.headroom:
        return False
    capacity = whole.kv_bytes[pool] if pool < len(whole.kv_bytes) else 0
    return not 0 < capacity < state.kv_bytes + request.kv_bytes
