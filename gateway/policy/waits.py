"""How long a refused request should wait: honest, and not the same for everybody.

Each wait adds what earlier refusals were promised and have not had yet. Told all the same
wait, a burst comes back as a burst: the official client's two retries then complete 80, 60,
40 and 24 % of bursts of 1.5, 2, 3 and 5 times the bucket's depth; with promises, all.
"""

import math
from bisect import bisect_left

from gateway.policy.ledger import Account, PoolBook

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
    gone = inflight * max(0.0, now_s - account.waiters_s) / max(1e-3, service_s)
    waiting = max(0.0, account.waiters - gone)
    return (waiting + 1) * service_s / (inflight + 1)


def kv_wait_s(
    account: Account, short_bytes: int, held_bytes: int, service_s: float, now_s: float
) -> float:
    """Until the entitlement's own requests have freed the bytes that are short."""
    gone = account.total * max(0.0, now_s - account.waiters_s) / max(1e-3, service_s)
    waiting = max(0.0, account.waiters - gone)
    freed_per_s = max(1.0, held_bytes / max(1e-3, service_s))
    return short_bytes * (waiting + 1) / freed_per_s


def priority_wait_s(pool: PoolBook, weight: float, slots: int) -> float:
    """Until the pool has served those of at least this weight that were refused before."""
    return (denied_above(pool, weight) + 1) * pool.service_s / max(1, slots)


def denied_above(pool: PoolBook, weight: float) -> int:
    """Requests of at least this weight that the pool refused in this tick and the last."""
    count = 0
    for weights in (pool.denials, pool.denials_last):
        count += len(weights) - bisect_left(weights, weight)
    return count


def told_s(wait_s: float, jitter: float) -> int:
    """Whole seconds for Retry-After: the wait times 1 to 1.5 (`jitter` in [0, 1]), in [1, 60]."""
    return math.ceil(min(max(wait_s * (1.0 + JITTER * jitter), LEAST_S), MOST_S))
