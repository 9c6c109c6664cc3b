"""What a worker's time costs, shared among the sequences that run on it.

A worker's KV cache is its slots. A sequence that holds one of `slots` for a second owes that share
of what the worker costs in a second; where more sequences than slots run, they share the worker
evenly. So no more is ever shared out than the worker costs, and what is not shared out is idle.

For each worker a total grows at the rate that one sequence owes. The difference of two readings is
what a sequence that ran between them owes, whatever else began and ended meanwhile.
"""

from typing import Final

SECONDS_AN_HOUR: Final = 3600.0
_NANO: Final = 1e9


class SlotClock:
    """Of the workers of one pool. Times are seconds of any monotonic clock."""

    __slots__ = ("_at_s", "_owed_nano", "nano_per_s")

    def __init__(self, worker_hour: float) -> None:
        """`worker_hour`: what an hour of one worker costs, in units of the currency."""
        self.nano_per_s = worker_hour * _NANO / SECONDS_AN_HOUR
        """What a second of one worker costs, in nano-units."""
        self._owed_nano: list[float] = []
        """By worker: what one sequence would owe that ran since the start."""
        self._at_s: list[float] = []
        """By worker: when that was computed."""

    def read(self, worker: int, active: int, slots: int, now_s: float) -> float:
        """The worker's total; `active` sequences ran on it since the last reading.

        Call it before `active` changes, each time that it changes.
        """
        while worker >= len(self._at_s):
            self._owed_nano.append(0.0)
            self._at_s.append(now_s)
        elapsed_s = now_s - self._at_s[worker]
        if elapsed_s > 0.0:
            self._at_s[worker] = now_s
            self._owed_nano[worker] += self.nano_per_s * elapsed_s / max(active, slots, 1)
        return self._owed_nano[worker]
