"""How many items may be in flight: what live requests leave free, and what admission lets in. Pure.

Times are monotonic, in seconds.
"""

from math import inf
from typing import Final

_FIRST: Final = 4.0
_LESS: Final = 0.8
"""What a refusal leaves of the limit: slots are seen, so most refusals are races for the last."""
_REFUSED_S: Final = 0.01
_MOST_S: Final = 5.0


class Pace:
    """How many items of a batch may be in flight: more after answers, less after a refusal."""

    def __init__(self) -> None:
        self._limit = _FIRST
        self._calm = inf
        """Below it each answer adds one, beyond it as many answers as are in flight do."""
        self._less_s = self._until_s = 0.0
        self._refusals = 0
        """Since the last answer; each makes the wait four times as long."""

    def answered(self, running: int) -> None:
        """An item was answered while so many others were in flight."""
        self._refusals = 0
        if running + 1 >= self._limit / 2:  # else it is not what holds them back
            self._limit += 1.0 if self._limit < self._calm else 1.0 / self._limit

    def refused(self, sent_s: float, now_s: float) -> None:
        """An item that was sent at `sent_s` has to come later."""
        if sent_s >= self._less_s:  # all that were in flight together count as one
            self._limit = self._calm = max(1.0, self._limit * _LESS)
            self._less_s = now_s
            self._refusals += 1
        backoff_s = min(_MOST_S, _REFUSED_S * 4.0 ** min(self._refusals, 8))
        self._until_s = max(self._until_s, now_s + backoff_s)

    def room(self, running: int, now_s: float) -> int:
        """How many more may go now."""
        return 0 if now_s < self._until_s else max(0, int(self._limit) - running)


class Leftovers:
    """Slots of a model that its live requests leave.

    A slot that an item holds is free again when the item ends. So what live requests may need until
    then stays free: their peak of the last one to two times that an item takes, and one slot.
    """

    def __init__(self) -> None:
        self._peaks = (0, 0)
        """Most live sequences in this window and in the one before."""
        self._ends_s = 0.0

    def slots(self, slots: int, live: int, now_s: float, item_s: float) -> int:
        """Of so many slots those that batches may use; `live` are taken by other requests."""
        if now_s >= self._ends_s:
            self._peaks = (live, self._peaks[0])
            self._ends_s = now_s + min(max(item_s, _LEAST_S), _LONGEST_S)
        self._peaks = (max(self._peaks[0], live), self._peaks[1])
        return max(0, slots - max(self._peaks) - HEADROOM)


HEADROOM: Final = 1
"""Slots that stay free beyond the live peak."""
_LEAST_S: Final = 0.25
_LONGEST_S: Final = 60.0
