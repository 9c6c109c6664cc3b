"""Leases that began and ended before the books heard of them: entered as one sum.

While there is plenty of room a worker process takes leases by itself, and tells of those that have
ended when it next says something. Whatever a grant and a settlement would have changed is changed
here, but for what only a lease in force changes: no pool is fuller, no weight is in flight.
"""

from collections.abc import Sequence

from gateway.domain import Record, Usage
from gateway.policy.buckets import average, pay, serve
from gateway.policy.entitlements import charge_tokens
from gateway.policy.leases import MEAN_GAIN
from gateway.policy.ledger import Account, TokenPool
from gateway.policy.limits import funded_by


class Passing(Record, frozen=True):
    """One such lease."""

    cost_tokens: int
    """What it reserved."""
    sequences: int
    kv_bytes: int
    life_s: float
    usage: Usage | None
    """None: nothing is charged."""


def enter(
    book: TokenPool, name: str, pool: int, leases: Sequence[Passing], now_s: float
) -> int | None:
    """Charge leases of an entitlement in a pool; how many were settled, the others refunded.

    None when there is no such entitlement any more.
    """
    account = book.accounts.get(name)
    if account is None:
        return None
    average(account, now_s)
    settled = sum(_entered(book, account, pool, lease, now_s) for lease in leases)
    book.settled += settled
    book.refunds += len(leases) - settled
    book.active.add(name)
    book.note(account)
    return settled


def _entered(book: TokenPool, account: Account, pool: int, lease: Passing, now_s: float) -> bool:
    account.inflight_seconds += lease.sequences * lease.life_s
    account.kv_seconds += lease.kv_bytes * lease.life_s
    account.debited += lease.cost_tokens
    usage = lease.usage
    if usage is None:
        account.refunded += lease.cost_tokens
        return False
    used = charge_tokens(
        book.terms.profile, usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens
    )
    # As admission funds what was decided before: by what there is now.
    funded = funded_by(book, account, lease.cost_tokens, now_s) or (
        "own" if account.terms.tokens_per_s > 0 else "surplus"
    )
    pay(book, account, funded, used, now_s)
    account.debited += max(0, used - lease.cost_tokens)
    account.refunded += max(0, lease.cost_tokens - used)
    account.used += used
    state = book.pools[pool]
    state.service_s += MEAN_GAIN * (lease.life_s - state.service_s)
    if account.mean_cost > 0:
        account.mean_cost += MEAN_GAIN * (used - account.mean_cost)
    else:
        account.mean_cost = float(used)
    serve(book, account, funded, used)
    return True
