"""W-hat: the work expected ahead of a newcomer, by worker, draining in wall-clock time.

W = max(0, W - dt), plus the mean prediction of each request assigned (QUARTZ, section 3.3:
means add up, quantiles do not). Kept as the time at which the worker would be free, which is
the same number and does not change while nothing is assigned: so the order of the workers does
not change with time either, and the least is found in a heap. Draining forgets stalls; those
are `quartz_breaker`'s.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

SPARE_ENTRIES = 64


class Backlogs:
    """Free-at times of one pool's workers; W-hat is never negative."""

    __slots__ = ("_heap", "_members", "free_at_s")

    def __init__(self, workers: int) -> None:
        self.free_at_s = [0.0] * workers
        """When each worker would be done with all it was assigned; may be past."""
        self._members: list[bool] = [True] * workers
        self._heap: list[tuple[float, int]] = [(0.0, w) for w in range(workers)]

    def wait_s(self, worker: int, now_s: float) -> float:
        """W-hat, >= 0."""
        return max(0.0, self.free_at_s[worker] - now_s)

    def add(self, worker: int, work_s: float, now_s: float) -> None:
        """Assign work of this mean duration, >= 0."""
        self.set(worker, max(now_s, self.free_at_s[worker]) + work_s)

    def remove(self, worker: int, work_s: float, now_s: float) -> None:
        """Take back work that will not be done; no further than to an idle worker."""
        free_s = self.free_at_s[worker]
        if free_s > now_s:
            self.set(worker, max(now_s, free_s - work_s))

    def keep(self, members: Sequence[int]) -> None:
        """From now on `least` chooses among these."""
        self._members = [False] * len(self.free_at_s)
        for worker in members:
            self._members[worker] = True
        self._rebuild()

    def least(self) -> int:
        """The member with the least W-hat, of idle ones the longest idle; -1 without members."""
        heap, free_at_s = self._heap, self.free_at_s
        while heap:
            free_s, worker = heap[0]
            if free_at_s[worker] == free_s:
                return worker
            heappop(heap)
        return -1

    def set(self, worker: int, free_s: float) -> None:
        """Say when a worker would be free."""
        self.free_at_s[worker] = free_s
        if self._members[worker]:
            heappush(self._heap, (free_s, worker))
            if len(self._heap) > 2 * len(self.free_at_s) + SPARE_ENTRIES:
                self._rebuild()

    def _rebuild(self) -> None:
        self._heap = [(self.free_at_s[w], w) for w, member in enumerate(self._members) if member]
        heapify(self._heap)
