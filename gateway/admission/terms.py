"""Records of admission: terms, lease, request, grant or denial, and the chosen place."""

from typing import Any, Literal

from msgspec import Struct

from gateway.records.entitlement import PROFILES, AdmissionProfile
from gateway.records.limit import Holding, Limit, LimitUse
from gateway.records.record import Record


class LeaseRecord(Struct, gc=False):
    """A lease in force; times are Unix seconds of the store's clock."""

    id: str
    entitlement: str
    pool: int
    sequences: int
    estimate_tokens: int
    """Charged so far: the estimate, plus tokens streamed beyond it."""
    kv_bytes: int
    weight: float
    """w_e when it was issued (a spilled lease at most `SPILLED_WEIGHT`)."""
    issued_s: float
    expires_s: float
    funded: str
    """The bucket that paid: own, surplus or none."""
    owner: str
    """The process that serves it."""
    would_deny: str
    """In observe mode, the reason of the denial that was not applied, or ""."""
    spilled: bool = False
    evicted: bool = False
    held: tuple[Holding, ...] = ()
    """Reserved of limits of its key, entitlement and tenant."""


UNLIMITED = 1 << 53
"""Above every entitlement's `created`: all are bound."""


class Terms(Record, frozen=True, kw_only=True):
    """A model's capacity and rules. Lists are by pool, windows ascending."""

    slots: tuple[int, ...]
    """C: sequences that the ready workers run at once."""
    kv_bytes: tuple[int, ...] = ()
    """KVcap; 0 or missing for not enforced."""
    tokens_per_s: float = 0.0
    """Lambda, over all pools; 0 for not enforced and no surplus."""
    largest_tokens: int = 0
    """Largest single request that the widest window takes: the least depth of every bucket."""
    mean_slo_ms: float = 0.0
    """l_bar: mean SLO of the model's entitlements; 0 when none states one."""
    bound_until: tuple[int, ...] = ()
    """`created` of the newest entitlement whose reserve the pool's current capacity holds;
    newer ones have no reserve there. Missing pools hold all."""
    ever_bound_until: int = UNLIMITED
    """`created` of the newest that ever had all reserves; older ones lacking some are degraded."""
    headroom: int = 1
    """Slots that backfill and above-baseline traffic must leave free."""
    spill_queue: int = 0
    reclaim_spot: bool = False
    """Whether spot and spilled leases, too, are evicted for protected requests."""
    profile: AdmissionProfile = PROFILES["default"]

    def kv_of(self, pool: int) -> int:
        """KVcap of a pool; 0 for not enforced."""
        return self.kv_bytes[pool] if pool < len(self.kv_bytes) else 0

    def bound_in(self, pool: int) -> int:
        """`created` of the newest entitlement whose reserve a pool holds."""
        return self.bound_until[pool] if pool < len(self.bound_until) else UNLIMITED


DenialReason = Literal[
    "entitlement_unknown",
    "entitlement_pending",
    "entitlement_degraded",
    "entitlement_expired",
    "entitlement_suspended",
    "exceeds_entitlement",
    "concurrency",
    "tokens",
    "kv",
    "priority",
    "key_requests",
    "key_concurrency",
    "budget",
    "budget_reserved",
]
Unit = Literal["sequences", "tokens", "bytes of KV cache", "requests", "money"]


class AdmissionRequest(Record, frozen=True, kw_only=True):
    """One request for a lease; the store decides it in one atomic call."""

    lease_id: str
    """Made by the gateway: clients may send one request id twice."""
    model: str = ""
    entitlement: str
    pool: int
    alternates: tuple[int, ...] = ()
    pools: tuple[Any, ...] = ()
    """States of the pools that these indices are of, to count the lease in: a reload may replace
    the model meanwhile. () for those of the model that has the name now."""
    estimate_tokens: int
    """L_in + min(cap, q_out), all sequences."""
    kv_bytes: int = 0
    """The same in KV bytes."""
    sequences: int = 1
    limits: tuple[Limit, ...] = ()
    """Of its key, its entitlement and its tenant, over all models."""
    money: int = 0
    """What it costs if it uses its estimate, in billionths; 0 where no budget is in money."""
    most_tokens: int = 0
    """What it uses at most, by no estimate; budgets reserve it. 0: the estimate."""
    most_money: int = 0
    demoted: bool = False
    """Leftovers only: an item of a batch, or beyond a budget that says `on_exceed: spot`."""

    def wants(self, limit: Limit) -> int:
        """What it is expected to take of a limit, in its unit."""
        if limit.unit == "tokens":
            return self.estimate_tokens
        if limit.unit == "money":
            return self.money
        return self.sequences if limit.unit == "sequences" else 1

    def reserves(self, limit: Limit) -> int:
        """What its lease reserves of a limit: of a budget that refuses, the most it may use."""
        asked = self.wants(limit)
        if limit.spot or not limit.budget:
            return asked
        return max(asked, self.most_tokens if limit.unit == "tokens" else self.most_money)


class Grant(Record, frozen=True, kw_only=True, array_like=True, tag=1):
    """Admitted. The figures, as of after this grant, fill the client's rate-limit headers.

    The Redis scripts return its fields in this order, and those of a denial.
    """

    pool: int
    weight: float
    spilled: bool
    contended: bool
    """The engines will queue it; a protected request may evict preemptible work."""
    protected: bool
    """Within a reserved baseline."""
    funded: str
    would_deny: str
    limit_sequences: int
    inflight_sequences: int
    depth_tokens: float
    level_tokens: float
    rate_tokens_per_s: float
    service_s: float
    held: tuple[Holding, ...] = ()
    """What it reserved of its limits."""
    uses: tuple[LimitUse, ...] = ()
    """Level of each of its limits, in their order."""


class Denial(Record, frozen=True, kw_only=True, array_like=True, tag=0):
    """Refused. `wait_s` is before jitter, and 0 where waiting does not help."""

    reason: DenialReason
    wait_s: float = 0.0
    limit: float = 0.0
    used: float = 0.0
    requested: float = 0.0
    unit: Unit = "sequences"
    of_pool: bool = False
    """The pool's load caused it, not a limit of the entitlement."""
    limit_index: int = -1
    """Which of the request's limits caused it; -1 for none."""
    reserved: float = 0.0
    """Of `used`, by requests in flight."""
    resets_unix_s: float = 0.0
    """When a budget has room again; 0 where that is not known."""


class Placement(Record, frozen=True, kw_only=False):
    """The pool that takes a request, or, in `denied`, the reason why none does."""

    pool: int
    contended: bool = False
    spilled: bool = False
    denied: Literal["", "priority", "kv"] = ""
