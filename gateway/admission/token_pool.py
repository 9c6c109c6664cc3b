"""The state of one model's token pool, which admission reads and changes.

One model has one `TokenPool`, which covers all its pools of workers, so that admission, spillover
and a lease's transfer are each one atomic step. The Redis store keeps the same fields, and its
scripts transcribe these functions.

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
from sortedcontainers import SortedList

from gateway.admission.limit_book import LimitBook
from gateway.admission.terms import LeaseRecord, Terms
from gateway.records.entitlement import OVERDUE_WEIGHT, Entitlement, weight
from gateway.records.limit import Holding

MAX_S = 60.0
"""Longest Retry-After."""
FIRST_SERVICE_S = 5.0
"""Mean service time assumed before any request was served."""
BUCKET_S = 10.0
"""A bucket holds at least this many seconds of its rate."""
LEASE_TTL_S = 30.0
RENEW_EVERY_S = 10.0
REAP_BATCH = 64
TOMBSTONES = 10_000
"""Tombstones kept: expired leases whose late usage still replaces the charged estimate."""
RETAINED_DENIALS = 2_000
"""Most refused tenants that a pool remembers in a tick."""


class RecentDenials:
    """Tenants that a pool refused recently, each with the weight of its latest refusal.

    Each tenant counts once; otherwise one tenant's retries would lengthen everybody's wait.
    """

    def __init__(self) -> None:
        self.weights: dict[str, float] = {}
        """By tenant."""
        self._ascending = SortedList()

    def note(self, tenant: str, weight: float, most: int = RETAINED_DENIALS) -> None:
        """Record a refused tenant; beyond `most` tenants no new one is added."""
        self.forget(tenant)
        if len(self.weights) < most:
            self.weights[tenant] = weight
            self._ascending.add(weight)

    def forget(self, tenant: str) -> None:
        """Remove a tenant, if it is counted."""
        weight = self.weights.pop(tenant, None)
        if weight is not None:
            self._ascending.remove(weight)

    def others_above(self, tenant: str, weight: float) -> int:
        """Number of other tenants whose refused request had at least this weight."""
        count: int = len(self._ascending) - self._ascending.bisect_left(weight)
        return count - (self.weights.get(tenant, -1.0) >= weight)


class Journal:
    """Changes since it was last emptied, for a reader that keeps a copy of the token pool."""

    def __init__(self) -> None:
        self.accounts: set[str] = set()
        """Names of changed accounts; a name without an account was removed."""
        self.leases: set[str] = set()
        """Ids of changed leases; an id without a lease has ended."""


class Account:
    """Usage, bucket, debt and ledger of one entitlement."""

    # With more than 29 fields instances would not share their keys: 1.6 KB each instead of 0.3.

    def __init__(self, terms: Entitlement, pools: int) -> None:
        self.terms = terms
        self.epoch = -1
        """Epoch of the terms that `weight` and `most` derive from; -1: recompute."""
        self.weight = 0.0
        """w_e; read it through `TokenPool.weight_now`."""
        self.most = 0
        """r_e; read it through `TokenPool.max_sequences`."""
        self.inflight = [0] * pools
        """Sequences holding a lease, by pool."""
        self.spilled = [0] * pools
        """Part of `inflight` that requested another pool."""
        self.total = 0
        self.kv_bytes = 0
        self.level = 0.0
        """Level of its token bucket at `level_s`; a bucket that was never used is full."""
        self.level_s = 0.0
        self.borrowed = 0.0
        """Recent borrowing, drained at (limit - lambda_e)."""
        self.borrowed_s = 0.0
        self.debt = 0.0
        self.burst = 0.0
        self.served = 0
        """Tokens settled in this tick."""
        self.denied = 0
        """Denials by a pool in this tick that a higher weight could have avoided."""
        self.denied_seconds = 0.0
        """Slot-seconds that these would have used at the pool's mean service time."""
        self.denied_kv_seconds = 0.0
        """Byte-seconds of KV cache likewise."""
        self.promised = 0.0
        """Tokens promised to earlier refusals by Retry-After, drained at lambda_e."""
        self.promised_s = 0.0
        self.waiters = 0.0
        """Sequences refused because slots were full, drained as slots come free."""
        self.waiters_s = 0.0
        self.mean_cost = 0.0
        """Moving mean of settled charges, in tokens per sequence; 0 before the first."""
        self.inflight_seconds = 0.0
        """Integral of `total` over this tick, for its time average; `kv_seconds` likewise."""
        self.kv_seconds = 0.0
        self.since_s = 0.0
        """The time up to which the integrals are computed."""
        self.debited = 0
        self.refunded = 0
        self.used = 0
        """Ledger, never reset: debited - refunded = used once nothing is in flight."""

    def own(self, pool: int) -> int:
        """Sequences in flight in a pool that requested it; these count against the baseline."""
        return self.inflight[pool] - self.spilled[pool]

    @property
    def tenant(self) -> str:
        """The tenant, or the entitlement's own name where none is set."""
        return self.terms.tenant or self.terms.name

    def own_level(self, depth: float, now_s: float) -> float:
        """The level of its own bucket, refilled up to now."""
        passed_s = now_s - self.level_s
        if passed_s > 0:
            self.level += self.terms.tokens_per_s * passed_s
            self.level_s = now_s
        self.level = min(self.level, depth)
        return self.level

    def recently_borrowed(self, now_s: float) -> float:
        """Tokens borrowed and not yet drained at `tokens_per_s_limit` - lambda_e."""
        rate = max(0.0, self.terms.tokens_per_s_limit - self.terms.tokens_per_s)
        return max(0.0, self.borrowed - rate * max(0.0, now_s - self.borrowed_s))

    def may_borrow(self, tokens: int, now_s: float) -> bool:
        """Whether borrowing these tokens stays within its `tokens_per_s_limit`."""
        if self.terms.tokens_per_s_limit <= 0:
            return True
        rate = self.terms.tokens_per_s_limit - self.terms.tokens_per_s
        if rate <= 0:
            return False
        recent = self.recently_borrowed(now_s)
        return recent <= 0 or recent + tokens <= BUCKET_S * rate

    def average(self, now_s: float) -> None:
        """Extend the tick's integrals of sequences and KV up to now."""
        passed_s = now_s - self.since_s
        if passed_s <= 0:
            return
        if self.total:
            self.inflight_seconds += self.total * passed_s
            self.kv_seconds += self.kv_bytes * passed_s
        self.since_s = now_s

    def still_promised(self, rate_per_s: float, now_s: float) -> float:
        """Tokens promised to earlier refusals and not refilled since."""
        return max(0.0, self.promised - rate_per_s * max(0.0, now_s - self.promised_s))

    def still_waiting(self, places: int, service_s: float, now_s: float) -> float:
        """Earlier refused sequences still waiting, as `places` slots come free per `service_s`."""
        gone = places * max(0.0, now_s - self.waiters_s) / max(1e-3, service_s)
        return max(0.0, self.waiters - gone)

    def wait_too(self, sequences: int, places: int, service_s: float, now_s: float) -> None:
        """Count a refused request as waiting; at most what MAX_S can serve is kept."""
        waiting = self.still_waiting(places, service_s, now_s) + sequences
        self.waiters = min(waiting, MAX_S * (places + 1) / max(1e-3, service_s))
        self.waiters_s = now_s


class PoolCounters:
    """Admission's counters for one pool of workers."""

    def __init__(self) -> None:
        self.inflight = 0
        self.kv_bytes = 0
        self.idle_dedicated = 0
        """Unused baseline of dedicated entitlements, kept free for them."""
        self.unreserved = 0
        """Sequences in flight of non-reserving classes."""
        self.service_s = FIRST_SERVICE_S
        """Moving mean of a lease's lifetime, in seconds."""
        self.weights = SortedList()
        self.evictable: dict[str, LeaseRecord] = {}
        self.denials = RecentDenials()
        """Tenants refused in this tick; `denials_last` has those of the last tick only."""
        self.denials_last = RecentDenials()
        self.refused_sequences = 0
        """Of requests that more workers would have let in, since the start."""
        self.refused_kv_bytes = 0
        self.refused_tokens = 0
        self.served_tokens = 0
        """Settled tokens of its leases, since the start."""

    def others_refused(self, tenant: str, weight: float) -> int:
        """Other tenants refused in this tick or the last, with at least this weight."""
        now = self.denials.others_above(tenant, weight)
        return now + self.denials_last.others_above(tenant, weight)


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
        else:
            self._reserve(account, -1)
            if entitlement.reserves != account.terms.reserves:  # what is in flight is recounted
                for counters, sequences in zip(self.pools, account.inflight, strict=True):
                    counters.unreserved += -sequences if entitlement.reserves else sequences
            account.terms, account.epoch = entitlement, -1
        self._reserve(account, 1)
        if entitlement.service_class != "elastic":
            account.debt = 0.0
        keeps = entitlement.service_class == "dedicated" and any(entitlement.baseline)
        (self.dedicated.add if keeps else self.dedicated.discard)(entitlement.name)
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
            self.note(None, lease_id)

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
                self.idle_of(self.accounts[name], pool) for name in self.dedicated
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

    def hold(self, account: Account, lease: LeaseRecord) -> None:
        """Add a new lease, whose id is not taken, to all indexes."""
        self.leases[lease.id] = lease
        self.active.add(lease.entitlement)
        self.file(account, lease)

    def note(self, account: Account | None, lease_id: str = "") -> None:
        """Record a change in the journal, if there is one."""
        if self.journal is not None:
            if account is not None:
                self.journal.accounts.add(account.terms.name)
            if lease_id:
                self.journal.leases.add(lease_id)

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
                counters.idle_dedicated += sign * self.idle_of(account, pool)

    def idle_of(self, account: Account, pool: int) -> int:
        """Slots that a dedicated entitlement keeps idle in a pool, if it is bound there."""
        terms = account.terms
        if terms.suspended or not self.bound(terms, pool):
            return 0
        return max(0, terms.baseline_of(pool) - account.inflight[pool])

    # -- buckets and ledgers

    def weight_now(self, account: Account) -> float:
        """The current weight w_e of an entitlement."""
        if account.epoch != self.epoch:
            self._derive(account)
        # Debt is at most 1, so `overdue_debt` of 1 turns this off.
        if account.debt > self.terms.profile.overdue_debt and not account.total:
            terms = account.terms
            if terms.service_class == "elastic" and sum(terms.baseline) > 0:
                return OVERDUE_WEIGHT
        return account.weight

    def max_sequences(self, account: Account) -> int:
        """r_e over all pools: the baseline of a guaranteed entitlement, else its limit or C."""
        if account.epoch != self.epoch:
            self._derive(account)
        return account.most

    def depth_tokens(self, account: Account) -> float:
        """The depth of an entitlement's bucket, in tokens."""
        if account.epoch != self.epoch:
            self._derive(account)
        least, moving = BUCKET_S * account.terms.tokens_per_s, account.most * account.mean_cost
        return max(least, moving, float(self.terms.largest_tokens))

    def _derive(self, account: Account) -> None:
        """Recompute the derived values after terms, burst or debt changed."""
        terms, whole = account.terms, self.terms
        account.weight = weight(
            whole.profile,
            terms.service_class,
            terms.slo_ms,
            whole.mean_slo_ms,
            account.burst,
            account.debt,
        )
        if terms.service_class == "guaranteed":
            account.most = sum(terms.baseline)
        else:
            account.most = terms.limit or sum(whole.slots)
        account.epoch = self.epoch

    def surplus_depth(self) -> float:
        """The depth of the surplus bucket, in tokens; 0 where no rate is enforced."""
        rate = self.terms.tokens_per_s
        return max(BUCKET_S * rate, float(self.terms.largest_tokens)) if rate > 0 else 0.0

    def surplus_level(self, now_s: float) -> float:
        """The level of the surplus bucket, refilled up to now."""
        gained = self.surplus_per_s * max(0.0, now_s - self.surplus_s)
        self.surplus = min(self.surplus_depth(), self.surplus + gained)
        self.surplus_s = max(now_s, self.surplus_s)
        return self.surplus

    def pay(self, account: Account, funded: str, tokens: int, now_s: float) -> None:
        """Take tokens from the bucket that funds a lease (negative: give back, up to its depth)."""
        if funded == "own":
            depth = self.depth_tokens(account)
            account.level = min(account.own_level(depth, now_s) - tokens, depth)
        elif funded == "surplus":
            if self.terms.tokens_per_s > 0:
                self.surplus = min(self.surplus_level(now_s) - tokens, self.surplus_depth())
            if account.terms.tokens_per_s_limit > 0:
                account.borrowed = max(0.0, account.recently_borrowed(now_s) + tokens)
                account.borrowed_s = now_s

    def correct(
        self, account: Account, funded: str, estimate: int, used: int, now_s: float
    ) -> None:
        """Replace a reserved estimate by the actual usage, in bucket and ledger."""
        if used != estimate:
            self.pay(account, funded, used - estimate, now_s)
        if used <= estimate:
            account.refunded += estimate - used
        else:
            account.debited += used - estimate
        account.used += used

    def serve(self, account: Account, pool: int, funded: str, tokens: int) -> None:
        """Count settled tokens for the tick, and as the pool's."""
        account.served += tokens
        self.pools[pool].served_tokens += tokens
        if funded != "surplus":
            self.own_served += tokens
        self.active.add(account.terms.name)
