"""One engine of `scheduling`, with a clock that can stand still, and what befalls it."""

from collections.abc import Sequence
from math import inf
from typing import Final

from simulator.engine.engine import Engine, EngineProfile
from simulator.experiments.scheduling_records import Trouble

_ROUNDING_S: Final = 1e-9


class Worker:
    """An engine with a clock that can stand still."""

    def __init__(self, profile: EngineProfile) -> None:
        self.profile = profile
        self.engine = Engine(profile)
        self.behind_s = 0.0
        self.halted_s = inf

    @property
    def halted(self) -> bool:
        """Whether it stands still."""
        return self.halted_s < inf

    def local_s(self, now_s: float) -> float:
        """The time by its own clock; rounded up, so that what is due is not missed by a bit."""
        local_s = min(now_s, self.halted_s) - self.behind_s
        return local_s + _ROUNDING_S if self.behind_s else local_s

    def resume(self, now_s: float) -> None:
        """Go on where it stopped."""
        self.behind_s += now_s - self.halted_s
        self.halted_s = inf

    def due_s(self) -> float:
        """When something may happen; never while it stands still."""
        due_s = None if self.halted else self.engine.next_event_s()
        return inf if due_s is None else due_s + self.behind_s


def events_of(troubles: Sequence[Trouble]) -> list[tuple[float, tuple[str, int]]]:
    """Beginnings and ends, latest first."""
    names = {"stall": ("stall", "resume"), "restart": ("down", "up"), "cold": ("cold", "")}
    events = []
    for trouble in troubles:
        first, last = names[trouble.what]
        events.append((trouble.at_s, (first, trouble.worker)))
        if last:
            events.append((trouble.at_s + trouble.lasts_s, (last, trouble.worker)))
    return sorted(events, reverse=True)
