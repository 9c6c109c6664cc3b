"""Leases that began and ended before the books heard of them: entered as one sum.

While there is plenty of room a worker process takes leases by itself, and tells of those that have
ended when it next says something. Whatever a grant and a settlement would have changed is changed
here, but for what only a lease in force changes: no pool is fuller, no weight is in flight.
"""

from collections.abc import Sequence

from gateway.policy.buckets import average, pay, serve
from gateway.policy.charging import charge_tokens
from gateway.policy.leases import MEAN_GAIN
from gateway.policy.ledger import Account, TokenPool
from gateway.policy.limits import funded_by, paid_by

Passing = tuple[int, int, int, float, tuple[int, int, int] | None]
"""One such lease, as it travels: tokens that it reserved, sequences, KV bytes, how long it lived in
seconds, and its usage as prompt, completion and cached tokens; None: nothing is charged."""


def enter(
    book: TokenPool, name: str, pool: int, leases: Sequence[Passing], now_s: float
) -> int | None:
    """Charge leases of an entitlement in a pool; how many were settled, the others refunded.

    None when there is no such entitlement any more. Tokens are whole, so the ledger is the same as
    if each had been entered by itself.
    """
    account = book.accounts.get(name)
    if account is None:
        return None
    average(account, now_s)
    profile, state = book.terms.profile, book.pools[pool]
    inflight_s, kv_s, service_s, mean_cost = 0.0, 0.0, state.service_s, account.mean_cost
    debited = refunded = charged = 0
    each: list[tuple[int, int]] = []
    for cost_tokens, sequences, kv_bytes, life_s, usage in leases:
        inflight_s += sequences * life_s
        kv_s += kv_bytes * life_s
        debited += cost_tokens
        if usage is None:
            refunded += cost_tokens
            continue
        used = charge_tokens(profile, *usage)
        each.append((cost_tokens, used))
        charged += used
        if used < cost_tokens:
            refunded += cost_tokens - used
        else:
            debited += used - cost_tokens
        service_s += MEAN_GAIN * (life_s - service_s)
        cost = used / max(1, sequences)
        mean_cost = mean_cost + MEAN_GAIN * (cost - mean_cost) if mean_cost > 0 else cost
    account.inflight_seconds += inflight_s
    account.kv_seconds += kv_s
    account.debited += debited
    account.refunded += refunded
    account.used += charged
    _pay(book, account, each, now_s)
    account.mean_cost, state.service_s = mean_cost, service_s
    book.settled += len(each)
    book.refunds += len(leases) - len(each)
    book.active.add(name)
    book.note(account)
    return len(each)


def _pay(book: TokenPool, account: Account, each: Sequence[tuple[int, int]], now_s: float) -> None:
    """Take what was used from the bucket that funds it: (reserved, used) of each lease.

    As admission funds what was decided before: by what there is now.
    """
    if not each:
        return
    reserved = sum(cost_tokens for cost_tokens, _ in each)
    if funded_by(book, account, reserved, now_s) in {"own", "none"}:  # of each, too
        each = [(reserved, sum(used for _, used in each))]
    for cost_tokens, used in each:
        funded = paid_by(book, account, cost_tokens, now_s)
        pay(book, account, funded, used, now_s)
        serve(book, account, funded, used)
