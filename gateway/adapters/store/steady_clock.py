"""Unix time that no step of the machine's clock moves."""

from collections.abc import Callable
from typing import Final

LATE_S: Final = 5.0
"""How long after it was timed a settlement may come; longer, and the clock was set."""
EARLY_S: Final = 0.1
"""How far the machine's clock may have drifted from this one."""


class SteadyClock:
    """Unix time at the start, and what has passed since by a clock that only goes on.

    Buckets fill, leases expire and ticks are due by elapsed time: a clock set back would refuse
    for as long as it was set back, one set forward would refill buckets and reap live leases.
    """

    def __init__(self, clock: Callable[[], float], wall_clock: Callable[[], float]) -> None:
        """`clock` monotonic, `wall_clock` Unix time, in seconds."""
        self._clock = clock
        self._ahead_s = wall_clock() - clock()

    def __call__(self) -> float:
        """Unix time in seconds."""
        return self._clock() + self._ahead_s

    def at(self, unix_s: float) -> float:
        """When something was that was not long ago by the machine's clock."""
        now_s = self()
        return unix_s if -EARLY_S <= now_s - unix_s <= LATE_S else now_s
