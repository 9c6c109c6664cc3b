"""Decides admission in one atomic step over a model's token pool, and hands out the lease.

Order of checks (token-pools paper, section 4.3; the project filled the gaps it leaves):

- Reap expired leases; repeat the earlier grant for a lease id that is already held.
- Limits of the key, the entitlement and the tenant over all models, where there are any.
- The entitlement is in force; the request can ever fit; concurrency, token rate, KV; a pool has
  room, contended or not (`gateway.admission.checks`).

Invariants: a pool's in-flight and KV are the sums over its leases; exactly one settlement or
expiry returns what a grant took; only a bucket in debt is ever negative.
`charge` is whole tokens, so debited - refunded = used exactly.

All checks run before any state changes; a grant or denial is then applied in one step. The
embedded store calls these functions, and the Redis scripts transcribe them.
"""

from gateway.admission import checks
from gateway.admission.checks import inadmissible, min_weight, overshoot
from gateway.admission.counters import MAX_S, Account
from gateway.admission.leases import evict, reap, renew, resize, settle
from gateway.admission.limit_book import Weighed
from gateway.admission.terms import (
    AdmissionRequest,
    Denial,
    DenialReason,
    Grant,
    LeaseRecord,
    Unit,
)
from gateway.admission.token_pool import (
    BUCKET_S,
    LEASE_TTL_S,
    RETAINED_DENIALS,
    TokenPool,
    average,
    depth_tokens,
    max_sequences,
    may_borrow,
    pay,
    surplus_depth,
    surplus_level,
    weight_now,
)
from gateway.records.entitlement import BORROWING, RESERVING, SPILLED_WEIGHT
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
    "evict",
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
        weighed, over, request = checks.weigh(token_pool, request, now_s)
        w = min(w, SPILLED_WEIGHT) if request.demoted else w
    found = over or checks.decide(token_pool, account, request, w, now_s)
    would_deny = ""
    if isinstance(found, Denial):
        _refused(token_pool, account, request, w, found, now_s)
        if not (observe or account.terms.observe):
            return found
        would_deny, funded = found.reason, "none"
        pool, spilled, contended = request.pool, False, False
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
        lease.held, uses = token_pool.limits.reserve(request, weighed)
    token_pool.move(account, pool, request.sequences, request.kv_bytes)
    if funded == "own":
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
    denial = None if force else inadmissible(token_pool, account, lease, pool, now_s)
    if denial is None:
        lease.pool = pool
    token_pool.move(account, lease.pool, lease.sequences, lease.kv_bytes)
    token_pool.file(account, lease)
    return denial


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
    state, terms = token_pool.pools[request.pool], account.terms
    n, tokens, slots = request.sequences, request.estimate_tokens, token_pool.terms.slots
    # More workers would have let it in, so it counts as demand for them.
    lacking = denial.of_pool
    if denial.reason == "tokens":
        borrows = terms.service_class in BORROWING
        lacking = borrows and may_borrow(account, tokens, now_s)
    elif denial.reason == "concurrency":
        lacking = not terms.limit and terms.service_class != "guaranteed"  # then C is its limit
    if lacking:
        state.refused_sequences += n
        state.refused_kv_bytes += request.kv_bytes
        state.refused_tokens += tokens
    if denial.of_pool:
        state.denials_last.forget(account.tenant)
        state.denials.note(account.tenant, w, RETAINED_DENIALS)
        account.wait_too(n, slots[request.pool], state.service_s, now_s)
        if checks.could_outrank(token_pool, request):  # otherwise debt could not help it in
            account.denied += 1
            account.denied_seconds += n * state.service_s
            account.denied_kv_seconds += request.kv_bytes * state.service_s
            token_pool.priority_denials += 1
            token_pool.active.add(request.entitlement)
    elif denial.reason == "tokens":
        # Retry-After is at most MAX_S, so no more than that was promised.
        rate = checks.refill_per_s(token_pool, terms)
        account.promised = min(account.still_promised(rate, now_s) + tokens, MAX_S * rate)
        account.promised_s = now_s
    elif denial.reason in ("concurrency", "kv"):
        account.wait_too(n, account.total, state.service_s, now_s)


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
