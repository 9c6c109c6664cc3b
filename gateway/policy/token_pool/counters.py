"""What one model's token pool counts: an entitlement's account, a pool of workers.

Plain mutable state of `gateway.policy.token_pool.token_pool.TokenPool`, changed by it and by
admission only. All times are Unix seconds of one clock (the store's). Sequences, bytes and tokens
are whole.
"""

from bisect import bisect_left, insort

from gateway.policy.entitlements.entitlement import Entitlement
from gateway.policy.token_pool.open_leases import LeaseWeights
from gateway.policy.token_pool.terms import Held


class Refused:
    """Tenants that a pool refused of late, each with the weight of its latest refusal.

    Each counts once: counting attempts would let one tenant's retries lengthen everybody's wait.
    """

    __slots__ = ("_ascending", "weights")

    def __init__(self) -> None:
        self.weights: dict[str, float] = {}
        """By tenant."""
        self._ascending: list[float] = []

    def __len__(self) -> int:
        return len(self.weights)

    def note(self, tenant: str, weight: float, most: int) -> None:
        """A tenant was refused; beyond `most` of them nobody is added."""
        self.forget(tenant)
        if len(self.weights) < most:
            self.weights[tenant] = weight
            insort(self._ascending, weight)

    def forget(self, tenant: str) -> None:
        """Count it no longer, if it was."""
        weight = self.weights.pop(tenant, None)
        if weight is not None:
            del self._ascending[bisect_left(self._ascending, weight)]

    def others_above(self, tenant: str, weight: float) -> int:
        """Other tenants whose request was of at least this weight."""
        count = len(self._ascending) - bisect_left(self._ascending, weight)
        return count - (self.weights.get(tenant, -1.0) >= weight)


FIRST_SERVICE_S = 5.0
"""Mean service time before any request was served."""


class Journal:
    """What changed since it was last emptied, for whoever keeps a copy of the pool."""

    __slots__ = ("accounts", "leases")

    def __init__(self) -> None:
        self.accounts: set[str] = set()
        """Names; one that is gone was removed."""
        self.leases: set[str] = set()
        """Ids; one that is gone has ended."""


class Account:
    """What an entitlement uses and is owed."""

    __slots__ = (
        "borrowed",
        "borrowed_s",
        "burst",
        "debited",
        "debt",
        "denied",
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
        """Of the pool's terms that `weight`, `most` and `floor_tokens` follow; -1 for none."""
        self.weight = 0.0
        """w_e; ask `admission.weight_now`."""
        self.most = 0
        """r_e; ask `admission.most_sequences`."""
        self.floor_tokens = 0.0
        """Least depth of its bucket; ask `admission.depth_tokens`."""
        self.inflight = [0] * pools
        """Sequences holding a lease, by pool."""
        self.spilled = [0] * pools
        """Of them, those that another pool was asked for."""
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
        """Denials for the pool's sake in this tick, of what weight could have let in."""
        self.promised = 0.0
        """Tokens that earlier refusals were told to wait for, drained at lambda_e."""
        self.promised_s = 0.0
        self.waiters = 0.0
        """Sequences refused for want of a place, drained as places come free."""
        self.waiters_s = 0.0
        self.mean_cost = 0.0
        """Moving mean of settled charges, tokens a sequence; 0 before the first."""
        self.inflight_seconds = 0.0
        """Integral of `total` over this tick, for its time average; likewise KV."""
        self.kv_seconds = 0.0
        self.since_s = 0.0
        """Up to when the integrals go; before its first request nothing is in flight."""
        self.debited = 0
        self.refunded = 0
        self.used = 0
        """The uncut ledger: debited - refunded = used once nothing is in flight."""

    def own(self, pool: int) -> int:
        """Sequences in flight in a pool that were meant for it: they use its baseline."""
        return self.inflight[pool] - self.spilled[pool]


class PoolBook:
    """One pool of workers as admission counts it."""

    __slots__ = (
        "denials",
        "denials_last",
        "denied",
        "denied_last",
        "evictable",
        "idle_dedicated",
        "inflight",
        "kv_bytes",
        "service_s",
        "unreserved",
        "weights",
    )

    def __init__(self) -> None:
        self.inflight = 0
        self.kv_bytes = 0
        self.idle_dedicated = 0
        """Unused baseline of dedicated entitlements: lent to nobody."""
        self.unreserved = 0
        """Sequences in flight of classes that reserve nothing."""
        self.service_s = FIRST_SERVICE_S
        """Moving mean of a lease's life."""
        self.weights = LeaseWeights()
        self.evictable: dict[str, Held] = {}
        self.denials = Refused()
        """Whom it refused in this tick; `denials_last` in the last one and not in this."""
        self.denials_last = Refused()
        self.denied = 0
        """Requests that it refused in this tick; `denied_last` in the last one."""
        self.denied_last = 0
