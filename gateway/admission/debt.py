"""The periodic tick: updates each entitlement's debt (underserved) and burst (overuse).

Token-pools paper, eq. 2 and 3, plus three rules of this project. Debt grows only while the pool
is contended and the entitlement was denied a request that a higher weight could have let in;
otherwise idle tenants, and those whose requests never fit a full pool, would build debt up to 1.
Only elastic entitlements have debt. Negative debt (credit) stops at `least_debt`.

Debt is owed in one unit: tokens per second where the entitlement states them, else its baseline of
sequences, else its KV cache. Debt in sequences and KV never exceeds the denied requests: one
refused request of a tenant that asks for little is not the whole baseline. Retries count again, so
the denied seconds may exceed the demand, but a tick never owes more than the shortfall.
"""

from collections.abc import Iterable

from gateway.admission.token_pool import Account, RecentDenials, TokenPool

SETTLED = 1e-3
"""Debt and burst below this need no further ticks."""


def tick(
    token_pool: TokenPool,
    names: Iterable[str],
    elapsed_s: float,
    now_s: float,
    *,
    contended: bool | None = None,
) -> None:
    """Apply a tick to these entitlements, `elapsed_s` after the last one.

    After k - 1 missed ticks the old values decay by gamma^k and rates average over the whole
    time. A caller that ticks in slices passes `contended` as it was before the first slice.
    """
    if contended is None:
        contended = is_contended(token_pool)
    for name in names:
        account = token_pool.accounts.get(name)
        if account is None:
            token_pool.active.discard(name)
            continue
        update(token_pool, account, elapsed_s, now_s, contended=contended)
        idle = not account.total and abs(account.debt) <= SETTLED and account.burst <= SETTLED
        if idle:
            token_pool.active.discard(name)


def close(token_pool: TokenPool, elapsed_s: float, now_s: float) -> None:
    """End the tick for the token pool as a whole, after all active entitlements are updated."""
    token_pool.surplus_level(now_s)
    lent_per_s = token_pool.terms.tokens_per_s - token_pool.own_served / max(1e-3, elapsed_s)
    token_pool.surplus_per_s = max(0.0, lent_per_s)
    token_pool.own_served = 0
    token_pool.priority_denials = 0
    for pool in token_pool.pools:
        pool.denials_last, pool.denials = pool.denials, RecentDenials()
    token_pool.ticked_s = now_s


def is_contended(token_pool: TokenPool) -> bool:
    """Whether a pool is full, or this tick denied a request that more weight could have let in."""
    full = any(
        pool.inflight >= slots
        for pool, slots in zip(token_pool.pools, token_pool.terms.slots, strict=False)
    )
    return full or token_pool.priority_denials > 0


def update(
    token_pool: TokenPool, account: Account, elapsed_s: float, now_s: float, *, contended: bool
) -> None:
    """Apply eq. 2 and 3 to one entitlement and reset its counters of the tick."""
    terms, profile = account.terms, token_pool.terms.profile
    baseline, kv_bytes = float(sum(terms.baseline)), float(terms.kv_bytes)
    elapsed_s = max(1e-3, elapsed_s)
    missed = max(1, int(elapsed_s / profile.tick_s + 0.5))
    account.average(now_s)
    sequences, kv = account.inflight_seconds / elapsed_s, account.kv_seconds / elapsed_s
    rate = account.served / elapsed_s
    if terms.service_class == "elastic":
        gap = 0.0  # the share of what was promised that is missing; below 0: overuse
        if terms.tokens_per_s > 0:
            gap = (terms.tokens_per_s - rate) / terms.tokens_per_s
        elif baseline > 0:
            gap = min(baseline - sequences, account.denied_seconds / elapsed_s) / baseline
        elif kv_bytes > 0:
            gap = min(kv_bytes - kv, account.denied_kv_seconds / elapsed_s) / kv_bytes
        if gap > 0 and not (contended and account.denied):
            gap = 0.0
        remaining = profile.debt_keep**missed
        debt = remaining * account.debt + (1 - remaining) * gap
        account.debt = min(max(debt, profile.least_debt), 1.0)
    else:
        account.debt = 0.0
    over = 0.0
    for used, promised in ((rate, terms.tokens_per_s), (kv, kv_bytes), (sequences, baseline)):
        if promised > 0:
            over += max(0.0, used / promised - 1)
    remaining = profile.burst_keep**missed
    account.burst = remaining * account.burst + (1 - remaining) * over
    account.epoch = -1
    token_pool.note(account)
    account.served = account.denied = 0
    account.denied_seconds = account.denied_kv_seconds = 0.0
    account.inflight_seconds = account.kv_seconds = 0.0
    account.since_s = now_s
