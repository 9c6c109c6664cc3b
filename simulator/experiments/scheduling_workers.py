"""One engine of `scheduling`, with a clock that can be halted, and its troubles."""

from collections.abc import Sequence
from math import inf
from typing import Final

from simulator.engine.engine import Engine, EngineProfile
from simulator.experiments.scheduling_records import Trouble

_ROUNDING_S: Final = 1e-9


class Worker:
    """An engine with a clock that can be halted."""

    def __init__(self, profile: EngineProfile) -> None:
        self.profile = profile
        self.engine = Engine(profile)
        self.behind_s = 0.0
        self.halted_s = inf

    @property
    def halted(self) -> bool:
        """Whether its clock is halted."""
        return self.halted_s < inf

    def local_s(self, now_s: float) -> float:
        """Time by its own clock; rounded up, so that rounding never misses a due event."""
        local_s = min(now_s, self.halted_s) - self.behind_s
        return local_s + _ROUNDING_S if self.behind_s else local_s

    def resume(self, now_s: float) -> None:
        """Continue at the time at which it was halted."""
        self.behind_s += now_s - self.halted_s
        self.halted_s = inf

    def due_s(self) -> float:
        """Time of the next event; never while it is halted."""
        due_s = None if self.halted else self.engine.next_event_s()
        return inf if due_s is None else due_s + self.behind_s


def events_of(troubles: Sequence[Trouble]) -> list[tuple[float, tuple[str, int]]]:
    """Starts and ends of troubles, latest first."""
    names = {"stall": ("stall", "resume"), "restart": ("down", "up"), "cold": ("cold", "")}
    events = []
    for trouble in troubles:
        first, last = names[trouble.what]
        events.append((trouble.at_s, (first, trouble.worker)))
        if last:
            events.append((trouble.at_s + trouble.lasts_s, (last, trouble.worker)))
    return sorted(events, reverse=True)
