"""Checks 1 to 6: the entitlement is in force, the request can fit and is within the limits.

Token-pools paper, section 4.3. Only the buckets' refill with time changes state here.

Limits of the request's key, entitlement and tenant count over all models. They come before all
other checks: who is over one is told so, and no other model is asked.
"""

import msgspec

from gateway.admission.decision import AdmissionRequest, Denial, DenialReason, Unit
from gateway.admission.limit_book import Over, Wanted, Weighed
from gateway.admission.placement import overshoot, within_reserve
from gateway.admission.retry_after import concurrency_wait_s, kv_wait_s, tokens_wait_s
from gateway.admission.token_pool import (
    BUCKET_S,
    Account,
    TokenPool,
    depth_tokens,
    max_sequences,
    may_borrow,
    own_level,
    recently_borrowed,
    surplus_depth,
    surplus_level,
)
from gateway.records.entitlement import BORROWING, Entitlement, kv_limit
from gateway.records.limit import Limit


def wanted(request: AdmissionRequest) -> Wanted:
    """What a request would take of its limits."""
    return Wanted(
        request.sequences,
        request.estimate_tokens,
        request.money,
        request.most_tokens,
        request.most_money,
    )


def weigh(
    token_pool: TokenPool, request: AdmissionRequest, now_s: float
) -> tuple[list[Weighed], Denial | None, AdmissionRequest]:
    """Its limits, the denial by one of them, and the request, which a budget may have demoted."""
    now_s = token_pool.limits.time_s(now_s)
    weighed, over, demoted = token_pool.limits.weigh(request.limits, wanted(request), now_s)
    if demoted:
        request = msgspec.structs.replace(request, demoted=True)
    if over is None:
        return weighed, None, request
    limit = request.limits[over.place]
    service_s = token_pool.pools[request.pool].service_s
    return weighed, _over(over, limit, service_s, now_s), request


def _over(over: Over, limit: Limit, service_s: float, now_s: float) -> Denial:
    reason: DenialReason = "key_requests"
    wait_s = over.resets_s - now_s
    if over.never:
        reason, wait_s = "exceeds_entitlement", 0.0
    elif limit.unit == "sequences":
        reason, wait_s = "key_concurrency", service_s / max(1, over.used)
    elif limit.budget:
        # What only reservations use up may be given back: that is worth waiting for.
        waits = over.used - over.reserved + over.requested <= over.amount
        reason = "budget_reserved" if waits else "budget"
        wait_s = service_s / max(1, over.reserved // max(1, over.requested)) if waits else wait_s
    return Denial(
        reason=reason,
        wait_s=wait_s,
        limit=over.amount,
        used=over.used,
        requested=over.requested,
        unit=limit.unit,
        limit_index=over.place,
        reserved=over.reserved,
        resets_unix_s=over.resets_s,
    )


def not_in_force(terms: Entitlement, now_s: float) -> Denial | None:
    """Check 1: the entitlement is neither suspended nor expired."""
    if terms.suspended:
        return Denial(reason="entitlement_suspended")
    if 0 < terms.expires_unix_s <= now_s:
        return Denial(reason="entitlement_expired")
    return None


def unbound(token_pool: TokenPool, terms: Entitlement) -> Denial:
    """Deny a request within a reserve that its pool's current capacity does not hold."""
    once = terms.created <= token_pool.terms.ever_bound_until
    reason: DenialReason = "entitlement_degraded" if once else "entitlement_pending"
    return Denial(reason=reason, wait_s=BUCKET_S)


def misfit(token_pool: TokenPool, account: Account, request: AdmissionRequest) -> Denial | None:
    """Check 3: deny a request that no waiting would help."""
    terms = account.terms
    most = terms.limit
    guaranteed = terms.service_class == "guaranteed"
    if guaranteed:
        most = terms.baseline_of(request.pool)
    if request.sequences > most and (most or guaranteed):
        return _never("sequences", most, request.sequences)
    depth = 0.0
    if terms.tokens_per_s > 0:
        depth = depth_tokens(token_pool, account)
    elif terms.service_class in BORROWING:
        depth = surplus_depth(token_pool)
    if 0 < depth < request.estimate_tokens:
        return _never("tokens", depth, request.estimate_tokens)
    most_kv = kv_limit(terms)
    if 0 < most_kv < request.kv_bytes:
        return _never("bytes of KV cache", most_kv, request.kv_bytes)
    if request.sequences == 1 and request.kv_bytes <= token_pool.terms.kv_of(request.pool):
        return None
    # What no eligible pool could hold even when empty; pools without workers may return.
    pools = (request.pool, *request.alternates)
    slots = [token_pool.terms.slots[pool] for pool in pools]
    room = max(n + overshoot(n) for n in slots)
    if request.sequences > room and any(slots):
        return _never("sequences", room, request.sequences)
    kv_room = [token_pool.terms.kv_of(pool) for pool in pools]
    if all(kv_room) and request.kv_bytes > max(kv_room):
        return _never("bytes of KV cache", max(kv_room), request.kv_bytes)
    return None


def _never(unit: Unit, limit: float, requested: float) -> Denial:
    return Denial(reason="exceeds_entitlement", limit=limit, requested=requested, unit=unit)


def over_concurrency(
    token_pool: TokenPool, account: Account, request: AdmissionRequest, now_s: float
) -> Denial | None:
    """Check 4: r_e over all pools; guaranteed is also held to its baseline in each pool.

    Without a ready worker C is 0 and limits nothing here: choosing a worker fails later.
    """
    terms = account.terms
    limit, used = max_sequences(token_pool, account), account.total
    if terms.service_class == "guaranteed":
        here = terms.baseline_of(request.pool)
        if account.own(request.pool) + request.sequences > here:
            limit, used = here, account.own(request.pool)
    elif not limit:
        return None
    if used + request.sequences <= limit:
        return None
    return Denial(
        reason="concurrency",
        wait_s=concurrency_wait_s(account, token_pool.pools[request.pool].service_s, used, now_s),
        limit=limit,
        used=used,
        requested=request.sequences,
    )


def funded_by(token_pool: TokenPool, account: Account, tokens: int, now_s: float) -> str:
    """Check 5: what pays, own, surplus or none (no rate is set); "" for a denial.

    Where pools state no rate, the surplus is what slots and KV have free: `placement` decides.
    """
    terms, stated = account.terms, token_pool.terms.tokens_per_s > 0
    borrows = terms.service_class in BORROWING
    if terms.tokens_per_s > 0:
        level = own_level(account, depth_tokens(token_pool, account), now_s)
        if level >= tokens:
            return "own"
        # A bucket in debt pays first: borrowing from the others' would be a way around the debt.
        if not borrows or (stated and level < 0):
            return ""
    elif not borrows or not (stated or terms.tokens_per_s_limit > 0):
        return "none"
    if stated and surplus_level(token_pool, now_s) < tokens:
        return ""
    return "surplus" if may_borrow(account, tokens, now_s) else ""


def bursts(token_pool: TokenPool, account: Account, request: AdmissionRequest, funded: str) -> bool:
    """Whether a request is beyond its entitlement's rate, with only free slots and KV to pay."""
    beyond = funded == "surplus" and account.terms.tokens_per_s > 0
    stated = token_pool.terms.tokens_per_s > 0
    return beyond and not stated and not within_reserve(account, request)


def refill_per_s(token_pool: TokenPool, terms: Entitlement) -> float:
    """Tokens/s by which waiting brings a request nearer that no bucket pays for."""
    return terms.tokens_per_s or token_pool.surplus_per_s or terms.tokens_per_s_limit


def over_rate(
    token_pool: TokenPool, account: Account, request: AdmissionRequest, now_s: float
) -> Denial:
    """The denial when no bucket pays."""
    terms, rate = account.terms, refill_per_s(token_pool, account.terms)
    if terms.tokens_per_s > 0:
        level, limit = account.level, depth_tokens(token_pool, account)
    elif token_pool.terms.tokens_per_s > 0:
        level, limit = token_pool.surplus, surplus_depth(token_pool)
    else:
        limit = max(BUCKET_S * rate, float(request.estimate_tokens))
        level = limit - recently_borrowed(account, now_s)
    return Denial(
        reason="tokens",
        wait_s=tokens_wait_s(account, request.estimate_tokens, level, rate, now_s),
        limit=limit,
        used=limit - level,
        requested=request.estimate_tokens,
        unit="tokens",
    )


def over_kv(
    token_pool: TokenPool, account: Account, request: AdmissionRequest, now_s: float
) -> Denial | None:
    """Check 6: chi_e over all pools."""
    limit = kv_limit(account.terms)
    if not limit:
        return None
    short = account.kv_bytes + request.kv_bytes - limit
    if short <= 0:
        return None
    service_s = token_pool.pools[request.pool].service_s
    return Denial(
        reason="kv",
        wait_s=kv_wait_s(account, short, account.kv_bytes, service_s, now_s),
        limit=limit,
        used=account.kv_bytes,
        requested=request.kv_bytes,
        unit="bytes of KV cache",
    )


def lacks_capacity(
    account: Account, request: AdmissionRequest, denial: Denial, now_s: float
) -> bool:
    """Whether more workers would have let a request in, so that it counts as demand for them."""
    terms = account.terms
    if denial.reason == "tokens":
        borrows = terms.service_class in BORROWING
        return borrows and may_borrow(account, request.estimate_tokens, now_s)
    if denial.reason == "concurrency":
        return not terms.limit and terms.service_class != "guaranteed"  # then C is its limit
    return denial.of_pool
