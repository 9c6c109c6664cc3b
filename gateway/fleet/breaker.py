"""A circuit breaker: when to stop calling a store that does not answer, and when to try again.

Closed: every call is allowed. After FAILURES in a row the breaker opens: no call is allowed
until a pause is over. Then one probe (half-open) closes it or doubles the pause, up to
MAX_PAUSE_S. It starts half-open, because the store's state is unknown. The caller's random
number jitters the pauses, so that replicas do not return all at once.
"""

from typing import Final

FAILURES: Final = 2
FIRST_PAUSE_S: Final = 0.5
MAX_PAUSE_S: Final = 5.0


class Breaker:
    """State of one store's breaker, for a single caller. Time and chance are arguments."""

    __slots__ = ("_failures", "_pause_s", "closed", "retry_at_s")

    def __init__(self) -> None:
        self.closed = False
        self.retry_at_s = 0.0
        """While open, no call is allowed before this time."""
        self._failures = 0
        self._pause_s = FIRST_PAUSE_S

    def allows(self, now_s: float) -> bool:
        """Whether a call may be made now."""
        return self.closed or now_s >= self.retry_at_s

    @property
    def doubtful(self) -> bool:
        """Closed, but the last call failed: try again soon."""
        return self.closed and self._failures > 0

    def succeeded(self) -> None:
        """Note that a call succeeded."""
        self.closed = True
        self._failures = 0
        self._pause_s = FIRST_PAUSE_S

    def failed(self, now_s: float, chance: float) -> None:
        """Note that a call failed; `chance` is a random number in [0, 1) for the jitter."""
        self._failures += 1
        if self.closed and self._failures < FAILURES:
            return
        self.closed = False
        self.retry_at_s = now_s + self._pause_s * (0.5 + chance / 2)
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
