"""Iterations at which sequences are known to end their prefill or their output."""

from heapq import heapify, heappop, heappush

from simulator.engine.sequence import Sequence

NEVER = 1 << 62
STALE_EVENTS = 64
"""Stale events are dropped when there are more than this and more than half of all."""


class EventQueue:
    """A heap by iteration, then by run number; events of removed sequences are skipped later."""

    __slots__ = ("_heap", "_stale")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Sequence]] = []
        self._stale = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, v: int, seq: Sequence) -> None:
        """Expect the sequence's event at the end of iteration v."""
        heappush(self._heap, (v, seq.run, seq))

    def next_v(self) -> int:
        """The first iteration with an event; NEVER when there is none."""
        return self._heap[0][0] if self._heap else NEVER

    def take(self, v: int) -> list[Sequence]:
        """Remove the events up to iteration v; returns their sequences in order of admission."""
        heap, due = self._heap, []
        while heap and heap[0][0] <= v:
            _, run, seq = heappop(heap)
            if seq.run == run:
                due.append(seq)
            else:
                self._stale -= 1
        return due

    def forget_one(self) -> None:
        """Note that a sequence with an event here stopped running."""
        self._stale += 1

    def tidy(self) -> None:
        """Make sure that the next event is a live one, and that few stale ones remain."""
        if not self._stale:
            return
        heap = self._heap
        if self._stale > STALE_EVENTS and self._stale * 2 > len(heap):
            heap[:] = [entry for entry in heap if entry[2].run == entry[1]]
            heapify(heap)
            self._stale = 0
        while heap and heap[0][2].run != heap[0][1]:
            heappop(heap)
            self._stale -= 1
