"""The state of one model's token pool, which admission reads and changes.

One model has one `TokenPool`, which covers all its pools of workers, so that admission, spillover
and a lease's transfer are each one atomic step. Only this package and admission change it. The
Redis store keeps the same fields, and its scripts transcribe these functions.

Each entitlement has a bucket of tokens and a ledger, and all share the surplus bucket. An
entitlement's bucket refills at lambda_e up to its depth; the surplus bucket refills at the token
rate that the pool leaves unused (token-pools paper, section 4.3). Where pools state no rate there
is no such bucket, and the surplus is what slots and KV have free: a pool's rate is its slots
times the rate of a busy slot, so it is used up exactly when the slots are. When requests use more
than they reserved, a level goes below zero without bound, and the bucket admits again only after
the debt is paid in full. So in any period a bucket pays out at most its rate, its depth and the
tokens in flight. The ledger counts whole tokens: debited - refunded = used exactly, once nothing
is in flight.

All times are Unix seconds of one clock (the store's). Sequences, bytes and tokens are whole.
"""

from collections import OrderedDict

import msgspec

from gateway.admission.counters import (
    Account,
    Journal,
    PoolCounters,
)
from gateway.admission.limit_book import LimitBook
from gateway.admission.terms import LeaseRecord, Terms
from gateway.records.entitlement import OVERDUE_WEIGHT, Entitlement, weight
from gateway.records.limit import Holding

BUCKET_S = 10.0
"""A bucket holds at least this many seconds of its rate."""
LEASE_TTL_S = 30.0
RENEW_EVERY_S = 10.0
REAP_BATCH = 64
TOMBSTONES = 10_000
"""Tombstones kept: expired leases whose late usage still replaces the charged estimate."""
RETAINED_DENIALS = 2_000
"""Most refused tenants that a pool remembers in a tick."""


class TokenPool:
    """Admission's whole state for one model."""

    def __init__(self, terms: Terms, limits: LimitBook | None = None) -> None:
        self.terms = terms
        self.limits = limits or LimitBook()
        """Limits of keys, entitlements and tenants; all models of a process share them."""
        self.epoch = 0
        """Counts changes of the terms; accounts recompute derived values of older epochs."""
        self.pools = [PoolCounters() for _ in terms.slots]
        self.accounts: dict[str, Account] = {}
        self.dedicated: set[str] = set()
        """Accounts whose idle baseline is reserved: no more than there are slots."""
        self.journal: Journal | None = None
        """None unless a reader empties it."""
        self.leases: OrderedDict[str, LeaseRecord] = OrderedDict()
        """By id, in order of issue or renewal: the order of expiry, for there is one TTL."""
        self.reap_at_s = 0.0
        """No lease expires before this time."""
        self.tombstones: dict[str, tuple[str, int, str, tuple[Holding, ...]]] = {}
        """Expired lease id -> (entitlement, tokens charged, funded, limits), oldest first."""
        self.active: set[str] = set()
        """Entitlements that the next tick has to update."""
        self.surplus = 0.0
        self.surplus_s = 0.0
        self.surplus_per_s = terms.tokens_per_s
        """Refill rate of the surplus bucket: Lambda less the recent use that it did not pay for."""
        self.own_served = 0
        """Tokens settled in this tick and not paid by the surplus."""
        self.priority_denials = 0
        """Denials by pools in this tick that a higher weight could have avoided."""
        self.ticked_s = 0.0
        self.settled = 0
        self.refunds = 0

    def define(self, entitlement: Entitlement) -> Account:
        """Add an entitlement or change its terms; its counters stay."""
        account = self.accounts.get(entitlement.name)
        if account is None:
            account = self.accounts[entitlement.name] = Account(entitlement, len(self.pools))
            self._reserve(account, 1)
        else:
            self._reserve(account, -1)
            if entitlement.reserves != account.terms.reserves:  # what is in flight is recounted
                for counters, sequences in zip(self.pools, account.inflight, strict=True):
                    counters.unreserved += -sequences if entitlement.reserves else sequences
            account.terms = entitlement
            account.epoch = -1
            self._reserve(account, 1)
            if entitlement.service_class != "elastic":
                account.debt = 0.0
        if entitlement.service_class == "dedicated" and any(entitlement.baseline):
            self.dedicated.add(entitlement.name)
        else:
            self.dedicated.discard(entitlement.name)
        self.note(account)
        return account

    def remove(self, name: str) -> None:
        """Remove an entitlement and its tombstones, so that a later namesake is not charged.

        ValueError while it has sequences in flight: suspend it first and let them end.
        """
        account = self.accounts.get(name)
        if account is None:
            return
        if account.total:
            raise ValueError(f"{name} has {account.total} sequences in flight")
        self._reserve(account, -1)
        self.dedicated.discard(name)
        self.note(account)
        del self.accounts[name]
        self.active.discard(name)
        for lease_id in [i for i, tombstone in self.tombstones.items() if tombstone[0] == name]:
            del self.tombstones[lease_id]
            if self.journal is not None:
                self.journal.leases.add(lease_id)

    def change(self, terms: Terms) -> None:
        """Adopt new capacity or rules.

        Pools are added if there are more now. Those that are gone stay, without slots, for the
        leases that are still held there.
        """
        for _ in range(len(terms.slots) - len(self.pools)):
            self.pools.append(PoolCounters())
            for account in self.accounts.values():
                account.inflight.append(0)
                account.spilled.append(0)
        gone = len(self.pools) - len(terms.slots)
        if gone:
            terms = msgspec.structs.replace(terms, slots=(*terms.slots, *([0] * gone)))
        more_per_s = terms.tokens_per_s - self.terms.tokens_per_s
        self.surplus_per_s = max(0.0, self.surplus_per_s + more_per_s)
        self.terms = terms
        self.epoch += 1
        for pool, counters in enumerate(self.pools):
            counters.idle_dedicated = sum(
                self._idle_of(self.accounts[name], pool) for name in self.dedicated
            )

    def move(self, account: Account, pool: int, sequences: int, kv_bytes: int) -> None:
        """Add sequences and KV bytes to a pool's counters (negative: subtract)."""
        counters = self.pools[pool]
        if account.terms.service_class == "dedicated":
            self._reserve(account, -1)
            account.inflight[pool] += sequences
            self._reserve(account, 1)
        else:
            account.inflight[pool] += sequences
        account.total += sequences
        account.kv_bytes += kv_bytes
        counters.inflight += sequences
        counters.kv_bytes += kv_bytes
        if not account.terms.reserves:
            counters.unreserved += sequences
        if self.journal is not None:
            self.journal.accounts.add(account.terms.name)

    def first_to_expire(self) -> LeaseRecord | None:
        """The lease that expires first, if there is one."""
        return next(iter(self.leases.values()), None)

    def hold(self, account: Account, lease: LeaseRecord) -> None:
        """Add a new lease, whose id is not taken, to all indexes."""
        self.leases[lease.id] = lease
        self.active.add(lease.entitlement)
        self.file(account, lease)

    def note(self, account: Account, lease: LeaseRecord | None = None) -> None:
        """Record a change in the journal, if there is one."""
        if self.journal is not None:
            self.journal.accounts.add(account.terms.name)
            if lease is not None:
                self.journal.leases.add(lease.id)

    def release(self, account: Account, lease: LeaseRecord) -> None:
        """Remove a lease from its pool's counters; `file` may add it to another's."""
        if self.journal is not None:
            self.journal.leases.add(lease.id)
        counters = self.pools[lease.pool]
        if counters.evictable:
            counters.evictable.pop(lease.id, None)
        counters.weights.discard(lease.weight)
        if lease.spilled:
            account.spilled[lease.pool] -= lease.sequences
        self.move(account, lease.pool, -lease.sequences, -lease.kv_bytes)

    def file(self, account: Account, lease: LeaseRecord) -> None:
        """Index a lease by weight and evictability in its pool (again, after it moved)."""
        if self.journal is not None:
            self.journal.leases.add(lease.id)
        counters = self.pools[lease.pool]
        counters.weights.add(lease.weight)
        if lease.spilled:
            account.spilled[lease.pool] += lease.sequences
        if self.gives_way(account, lease):
            counters.evictable[lease.id] = lease

    def gives_way(self, account: Account, lease: LeaseRecord) -> bool:
        """Whether a lease may be evicted, by its entitlement's current class."""
        service_class = account.terms.service_class
        return service_class == "preemptible" or (
            self.terms.reclaim_spot and (lease.spilled or service_class == "spot")
        )

    def bound(self, entitlement: Entitlement, pool: int) -> bool:
        """Whether a pool holds an entitlement's reserve; True for non-reserving classes."""
        return not entitlement.reserves or entitlement.created <= self.terms.bound_in(pool)

    def bound_everywhere(self, entitlement: Entitlement) -> bool:
        """Whether every pool holds the entitlement's reserve there."""
        return all(
            self.bound(entitlement, pool)
            for pool, sequences in enumerate(entitlement.baseline)
            if sequences
        )

    def _reserve(self, account: Account, sign: int) -> None:
        if account.terms.service_class == "dedicated":
            for pool, counters in enumerate(self.pools):
                counters.idle_dedicated += sign * self._idle_of(account, pool)

    def _idle_of(self, account: Account, pool: int) -> int:
        """Slots that a dedicated entitlement keeps idle in a pool, if it is bound there."""
        terms = account.terms
        if terms.suspended or not self.bound(terms, pool):
            return 0
        return max(0, terms.baseline_of(pool) - account.inflight[pool])


# -- buckets and ledgers


def weight_now(token_pool: TokenPool, account: Account) -> float:
    """The current weight w_e of an entitlement."""
    if account.epoch != token_pool.epoch:
        _derive(token_pool, account)
    # Debt is at most 1, so `overdue_debt` of 1 turns this off.
    if account.debt > token_pool.terms.profile.overdue_debt and not account.total:
        terms = account.terms
        if terms.service_class == "elastic" and sum(terms.baseline) > 0:
            return OVERDUE_WEIGHT
    return account.weight


def max_sequences(token_pool: TokenPool, account: Account) -> int:
    """r_e over all pools: the baseline of a guaranteed entitlement, else its limit or C."""
    if account.epoch != token_pool.epoch:
        _derive(token_pool, account)
    return account.most


def depth_tokens(token_pool: TokenPool, account: Account) -> float:
    """The depth of an entitlement's bucket, in tokens."""
    if account.epoch != token_pool.epoch:
        _derive(token_pool, account)
    return max(account.floor_tokens, account.most * account.mean_cost)


def _derive(token_pool: TokenPool, account: Account) -> None:
    """Recompute the derived values after terms, burst or debt changed."""
    terms = account.terms
    account.weight = weight(
        token_pool.terms.profile,
        terms.service_class,
        terms.slo_ms,
        token_pool.terms.mean_slo_ms,
        account.burst,
        account.debt,
    )
    if terms.service_class == "guaranteed":
        account.most = sum(terms.baseline)
    else:
        account.most = terms.limit or sum(token_pool.terms.slots)
    account.floor_tokens = max(
        BUCKET_S * terms.tokens_per_s, float(token_pool.terms.largest_tokens)
    )
    account.epoch = token_pool.epoch


def own_level(account: Account, depth: float, now_s: float) -> float:
    """The level of an entitlement's own bucket, refilled up to now."""
    passed_s = now_s - account.level_s
    if passed_s > 0:
        account.level += account.terms.tokens_per_s * passed_s
        account.level_s = now_s
    account.level = min(account.level, depth)
    return account.level


def surplus_depth(token_pool: TokenPool) -> float:
    """The depth of the surplus bucket, in tokens; 0 where no rate is enforced."""
    rate = token_pool.terms.tokens_per_s
    return max(BUCKET_S * rate, float(token_pool.terms.largest_tokens)) if rate > 0 else 0.0


def surplus_level(token_pool: TokenPool, now_s: float) -> float:
    """The level of the surplus bucket, refilled up to now."""
    gained = token_pool.surplus_per_s * max(0.0, now_s - token_pool.surplus_s)
    token_pool.surplus = min(surplus_depth(token_pool), token_pool.surplus + gained)
    token_pool.surplus_s = max(now_s, token_pool.surplus_s)
    return token_pool.surplus


def may_borrow(account: Account, tokens: int, now_s: float) -> bool:
    """Whether borrowing these tokens stays within the entitlement's `tokens_per_s_limit`."""
    terms = account.terms
    if terms.tokens_per_s_limit <= 0:
        return True
    rate = terms.tokens_per_s_limit - terms.tokens_per_s
    if rate <= 0:
        return False
    recent = recently_borrowed(account, now_s)
    return recent <= 0 or recent + tokens <= BUCKET_S * rate


def recently_borrowed(account: Account, now_s: float) -> float:
    """Tokens borrowed and not yet drained at `tokens_per_s_limit` - lambda_e."""
    rate = max(0.0, account.terms.tokens_per_s_limit - account.terms.tokens_per_s)
    return max(0.0, account.borrowed - rate * max(0.0, now_s - account.borrowed_s))


def pay(token_pool: TokenPool, account: Account, funded: str, tokens: int, now_s: float) -> None:
    """Take tokens from the bucket that funds a lease (negative: give back, up to its depth)."""
    if funded == "own":
        depth = depth_tokens(token_pool, account)
        level = own_level(account, depth, now_s) - tokens
        account.level = min(level, depth)
    elif funded == "surplus":
        if token_pool.terms.tokens_per_s > 0:
            level = surplus_level(token_pool, now_s) - tokens
            token_pool.surplus = min(level, surplus_depth(token_pool))
        if account.terms.tokens_per_s_limit > 0:
            account.borrowed = max(0.0, recently_borrowed(account, now_s) + tokens)
            account.borrowed_s = now_s


def correct(
    token_pool: TokenPool, account: Account, funded: str, estimate: int, used: int, now_s: float
) -> None:
    """Replace a reserved estimate by the actual usage, in bucket and ledger."""
    if used != estimate:
        pay(token_pool, account, funded, used - estimate, now_s)
    if used <= estimate:
        account.refunded += estimate - used
    else:
        account.debited += used - estimate
    account.used += used


def serve(token_pool: TokenPool, account: Account, pool: int, funded: str, tokens: int) -> None:
    """Count settled tokens for the tick, and as the pool's."""
    account.served += tokens
    token_pool.pools[pool].served_tokens += tokens
    if funded != "surplus":
        token_pool.own_served += tokens
    token_pool.active.add(account.terms.name)


def average(account: Account, now_s: float) -> None:
    """Extend the tick's integrals of sequences and KV up to now."""
    passed_s = now_s - account.since_s
    if passed_s <= 0:
        return
    if account.total:
        account.inflight_seconds += account.total * passed_s
        account.kv_seconds += account.kv_bytes * passed_s
    account.since_s = now_s
