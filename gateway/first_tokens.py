"""First tokens as the gateway notices them: late, or, where an answer is not streamed, never.

A busy event loop reads what came some time ago. Its own lateness is no engine's prefill: taken
for one, it would have requests held back from engines that wait for them, the longer the busier
the gateway is.

A first token that nobody sees is assumed in time, all of them by one timer, set for the next one
due. Most requests end before theirs is due, and a timer each, made and cancelled, would cost
more than their place in line.
"""

import asyncio
from collections.abc import Callable
from heapq import heapify, heappop, heappush

from gateway.policy.scheduling import Job, Scheduler

_LEAST_S = 0.001
_MOST_LATE_S = 10.0
_GAIN = 0.05
"""Of the newest in the mean lateness."""
_SPARE_ENTRIES = 1024
"""Of jobs that have ended; beyond as many as have not, they are dropped."""


class Lateness:
    """How long ago what the event loop reads now has come."""

    __slots__ = ("_mean_s",)

    def __init__(self) -> None:
        self._mean_s = 0.0

    def of(self, now_s: float, turn_s: float) -> float:
        """Seconds, >= 0, in the mean: since the loop's turn began, and half a turn before that.

        What came while the turn before was at work waited for this one. Of a turn's length
        only how far it has got is seen: half of it, in the mean over what is asked.
        """
        position_s = now_s - turn_s
        if not 0.0 <= position_s < _MOST_LATE_S:  # other clocks
            return 0.0
        self._mean_s += _GAIN * (position_s - self._mean_s)
        return position_s + self._mean_s


class AssumedTokens:
    """Jobs by the time at which their prefill should be done. One for a process."""

    __slots__ = ("_clock", "_entries", "_most", "_order", "_tell", "_timer", "_wakes_s")

    def __init__(
        self, clock: Callable[[], float], tell: Callable[[Scheduler, Job, float], None]
    ) -> None:
        """`clock` is the schedulers'; `tell` says one that a job's token is due."""
        self._clock = clock
        self._tell = tell
        self._entries: list[tuple[float, int, Scheduler, Job]] = []
        self._most = _SPARE_ENTRIES
        self._order = 0
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_s = 0.0
        """By the event loop's clock, as all that is due."""

    def __len__(self) -> int:
        return len(self._entries)

    def expect(self, scheduler: Scheduler, job: Job) -> None:
        """A job was sent: its first token is due after its predicted quantile."""
        loop = asyncio.get_running_loop()
        due_s = loop.time() + max(job.quantile_s, _LEAST_S)
        self._order += 1
        heappush(self._entries, (due_s, self._order, scheduler, job))
        if len(self._entries) > self._most:
            self._prune()
        if self._timer is None or due_s < self._wakes_s:
            self._set(loop, due_s)

    def _prune(self) -> None:
        self._entries = [entry for entry in self._entries if entry[3].state == "sent"]
        heapify(self._entries)
        self._most = 2 * len(self._entries) + _SPARE_ENTRIES

    def _set(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._wakes_s = due_s
        self._timer = loop.call_at(due_s, self._due, loop)

    def _due(self, loop: asyncio.AbstractEventLoop) -> None:
        """Tell of all that are due; those that have ended, and are next in line, are dropped."""
        self._timer = None
        entries = self._entries
        soon_s = loop.time() + _LEAST_S
        while entries and (entries[0][0] <= soon_s or entries[0][3].state != "sent"):
            _, _, scheduler, job = heappop(entries)
            if job.state == "sent":
                self._tell(scheduler, job, self._clock())
        if entries:
            self._set(loop, entries[0][0])
