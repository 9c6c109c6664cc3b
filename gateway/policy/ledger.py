"""The state of one model's token pool: what admission reads and changes.

One model has one `TokenPool`; it holds all its pools of workers, so that admission, spillover
and a lease's transfer are one atomic step. Plain mutable state, changed only by the functions
of `gateway.policy.admission`, `debt` and `eviction`; the Redis store keeps the same fields and
its scripts are transcriptions of the same functions.

All times are Unix seconds of one clock (the store's). Sequences, bytes and tokens are whole.
"""

from collections import OrderedDict
from heapq import heappush

from gateway.domain import Record
from gateway.policy.entitlements import PROFILES, AdmissionProfile, Entitlement

LEASE_TTL_S = 30.0
RENEW_EVERY_S = 10.0
REAPED_AT_ONCE = 64
TOMBSTONES = 10_000
"""Expired leases whose late usage still replaces the charged estimate."""
DENIALS_KEPT = 2_000
"""Weights of denied requests that a pool remembers in a tick."""
FIRST_SERVICE_S = 5.0
"""Mean service time before any request was served."""


class Terms(Record, frozen=True, kw_only=True):
    """A model's capacity and rules. Lists are by pool, windows ascending."""

    slots: tuple[int, ...]
    """C: sequences that the ready workers run at once."""
    kv_bytes: tuple[int, ...] = ()
    """KVcap; 0 or missing for not enforced."""
    tokens_per_s: float = 0.0
    """Lambda, over all pools; 0 for not enforced and no surplus."""
    largest_tokens: int = 0
    """The largest single request that the widest window takes: no bucket is smaller."""
    mean_slo_ms: float = 0.0
    """l_bar."""
    bound_until: int = 1 << 53
    """Reserving entitlements created after this one do not fit today's capacity."""
    ever_bound_until: int = 1 << 53
    """The same, at its highest so far: those between were bound once and are degraded."""
    headroom: int = 1
    """Slots that backfill and above-baseline traffic leave free."""
    spill_queue: int = 0
    reclaim_spot: bool = False
    """Whether spot, too, is evicted for protected requests."""
    profile: AdmissionProfile = PROFILES["default"]

    def kv_of(self, pool: int) -> int:
        """KVcap of a pool; 0 for not enforced."""
        return self.kv_bytes[pool] if pool < len(self.kv_bytes) else 0


class Held:
    """A lease in force."""

    __slots__ = (
        "entitlement",
        "estimate_tokens",
        "evicted",
        "expires_s",
        "funded",
        "id",
        "issued_s",
        "kv_bytes",
        "owner",
        "pool",
        "sequences",
        "spilled",
        "weight",
        "would_deny",
    )

    def __init__(
        self,
        id: str,  # noqa: A002 - what it is
        entitlement: str,
        pool: int,
        sequences: int,
        estimate_tokens: int,
        kv_bytes: int,
        weight: float,
        issued_s: float,
        expires_s: float,
        funded: str,
        owner: str,
        would_deny: str,
        *,
        spilled: bool,
    ) -> None:
        self.id = id
        self.entitlement = entitlement
        self.pool = pool
        self.sequences = sequences
        self.estimate_tokens = estimate_tokens
        """Charged so far: the estimate, and what was streamed past it."""
        self.kv_bytes = kv_bytes
        self.weight = weight
        """w_e when it was issued (a spilled lease at most `SPILLED_WEIGHT`)."""
        self.issued_s = issued_s
        self.expires_s = expires_s
        self.funded = funded
        """own, surplus or none: which bucket paid."""
        self.spilled = spilled
        self.owner = owner
        """The process that serves it."""
        self.would_deny = would_deny
        """Observe mode: the reason it would have been denied for, or ""."""
        self.evicted = False


class Account:
    """What an entitlement uses and is owed."""

    __slots__ = (
        "borrowed",
        "borrowed_s",
        "burst",
        "debited",
        "debt",
        "denied",
        "inflight",
        "inflight_seconds",
        "kv_bytes",
        "kv_seconds",
        "level",
        "level_s",
        "mean_cost",
        "promised",
        "promised_s",
        "refunded",
        "served",
        "since_s",
        "terms",
        "total",
        "used",
        "waiters",
        "waiters_s",
    )

    def __init__(self, terms: Entitlement, pools: int) -> None:
        self.terms = terms
        self.inflight = [0] * pools
        """Sequences holding a lease, by pool."""
        self.total = 0
        self.kv_bytes = 0
        self.level = 0.0
        """Token bucket at `level_s`; never used before means full."""
        self.level_s = 0.0
        self.borrowed = 0.0
        """Recent borrowing, drained at (limit - lambda_e)."""
        self.borrowed_s = 0.0
        self.debt = 0.0
        self.burst = 0.0
        self.served = 0
        """Tokens settled in this tick."""
        self.denied = 0
        """Denials for the pool's sake in this tick."""
        self.promised = 0.0
        """Tokens that earlier refusals were told to wait for, drained at lambda_e."""
        self.promised_s = 0.0
        self.waiters = 0.0
        """Earlier refusals for concurrency or KV, drained as leases end."""
        self.waiters_s = 0.0
        self.mean_cost = 0.0
        """Moving mean of settled charges, tokens."""
        self.inflight_seconds = 0.0
        """Integral of `total` over this tick, for its time average; likewise KV."""
        self.kv_seconds = 0.0
        self.since_s = 0.0
        self.debited = 0
        self.refunded = 0
        self.used = 0
        """The uncut ledger: debited - refunded = used once nothing is in flight."""


class PoolBook:
    """One pool of workers as admission counts it."""

    __slots__ = (
        "denials",
        "denials_last",
        "evictable",
        "idle_dedicated",
        "inflight",
        "kv_bytes",
        "service_s",
        "weights",
    )

    def __init__(self) -> None:
        self.inflight = 0
        self.kv_bytes = 0
        self.idle_dedicated = 0
        """Unused baseline of dedicated entitlements: lent to nobody."""
        self.service_s = FIRST_SERVICE_S
        """Moving mean of a lease's life."""
        self.weights: list[tuple[float, str]] = []
        """Heap of (weight, lease id) of leases in force, with dead entries among them."""
        self.evictable: dict[str, Held] = {}
        self.denials: list[float] = []
        """Weights of requests denied on priority in this tick; the newest are kept."""
        self.denials_last: list[float] = []


class TokenPool:
    """Everything that admission knows of one model."""

    __slots__ = (
        "accounts",
        "active",
        "dedicated",
        "leases",
        "own_served",
        "pools",
        "priority_denials",
        "refunds",
        "settled",
        "surplus",
        "surplus_per_s",
        "surplus_s",
        "terms",
        "ticked_s",
        "tombstones",
    )

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.pools = [PoolBook() for _ in terms.slots]
        self.accounts: dict[str, Account] = {}
        self.dedicated: set[str] = set()
        """Accounts whose idle baseline is reserved."""
        self.leases: OrderedDict[str, Held] = OrderedDict()
        """By expiry: every lease lives equally long from its issue or renewal."""
        self.tombstones: dict[str, tuple[str, int, str]] = {}
        """Expired lease id -> (entitlement, tokens charged, funded), oldest first."""
        self.active: set[str] = set()
        """Entitlements that the next tick has to look at."""
        self.surplus = 0.0
        self.surplus_s = 0.0
        self.surplus_per_s = terms.tokens_per_s
        """Refill of the surplus bucket: Lambda less what own buckets paid for lately."""
        self.own_served = 0
        """Tokens settled in this tick that own buckets paid for."""
        self.priority_denials = 0
        """Denials on priority in this tick, over all entitlements."""
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
            account.terms = entitlement
            self._reserve(account, 1)
        if entitlement.service_class == "dedicated":
            self.dedicated.add(entitlement.name)
        else:
            self.dedicated.discard(entitlement.name)
        return account

    def remove(self, name: str) -> None:
        """Forget an entitlement that has nothing in flight; one that has is suspended first."""
        account = self.accounts.get(name)
        if account is None:
            return
        if account.total:
            raise ValueError(f"{name} has {account.total} sequences in flight")
        self._reserve(account, -1)
        del self.accounts[name]
        self.active.discard(name)
        self.dedicated.discard(name)

    def change(self, terms: Terms) -> None:
        """Take over new capacity or rules."""
        self.terms = terms
        while len(self.pools) < len(terms.slots):
            self.pools.append(PoolBook())
        for book in self.pools:
            book.idle_dedicated = 0
        for name in self.dedicated:
            self._reserve(self.accounts[name], 1)

    def move(self, account: Account, pool: int, sequences: int, kv_bytes: int) -> None:
        """Count sequences and KV in (positive) or out (negative) of a pool."""
        book = self.pools[pool]
        if account.terms.service_class == "dedicated":
            self._reserve(account, -1)
            account.inflight[pool] += sequences
            self._reserve(account, 1)
        else:
            account.inflight[pool] += sequences
        account.total += sequences
        account.kv_bytes += kv_bytes
        book.inflight += sequences
        book.kv_bytes += kv_bytes

    def hold(self, lease: Held) -> None:
        """File a lease under everything that looks for leases."""
        self.leases[lease.id] = lease
        self.file(lease)

    def file(self, lease: Held) -> None:
        """Enter a lease in its pool's books (again, after it moved)."""
        book = self.pools[lease.pool]
        if len(book.weights) > 64 and len(book.weights) > 2 * len(self.leases):
            live = [h for h in self.leases.values() if h.pool == lease.pool]
            book.weights = sorted((h.weight, h.id) for h in live)
        heappush(book.weights, (lease.weight, lease.id))
        account = self.accounts[lease.entitlement]
        gives_way = account.terms.service_class == "preemptible" or (
            self.terms.reclaim_spot and account.terms.service_class == "spot"
        )
        if lease.spilled or gives_way:
            book.evictable[lease.id] = lease

    def bound(self, entitlement: Entitlement) -> bool:
        """Whether today's capacity holds this entitlement's baseline (others have none)."""
        return not entitlement.reserves or entitlement.created <= self.terms.bound_until

    def _reserve(self, account: Account, sign: int) -> None:
        entitlement = account.terms
        if entitlement.service_class != "dedicated" or not self.bound(entitlement):
            return
        for pool, book in enumerate(self.pools):
            idle = entitlement.baseline_of(pool) - account.inflight[pool]
            if idle > 0:
                book.idle_dedicated += sign * idle
