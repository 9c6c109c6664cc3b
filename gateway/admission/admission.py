"""Decides admission in one atomic step over a model's token pool; then the lease until its end.

Order of checks (token-pools paper, section 4.3; the project filled the gaps it leaves):

- Reap expired leases; repeat the earlier grant for a lease id that is already held.
- Limits of the key, the entitlement and the tenant over all models, where there are any.
- The entitlement is in force; the request can ever fit; concurrency, token rate, KV; a pool has
  room, contended or not (`gateway.admission.checks`).

Invariants: a pool's in-flight and KV are the sums over its leases; exactly one settlement or
expiry returns what a grant took; only a bucket in debt is ever negative.
A charge is whole tokens, so debited - refunded = used exactly.

All checks run before any state changes; a grant or denial is then applied in one step. The
embedded store calls these functions, and the Redis scripts transcribe them.

An engine's usage report is charged if it is plausible, else the gateway's own count. An expired
lease is charged its estimate and leaves a tombstone; late usage replaces that charge
once and changes no in-flight counter. The paper does not cover crashes.

Leases are evicted for protected requests: preemptible work, lowest weight first, and of equal
weights the youngest, because it loses the least work. Spot and spilled leases are evicted only if
the model sets `reclaim: cancel`. A victim keeps its lease until its owner has cancelled it. Leases
of an entitlement that has since moved to a better class are spared.
"""

from heapq import nsmallest

import msgspec

from gateway.admission import checks
from gateway.admission.limit_book import Weighed
from gateway.admission.terms import AdmissionRequest, Denial, Grant, LeaseRecord
from gateway.admission.token_pool import LEASE_TTL_S, REAP_BATCH, TOMBSTONES, TokenPool
from gateway.records.attempt import Usage
from gateway.records.entitlement import RESERVING, SPILLED_WEIGHT, AdmissionProfile
from gateway.records.estimate import LengthEstimate
from gateway.records.limit import LimitUse, Spent

MEAN_GAIN = 0.1
_MAX_RATIO = 2.0
"""Reports beyond the pool's configured window are believed up to this multiple of the estimate:
the configured window may be too small, but a report is not trusted without bound."""


def admit(
    token_pool: TokenPool,
    request: AdmissionRequest,
    now_s: float,
    *,
    observe: bool,
    owner: str = "",
    dry: bool = False,
) -> Grant | Denial:
    """Decide, and on a grant take the lease for the process `owner`.

    `observe`: the model's mode. A denial is then recorded but the request is granted anyway,
    and no bucket pays for it. `dry`: nothing is taken or recorded, and the figures of a grant are
    as of before it.
    """
    if now_s >= token_pool.reap_at_s:
        reap(token_pool, now_s)
    account = token_pool.accounts.get(request.entitlement)
    if account is None:
        return Denial(reason="entitlement_unknown")
    record = token_pool.leases.get(request.lease_id)
    if record is not None:
        return _granted(token_pool, record, contended=False)
    account.average(now_s)
    w = token_pool.weight_now(account)
    over: Denial | None = None
    weighed: list[Weighed] = []
    if request.limits:
        service_s, limits = token_pool.pools[request.pool].service_s, token_pool.limits
        weighed, over, demoted = limits.weigh(request, limits.time_s(now_s), service_s)
        request = msgspec.structs.replace(request, demoted=True) if demoted else request
    w = min(w, SPILLED_WEIGHT) if request.demoted else w
    decided = over or checks.decide(token_pool, account, request, w, now_s)
    would_deny = ""
    if isinstance(decided, Denial):
        if not dry:
            checks.refused(token_pool, account, request, w, decided, now_s)
        if not (observe or account.terms.observe):
            return decided
        would_deny, funded = decided.reason, "none"
        pool, spilled, contended = request.pool, False, False
    else:
        place, funded, w = decided
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
    if dry:
        return _granted(token_pool, lease, contended=contended)
    uses: tuple[LimitUse, ...] = ()
    if request.limits:
        lease.held, uses = token_pool.limits.reserve(request, weighed)
    token_pool.move(account, pool, request.sequences, request.kv_bytes)
    if funded == "own":
        account.level -= request.estimate_tokens  # check 5 filled it and found enough
    else:
        token_pool.pay(account, funded, request.estimate_tokens, now_s)
    account.debited += request.estimate_tokens
    token_pool.hold(account, lease)
    return _granted(token_pool, lease, uses, contended=contended)


def count_request(token_pool: TokenPool, request: AdmissionRequest, now_s: float) -> Denial | None:
    """Count a request that takes no lease in its limits, all of requests; else the denial."""
    limits = token_pool.limits
    weighed, over, _ = limits.weigh(request, limits.time_s(now_s), 0.0)
    if over is None:
        limits.reserve(request, weighed)
    return over


def _granted(
    token_pool: TokenPool,
    lease: LeaseRecord,
    uses: tuple[LimitUse, ...] = (),
    *,
    contended: bool,
) -> Grant:
    account, pool = token_pool.accounts[lease.entitlement], lease.pool
    terms, protected = account.terms, False
    limit, used = token_pool.max_sequences(account), account.total
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
        depth_tokens=token_pool.depth_tokens(account) if terms.tokens_per_s > 0 else 0.0,
        level_tokens=account.level,
        rate_tokens_per_s=terms.tokens_per_s,
        service_s=token_pool.pools[pool].service_s,
        held=lease.held,
        uses=uses,
    )


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
    account.average(now_s)
    token_pool.release(account, lease)
    denial = None if force else checks.inadmissible(token_pool, account, lease, pool, now_s)
    if denial is None:
        lease.pool = pool
    token_pool.move(account, lease.pool, lease.sequences, lease.kv_bytes)
    token_pool.file(account, lease)
    return denial


def resize(
    token_pool: TokenPool, lease_id: str, estimate_tokens: int, kv_bytes: int, now_s: float
) -> bool:
    """Change a lease's reservation: down after compression, up as tokens stream past it.

    Never refused: a request that outgrows its reservation goes on, and its bucket pays.
    """
    lease = token_pool.leases.get(lease_id)
    if lease is None:
        return False
    account = token_pool.accounts[lease.entitlement]
    account.average(now_s)
    more = estimate_tokens - lease.estimate_tokens
    token_pool.pay(account, lease.funded, more, now_s)
    if more >= 0:
        account.debited += more
    else:
        account.refunded -= more
    token_pool.move(account, lease.pool, 0, kv_bytes - lease.kv_bytes)
    lease.estimate_tokens = estimate_tokens
    lease.kv_bytes = kv_bytes
    token_pool.note(account, lease_id)
    return True


def renew(token_pool: TokenPool, lease_id: str, now_s: float) -> bool:
    """Extend a lease by LEASE_TTL_S; False when it is gone."""
    lease = token_pool.leases.get(lease_id)
    if lease is None:
        return False
    lease.expires_s = now_s + LEASE_TTL_S
    token_pool.leases.move_to_end(lease_id)
    token_pool.note(None, lease_id)
    return True


def settle(
    token_pool: TokenPool,
    lease_id: str,
    charge: int | None,
    now_s: float,
    spent: Spent | None = None,
) -> bool:
    """End a lease and charge it; `charge` None refunds all. False when it was not in force.

    For an expired lease, the first late usage replaces the charged estimate. `spent` is what
    budgets count; absent, they count the charge.
    """
    if spent is None and charge is not None:
        spent = Spent(charge)
    used = 0 if charge is None else charge
    lease = token_pool.leases.pop(lease_id, None)
    if lease is None:
        tombstone = token_pool.tombstones.pop(lease_id, None)
        if tombstone is None:
            return False
        entitlement, charged, funded, held = tombstone
        if held:
            token_pool.limits.correct(held, spent)
        late = token_pool.accounts.get(entitlement)
        token_pool.note(late, lease_id)
        if late is not None:
            late.used -= charged
            token_pool.correct(late, funded, charged, used, now_s)
        return False
    if lease.held:
        token_pool.limits.settle(lease.held, spent)
    account = token_pool.accounts[lease.entitlement]
    account.average(now_s)
    token_pool.release(account, lease)
    token_pool.correct(account, lease.funded, lease.estimate_tokens, used, now_s)
    if charge is None:
        token_pool.refunds += 1
        return True
    token_pool.settled += 1
    pool = token_pool.pools[lease.pool]
    pool.service_s += MEAN_GAIN * (max(0.0, now_s - lease.issued_s) - pool.service_s)
    cost = used / max(1, lease.sequences)
    if account.mean_cost > 0:
        account.mean_cost += MEAN_GAIN * (cost - account.mean_cost)
    else:
        account.mean_cost = cost
    token_pool.serve(account, lease.pool, lease.funded, used)
    return True


def reap(token_pool: TokenPool, now_s: float, most: int = REAP_BATCH) -> int:
    """End at most `most` expired leases, charging their estimates; returns how many."""
    count = 0
    token_pool.reap_at_s = now_s + LEASE_TTL_S
    while token_pool.leases:
        lease = next(iter(token_pool.leases.values()))
        if count >= most or lease.expires_s > now_s:
            token_pool.reap_at_s = lease.expires_s
            break
        lapse(token_pool, lease.id, now_s)
        count += 1
    return count


def lapse(token_pool: TokenPool, lease_id: str, now_s: float) -> bool:
    """End an abandoned lease, charging its estimate; False when it is not held.

    A lease is abandoned when it expires or when the replica that served it is gone.
    """
    lease = token_pool.leases.pop(lease_id, None)
    if lease is None:
        return False
    account = token_pool.accounts[lease.entitlement]
    account.average(now_s)
    token_pool.release(account, lease)
    account.used += lease.estimate_tokens
    token_pool.serve(account, lease.pool, lease.funded, lease.estimate_tokens)
    token_pool.limits.lapse(lease.held)
    tombstones = token_pool.tombstones
    tombstones[lease.id] = (lease.entitlement, lease.estimate_tokens, lease.funded, lease.held)
    if len(tombstones) > TOMBSTONES:
        oldest = next(iter(tombstones))
        del tombstones[oldest]
        token_pool.note(None, oldest)
    return True


def evict(token_pool: TokenPool, pool: int, sequences: int) -> list[LeaseRecord]:
    """Mark victims that together free at least `sequences`, so that none is chosen twice.

    Evicts no more than what the pool holds beyond its slots after earlier victims have left.
    """
    state = token_pool.pools[pool]
    leaving = sum(h.sequences for h in state.evictable.values() if h.evicted)
    over = min(sequences, state.inflight - leaving - token_pool.terms.slots[pool])
    candidates = [
        h
        for h in state.evictable.values()
        if not h.evicted and token_pool.gives_way(token_pool.accounts[h.entitlement], h)
    ]
    chosen: list[LeaseRecord] = []
    for record in nsmallest(over, candidates, key=lambda h: (h.weight, -h.issued_s, h.id)):
        if over <= 0:
            break
        over -= record.sequences
        record.evicted = True
        chosen.append(record)
    return chosen


# -- what a request is charged


def believed(usage: Usage, estimate: LengthEstimate, window_tokens: int) -> Usage:
    """The engine's report if it is plausible, else the gateway's own count.

    A report is implausible if it has no prompt tokens, more cached than prompt tokens, more
    completion tokens than the client's limit, or more tokens in all than both the window and
    twice the estimate. A report above the window but within twice the estimate is believed: the
    configured window is then wrong (`beyond_window`).
    """
    if usage.source != "engine":
        return usage
    sequences = estimate.sequences
    window = window_tokens * sequences
    most = max(window, int(_MAX_RATIO * estimate.cost_tokens))
    most_completion = most if estimate.cap_tokens is None else estimate.cap_tokens * sequences
    possible = (
        usage.prompt_tokens > 0
        and usage.cached_tokens <= usage.prompt_tokens
        and usage.completion_tokens <= most_completion
        and usage.prompt_tokens + usage.completion_tokens <= most
    )
    if possible:
        return usage
    room = max(0, window - estimate.input_tokens_total)
    return msgspec.structs.replace(
        usage,
        prompt_tokens=estimate.input_tokens_total,
        completion_tokens=min(usage.completion_tokens, most_completion, room),
        cached_tokens=0,
        cached_reported=False,
        source="counted",
    )


def beyond_window(usage: Usage, sequences: int, window_tokens: int) -> bool:
    """Whether an engine served one sequence with more tokens than its configured window."""
    used = usage.prompt_tokens + usage.completion_tokens
    return usage.source == "engine" and sequences == 1 and used > window_tokens


def spent_by(usage: Usage | None, money: int, *, dispatched: bool) -> Spent | None:
    """What limits count of a request; None gives all of it back."""
    if usage is None:
        return Spent(0) if dispatched else None
    return Spent(usage.prompt_tokens + usage.completion_tokens, money)


def charge_tokens(profile: AdmissionProfile, usage: Usage) -> int:
    """The charge for usage, in whole tokens, rounded up; cached prompt tokens cost less."""
    used = usage.prompt_tokens + usage.completion_tokens
    cached = min(usage.cached_tokens, usage.prompt_tokens)
    return used - int(cached - cached * profile.cached_input_charge) if cached else used
