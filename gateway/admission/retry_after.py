"""Retry-After: how long a refused request should wait, spread so that bursts do not return.

Each wait adds the capacity promised to earlier refusals of the same entitlement and not used yet.
With equal waits a burst comes back as a burst: the official client's two retries then complete
80, 60, 40 and 24 % of bursts of 1.5, 2, 3 and 5 times the bucket's depth; with promises, all.
When a pool is full, each other waiting tenant counts once, however often it retries, so a tenant
lengthens another's wait by at most the time that one slot takes to come free.
"""

import math

from gateway.admission.token_pool import Account, PoolCounters

MIN_S, MAX_S = 1.0, 60.0
JITTER = 0.5


def tokens_wait_s(
    account: Account, tokens: int, level: float, rate_per_s: float, now_s: float
) -> float:
    """Seconds until the bucket holds `tokens` beyond what it has promised."""
    if rate_per_s <= 0:
        return MAX_S
    kept = max(0.0, account.promised - rate_per_s * max(0.0, now_s - account.promised_s))
    return (tokens - level + kept) / rate_per_s


def concurrency_wait_s(account: Account, service_s: float, inflight: int, now_s: float) -> float:
    """Seconds until enough of the entitlement's own requests end for those already waiting."""
    waiting = still_waiting(account, inflight, service_s, now_s)
    return (waiting + 1) * service_s / (inflight + 1)


def kv_wait_s(
    account: Account, short_bytes: int, held_bytes: int, service_s: float, now_s: float
) -> float:
    """Seconds until the entitlement's own requests have freed the missing bytes."""
    waiting = still_waiting(account, account.total, service_s, now_s)
    freed_per_s = max(1.0, held_bytes / max(1e-3, service_s))
    return short_bytes * (waiting + 1) / freed_per_s


def priority_wait_s(
    pool: PoolCounters, account: Account, weight: float, slots: int, now_s: float
) -> float:
    """Seconds until the pool has served the waiting requests of at least this weight."""
    waiting = before(pool, account, weight, slots, now_s)
    return (waiting + 1) * pool.service_s / max(1, slots)


def before(pool: PoolCounters, account: Account, weight: float, slots: int, now_s: float) -> float:
    """Requests ahead: the entitlement's own waiting ones, and one for each other tenant."""
    own, tenant = still_waiting(account, slots, pool.service_s, now_s), tenant_of(account)
    others = pool.denials.others_above(tenant, weight)
    return own + others + pool.denials_last.others_above(tenant, weight)


def still_waiting(account: Account, places: int, service_s: float, now_s: float) -> float:
    """Earlier refused sequences still waiting, as `places` slots come free per `service_s`."""
    gone = places * max(0.0, now_s - account.waiters_s) / max(1e-3, service_s)
    return max(0.0, account.waiters - gone)


def wait_too(account: Account, sequences: int, places: int, service_s: float, now_s: float) -> None:
    """Count a refused request as waiting; at most what MAX_S can serve is kept."""
    waiting = still_waiting(account, places, service_s, now_s) + sequences
    account.waiters = min(waiting, MAX_S * (places + 1) / max(1e-3, service_s))
    account.waiters_s = now_s


def tenant_of(account: Account) -> str:
    """The tenant, or the entitlement's own name where none is set."""
    return account.terms.tenant or account.terms.name


def retry_after_s(wait_s: float, jitter: float) -> int:
    """Whole seconds for Retry-After: the wait times 1 to 1.5 (`jitter` in [0, 1]), in [1, 60]."""
    return math.ceil(min(max(wait_s * (1.0 + JITTER * jitter), MIN_S), MAX_S))
