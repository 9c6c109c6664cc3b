"""How many items may be in flight: what live requests leave free, and what admission lets in. Pure.

Times are monotonic, in seconds.
"""

from math import inf
from typing import Final

_FIRST: Final = 4.0
_REFUSED_S: Final = 0.1
_MOST_S: Final = 5.0
"""What a refusal says of a wait is a forecast, and capacity comes and goes."""
_PEAK_S: Final = 30.0
_HEADROOM: Final = 16
"""One slot in so many stays free beyond the live peak."""


class Pace:
    """How many items of a batch may be in flight: more after answers, half after a refusal."""

    def __init__(self) -> None:
        self._limit = _FIRST
        self._calm = inf
        """Below it each answer adds one, beyond it as many answers as are in flight do."""
        self._halved_s = self._until_s = 0.0
        self._refusals = 0
        """Since the last answer; each doubles the wait."""

    def answered(self, running: int) -> None:
        """An item was answered while so many others were in flight."""
        self._refusals = 0
        if running + 1 >= self._limit / 2:  # else it is not what holds them back
            self._limit += 1.0 if self._limit < self._calm else 1.0 / self._limit

    def refused(self, sent_s: float, now_s: float, wait_s: float | None) -> None:
        """An item that was sent at `sent_s` has to come later; `wait_s`: as it was told."""
        if sent_s >= self._halved_s:  # all that were in flight together count as one
            self._limit = self._calm = max(1.0, self._limit / 2)
            self._halved_s = now_s
            self._refusals += 1
        backoff_s = _REFUSED_S * 2.0 ** min(self._refusals, 8)
        self._until_s = max(self._until_s, now_s + min(_MOST_S, max(backoff_s, wait_s or 0.0)))

    def wait_s(self, now_s: float) -> float:
        """Seconds until any may go."""
        return max(0.0, self._until_s - now_s)

    def room(self, running: int, now_s: float) -> int:
        """How many more may go now."""
        return 0 if now_s < self._until_s else max(0, int(self._limit) - running)


class Leftovers:
    """Slots of a model that its live requests leave: beyond their peak of the last half minute."""

    def __init__(self) -> None:
        self._peaks = (0, 0)
        """Most live sequences in this half minute and in the one before."""
        self._window = -1

    def slots(self, slots: int, live: int, now_s: float) -> int:
        """Of so many slots those that batches may use; `live` are taken by other requests."""
        window = int(now_s / _PEAK_S)
        if window != self._window:
            self._peaks = (0, self._peaks[0] if window == self._window + 1 else live)
            self._window = window
        self._peaks = (max(self._peaks[0], live), self._peaks[1])
        headroom = min(max(1, slots // _HEADROOM), slots - 1)
        return max(0, slots - max(self._peaks) - headroom)
