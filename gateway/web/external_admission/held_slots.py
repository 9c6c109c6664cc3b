"""Limits on leases held for other proxies: in total, per tenant, and per pool."""

from collections import Counter

from gateway.errors import RateLimited, Unavailable
from gateway.records.lease import Lease

MAX_HELD = 10_000
"""Leases held at once; further ones are refused with 503."""
MAX_HELD_EACH = 2_000
"""Leases held at once for one tenant, over all of its entitlements; further ones get 429."""


class HeldSlots:
    """Places taken by leases that are held or being requested."""

    def __init__(self) -> None:
        self._taken = 0
        self._each: Counter[str] = Counter()
        self._slots: Counter[tuple[str, str]] = Counter()
        """Sequences of leases beyond reserved baselines, by model and pool."""

    def take(self, tenant: str) -> None:
        """Take a place. Raises Unavailable, or RateLimited if the tenant is at its limit."""
        if self._taken >= MAX_HELD:
            raise Unavailable(
                "This gateway holds as many leases as it can. Report usage when a request ends.",
                reason="too_many_leases",
                retry_after_s=5.0,
            )
        if self._each[tenant] >= MAX_HELD_EACH:
            raise RateLimited(
                f"The tenant '{tenant}' holds {MAX_HELD_EACH} leases whose usage was "
                "not reported. Report usage when a request ends.",
                reason="too_many_leases",
                code="rate_limit_exceeded",
                retry_after_s=5.0,
            )
        self._taken += 1
        self._each[tenant] += 1

    def free(self, tenant: str) -> None:
        """Give back a place."""
        self._taken -= 1
        self._each[tenant] -= 1
        if not self._each[tenant]:
            del self._each[tenant]

    def take_slots(self, lease: Lease, pool: str, most: int) -> None:
        """Count a lease's sequences in its pool. Raises RateLimited at `most` sequences."""
        taken = self._slots[lease.model, pool] + lease.sequences
        if taken > most:
            raise RateLimited(
                f"Leases of other proxies hold as many slots of this pool as they may ({most}). "
                "Report usage when a request ends.",
                reason="too_many_leases",
                code="rate_limit_exceeded",
                retry_after_s=5.0,
            )
        self._slots[lease.model, pool] = taken

    def free_slots(self, lease: Lease, pool: str) -> None:
        """Give back what `take_slots` counted."""
        self._slots[lease.model, pool] -= lease.sequences
