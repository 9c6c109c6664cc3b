"""Workers that stall: they accept requests and answer none of them.

Draining by the clock (`quartz_backlog`) would soon call such a worker idle and send it
everything. So the oldest prefill it owes is looked at: far past its prediction, the worker is
left out. Any answer brings it back. When all it owed has ended without one, it is put on
probation: in the rotation, for one request at a time, until one is answered.
"""

from gateway.policy.scheduling import Job


class StallBreaker:
    """Stalled workers of one pool, and those on probation."""

    __slots__ = ("_factor", "_least_s", "probation", "stalled")

    def __init__(self, workers: int, least_s: float, factor: float) -> None:
        self._least_s = least_s
        self._factor = factor
        self.stalled = [False] * workers
        self.probation = [False] * workers

    def look(self, worker: int, oldest: Job | None, now_s: float) -> bool:
        """Look at the oldest prefill that a worker owes; True when its standing changed."""
        if oldest is None:
            if not self.stalled[worker]:
                return False
            self.stalled[worker] = False
            self.probation[worker] = True
            return True
        if self.stalled[worker]:
            return False
        limit_s = max(self._least_s, self._factor * oldest.quantile_s)
        if now_s - oldest.sent_s <= limit_s:
            return False
        self.stalled[worker] = True
        self.probation[worker] = False
        return True

    def answered(self, worker: int) -> bool:
        """A first token came; True when it brought the worker back."""
        back = self.stalled[worker] or self.probation[worker]
        self.stalled[worker] = self.probation[worker] = False
        return back
