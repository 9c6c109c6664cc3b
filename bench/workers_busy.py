"""The load at which two workers are compared with one, and which rounds of it count.

A second worker is for who needs more than one core, so the offered load takes one worker near its
core. Two that share this load, each on a core of its own, are half as busy, and who is half as busy
spends more on each request, whatever the number of processes: fewer requests are handled in one
turn of the loop. So there are two such loads. In the one that is asked for everybody runs where the
kernel has them run. In the other one all of a gateway's processes share one core, which is then as
busy under two as under one, and the load runs on the others.

Of a process that pauses, others on the same host take the caches. Where everybody runs anywhere
and two workers pause, a round counts only if a loop of a few lines, which knows nothing of the
gateway, lost none in its pauses.
"""

from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from bench.overhead_rounds import LEAST_UTILISATION
from bench.workers_rounds import Point, Seen

ONE, TWO, APART = "1", "2", "1+1"
"""Gateways of so many workers."""
NEAR: Final = 0.94
"""Of one core, which the asked load is to take of one worker. More, and a moment in which the
machine is slow saturates it."""
LEAST_KEPT_UP: Final = 0.98
"""Of the offered load is served, or it was not the same for all."""
MOST_LOST: Final = 4.0
"""Memory may take so many times as long after a pause of 1 ms. A machine of one's own: 1 to 2."""
BUSY: Final = Point("whole", 0)
"""The offered load that is asked for."""
ONE_CORE: Final = Point("whole", 0, one_core=True)
"""As much, to be seen beside it."""


class NearOne:
    """Finds the load that takes one worker to NEAR: each round's by what the one before saw."""

    def __init__(self, asked: Point) -> None:
        """`asked`: BUSY or ONE_CORE."""
        self.point = replace(asked, rate=2000.0)

    def saw(self, one: Seen) -> None:
        """A run of one worker under that load."""
        change = min(2.0, max(0.5, NEAR / one.cores))
        self.point = replace(self.point, rate=round(one.served * change, -1))


def counting(found: Sequence[dict[str, Seen]]) -> list[dict[str, Seen]]:
    """Rounds in which one worker was busy, all served what was offered, and the host was quiet."""
    return [
        seen
        for seen in found
        if seen[ONE].cores >= LEAST_UTILISATION
        and all(each.served >= LEAST_KEPT_UP * each.offered for each in seen.values())
        and all(each.caches_lost <= MOST_LOST for each in seen.values())
    ]
