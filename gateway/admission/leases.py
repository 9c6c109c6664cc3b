"""A lease after admission: what it is charged, and how it is settled, resized, renewed, expires.

An engine's usage report is charged if it is plausible, else the gateway's own count. Exactly one
settlement or expiry returns what a grant took. An expired lease is charged its estimate and leaves
a tombstone; late usage replaces that charge once and changes no in-flight counter. The token-pools
paper (section 4.3) does not cover crashes.

Leases are evicted for protected requests: preemptible work, lowest weight first, and of equal
weights the youngest, because it loses the least work. Spot and spilled leases are evicted only if
the model sets `reclaim: cancel`. A victim keeps its lease until its owner has cancelled it. Leases
of an entitlement that has since moved to a better class are spared.
"""

from heapq import nsmallest
from typing import Final

import msgspec

from gateway.admission.terms import LeaseRecord
from gateway.admission.token_pool import (
    LEASE_TTL_S,
    REAP_BATCH,
    TOMBSTONES,
    TokenPool,
    average,
    correct,
    pay,
    serve,
)
from gateway.records.attempt import Usage
from gateway.records.entitlement import AdmissionProfile
from gateway.records.estimate import LengthEstimate
from gateway.records.limit import Spent

_MAX_RATIO: Final = 2.0
"""Reports beyond the pool's configured window are believed up to this multiple of the estimate:
the configured window may be too small, but a report is not trusted without bound."""


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


def charge_tokens(
    profile: AdmissionProfile, prompt_tokens: int, completion_tokens: int, cached_tokens: int
) -> int:
    """The charge for usage, in whole tokens, rounded up; cached prompt tokens cost less."""
    if not cached_tokens:
        return prompt_tokens + completion_tokens
    cached = min(cached_tokens, prompt_tokens)
    saved = cached - cached * profile.cached_input_charge
    return prompt_tokens + completion_tokens - int(saved)


MEAN_GAIN = 0.1


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
    lease = token_pool.leases.pop(lease_id, None)
    if lease is None:
        return _settle_expired(token_pool, lease_id, charge, now_s, spent)
    if lease.held:
        token_pool.limits.settle(lease.held, spent)
    account = token_pool.accounts[lease.entitlement]
    average(account, now_s)
    token_pool.release(account, lease)
    used = 0 if charge is None else charge
    correct(token_pool, account, lease.funded, lease.estimate_tokens, used, now_s)
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
    serve(token_pool, account, lease.pool, lease.funded, used)
    return True


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
    average(account, now_s)
    more = estimate_tokens - lease.estimate_tokens
    pay(token_pool, account, lease.funded, more, now_s)
    if more >= 0:
        account.debited += more
    else:
        account.refunded -= more
    token_pool.move(account, lease.pool, 0, kv_bytes - lease.kv_bytes)
    lease.estimate_tokens = estimate_tokens
    lease.kv_bytes = kv_bytes
    token_pool.note(account, lease)
    return True


def renew(token_pool: TokenPool, lease_id: str, now_s: float) -> bool:
    """Extend a lease by LEASE_TTL_S; False when it is gone."""
    lease = token_pool.leases.get(lease_id)
    if lease is None:
        return False
    lease.expires_s = now_s + LEASE_TTL_S
    token_pool.leases.move_to_end(lease_id)
    if token_pool.journal is not None:
        token_pool.journal.leases.add(lease_id)
    return True


def reap(token_pool: TokenPool, now_s: float, most: int = REAP_BATCH) -> int:
    """End at most `most` expired leases, charging their estimates; returns how many."""
    count = 0
    token_pool.reap_at_s = now_s + LEASE_TTL_S
    while (lease := token_pool.first_to_expire()) is not None:
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
    average(account, now_s)
    token_pool.release(account, lease)
    account.used += lease.estimate_tokens
    serve(token_pool, account, lease.pool, lease.funded, lease.estimate_tokens)
    if lease.held:
        token_pool.limits.lapse(lease.held)
    token_pool.tombstones[lease.id] = (
        lease.entitlement,
        lease.estimate_tokens,
        lease.funded,
        lease.held,
    )
    if len(token_pool.tombstones) > TOMBSTONES:
        oldest = next(iter(token_pool.tombstones))
        del token_pool.tombstones[oldest]
        if token_pool.journal is not None:
            token_pool.journal.leases.add(oldest)
    return True


def _settle_expired(
    token_pool: TokenPool, lease_id: str, charge: int | None, now_s: float, spent: Spent | None
) -> bool:
    """Replace an expired lease's charged estimate by its usage, once; counters stay."""
    tombstone = token_pool.tombstones.pop(lease_id, None)
    if tombstone is None:
        return False
    if token_pool.journal is not None:
        token_pool.journal.leases.add(lease_id)
    entitlement, charged, funded, held = tombstone
    if held:
        token_pool.limits.correct(held, spent)
    account = token_pool.accounts.get(entitlement)
    if account is not None:
        token_pool.note(account)
        account.used -= charged
        correct(token_pool, account, funded, charged, charge or 0, now_s)
    return False


# -- eviction


def victims(token_pool: TokenPool, pool: int, sequences: int) -> list[LeaseRecord]:
    """Leases of a pool that together free at least `sequences`, as far as there are any."""
    candidates = [
        h
        for h in token_pool.pools[pool].evictable.values()
        if not h.evicted and token_pool.gives_way(token_pool.accounts[h.entitlement], h)
    ]
    chosen: list[LeaseRecord] = []
    freed = 0
    for record in nsmallest(sequences, candidates, key=lambda h: (h.weight, -h.issued_s, h.id)):
        if freed >= sequences:
            break
        chosen.append(record)
        freed += record.sequences
    return chosen


def evict(token_pool: TokenPool, pool: int, sequences: int) -> list[LeaseRecord]:
    """Mark victims, so that none is chosen twice.

    Evicts no more than what the pool holds beyond its slots after earlier victims have left.
    """
    state = token_pool.pools[pool]
    leaving = sum(h.sequences for h in state.evictable.values() if h.evicted)
    over = state.inflight - leaving - token_pool.terms.slots[pool]
    chosen = victims(token_pool, pool, max(0, min(sequences, over)))
    for record in chosen:
        record.evicted = True
    return chosen
