"""Timers that open schedulers' gates: one for each that has requests waiting for the clock.

A scheduler says when a waiting request could be sent without any event (`Scheduler.due_s`); it is
asked again then. Where nobody waits there is nothing to look at but one number.
"""

import asyncio
from collections.abc import Callable, Sequence
from math import inf

from gateway.policy.scheduling import Job, Scheduler

_LEAST_S = 0.001
"""Openings closer together than this are one."""


class GateTimers:
    """Of all schedulers of a process."""

    __slots__ = ("_armed", "_clock", "_send")

    def __init__(self, clock: Callable[[], float], send: Callable[[Sequence[Job]], None]) -> None:
        """`clock`: the schedulers', in seconds; `send` takes the jobs to send."""
        self._clock = clock
        self._send = send
        self._armed: dict[Scheduler, tuple[float, asyncio.TimerHandle]] = {}

    def look(self, scheduler: Scheduler) -> None:
        """Have it asked when its next gate is due; after every call that may have moved that."""
        due_s = scheduler.due_s
        if due_s == inf:
            return  # a timer that is set runs out, and asks in vain once
        held = self._armed.get(scheduler)
        if held is not None:
            if held[0] <= due_s:
                return
            held[1].cancel()
        delay_s = max(due_s - self._clock(), _LEAST_S)
        timer = asyncio.get_running_loop().call_later(delay_s, self._due, scheduler)
        self._armed[scheduler] = (due_s, timer)

    def _due(self, scheduler: Scheduler) -> None:
        del self._armed[scheduler]
        self._send(scheduler.pump(self._clock()))
        self.look(scheduler)
