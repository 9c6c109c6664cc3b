"""How long a refused request should wait: honest, and not the same for everybody.

Each wait adds what earlier refusals of the same entitlement were promised and have not had yet.
Told all the same wait, a burst comes back as a burst: the official client's two retries then
complete 80, 60, 40 and 24 % of bursts of 1.5, 2, 3 and 5 times the bucket's depth; with promises,
all. Where a pool has no place, each other tenant that waits adds one, however often it asks: no
tenant lengthens another's wait by more than its one place takes to come free.
"""

import math

from gateway.policy.token_pool.token_pool import Account, PoolBook

LEAST_S, MOST_S = 1.0, 60.0
JITTER = 0.5


def tokens_wait_s(
    account: Account, tokens: int, level: float, rate_per_s: float, now_s: float
) -> float:
    """Until the bucket holds `tokens` beyond what it has promised."""
    if rate_per_s <= 0:
        return MOST_S
    kept = max(0.0, account.promised - rate_per_s * max(0.0, now_s - account.promised_s))
    return (tokens - level + kept) / rate_per_s


def concurrency_wait_s(account: Account, service_s: float, inflight: int, now_s: float) -> float:
    """Until one of the entitlement's own requests ends for each one that waits already."""
    waiting = still_waiting(account, inflight, service_s, now_s)
    return (waiting + 1) * service_s / (inflight + 1)


def kv_wait_s(
    account: Account, short_bytes: int, held_bytes: int, service_s: float, now_s: float
) -> float:
    """Until the entitlement's own requests have freed the bytes that are short."""
    waiting = still_waiting(account, account.total, service_s, now_s)
    freed_per_s = max(1.0, held_bytes / max(1e-3, service_s))
    return short_bytes * (waiting + 1) / freed_per_s


def priority_wait_s(
    pool: PoolBook, account: Account, weight: float, slots: int, now_s: float
) -> float:
    """Until the pool has served those of at least this weight that wait already."""
    waiting = before(pool, account, weight, slots, now_s)
    return (waiting + 1) * pool.service_s / max(1, slots)


def before(pool: PoolBook, account: Account, weight: float, slots: int, now_s: float) -> float:
    """Who comes first: what the entitlement has waiting already, and each other tenant once."""
    own, tenant = still_waiting(account, slots, pool.service_s, now_s), tenant_of(account)
    others = pool.denials.others_above(tenant, weight)
    return own + others + pool.denials_last.others_above(tenant, weight)


def still_waiting(account: Account, places: int, service_s: float, now_s: float) -> float:
    """Sequences refused before that have had no turn yet; so many places come free in turn."""
    gone = places * max(0.0, now_s - account.waiters_s) / max(1e-3, service_s)
    return max(0.0, account.waiters - gone)


def wait_too(account: Account, sequences: int, places: int, service_s: float, now_s: float) -> None:
    """One more was refused. Nobody is told more than MOST_S, so no more than that is kept."""
    waiting = still_waiting(account, places, service_s, now_s) + sequences
    account.waiters = min(waiting, MOST_S * (places + 1) / max(1e-3, service_s))
    account.waiters_s = now_s


def tenant_of(account: Account) -> str:
    """Whose requests count as one tenant's."""
    return account.terms.tenant or account.terms.name


def told_s(wait_s: float, jitter: float) -> int:
    """Whole seconds for Retry-After: the wait times 1 to 1.5 (`jitter` in [0, 1]), in [1, 60]."""
    return math.ceil(min(max(wait_s * (1.0 + JITTER * jitter), LEAST_S), MOST_S))
