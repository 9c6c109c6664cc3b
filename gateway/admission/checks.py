"""Checks 1 to 8: a request is in force, can fit, is within every limit, and a pool takes it.

Token-pools paper, section 4.3. Before `refused`, only the buckets' refill with time changes state.

Limits of the request's key, entitlement and tenant count over all models. They come before all
other checks: who is over one is told so, and no other model is asked.

Contended (the pool is full): protected traffic passes; other traffic needs more weight than the
least in flight, and room under the overshoot. Uncontended: backfill leaves headroom. A pool
that is more than full spills into an alternate's idle room.

A request is protected when it is within a reserve that its pool holds. After workers are lost,
a pool may no longer hold a reserve; requests within that reserve then take free slots and the
slots of non-reserving classes, also in an alternate while their own pool has no worker. So a
request within a reserve is never refused while an eligible pool serves a lower class.

A refusal tells how long to wait. Each wait adds the capacity promised to earlier refusals of the
same entitlement and not used yet. With equal waits a burst comes back as a burst: the official
client's two retries then complete 80, 60, 40 and 24 % of bursts of 1.5, 2, 3 and 5 times the
bucket's depth; with promises, all. When a pool is full, each other waiting tenant counts once,
however often it retries, so a tenant lengthens another's wait by at most the time that one slot
takes to come free.
"""

from math import inf

from gateway.admission.terms import (
    AdmissionRequest,
    Denial,
    DenialReason,
    LeaseRecord,
    Placement,
    Unit,
)
from gateway.admission.token_pool import BUCKET_S, MAX_S, Account, TokenPool
from gateway.records.entitlement import (
    BACKFILL,
    BORROWING,
    BURST_WEIGHT,
    RESERVING,
    Entitlement,
    kv_limit,
)


def decide(
    token_pool: TokenPool, account: Account, request: AdmissionRequest, w: float, now_s: float
) -> Denial | tuple[Placement, str, float]:
    """Checks 1 to 8: a denial, or the place, which bucket pays, and the weight."""
    terms, tokens = account.terms, request.estimate_tokens
    # 1 and 2: the entitlement is in force.
    if terms.suspended:
        return Denial(reason="entitlement_suspended")
    if 0 < terms.expires_unix_s <= now_s:
        return Denial(reason="entitlement_expired")
    denial = _misfit(token_pool, account, request) or _over_concurrency(
        token_pool, account, request, now_s
    )
    if denial is not None:
        return denial
    funded = _funded_by(token_pool, account, tokens, now_s)
    if not funded:
        return _over_rate(token_pool, account, tokens, now_s)
    # 6: chi_e over all pools.
    limit = kv_limit(terms)
    if limit and account.kv_bytes + request.kv_bytes > limit:
        service_s = token_pool.pools[request.pool].service_s
        ahead = account.still_waiting(account.total, service_s, now_s)
        return _over_kv(request, account.kv_bytes, limit, ahead, service_s)
    reserved = within_reserve(account, request)
    # Beyond its entitlement's rate, with only free slots and KV to pay.
    stated = token_pool.terms.tokens_per_s > 0
    bursts = funded == "surplus" and terms.tokens_per_s > 0 and not stated and not reserved
    w = min(w, BURST_WEIGHT) if bursts else w
    placed = place(token_pool, account, request, w)
    # A pool that lately refused another tenant, which comes before bursts beyond a rate.
    sought = bursts and token_pool.pools[placed.pool].others_refused(account.tenant, BURST_WEIGHT)
    if sought or (bursts and placed.denied):
        return _over_rate(token_pool, account, tokens, now_s)
    if not placed.denied:
        return placed, funded, w
    if reserved:  # the pool's current capacity lacks the reserve
        once = terms.created <= token_pool.terms.ever_bound_until
        reason: DenialReason = "entitlement_degraded" if once else "entitlement_pending"
        return Denial(reason=reason, wait_s=BUCKET_S)
    return _pool_denial(token_pool, account, request, w, placed, now_s)


def inadmissible(
    token_pool: TokenPool, account: Account, lease: LeaseRecord, pool: int, now_s: float
) -> Denial | None:
    """Checks 4, 7 and 8 for a lease that would move here from another pool."""
    request = AdmissionRequest(
        lease_id=lease.id,
        entitlement=lease.entitlement,
        pool=pool,
        estimate_tokens=lease.estimate_tokens,
        kv_bytes=lease.kv_bytes,
        sequences=lease.sequences,
    )
    denial = _over_concurrency(token_pool, account, request, now_s)
    if denial is not None:
        return denial
    placed = place(token_pool, account, request, lease.weight)
    if token_pool.terms.slots[pool] <= 0:
        placed = Placement(pool, contended=True, denied="priority")
    if not placed.denied:
        return None
    return _pool_denial(token_pool, account, request, lease.weight, placed, now_s)


def refused(
    token_pool: TokenPool,
    account: Account,
    request: AdmissionRequest,
    w: float,
    denial: Denial,
    now_s: float,
) -> None:
    """Record demand, and the wait promised, so that the next refusal is told a longer one."""
    state, terms = token_pool.pools[request.pool], account.terms
    n, tokens, slots = request.sequences, request.estimate_tokens, token_pool.terms.slots
    # More workers would have let it in, so it counts as demand for them.
    lacking = denial.of_pool
    if denial.reason == "tokens":
        lacking = terms.service_class in BORROWING and account.may_borrow(tokens, now_s)
    elif denial.reason == "concurrency":
        lacking = not terms.limit and terms.service_class != "guaranteed"  # then C is its limit
    if lacking:
        state.refused_sequences += n
        state.refused_kv_bytes += request.kv_bytes
        state.refused_tokens += tokens
    if denial.of_pool:
        state.denials_last.forget(account.tenant)
        state.denials.note(account.tenant, w)
        account.wait_too(n, slots[request.pool], state.service_s, now_s)
        kv_bytes = token_pool.terms.kv_of(request.pool)
        fits = not kv_bytes or request.kv_bytes <= kv_bytes // 8
        # One wider than the overshoot waits for room whatever it weighs: debt could not help it.
        if fits and n <= overshoot(slots[request.pool]):
            account.denied += 1
            account.denied_seconds += n * state.service_s
            account.denied_kv_seconds += request.kv_bytes * state.service_s
            token_pool.priority_denials += 1
            token_pool.active.add(request.entitlement)
    elif denial.reason == "tokens":
        # Retry-After is at most MAX_S, so no more than that was promised.
        rate = refill_per_s(token_pool, terms)
        account.promised = min(account.still_promised(rate, now_s) + tokens, MAX_S * rate)
        account.promised_s = now_s
    elif denial.reason in ("concurrency", "kv"):
        account.wait_too(n, account.total, state.service_s, now_s)


# -- checks 3 to 6


def _misfit(token_pool: TokenPool, account: Account, request: AdmissionRequest) -> Denial | None:
    """Check 3: deny a request that no waiting would help."""
    terms = account.terms
    guaranteed = terms.service_class == "guaranteed"
    most = terms.baseline_of(request.pool) if guaranteed else terms.limit
    if request.sequences > most and (most or guaranteed):
        return _never("sequences", most, request.sequences)
    depth = 0.0
    if terms.tokens_per_s > 0:
        depth = token_pool.depth_tokens(account)
    elif terms.service_class in BORROWING:
        depth = token_pool.surplus_depth()
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


def _over_concurrency(
    token_pool: TokenPool, account: Account, request: AdmissionRequest, now_s: float
) -> Denial | None:
    """Check 4: r_e over all pools; guaranteed is also held to its baseline in each pool.

    Without a ready worker C is 0 and limits nothing here: choosing a worker fails later.
    """
    terms = account.terms
    limit, used = token_pool.max_sequences(account), account.total
    if terms.service_class == "guaranteed":
        here = terms.baseline_of(request.pool)
        if account.own(request.pool) + request.sequences > here:
            limit, used = here, account.own(request.pool)
    elif not limit:
        return None
    if used + request.sequences <= limit:
        return None
    service_s = token_pool.pools[request.pool].service_s
    waiting = account.still_waiting(used, service_s, now_s)
    return Denial(
        reason="concurrency",
        wait_s=(waiting + 1) * service_s / (used + 1),
        limit=limit,
        used=used,
        requested=request.sequences,
    )


def _funded_by(token_pool: TokenPool, account: Account, tokens: int, now_s: float) -> str:
    """Check 5: what pays, own, surplus or none (no rate is set); "" for a denial.

    Where pools state no rate, the surplus is what slots and KV have free: `place` decides.
    """
    terms, stated = account.terms, token_pool.terms.tokens_per_s > 0
    borrows = terms.service_class in BORROWING
    if terms.tokens_per_s > 0:
        level = account.own_level(token_pool.depth_tokens(account), now_s)
        if level >= tokens:
            return "own"
        # A bucket in debt pays first: borrowing from the others' would be a way around the debt.
        if not borrows or (stated and level < 0):
            return ""
    elif not borrows or not (stated or terms.tokens_per_s_limit > 0):
        return "none"
    if stated and token_pool.surplus_level(now_s) < tokens:
        return ""
    return "surplus" if account.may_borrow(tokens, now_s) else ""


def refill_per_s(token_pool: TokenPool, terms: Entitlement) -> float:
    """Tokens/s by which waiting brings a request nearer that no bucket pays for."""
    return terms.tokens_per_s or token_pool.surplus_per_s or terms.tokens_per_s_limit


def _over_rate(token_pool: TokenPool, account: Account, tokens: int, now_s: float) -> Denial:
    """The denial when no bucket pays: wait until it holds `tokens` beyond what it has promised."""
    terms, rate = account.terms, refill_per_s(token_pool, account.terms)
    if terms.tokens_per_s > 0:
        level, limit = account.level, token_pool.depth_tokens(account)
    elif token_pool.terms.tokens_per_s > 0:
        level, limit = token_pool.surplus, token_pool.surplus_depth()
    else:
        limit = max(BUCKET_S * rate, float(tokens))
        level = limit - account.recently_borrowed(now_s)
    wait_s = MAX_S
    if rate > 0:
        wait_s = (tokens - level + account.still_promised(rate, now_s)) / rate
    return Denial(
        reason="tokens",
        wait_s=wait_s,
        limit=limit,
        used=limit - level,
        requested=tokens,
        unit="tokens",
    )


def _over_kv(
    request: AdmissionRequest,
    used: int,
    limit: int,
    ahead: float,
    service_s: float,
    *,
    of_pool: bool = False,
) -> Denial:
    """The denial where a limit of KV is passed; `ahead`: earlier refused requests."""
    freed_per_s = max(1.0, used / max(1e-3, service_s))
    return Denial(
        reason="kv",
        wait_s=(used + request.kv_bytes - limit) * (ahead + 1) / freed_per_s,
        limit=limit,
        used=used,
        requested=request.kv_bytes,
        unit="bytes of KV cache",
        of_pool=of_pool,
    )


# -- checks 7 and 8


def min_weight(token_pool: TokenPool, pool: int) -> float:
    """The admission threshold: the least weight in flight in a pool; 0 when it is empty."""
    weights = token_pool.pools[pool].weights
    return weights[0] if weights else 0.0


def overshoot(slots: int) -> int:
    """Sequences beyond capacity that outranking traffic may take."""
    return max(1, -(-slots // 8))


def within_reserve(account: Account, request: AdmissionRequest) -> bool:
    """Whether a request is within its entitlement's reserve in the requested pool."""
    if account.terms.service_class not in RESERVING or request.demoted:
        return False
    baseline = account.terms.baseline_of(request.pool)
    return account.own(request.pool) + request.sequences <= baseline


def place(
    token_pool: TokenPool, account: Account, request: AdmissionRequest, w: float
) -> Placement:
    """The requested pool, an alternate with idle room, or a denial."""
    terms, whole = account.terms, token_pool.terms
    pool, n = request.pool, request.sequences
    slots = whole.slots[pool]
    used = _occupied(token_pool, account, pool)
    reserved = within_reserve(account, request)
    protected = reserved and token_pool.bound(terms, pool)
    kv_full = _kv_over(token_pool, pool, request.kv_bytes, 0)
    contended = kv_full or used + n > slots
    if not contended:
        within = not request.demoted and account.own(pool) + n <= terms.baseline_of(pool)
        fills_up = protected or (within and not reserved and terms.service_class not in BACKFILL)
        if fills_up or used + n <= slots - whole.headroom:
            return Placement(pool)
    elif slots <= 0 or (not protected and (kv_full or used + n > slots + whole.spill_queue)):
        for other in request.alternates:  # one with idle slots beyond its headroom, and KV
            free = whole.slots[other] - whole.headroom - _occupied(token_pool, account, other)
            if n <= free and not _kv_over(token_pool, other, request.kv_bytes, 0):
                return Placement(other, spilled=True)
    if reserved and (slots <= 0 or not protected):
        for other in (pool, *request.alternates):  # one whose non-reserving classes give way
            lower = token_pool.pools[other].unreserved
            staying = _occupied(token_pool, account, other) - lower
            if lower > 0 and staying + n <= whole.slots[other]:
                full = contended or other != pool
                return Placement(other, contended=full, spilled=other != pool)
    # Without slots there is no worker to queue for; choosing one fails later and says so.
    if protected or slots <= 0:
        return Placement(pool, contended=True)
    if not contended or (reserved and not token_pool.pools[pool].unreserved):
        return Placement(pool, contended, denied="priority")
    # Unprotected traffic has to outrank, which preemptible never does. Contended with nothing in
    # flight: idle dedicated baselines keep all slots.
    least = min_weight(token_pool, pool) or inf
    over = used + n > slots + overshoot(slots)
    if terms.service_class == "preemptible" or w <= least or over:
        return Placement(pool, contended=True, denied="priority")
    kv_over = _kv_over(token_pool, pool, request.kv_bytes, whole.kv_of(pool) // 8)
    return Placement(pool, contended=True, denied="kv" if kv_over else "")


def _occupied(token_pool: TokenPool, account: Account, pool: int) -> int:
    """Slots in use, or kept for the idle baselines of other dedicated entitlements."""
    state = token_pool.pools[pool]
    if not state.idle_dedicated:
        return state.inflight
    own = token_pool.idle_of(account, pool) if account.terms.service_class == "dedicated" else 0
    return state.inflight + state.idle_dedicated - own


def _kv_over(token_pool: TokenPool, pool: int, kv_bytes: int, allowance: int) -> bool:
    """Whether a pool's KV would exceed its capacity plus an allowance, in bytes."""
    capacity = token_pool.terms.kv_of(pool)
    return capacity > 0 and token_pool.pools[pool].kv_bytes + kv_bytes > capacity + allowance


def _pool_denial(
    token_pool: TokenPool,
    account: Account,
    request: AdmissionRequest,
    w: float,
    placed: Placement,
    now_s: float,
) -> Denial:
    """The denial for a place that was refused."""
    state, slots = token_pool.pools[placed.pool], token_pool.terms.slots[placed.pool]
    # Those ahead: the entitlement's own waiting requests, and one for each other tenant.
    ahead = account.still_waiting(slots, state.service_s, now_s)
    ahead += state.others_refused(account.tenant, w)
    if placed.denied == "kv":
        capacity = token_pool.terms.kv_of(placed.pool)
        return _over_kv(request, state.kv_bytes, capacity, ahead, state.service_s, of_pool=True)
    return Denial(
        reason="priority",
        wait_s=(ahead + 1) * state.service_s / max(1, slots),
        limit=slots,
        used=_occupied(token_pool, account, placed.pool),
        requested=request.sequences,
        of_pool=True,
    )
