"""Checks 7 and 8: choose the pool that takes the request now, or deny it.

Contended (the pool is full): protected traffic passes; other traffic needs more weight than the
least in flight, and room under the overshoot. Uncontended: backfill leaves headroom. A pool
that is more than full spills into an alternate's idle room (token-pools paper, section 4.3).

A request is protected when it is within a reserve that its pool holds. After workers are lost,
a pool may no longer hold a reserve; requests within that reserve then take free slots and the
slots of non-reserving classes, also in an alternate while their own pool has no worker. So a
request within a reserve is never refused while an eligible pool serves a lower class.
"""

from math import inf

from gateway.admission.decision import AdmissionRequest, Denial, Placement
from gateway.admission.retry_after import before, priority_wait_s, tenant_of
from gateway.admission.token_pool import Account, TokenPool
from gateway.records.entitlement import BACKFILL, BURST_WEIGHT, RESERVING


def min_weight(token_pool: TokenPool, pool: int) -> float:
    """The admission threshold: the least weight in flight in a pool; 0 when it is empty."""
    weights = token_pool.pools[pool].weights
    return weights[0] if weights else 0.0


def overshoot(slots: int) -> int:
    """Sequences beyond capacity that outranking traffic may take."""
    return max(1, -(-slots // 8))


def place(
    token_pool: TokenPool, account: Account, request: AdmissionRequest, w: float
) -> Placement:
    """The requested pool, an alternate with idle room, or a denial."""
    terms = account.terms
    pool, n = request.pool, request.sequences
    slots = token_pool.terms.slots[pool]
    used = occupied(token_pool, account, pool)
    reserved = within_reserve(account, request)
    protected = reserved and token_pool.bound(terms, pool)
    kv_full = kv_over(token_pool, pool, request.kv_bytes, 0)
    contended = kv_full or used + n > slots
    if not contended:
        within = not request.demoted and account.own(pool) + n <= terms.baseline_of(pool)
        fills_up = protected or (within and not reserved and terms.service_class not in BACKFILL)
        if fills_up or used + n <= slots - token_pool.terms.headroom:
            return Placement(pool)
    elif slots <= 0 or (
        not protected and (kv_full or used + n > slots + token_pool.terms.spill_queue)
    ):
        for other in request.alternates:
            if _idle_room(token_pool, account, other, request):
                return Placement(other, spilled=True)
    if reserved and (slots <= 0 or not protected):
        for other in (pool, *request.alternates):
            if _makes_way(token_pool, account, other, request):
                full = contended or other != pool
                return Placement(other, contended=full, spilled=other != pool)
    # Without slots there is no worker to queue for; choosing one fails later and says so.
    if protected or slots <= 0:
        return Placement(pool, contended=True)
    if not contended or (reserved and not token_pool.pools[pool].unreserved):
        return Placement(pool, contended, denied="priority")
    return _outranking(token_pool, request, w, used)


def could_outrank(token_pool: TokenPool, request: AdmissionRequest) -> bool:
    """Whether weight alone could let a request into a full pool.

    A request wider than the overshoot waits for room whatever it weighs.
    """
    slots, kv_bytes = token_pool.terms.slots[request.pool], token_pool.terms.kv_of(request.pool)
    fits = not kv_bytes or request.kv_bytes <= kv_bytes // 8
    return fits and request.sequences <= overshoot(slots)


def within_reserve(account: Account, request: AdmissionRequest) -> bool:
    """Whether a request is within its entitlement's reserve in the requested pool."""
    if account.terms.service_class not in RESERVING or request.demoted:
        return False
    baseline = account.terms.baseline_of(request.pool)
    return account.own(request.pool) + request.sequences <= baseline


def sought(token_pool: TokenPool, account: Account, pool: int) -> bool:
    """Whether a pool lately refused another tenant that comes before bursts beyond a rate."""
    state, tenant = token_pool.pools[pool], tenant_of(account)
    return (
        state.denials.others_above(tenant, BURST_WEIGHT)
        + state.denials_last.others_above(tenant, BURST_WEIGHT)
        > 0
    )


def _makes_way(
    token_pool: TokenPool, account: Account, pool: int, request: AdmissionRequest
) -> bool:
    """Whether a pool would have room if its non-reserving classes gave way."""
    lower = token_pool.pools[pool].unreserved
    reserved = occupied(token_pool, account, pool) - lower
    return lower > 0 and reserved + request.sequences <= token_pool.terms.slots[pool]


def _outranking(token_pool: TokenPool, request: AdmissionRequest, w: float, used: int) -> Placement:
    """Check 7 for unprotected traffic; preemptible never outranks."""
    pool, slots = request.pool, token_pool.terms.slots[request.pool]
    service_class = token_pool.accounts[request.entitlement].terms.service_class
    # Contended with nothing in flight: idle dedicated baselines keep all slots.
    least = min_weight(token_pool, pool) or inf
    if service_class == "preemptible" or w <= least:
        return Placement(pool, contended=True, denied="priority")
    if used + request.sequences > slots + overshoot(slots):
        return Placement(pool, contended=True, denied="priority")
    if kv_over(token_pool, pool, request.kv_bytes, token_pool.terms.kv_of(pool) // 8):
        return Placement(pool, contended=True, denied="kv")
    return Placement(pool, contended=True)


def occupied(token_pool: TokenPool, account: Account, pool: int) -> int:
    """Slots in use, or kept for the idle baselines of other dedicated entitlements."""
    state = token_pool.pools[pool]
    if not state.idle_dedicated:
        return state.inflight
    reserved, terms = state.idle_dedicated, account.terms
    if terms.service_class == "dedicated" and token_pool.bound(terms, pool) and not terms.suspended:
        reserved -= max(0, terms.baseline_of(pool) - account.inflight[pool])
    return state.inflight + reserved


def kv_over(token_pool: TokenPool, pool: int, kv_bytes: int, allowance: int) -> bool:
    """Whether a pool's KV would exceed its capacity plus an allowance, in bytes."""
    capacity = token_pool.terms.kv_of(pool)
    return capacity > 0 and token_pool.pools[pool].kv_bytes + kv_bytes > capacity + allowance


def _idle_room(
    token_pool: TokenPool, account: Account, pool: int, request: AdmissionRequest
) -> bool:
    """Whether an alternate pool has idle slots beyond its headroom, and KV."""
    free = token_pool.terms.slots[pool] - token_pool.terms.headroom
    if occupied(token_pool, account, pool) + request.sequences > free:
        return False
    return not kv_over(token_pool, pool, request.kv_bytes, 0)


def pool_denial(
    token_pool: TokenPool,
    account: Account,
    request: AdmissionRequest,
    w: float,
    found: Placement,
    now_s: float,
) -> Denial:
    """The denial for a place that was refused."""
    state, slots = token_pool.pools[found.pool], token_pool.terms.slots[found.pool]
    if found.denied == "kv":
        capacity = token_pool.terms.kv_of(found.pool)
        short = state.kv_bytes + request.kv_bytes - capacity
        freed_per_s = max(1.0, state.kv_bytes / max(1e-3, state.service_s))
        return Denial(
            reason="kv",
            wait_s=short * (before(state, account, w, slots, now_s) + 1) / freed_per_s,
            limit=capacity,
            used=state.kv_bytes,
            requested=request.kv_bytes,
            unit="bytes of KV cache",
            of_pool=True,
        )
    return Denial(
        reason="priority",
        wait_s=priority_wait_s(state, account, w, slots, now_s),
        limit=slots,
        used=occupied(token_pool, account, found.pool),
        requested=request.sequences,
        of_pool=True,
    )
