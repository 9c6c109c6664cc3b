"""Configured limits for ejecting a worker, and for how long."""

from typing import Final

import msgspec

MISSES: Final = 3
"""Probes in a row that an engine must miss to leave the rotation."""


class HealthRules(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """When a worker leaves the rotation and how it returns."""

    eject_after: int = 3
    """Consecutive failed exchanges (reset, time-out, 5xx) before ejection."""
    eject_s: float = 5.0
    """First ejection; doubles with each further one up to `max_eject_s`."""
    max_eject_s: float = 60.0
    stall_s: float = 30.0
    """Seconds without progress, beyond the allowed time, until an engine counts as frozen."""
