"""First tokens that the gateway cannot see, for the answer is not streamed: assumed in time.

All of them by one timer, set for the next turn in which one is due. Most requests end before
theirs is due, and leave at once: a timer each, made and cancelled, would cost more than all
else, and what they hold, kept until its time, would have every new request built in memory that
the processor has not at hand.
"""

import asyncio
from collections.abc import Callable

from gateway.scheduling.scheduler import Job, Scheduler

_TURN_S = 0.004
"""Those due within so long of one another are told together."""


class AssumedTokens:
    """Jobs by the time at which their prefill should be done. One for a process."""

    __slots__ = ("_clock", "_loop", "_tell", "_timer", "_turns", "_wakes")

    def __init__(
        self, clock: Callable[[], float], tell: Callable[[Scheduler, Job, float], None]
    ) -> None:
        """`clock` is the schedulers'; `tell` says one that a job's token is due."""
        self._clock = clock
        self._tell = tell
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turns: dict[int, dict[Job, Scheduler]] = {}
        """Turn of the event loop's clock -> who is due in it; none is empty."""
        self._timer: asyncio.TimerHandle | None = None
        self._wakes = 0
        """The turn for which the timer is set."""

    def __len__(self) -> int:
        return sum(map(len, self._turns.values()))

    def expect(self, scheduler: Scheduler, job: Job) -> int:
        """A job was sent: its first token is due after its predicted mean. Its turn, > 0.

        The mean, not a quantile: what is asked is how much prefill is on its way in the sum.
        """
        loop = self._loop
        if loop is None:  # asked for once: it costs a call of the system
            loop = self._loop = asyncio.get_running_loop()
        turn = int((loop.time() + job.expected_s) / _TURN_S) + 1
        jobs = self._turns.get(turn)
        if jobs is None:
            self._turns[turn] = {job: scheduler}
            if self._timer is None or turn < self._wakes:
                self._set(loop, turn)
        else:
            jobs[job] = scheduler
        return turn

    def forget(self, turn: int, job: Job) -> None:
        """A job has ended. Idempotent. The timer is left: most often another job needs it."""
        jobs = self._turns.get(turn)
        if jobs is not None and job in jobs:
            del jobs[job]
            if not jobs:
                del self._turns[turn]

    def _set(self, loop: asyncio.AbstractEventLoop, turn: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._wakes = turn
        self._timer = loop.call_at(turn * _TURN_S, self._due, loop)

    def _due(self, loop: asyncio.AbstractEventLoop) -> None:
        """Tell of all that are due."""
        self._timer = None
        turns = self._turns
        now = max(int(loop.time() / _TURN_S), self._wakes)
        for turn in sorted(turn for turn in turns if turn <= now):
            # Telling of one may end another.
            for job, scheduler in tuple(turns.pop(turn, {}).items()):
                if job.state == "sent":
                    self._tell(scheduler, job, self._clock())
        if turns:  # in place of a timer that was set meanwhile, for a later one
            self._set(loop, min(turns))
