"""May this request enter? One atomic decision over a model's token pool, and its settlement.

Order of checks (token-pools paper, section 4.3, with what it leaves open):

0 expired leases are reaped; a lease id that is held gets its earlier grant.
1 the entitlement is in force.  3 the request can ever fit.  4 concurrency.  5 token rate.
6 KV.  7 a contended pool: protected traffic passes, the rest needs more weight than the least
in flight, and room under the overshoot.  8 an uncontended one: backfill leaves headroom.
(2, a missing output limit, was replaced by its default before the cost was computed.)

Invariants: a pool's in-flight and KV are the sums over its leases; what a grant takes, exactly
one settlement or expiry gives back; nothing is ever negative but a bucket in debt, which
stays within its depth. `charge` is whole tokens, so debited - refunded = used exactly.

Decisions change nothing until they are granted or refused, here, in one go: the embedded
store calls these functions, the Redis scripts are their transcription.
"""

from heapq import heappop
from typing import Literal

from gateway.domain import Record
from gateway.policy.entitlements import (
    BACKFILL,
    BORROWING,
    RESERVING,
    SPILLED_WEIGHT,
    Entitlement,
    weight,
)
from gateway.policy.ledger import (
    DENIALS_KEPT,
    LEASE_TTL_S,
    REAPED_AT_ONCE,
    TOMBSTONES,
    Account,
    Held,
    TokenPool,
)
from gateway.policy.waits import (
    concurrency_wait_s,
    kv_wait_s,
    priority_wait_s,
    tokens_wait_s,
)

BUCKET_S = 10.0
"""A bucket holds at least this many seconds of its rate."""
_MEAN_GAIN = 0.1

DenialReason = Literal[
    "entitlement_unknown",
    "entitlement_pending",
    "entitlement_degraded",
    "entitlement_expired",
    "entitlement_suspended",
    "exceeds_entitlement",
    "concurrency",
    "tokens",
    "kv",
    "priority",
]


class Request(Record, frozen=True, kw_only=True):
    """What admission needs to know of a request."""

    lease_id: str
    entitlement: str
    pool: int
    alternates: tuple[int, ...] = ()
    estimate_tokens: int
    """L_in + min(cap, q_out), all sequences."""
    kv_bytes: int = 0
    """The same in KV bytes."""
    sequences: int = 1
    owner: str = ""
    """The process that asks."""


class Grant(Record, frozen=True, kw_only=True):
    """Come in. The figures are for the client's rate-limit headers, after this grant."""

    pool: int
    weight: float
    spilled: bool
    contended: bool
    """The engines will queue it: protected traffic may have others evicted."""
    protected: bool
    """Within a reserved baseline."""
    funded: str
    would_deny: str
    limit_sequences: int
    inflight_sequences: int
    depth_tokens: float
    level_tokens: float
    rate_tokens_per_s: float
    service_s: float


class Denial(Record, frozen=True, kw_only=True):
    """Not now, or never. `wait_s` before jitter; 0 where waiting does not help."""

    reason: DenialReason
    wait_s: float = 0.0
    limit: float = 0.0
    used: float = 0.0
    requested: float = 0.0
    """In the unit of the reason: sequences, tokens, tokens of KV or slots."""


class _Place(Record, frozen=True, kw_only=True):
    """Where a request goes, or that it does not: `denied` says why."""

    pool: int
    spilled: bool = False
    contended: bool = False
    denied: str = ""


def admit(book: TokenPool, request: Request, now_s: float, *, observe: bool) -> Grant | Denial:
    """Decide and take the lease. `observe`: the model's; a denial is then noted, not applied."""
    reap(book, now_s)
    account = book.accounts.get(request.entitlement)
    if account is None:
        return Denial(reason="entitlement_unknown")
    held = book.leases.get(request.lease_id)
    if held is not None:
        return _granted(book, account, held, contended=False)
    _average(account, now_s)
    w = weight_now(book, account)
    denial, place, funded = _decide(book, account, request, w, now_s)
    would_deny = ""
    if denial is not None:
        _refused(book, account, request, w, denial, now_s)
        if not (observe or account.terms.observe):
            return denial
        would_deny = denial.reason
        place = _Place(pool=request.pool)
        funded = _funded(book, account, request.estimate_tokens, now_s) or "own"
    lease = Held(
        request.lease_id,
        request.entitlement,
        place.pool,
        request.sequences,
        request.estimate_tokens,
        request.kv_bytes,
        min(w, SPILLED_WEIGHT) if place.spilled else w,
        now_s,
        now_s + LEASE_TTL_S,
        funded,
        request.owner,
        would_deny,
        spilled=place.spilled,
    )
    book.move(account, place.pool, request.sequences, request.kv_bytes)
    _pay(book, account, funded, request.estimate_tokens, now_s)
    account.debited += request.estimate_tokens
    book.hold(lease)
    book.active.add(request.entitlement)
    return _granted(book, account, lease, contended=place.contended)


def settle(book: TokenPool, lease_id: str, charge: int | None, now_s: float) -> bool:
    """End a lease and charge it; None refunds all. False when it was not in force.

    A lease that expired was charged its estimate; the first late usage replaces that.
    """
    lease = book.leases.pop(lease_id, None)
    if lease is None:
        return _settle_late(book, lease_id, charge, now_s)
    account = book.accounts[lease.entitlement]
    _average(account, now_s)
    _release(book, account, lease)
    used = 0 if charge is None else charge
    _correct(book, account, lease.funded, lease.estimate_tokens, used, now_s)
    if charge is None:
        book.refunds += 1
        return True
    book.settled += 1
    service = book.pools[lease.pool]
    service.service_s += _MEAN_GAIN * (max(0.0, now_s - lease.issued_s) - service.service_s)
    account.mean_cost += _MEAN_GAIN * (used - account.mean_cost)
    _serve(book, account, lease.funded, used)
    return True


def resize(
    book: TokenPool, lease_id: str, estimate_tokens: int, kv_bytes: int, now_s: float
) -> bool:
    """Change what a lease has reserved: down after compression, up as tokens stream past it.

    Never refused: a request past its reserve is not cut, its bucket pays.
    """
    lease = book.leases.get(lease_id)
    if lease is None:
        return False
    account = book.accounts[lease.entitlement]
    _average(account, now_s)
    more = estimate_tokens - lease.estimate_tokens
    _pay(book, account, lease.funded, more, now_s)
    if more >= 0:
        account.debited += more
    else:
        account.refunded -= more
    book.move(account, lease.pool, 0, kv_bytes - lease.kv_bytes)
    lease.estimate_tokens = estimate_tokens
    lease.kv_bytes = kv_bytes
    return True


def renew(book: TokenPool, lease_id: str, now_s: float) -> bool:
    """Keep a lease in force for another term; False when it is gone."""
    lease = book.leases.get(lease_id)
    if lease is None:
        return False
    lease.expires_s = now_s + LEASE_TTL_S
    book.leases.move_to_end(lease_id)
    return True


def transfer(
    book: TokenPool, lease_id: str, pool: int, now_s: float, *, force: bool
) -> Denial | None:
    """Move a lease to another pool; without `force` only if it would be admitted there.

    None when it moved, was there already, or is no longer in force.
    """
    lease = book.leases.get(lease_id)
    if lease is None or lease.pool == pool:
        return None
    account = book.accounts[lease.entitlement]
    _average(account, now_s)
    _unfile(book, lease)
    book.move(account, lease.pool, -lease.sequences, -lease.kv_bytes)
    if not force:
        request = Request(
            lease_id=lease_id,
            entitlement=lease.entitlement,
            pool=pool,
            estimate_tokens=lease.estimate_tokens,
            kv_bytes=lease.kv_bytes,
            sequences=lease.sequences,
        )
        place = _place(book, account, request, weight_now(book, account))
        if place.denied:
            book.move(account, lease.pool, lease.sequences, lease.kv_bytes)
            book.file(lease)
            denial = _pool_denial(book, account, request, lease.weight, place)
            _refused(book, account, request, lease.weight, denial, now_s)
            return denial
    lease.pool = pool
    book.move(account, pool, lease.sequences, lease.kv_bytes)
    book.file(lease)
    return None


def reap(book: TokenPool, now_s: float, most: int = REAPED_AT_ONCE) -> int:
    """End leases whose time is up, charging their estimate; how many."""
    count = 0
    while count < most and book.leases:
        lease = next(iter(book.leases.values()))
        if lease.expires_s > now_s:
            break
        del book.leases[lease.id]
        account = book.accounts[lease.entitlement]
        _average(account, now_s)
        _release(book, account, lease)
        account.used += lease.estimate_tokens
        _serve(book, account, lease.funded, lease.estimate_tokens)
        book.tombstones[lease.id] = (lease.entitlement, lease.estimate_tokens, lease.funded)
        if len(book.tombstones) > TOMBSTONES:
            del book.tombstones[next(iter(book.tombstones))]
        count += 1
    return count


def weight_now(book: TokenPool, account: Account) -> float:
    """w_e of an entitlement as it stands."""
    terms = account.terms
    return weight(
        book.terms.profile,
        terms.service_class,
        terms.slo_ms,
        book.terms.mean_slo_ms,
        account.burst,
        account.debt,
    )


def depth_tokens(book: TokenPool, account: Account) -> float:
    """How much an entitlement's bucket holds."""
    terms = account.terms
    sequences = terms.limit or sum(book.terms.slots)
    return max(
        BUCKET_S * terms.tokens_per_s,
        sequences * account.mean_cost,
        float(book.terms.largest_tokens),
    )


def least_weight(book: TokenPool, pool: int) -> float:
    """The admission threshold: the least weight in flight in a pool; 0 when it is empty."""
    weights = book.pools[pool].weights
    while weights:
        lease = book.leases.get(weights[0][1])
        if lease is not None and lease.pool == pool:
            return weights[0][0]
        heappop(weights)
    return 0.0


def overshoot(slots: int) -> int:
    """Sequences beyond capacity that outranking traffic may take."""
    return max(1, -(-slots // 8))


# -- the decision


def _decide(
    book: TokenPool, account: Account, request: Request, w: float, now_s: float
) -> tuple[Denial | None, _Place, str]:
    """Checks 1-8: the denial if any, the place, and which bucket pays."""
    nowhere = _Place(pool=request.pool)
    denial = _not_in_force(book, account.terms, now_s) or _misfit(book, account, request)
    if denial is None:
        denial = _over_concurrency(book, account, request, now_s)
    if denial is not None:
        return denial, nowhere, ""
    funded = _funded(book, account, request.estimate_tokens, now_s)
    if not funded:
        return _over_rate(book, account, request, now_s), nowhere, ""
    denial = _over_kv(book, account, request, now_s)
    if denial is not None:
        return denial, nowhere, ""
    place = _place(book, account, request, w)
    if place.denied:
        return _pool_denial(book, account, request, w, place), nowhere, ""
    return None, place, funded


def _not_in_force(book: TokenPool, terms: Entitlement, now_s: float) -> Denial | None:
    if terms.suspended:
        return Denial(reason="entitlement_suspended")
    if terms.expires_unix_s > 0 and terms.expires_unix_s <= now_s:
        return Denial(reason="entitlement_expired")
    if book.bound(terms):
        return None
    once = terms.created <= book.terms.ever_bound_until
    reason: DenialReason = "entitlement_degraded" if once else "entitlement_pending"
    return Denial(reason=reason, wait_s=BUCKET_S)


def _misfit(book: TokenPool, account: Account, request: Request) -> Denial | None:
    """Check 3: what no waiting would help."""
    terms = account.terms
    most = terms.baseline_of(request.pool) if terms.service_class == "guaranteed" else terms.limit
    capped = most > 0 or terms.service_class == "guaranteed"
    if capped and request.sequences > most:
        return _never(most, account.inflight[request.pool], request.sequences)
    if terms.tokens_per_s > 0:
        depth = depth_tokens(book, account)
        if request.estimate_tokens > depth:
            return _never(depth, account.level, request.estimate_tokens)
    kv_limit = terms.kv_bytes_limit or terms.kv_bytes
    if kv_limit and request.kv_bytes > kv_limit:
        return _never(kv_limit, account.kv_bytes, request.kv_bytes)
    room = [book.terms.kv_of(p) for p in (request.pool, *request.alternates)]
    if all(room) and request.kv_bytes > max(room):
        return _never(max(room), book.pools[request.pool].kv_bytes, request.kv_bytes)
    return None


def _never(limit: float, used: float, requested: float) -> Denial:
    return Denial(reason="exceeds_entitlement", limit=limit, used=used, requested=requested)


def _over_concurrency(
    book: TokenPool, account: Account, request: Request, now_s: float
) -> Denial | None:
    """Check 4: r_e over all pools; guaranteed is held to its baseline, pool by pool."""
    terms = account.terms
    if terms.service_class == "guaranteed":
        limit, used = terms.baseline_of(request.pool), account.inflight[request.pool]
    elif terms.limit:
        limit, used = terms.limit, account.total
    else:
        return None
    if used + request.sequences <= limit:
        return None
    return Denial(
        reason="concurrency",
        wait_s=concurrency_wait_s(account, book.pools[request.pool].service_s, used, now_s),
        limit=limit,
        used=used,
        requested=request.sequences,
    )


def _funded(book: TokenPool, account: Account, tokens: int, now_s: float) -> str:
    """Check 5: own, surplus or none (no rate is set) - which bucket pays; "" for neither."""
    terms = account.terms
    rate, shared = terms.tokens_per_s, book.terms.tokens_per_s
    borrows = shared > 0 and terms.service_class in BORROWING
    if rate <= 0 and not borrows:
        return "none"
    if rate > 0 and _level(book, account, now_s) >= tokens:
        return "own"
    if borrows and _surplus(book, now_s) >= tokens and _may_borrow(terms, account, tokens, now_s):
        return "surplus"
    return ""


def _may_borrow(terms: Entitlement, account: Account, tokens: int, now_s: float) -> bool:
    if terms.tokens_per_s_limit <= 0:
        return True
    rate = terms.tokens_per_s_limit - terms.tokens_per_s
    if rate <= 0:
        return False
    recent = max(0.0, account.borrowed - rate * max(0.0, now_s - account.borrowed_s))
    return recent <= 0 or recent + tokens <= BUCKET_S * rate


def _over_rate(book: TokenPool, account: Account, request: Request, now_s: float) -> Denial:
    terms = account.terms
    if terms.tokens_per_s > 0:
        rate, level, limit = terms.tokens_per_s, account.level, depth_tokens(book, account)
    else:
        rate, level, limit = book.surplus_per_s, book.surplus, BUCKET_S * book.terms.tokens_per_s
    return Denial(
        reason="tokens",
        wait_s=tokens_wait_s(account, request.estimate_tokens, level, rate, now_s),
        limit=limit,
        used=limit - level,
        requested=request.estimate_tokens,
    )


def _over_kv(book: TokenPool, account: Account, request: Request, now_s: float) -> Denial | None:
    """Check 6: chi_e over all pools."""
    limit = account.terms.kv_bytes_limit or account.terms.kv_bytes
    short = account.kv_bytes + request.kv_bytes - limit
    if not limit or short <= 0:
        return None
    service_s = book.pools[request.pool].service_s
    return Denial(
        reason="kv",
        wait_s=kv_wait_s(account, short, account.kv_bytes, service_s, now_s),
        limit=limit,
        used=account.kv_bytes,
        requested=request.kv_bytes,
    )


def _place(book: TokenPool, account: Account, request: Request, w: float) -> _Place:
    """Checks 7 and 8, and spillover: the asked pool, an alternate with idle room, or nothing."""
    terms = account.terms
    pool, n = request.pool, request.sequences
    slots = book.terms.slots[pool]
    used = _occupied(book, account, pool)
    within = account.inflight[pool] + n <= terms.baseline_of(pool)
    kv_full = _kv_over(book, pool, request.kv_bytes, 0)
    contended = used + n > slots or kv_full
    if slots <= 0 or (contended and (kv_full or used + n > slots + book.terms.spill_queue)):
        protected = within and terms.service_class in RESERVING
        if slots <= 0 or not protected:
            for other in request.alternates:
                if _idle_room(book, account, other, request):
                    return _Place(pool=other, spilled=True)
        if slots <= 0:  # nobody is there to queue for: binding says so
            return _Place(pool=pool, contended=True)
    if within and terms.service_class in RESERVING:
        return _Place(pool=pool, contended=contended)
    if not contended:
        keeps_clear = terms.service_class in BACKFILL or not within
        if keeps_clear and used + n > slots - book.terms.headroom:
            return _Place(pool=pool, denied="priority")
        return _Place(pool=pool)
    if terms.service_class == "preemptible" or w <= least_weight(book, pool):
        return _Place(pool=pool, contended=True, denied="priority")
    if used + n > slots + overshoot(slots):
        return _Place(pool=pool, contended=True, denied="priority")
    if _kv_over(book, pool, request.kv_bytes, book.terms.kv_of(pool) // 8):
        return _Place(pool=pool, contended=True, denied="kv")
    return _Place(pool=pool, contended=True)


def _occupied(book: TokenPool, account: Account, pool: int) -> int:
    """Slots that are taken, or kept for dedicated entitlements other than this one."""
    state, terms = book.pools[pool], account.terms
    reserved = state.idle_dedicated
    if terms.service_class == "dedicated" and book.bound(terms):
        reserved -= max(0, terms.baseline_of(pool) - account.inflight[pool])
    return state.inflight + reserved


def _kv_over(book: TokenPool, pool: int, kv_bytes: int, allowance: int) -> bool:
    capacity = book.terms.kv_of(pool)
    return capacity > 0 and book.pools[pool].kv_bytes + kv_bytes > capacity + allowance


def _idle_room(book: TokenPool, account: Account, pool: int, request: Request) -> bool:
    """Whether an alternate pool has slots and KV that nobody else would have."""
    free = book.terms.slots[pool] - book.terms.headroom
    if _occupied(book, account, pool) + request.sequences > free:
        return False
    return not _kv_over(book, pool, request.kv_bytes, 0)


def _pool_denial(
    book: TokenPool, account: Account, request: Request, w: float, place: _Place
) -> Denial:
    state, slots = book.pools[place.pool], book.terms.slots[place.pool]
    if place.denied == "kv":
        capacity = book.terms.kv_of(place.pool)
        short = state.kv_bytes + request.kv_bytes - capacity
        freed_per_s = max(1.0, state.kv_bytes / max(1e-3, state.service_s))
        return Denial(
            reason="kv",
            wait_s=short / freed_per_s,
            limit=capacity,
            used=state.kv_bytes,
            requested=request.kv_bytes,
        )
    return Denial(
        reason="priority",
        wait_s=priority_wait_s(state, w, slots),
        limit=slots,
        used=_occupied(book, account, place.pool),
        requested=request.sequences,
    )


# -- what follows from a decision


def _refused(
    book: TokenPool, account: Account, request: Request, w: float, denial: Denial, now_s: float
) -> None:
    """Remember what this refusal was promised, so that the next one is told to wait longer."""
    if denial.reason == "tokens":
        rate = account.terms.tokens_per_s or book.surplus_per_s
        kept = max(0.0, account.promised - rate * max(0.0, now_s - account.promised_s))
        account.promised = kept + request.estimate_tokens
        account.promised_s = now_s
    elif denial.reason in ("concurrency", "kv"):
        service_s = max(1e-3, book.pools[request.pool].service_s)
        gone = account.total * max(0.0, now_s - account.waiters_s) / service_s
        account.waiters = max(0.0, account.waiters - gone) + request.sequences
        account.waiters_s = now_s
    elif denial.reason == "priority":
        state = book.pools[request.pool]
        if len(state.denials) < DENIALS_KEPT:
            state.denials.append(w)
        account.denied += 1
        book.priority_denials += 1
        book.active.add(request.entitlement)


def _granted(book: TokenPool, account: Account, lease: Held, *, contended: bool) -> Grant:
    terms = account.terms
    if terms.service_class == "guaranteed":
        limit, used = terms.baseline_of(lease.pool), account.inflight[lease.pool]
    else:
        limit, used = terms.limit or sum(book.terms.slots), account.total
    return Grant(
        pool=lease.pool,
        weight=lease.weight,
        spilled=lease.spilled,
        contended=contended,
        protected=terms.service_class in RESERVING
        and not lease.spilled
        and account.inflight[lease.pool] <= terms.baseline_of(lease.pool),
        funded=lease.funded,
        would_deny=lease.would_deny,
        limit_sequences=limit,
        inflight_sequences=used,
        depth_tokens=depth_tokens(book, account) if terms.tokens_per_s > 0 else 0.0,
        level_tokens=account.level,
        rate_tokens_per_s=terms.tokens_per_s,
        service_s=book.pools[lease.pool].service_s,
    )


def _release(book: TokenPool, account: Account, lease: Held) -> None:
    _unfile(book, lease)
    book.move(account, lease.pool, -lease.sequences, -lease.kv_bytes)


def _unfile(book: TokenPool, lease: Held) -> None:
    book.pools[lease.pool].evictable.pop(lease.id, None)


def _settle_late(book: TokenPool, lease_id: str, charge: int | None, now_s: float) -> bool:
    """Usage of a lease that expired: it replaces the estimate, once; counters stay."""
    grave = book.tombstones.pop(lease_id, None)
    if grave is None:
        return False
    entitlement, charged, funded = grave
    account = book.accounts.get(entitlement)
    if account is None:
        return False
    used = 0 if charge is None else charge
    account.used -= charged
    _correct(book, account, funded, charged, used, now_s)
    return False


def _correct(
    book: TokenPool, account: Account, funded: str, estimate: int, used: int, now_s: float
) -> None:
    """Replace a reserved estimate by what was used, in bucket and ledger."""
    _pay(book, account, funded, used - estimate, now_s)
    if used <= estimate:
        account.refunded += estimate - used
    else:
        account.debited += used - estimate
    account.used += used


def _pay(book: TokenPool, account: Account, funded: str, tokens: int, now_s: float) -> None:
    """Take tokens from the bucket that funds a lease (negative: give back), within its depth."""
    if funded == "own":
        depth = depth_tokens(book, account)
        level = _level(book, account, now_s) - tokens
        account.level = min(max(level, -depth), depth)
    elif funded == "surplus":
        depth = BUCKET_S * book.terms.tokens_per_s
        level = _surplus(book, now_s) - tokens
        book.surplus = min(max(level, -depth), depth)
        rate = account.terms.tokens_per_s_limit - account.terms.tokens_per_s
        drained = max(0.0, rate) * max(0.0, now_s - account.borrowed_s)
        account.borrowed = max(0.0, max(0.0, account.borrowed - drained) + tokens)
        account.borrowed_s = now_s


def _level(book: TokenPool, account: Account, now_s: float) -> float:
    """The own bucket, filled up to now."""
    gained = account.terms.tokens_per_s * max(0.0, now_s - account.level_s)
    account.level = min(depth_tokens(book, account), account.level + gained)
    account.level_s = max(now_s, account.level_s)
    return account.level


def _surplus(book: TokenPool, now_s: float) -> float:
    """The surplus bucket, filled up to now."""
    gained = book.surplus_per_s * max(0.0, now_s - book.surplus_s)
    book.surplus = min(BUCKET_S * book.terms.tokens_per_s, book.surplus + gained)
    book.surplus_s = max(now_s, book.surplus_s)
    return book.surplus


def _serve(book: TokenPool, account: Account, funded: str, tokens: int) -> None:
    account.served += tokens
    if funded == "own":
        book.own_served += tokens
    book.active.add(account.terms.name)


def _average(account: Account, now_s: float) -> None:
    """Extend the tick's integrals of sequences and KV up to now."""
    dt = max(0.0, now_s - account.since_s) if account.since_s > 0 else 0.0
    account.inflight_seconds += account.total * dt
    account.kv_seconds += account.kv_bytes * dt
    account.since_s = now_s
