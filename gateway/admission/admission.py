"""Decides admission in one atomic step over a model's token pool, and hands out the lease.

Order of checks (token-pools paper, section 4.3; the project filled the gaps it leaves):

- Reap expired leases; repeat the earlier grant for a lease id that is already held.
- The entitlement is in force.
- Limits of the key, the entitlement and the tenant over all models, where there are any; the
  request can ever fit; concurrency, token rate, KV (`gateway.admission.limits`).
- A pool has room, contended or not (`gateway.admission.placement`).

Invariants: a pool's in-flight and KV are the sums over its leases; exactly one settlement or
expiry returns what a grant took; only a bucket in debt is ever negative.
`charge` is whole tokens, so debited - refunded = used exactly.

All checks run before any state changes; a grant or denial is then applied in one step. The
embedded store calls these functions, and the Redis scripts transcribe them.
"""

from gateway.admission import limits, placement
from gateway.admission.decision import (
    AdmissionRequest,
    Denial,
    DenialReason,
    Grant,
    Placement,
    Unit,
)
from gateway.admission.leases import reap, renew, resize, settle
from gateway.admission.limit_book import Weighed
from gateway.admission.placement import min_weight, overshoot
from gateway.admission.retry_after import MAX_S, tenant_of, wait_too
from gateway.admission.terms import LeaseRecord
from gateway.admission.token_pool import (
    BUCKET_S,
    LEASE_TTL_S,
    RETAINED_DENIALS,
    Account,
    TokenPool,
    average,
    depth_tokens,
    max_sequences,
    own_level,
    pay,
    surplus_depth,
    surplus_level,
    weight_now,
)
from gateway.records.entitlement import (
    BURST_WEIGHT,
    RESERVING,
    SPILLED_WEIGHT,
    kv_limit,
)
from gateway.records.limit import LimitUse

__all__ = [
    "BUCKET_S",
    "AdmissionRequest",
    "Denial",
    "DenialReason",
    "Grant",
    "Unit",
    "admit",
    "depth_tokens",
    "max_sequences",
    "min_weight",
    "overshoot",
    "reap",
    "renew",
    "resize",
    "settle",
    "surplus_depth",
    "surplus_level",
    "transfer",
    "weight_now",
]


def admit(
    token_pool: TokenPool,
    request: AdmissionRequest,
    now_s: float,
    *,
    observe: bool,
    owner: str = "",
) -> Grant | Denial:
    """Decide, and on a grant take the lease for the process `owner`.

    `observe`: the model's mode. A denial is then recorded but the request is granted anyway,
    and no bucket pays for it.
    """
    if now_s >= token_pool.reap_at_s:
        reap(token_pool, now_s)
    account = token_pool.accounts.get(request.entitlement)
    if account is None:
        return Denial(reason="entitlement_unknown")
    record = token_pool.leases.get(request.lease_id)
    if record is not None:
        return _granted(
            token_pool, token_pool.accounts[record.entitlement], record, contended=False
        )
    average(account, now_s)
    w = weight_now(token_pool, account)
    over: Denial | None = None
    weighed: list[Weighed] = []
    if request.limits:
        weighed, over, request = limits.weigh(token_pool, request, now_s)
        w = min(w, SPILLED_WEIGHT) if request.demoted else w
    would_deny, pool, spilled, contended, funded = "", request.pool, False, False, "own"
    if over is not None or not fast_admit(token_pool, account, request, now_s):
        found = over or _decide(token_pool, account, request, w, now_s)
        if isinstance(found, Denial):
            _refused(token_pool, account, request, w, found, now_s)
            if not (observe or account.terms.observe):
                return found
            would_deny, funded = found.reason, "none"
        else:
            place, funded, w = found
            pool, contended = place.pool, place.contended
            spilled = place.spilled or request.demoted
    lease = LeaseRecord(
        request.lease_id,
        request.entitlement,
        pool,
        request.sequences,
        request.estimate_tokens,
        request.kv_bytes,
        min(w, SPILLED_WEIGHT) if spilled else w,
        now_s,
        now_s + LEASE_TTL_S,
        funded,
        owner,
        would_deny,
        spilled,
    )
    uses: tuple[LimitUse, ...] = ()
    if request.limits:
        lease.held, uses = token_pool.limits.reserve(
            request.limits, weighed, limits.wanted(request)
        )
    token_pool.move(account, pool, request.sequences, request.kv_bytes)
    if funded == "own" and not would_deny:
        account.level -= request.estimate_tokens  # check 5 filled it and found enough
    else:
        pay(token_pool, account, funded, request.estimate_tokens, now_s)
    account.debited += request.estimate_tokens
    token_pool.hold(account, lease)
    return _granted(token_pool, account, lease, uses, contended=contended)


def transfer(
    token_pool: TokenPool, lease_id: str, pool: int, now_s: float, *, force: bool
) -> Denial | None:
    """Move a lease to another pool; without `force` only if it would be admitted there.

    None when the lease moved, was there already, or is no longer in force. After a denial the
    request keeps running where it was, so the denial is not counted.
    """
    lease = token_pool.leases.get(lease_id)
    if lease is None or lease.pool == pool:
        return None
    account = token_pool.accounts[lease.entitlement]
    average(account, now_s)
    token_pool.release(account, lease)
    denial = None if force else _inadmissible(token_pool, account, lease, pool, now_s)
    if denial is None:
        lease.pool = pool
    token_pool.move(account, lease.pool, lease.sequences, lease.kv_bytes)
    token_pool.file(account, lease)
    return denial


# -- the decision


def _decide(
    token_pool: TokenPool, account: Account, request: AdmissionRequest, w: float, now_s: float
) -> Denial | tuple[Placement, str, float]:
    """Checks 1-8: a denial, or the place, which bucket pays, and the weight."""
    denial = (
        limits.not_in_force(account.terms, now_s)
        or limits.misfit(token_pool, account, request)
        or limits.over_concurrency(token_pool, account, request, now_s)
    )
    if denial is not None:
        return denial
    funded = limits.funded_by(token_pool, account, request.estimate_tokens, now_s)
    if not funded:
        return limits.over_rate(token_pool, account, request, now_s)
    denial = limits.over_kv(token_pool, account, request, now_s)
    if denial is not None:
        return denial
    bursts = limits.bursts(token_pool, account, request, funded)
    w = min(w, BURST_WEIGHT) if bursts else w
    found = placement.place(token_pool, account, request, w)
    if bursts and (found.denied or placement.sought(token_pool, account, found.pool)):
        return limits.over_rate(token_pool, account, request, now_s)
    if not found.denied:
        return found, funded, w
    if placement.within_reserve(account, request):  # the pool lacks the reserve
        return limits.unbound(token_pool, account.terms)
    return placement.pool_denial(token_pool, account, request, w, found, now_s)


def _inadmissible(
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
    denial = limits.over_concurrency(token_pool, account, request, now_s)
    if denial is not None:
        return denial
    found = placement.place(token_pool, account, request, lease.weight)
    if token_pool.terms.slots[pool] <= 0:
        found = Placement(pool, contended=True, denied="priority")
    if not found.denied:
        return None
    return placement.pool_denial(token_pool, account, request, lease.weight, found, now_s)


# -- what follows from a decision


def _refused(
    token_pool: TokenPool,
    account: Account,
    request: AdmissionRequest,
    w: float,
    denial: Denial,
    now_s: float,
) -> None:
    """Record demand, and the wait promised, so that the next refusal is told a longer one."""
    state = token_pool.pools[request.pool]
    if limits.lacks_capacity(account, request, denial, now_s):
        state.refused_sequences += request.sequences
        state.refused_kv_bytes += request.kv_bytes
        state.refused_tokens += request.estimate_tokens
    if denial.of_pool:
        tenant = tenant_of(account)
        state.denials_last.forget(tenant)
        state.denials.note(tenant, w, RETAINED_DENIALS)
        slots = token_pool.terms.slots[request.pool]
        wait_too(account, request.sequences, slots, state.service_s, now_s)
        if placement.could_outrank(token_pool, request):  # otherwise debt could not help it in
            account.denied += 1
            account.denied_seconds += request.sequences * state.service_s
            account.denied_kv_seconds += request.kv_bytes * state.service_s
            token_pool.priority_denials += 1
            token_pool.active.add(request.entitlement)
    elif denial.reason == "tokens":
        # Retry-After is at most MAX_S, so no more than that was promised.
        rate = limits.refill_per_s(token_pool, account.terms)
        kept = max(0.0, account.promised - rate * max(0.0, now_s - account.promised_s))
        account.promised = min(kept + request.estimate_tokens, MAX_S * rate)
        account.promised_s = now_s
    elif denial.reason in ("concurrency", "kv"):
        wait_too(account, request.sequences, account.total, state.service_s, now_s)


def _granted(
    token_pool: TokenPool,
    account: Account,
    lease: LeaseRecord,
    uses: tuple[LimitUse, ...] = (),
    *,
    contended: bool,
) -> Grant:
    terms, pool = account.terms, lease.pool
    limit, used = max_sequences(token_pool, account), account.total
    protected = False
    if terms.service_class in RESERVING:
        here, baseline = account.own(pool), terms.baseline_of(pool)
        protected = not lease.spilled and here <= baseline
        if terms.service_class == "guaranteed":
            limit, used = baseline, here
    return Grant(
        pool=pool,
        weight=lease.weight,
        spilled=lease.spilled,
        contended=contended,
        protected=protected,
        funded=lease.funded,
        would_deny=lease.would_deny,
        limit_sequences=limit,
        inflight_sequences=used,
        depth_tokens=depth_tokens(token_pool, account) if terms.tokens_per_s > 0 else 0.0,
        level_tokens=account.level,
        rate_tokens_per_s=terms.tokens_per_s,
        service_s=token_pool.pools[pool].service_s,
        held=lease.held,
        uses=uses,
    )


def fast_admit(
    token_pool: TokenPool, account: Account, request: AdmissionRequest, now_s: float
) -> bool:
    """Fast path for nearly every request: whether plain comparisons already prove a grant.

    True for one sequence of an entitlement in force that has its own rate, is within all its
    limits, whose bucket pays, and whose pool has room beyond the headroom. Checks 1 to 8 would
    then grant the requested pool, uncontended, funded by `own`. False proves nothing: the full
    checks decide, and say why.

    Like the full checks, it refills the entitlement's bucket up to now when it reads the bucket.
    The account's derived values must be up to date (call `weight_now` first).
    """
    terms, pool, most = account.terms, request.pool, account.most
    if (
        terms.tokens_per_s <= 0
        or request.sequences != 1
        or request.demoted
        or terms.suspended
        or 0 < terms.expires_unix_s <= now_s
        or (most and account.total >= most)
    ):
        return False
    if terms.service_class in RESERVING:
        bound_until = token_pool.terms.bound_until
        if pool < len(bound_until) and terms.created > bound_until[pool]:
            return False
        if terms.service_class == "guaranteed":
            baseline = terms.baseline
            if pool >= len(baseline) or account.inflight[pool] >= baseline[pool]:
                return False
    limit = kv_limit(terms)
    if 0 < limit < account.kv_bytes + request.kv_bytes or not _has_room(token_pool, request):
        return False
    depth, floor = most * account.mean_cost, account.floor_tokens
    depth = floor if floor > depth else depth  # noqa: FURB136 - max() would be a call
    tokens = request.estimate_tokens
    # A request larger than a full bucket is refused before the bucket is refilled.
    return tokens <= depth and own_level(account, depth, now_s) >= tokens


def _has_room(token_pool: TokenPool, request: AdmissionRequest) -> bool:
    """Whether a pool has room for one more sequence beyond its headroom."""
    whole, pool = token_pool.terms, request.pool
    state = token_pool.pools[pool]
    if state.idle_dedicated or state.inflight >= whole.slots[pool] - whole.headroom:
        return False
    capacity = whole.kv_bytes[pool] if pool < len(whole.kv_bytes) else 0
    return not 0 < capacity < state.kv_bytes + request.kv_bytes
