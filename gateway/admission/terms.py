"""Records of a token pool: a lease in force, and the model's capacity and rules."""

from msgspec import Struct

from gateway.records.entitlement import PROFILES, AdmissionProfile
from gateway.records.limit import Holding
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
