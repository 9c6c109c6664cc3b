"""A lease after admission: it is settled, resized, renewed, or it expires.

Exactly one settlement or expiry returns what a grant took. An expired lease is charged its
estimate and leaves a tombstone; late usage replaces that charge once and changes no in-flight
counter. The token-pools paper (section 4.3) does not cover crashes.
"""

from gateway.policy.token_pool.buckets import average, correct, pay, serve
from gateway.policy.token_pool.token_pool import LEASE_TTL_S, REAPED_AT_ONCE, TOMBSTONES, TokenPool

MEAN_GAIN = 0.1


def settle(book: TokenPool, lease_id: str, charge: int | None, now_s: float) -> bool:
    """End a lease and charge it; `charge` None refunds all. False when it was not in force.

    For an expired lease, the first late usage replaces the charged estimate.
    """
    lease = book.leases.take(lease_id)
    if lease is None:
        return _settle_late(book, lease_id, charge, now_s)
    account = book.accounts[lease.entitlement]
    average(account, now_s)
    book.release(account, lease)
    used = 0 if charge is None else charge
    correct(book, account, lease.funded, lease.estimate_tokens, used, now_s)
    if charge is None:
        book.refunds += 1
        return True
    book.settled += 1
    pool = book.pools[lease.pool]
    pool.service_s += MEAN_GAIN * (max(0.0, now_s - lease.issued_s) - pool.service_s)
    cost = used / max(1, lease.sequences)
    if account.mean_cost > 0:
        account.mean_cost += MEAN_GAIN * (cost - account.mean_cost)
    else:
        account.mean_cost = cost
    serve(book, account, lease.funded, used)
    return True


def resize(
    book: TokenPool, lease_id: str, estimate_tokens: int, kv_bytes: int, now_s: float
) -> bool:
    """Change a lease's reservation: down after compression, up as tokens stream past it.

    Never refused: a request that outgrows its reservation goes on, and its bucket pays.
    """
    lease = book.leases.get(lease_id)
    if lease is None:
        return False
    account = book.accounts[lease.entitlement]
    average(account, now_s)
    more = estimate_tokens - lease.estimate_tokens
    pay(book, account, lease.funded, more, now_s)
    if more >= 0:
        account.debited += more
    else:
        account.refunded -= more
    book.move(account, lease.pool, 0, kv_bytes - lease.kv_bytes)
    lease.estimate_tokens = estimate_tokens
    lease.kv_bytes = kv_bytes
    book.note(account, lease)
    return True


def renew(book: TokenPool, lease_id: str, now_s: float) -> bool:
    """Extend a lease by LEASE_TTL_S; False when it is gone."""
    lease = book.leases.get(lease_id)
    if lease is None:
        return False
    lease.expires_s = now_s + LEASE_TTL_S
    book.leases.renewed(lease_id)
    if book.journal is not None:
        book.journal.leases.add(lease_id)
    return True


def reap(book: TokenPool, now_s: float, most: int = REAPED_AT_ONCE) -> int:
    """End at most `most` expired leases, charging their estimates; returns how many."""
    count = 0
    book.reap_at_s = now_s + LEASE_TTL_S
    while (lease := book.leases.first()) is not None:
        if count >= most or lease.expires_s > now_s:
            book.reap_at_s = lease.expires_s
            break
        lapse(book, lease.id, now_s)
        count += 1
    return count


def lapse(book: TokenPool, lease_id: str, now_s: float) -> bool:
    """End an abandoned lease, charging its estimate; False when it is not held.

    A lease is abandoned when it expires or when the replica that served it is gone.
    """
    lease = book.leases.take(lease_id)
    if lease is None:
        return False
    account = book.accounts[lease.entitlement]
    average(account, now_s)
    book.release(account, lease)
    account.used += lease.estimate_tokens
    serve(book, account, lease.funded, lease.estimate_tokens)
    book.tombstones[lease.id] = (lease.entitlement, lease.estimate_tokens, lease.funded)
    if len(book.tombstones) > TOMBSTONES:
        del book.tombstones[next(iter(book.tombstones))]
    return True


def _settle_late(book: TokenPool, lease_id: str, charge: int | None, now_s: float) -> bool:
    """Replace an expired lease's charged estimate by its usage, once; counters stay."""
    grave = book.tombstones.pop(lease_id, None)
    if grave is None:
        return False
    if book.journal is not None:
        book.journal.leases.add(lease_id)
    entitlement, charged, funded = grave
    account = book.accounts.get(entitlement)
    if account is not None:
        book.note(account)
        account.used -= charged
        correct(book, account, funded, charged, charge or 0, now_s)
    return False
