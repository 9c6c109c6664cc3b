"""What a model's token pool counts: leases in force, usage by entitlement and by pool of workers.

Plain mutable state of `gateway.admission.token_pool.TokenPool`; only this package and
admission change it. All times are Unix seconds of one clock (the store's). Sequences, bytes and
tokens are whole.
"""

from bisect import bisect_left, insort

from sortedcontainers import SortedList

from gateway.admission.terms import LeaseRecord
from gateway.records.entitlement import Entitlement


class RecentDenials:
    """Tenants that a pool refused recently, each with the weight of its latest refusal.

    Each tenant counts once; otherwise one tenant's retries would lengthen everybody's wait.
    """

    __slots__ = ("_ascending", "weights")

    def __init__(self) -> None:
        self.weights: dict[str, float] = {}
        """By tenant."""
        self._ascending: list[float] = []

    def __len__(self) -> int:
        return len(self.weights)

    def note(self, tenant: str, weight: float, most: int) -> None:
        """Record a refused tenant; beyond `most` tenants no new one is added."""
        self.forget(tenant)
        if len(self.weights) < most:
            self.weights[tenant] = weight
            insort(self._ascending, weight)

    def forget(self, tenant: str) -> None:
        """Remove a tenant, if it is counted."""
        weight = self.weights.pop(tenant, None)
        if weight is not None:
            del self._ascending[bisect_left(self._ascending, weight)]

    def others_above(self, tenant: str, weight: float) -> int:
        """Number of other tenants whose refused request had at least this weight."""
        count = len(self._ascending) - bisect_left(self._ascending, weight)
        return count - (self.weights.get(tenant, -1.0) >= weight)


MAX_S = 60.0
"""Longest Retry-After."""
FIRST_SERVICE_S = 5.0
"""Mean service time assumed before any request was served."""


class Journal:
    """Changes since it was last emptied, for a reader that keeps a copy of the token pool."""

    __slots__ = ("accounts", "leases")

    def __init__(self) -> None:
        self.accounts: set[str] = set()
        """Names of changed accounts; a name without an account was removed."""
        self.leases: set[str] = set()
        """Ids of changed leases; an id without a lease has ended."""


class Account:
    """Usage, bucket, debt and ledger of one entitlement."""

    __slots__ = (
        "borrowed",
        "borrowed_s",
        "burst",
        "debited",
        "debt",
        "denied",
        "denied_kv_seconds",
        "denied_seconds",
        "epoch",
        "floor_tokens",
        "inflight",
        "inflight_seconds",
        "kv_bytes",
        "kv_seconds",
        "level",
        "level_s",
        "mean_cost",
        "most",
        "promised",
        "promised_s",
        "refunded",
        "served",
        "since_s",
        "spilled",
        "terms",
        "total",
        "used",
        "waiters",
        "waiters_s",
        "weight",
    )

    def __init__(self, terms: Entitlement, pools: int) -> None:
        self.terms = terms
        self.epoch = -1
        """Epoch of the terms that `weight`, `most`, `floor_tokens` derive from; -1: recompute."""
        self.weight = 0.0
        """w_e; read it through `admission.weight_now`."""
        self.most = 0
        """r_e; read it through `admission.max_sequences`."""
        self.floor_tokens = 0.0
        """Least depth of its bucket; read the depth through `admission.depth_tokens`."""
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
        return self.denials.others_above(tenant, weight) + self.denials_last.others_above(
            tenant, weight
        )
