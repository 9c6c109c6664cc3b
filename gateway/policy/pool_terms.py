"""What a model's token pool may give away, and by which rules."""

from gateway.domain import Record
from gateway.policy.entitlements import PROFILES, AdmissionProfile


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
