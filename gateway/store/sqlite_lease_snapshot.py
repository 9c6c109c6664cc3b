"""Consistent copies of the embedded token pools, taken in slices.

The pools' journals name what changed since the last copy. These items are copied in slices with
pauses for requests. Items that change meanwhile are in the journals again and copied again, until
the rest fits one slice, which is copied without a pause. The whole copy is therefore the state at
its end: it holds the lease of every estimate that an account was charged.
"""

import asyncio
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Final

import msgspec

from gateway.admission.counters import Account, Journal
from gateway.admission.debt import SETTLED
from gateway.admission.limit_book import Counter, LimitBook
from gateway.admission.terms import LeaseRecord
from gateway.admission.token_pool import LEASE_TTL_S, TokenPool
from gateway.records.limit import Holding

SLICE: Final = 200
"""Accounts and leases copied between two pauses."""
ROUNDS: Final = 20
"""Most rounds; after them the rest is copied at once, whatever its size."""


class AccountCopy(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The part of an account that is kept across restarts; in-flight follows from the leases."""

    level: float
    level_s: float
    borrowed: float
    borrowed_s: float
    debt: float
    burst: float
    promised: float
    promised_s: float
    waiters: float
    waiters_s: float
    mean_cost: float
    debited: int
    refunded: int
    used: int


class Tombstone(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """An expired lease's tombstone; late usage of the lease still counts."""

    entitlement: str
    charged_tokens: int
    funded: str
    held: tuple[Holding, ...] = ()


class LimitCopy(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The part of a limit's counter that is kept; what is reserved follows from the leases."""

    total: int
    warned_s: float
    added: int
    added_until_s: float
    starts: list[float]
    spent: list[int]


class PoolCopy(msgspec.Struct, frozen=True, array_like=True):
    """The part of a model's token pool that is kept across restarts."""

    surplus: float
    surplus_s: float
    surplus_per_s: float
    ticked_s: float
    settled: int
    refunds: int
    service_s: list[float]


class SnapshotSlice(msgspec.Struct, frozen=True):
    """A slice of one model's changes by name and id; None for removed items.

    Holds nothing that the garbage collector tracks, so a large copy does not trigger it.
    """

    model: str
    accounts: dict[str, AccountCopy | None] = {}
    leases: dict[str, LeaseRecord | Tombstone | None] = {}


class Batch(msgspec.Struct, frozen=True):
    """A copy of all changes. If several parts have the same name, the last one counts."""

    parts: list[SnapshotSlice] = []
    pools: dict[str, PoolCopy] = {}
    limits: dict[str, LimitCopy | None] = {}
    """By id, None for dropped ones; of the same moment as the last part, so that they hold its
    leases' reservations."""


async def collect(token_pools: Mapping[str, TokenPool]) -> Batch:
    """Copy the items that the journals name, and empty the journals."""
    batch, token_pools = Batch(), dict(token_pools)  # a reload may add and remove some meanwhile
    for turn in range(ROUNDS):
        taken = _take(token_pools)
        count = sum(len(j.accounts) + len(j.leases) for j in taken.values())
        last = count <= SLICE or turn == ROUNDS - 1
        for model, journal in taken.items():
            for part in _slices(token_pools[model], model, journal):
                batch.parts.append(part)
                if not last:
                    await asyncio.sleep(0)
        if last:
            break
    if batch.parts:
        batch.pools.update(
            (model, copy_pool(token_pool)) for model, token_pool in token_pools.items()
        )
    for token_pool in token_pools.values():
        book = token_pool.limits
        if book.changed:
            changed, book.changed = book.changed, set()
            batch.limits.update((name, copy_limit(book.counters.get(name))) for name in changed)
    return batch


def _take(token_pools: Mapping[str, TokenPool]) -> dict[str, Journal]:
    taken = {}
    for model, token_pool in token_pools.items():
        if token_pool.journal is not None:
            taken[model], token_pool.journal = token_pool.journal, Journal()
    return taken


def _slices(token_pool: TokenPool, model: str, journal: Journal) -> Iterator[SnapshotSlice]:
    """Yield the parts; each is copied on demand."""
    names, ids = iter(journal.accounts), iter(journal.leases)
    while some := list(islice(names, SLICE)):
        yield SnapshotSlice(
            model, {name: copy_account(token_pool.accounts.get(name)) for name in some}
        )
    while some := list(islice(ids, SLICE)):
        yield SnapshotSlice(
            model, {}, {lease_id: copy_lease(token_pool, lease_id) for lease_id in some}
        )


def copy_account(account: Account | None) -> AccountCopy | None:
    """A copy of an account; None for None."""
    if account is None:
        return None
    return AccountCopy(*(getattr(account, name) for name in AccountCopy.__struct_fields__))


def copy_lease(token_pool: TokenPool, lease_id: str) -> LeaseRecord | Tombstone | None:
    """A copy of a lease in force, or the tombstone of an expired one."""
    record = token_pool.leases.get(lease_id)
    if record is not None:
        return msgspec.structs.replace(record)
    tombstone = token_pool.tombstones.get(lease_id)
    return None if tombstone is None else Tombstone(*tombstone)


def copy_limit(counter: Counter | None) -> LimitCopy | None:
    """A copy of a limit's counter; None for None."""
    if counter is None:
        return None
    return LimitCopy(
        total=counter.total,
        warned_s=counter.warned_s,
        added=counter.added,
        added_until_s=counter.added_until_s,
        starts=[*counter.starts],
        spent=[*counter.spent],
    )


def restore_limit(book: LimitBook, limit_id: str, copy: LimitCopy) -> None:
    """Restore a limit's saved counter."""
    counter = book.counter(limit_id)
    for field in LimitCopy.__struct_fields__:
        setattr(counter, field, getattr(copy, field))


def copy_pool(token_pool: TokenPool) -> PoolCopy:
    """A copy of the pool-wide state."""
    return PoolCopy(
        surplus=token_pool.surplus,
        surplus_s=token_pool.surplus_s,
        surplus_per_s=token_pool.surplus_per_s,
        ticked_s=token_pool.ticked_s,
        settled=token_pool.settled,
        refunds=token_pool.refunds,
        service_s=[pool.service_s for pool in token_pool.pools],
    )


def restore_account(token_pool: TokenPool, name: str, copy: AccountCopy, now_s: float) -> bool:
    """Restore an account's saved counters; False if its entitlement no longer exists.

    Times later than now become now, because the machine's clock may have been set back.
    """
    account = token_pool.accounts.get(name)
    if account is None:
        return False
    for field in AccountCopy.__struct_fields__:
        value = getattr(copy, field)
        setattr(account, field, min(value, now_s) if field.endswith("_s") else value)
    if account.terms.service_class != "elastic":
        account.debt = 0.0
    account.epoch = -1
    if abs(account.debt) > SETTLED or account.burst > SETTLED:
        token_pool.active.add(name)
    return True


def restore_pool(token_pool: TokenPool, copy: PoolCopy, now_s: float) -> None:
    """Restore the pool-wide state."""
    token_pool.surplus, token_pool.surplus_s = copy.surplus, min(copy.surplus_s, now_s)
    token_pool.surplus_per_s = min(copy.surplus_per_s, token_pool.terms.tokens_per_s)
    token_pool.ticked_s = min(copy.ticked_s, now_s)
    token_pool.settled, token_pool.refunds = copy.settled, copy.refunds
    for pool, service_s in zip(token_pool.pools, copy.service_s, strict=False):
        pool.service_s = service_s


def restore_lease(token_pool: TokenPool, record: LeaseRecord, now_s: float) -> bool:
    """Count a former process's lease until it expires; False if its pool or entitlement is gone.

    Call in the order of expiry. The lease is not evictable, because no process can end it early.
    """
    account = token_pool.accounts.get(record.entitlement)
    if account is None or record.pool >= len(token_pool.pools):
        return False
    account.since_s = now_s
    record.expires_s = min(record.expires_s, now_s + LEASE_TTL_S)
    token_pool.move(account, record.pool, record.sequences, record.kv_bytes)
    token_pool.limits.hold(record.held)
    token_pool.hold(account, record)
    token_pool.pools[record.pool].evictable.pop(record.id, None)
    return True
