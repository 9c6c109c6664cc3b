"""Records of a token pool: a lease in force, what may be given away and by which rules."""

from msgspec import Struct

from gateway.policy.entitlements.entitlement import PROFILES, AdmissionProfile
from gateway.records.record import Record


class Held(Struct, gc=False):
    """A lease in force, as its token pool holds it; times are Unix seconds of the store's clock."""

    id: str
    entitlement: str
    pool: int
    sequences: int
    estimate_tokens: int
    """Charged so far: the estimate, and what was streamed past it."""
    kv_bytes: int
    weight: float
    """w_e when it was issued (a spilled lease at most `SPILLED_WEIGHT`)."""
    issued_s: float
    expires_s: float
    funded: str
    """own, surplus or none: which bucket paid."""
    owner: str
    """The process that serves it."""
    would_deny: str
    """Observe mode: the reason it would have been denied for, or ""."""
    spilled: bool = False
    evicted: bool = False


UNLIMITED = 1 << 53
"""Later than any entitlement was created: all are bound."""


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
    bound_until: tuple[int, ...] = ()
    """Reserving entitlements created after this one have no reserve in this pool: today's
    capacity does not hold it. Missing pools hold all."""
    ever_bound_until: int = UNLIMITED
    """The newest that ever had all its reserves: older ones that lack some are degraded."""
    headroom: int = 1
    """Slots that backfill and above-baseline traffic leave free."""
    spill_queue: int = 0
    reclaim_spot: bool = False
    """Whether spot, too, is evicted for protected requests."""
    profile: AdmissionProfile = PROFILES["default"]

    def kv_of(self, pool: int) -> int:
        """KVcap of a pool; 0 for not enforced."""
        return self.kv_bytes[pool] if pool < len(self.kv_bytes) else 0

    def bound_in(self, pool: int) -> int:
        """`created` of the newest entitlement whose reserve a pool holds."""
        return self.bound_until[pool] if pool < len(self.bound_until) else UNLIMITED
