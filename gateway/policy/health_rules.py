"""What ejects a worker, and for how long: figures of the configuration."""

import msgspec


class HealthRules(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """When a worker leaves the rotation and how it returns."""

    eject_after: int = 3
    """Consecutive failed exchanges (reset, time-out, 5xx) before ejection."""
    eject_s: float = 5.0
    """First ejection; doubles with each further one up to `max_eject_s`."""
    max_eject_s: float = 60.0
