"""Keeps tenancy in step with what a cluster's controller publishes.

The age of the news is what its publisher says by the store's clock when it arrives. It grows here
by the gateway's own, while nothing arrives, the same again, or an older set. Service classes that
nobody confirmed for long become stale.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Final

from gateway.errors import StateFailure
from gateway.records.tenancy import ClusterState
from gateway.tenancy.known import stale_classes
from gateway.tenancy.tenancy import Tenancy

STALE: Final = (
    "the last news of the cluster is %.0f s old, not counting what replaced controllers wrote: "
    "its entitlements of these classes get 503: %s"
)

_log = logging.getLogger("sluice.tenancy")


class ClusterSync:
    """Reads what a controller publishes, and tells tenancy."""

    def __init__(
        self,
        read: Callable[[tuple[int, int]], Awaitable[ClusterState | None]],
        tenancy: Tenancy,
        *,
        stale_after_s: float,
        clock: Callable[[], float],
    ) -> None:
        """`read` gives what changed after a version; `clock` monotonic, in seconds."""
        self._read = read
        self._tenancy = tenancy
        self._stale_after_s = stale_after_s
        self._clock = clock
        self._known_s = clock()
        """When the cluster was as it is known here."""
        self._seen_us = -1
        """That time by the store's clock."""
        self._failing = False

    @property
    def age_s(self) -> float:
        """Since the cluster was as it is known here; without any news since the start."""
        return max(0.0, self._clock() - self._known_s)

    async def poll(self) -> None:
        """Read what changed. Never raises."""
        try:
            known, state = self._tenancy.known.cluster, None
            try:
                state, self._failing = await self._read(known.version), False
            except StateFailure as error:
                if not self._failing:
                    _log.warning("what the cluster grants cannot be read: %s", error)
                self._failing = True
            if state and state.version >= known.version and state.seen_us != self._seen_us:
                self._known_s, self._seen_us = self._clock() - state.age_s, state.seen_us
            stale = stale_classes(self.age_s, self._stale_after_s)
            if stale != known.stale:
                _log.warning(STALE, self.age_s, ", ".join(sorted(stale)) or "none")
            await self._tenancy.take_cluster(state, stale)
        except Exception:  # noqa: BLE001 - a defect must not end the task
            _log.exception("keeping the cluster's entitlements in step failed")
