"""Prefills whose first tokens nobody sees: of answers that are not streamed.

They are taken for done when the prediction says so (`Scheduler.first_token`, assumed) and teach
nothing one by one. Where all answers are such, nothing would ever be learned: an engine that
prefills five times as fast as was assumed at first would be sent a fifth of what it can do. But
engines tell, of all their requests together, how many first tokens there were and how long they
took. Between two readings that is compared with what was predicted of those sent from here.

What it comes to, by Little's law: as many tokens are on their way to an engine as its gate says,
whatever its speed, since each counts for the time that the engine itself takes in the mean. The
engine is told from what it said: taken for too fast, it is sent too much, and what waits there
grows; how fast it grows says by how much too fast it was taken for.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

FirstTokens = Callable[[int, float], tuple[float, float, float] | None]
"""Worker and time to what its engine told: first tokens since it began, their seconds from
arrival in sum, and when it told; None when not known or stale."""


_LEAST_BETWEEN_S: Final = 0.1


class Told(NamedTuple):
    """What an engine took in the mean, beside what was predicted."""

    predicted_s: float
    actual_s: float
    growth: float
    """Of `actual_s`, seconds a second since the reading before; 0 where there was none."""
    requests: int
    """Of those predicted, >= 1."""


class UnseenPrefills:
    """Of one pool's workers, since each one's last reading."""

    __slots__ = (
        "_actual_s",
        "_first_tokens",
        "_predicted",
        "_predicted_s",
        "_read_s",
        "_seen",
        "_sum_s",
        "workers",
    )

    def __init__(self, workers: int) -> None:
        self.workers: set[int] = set()
        """Those that were sent such prefills since."""
        self._predicted = [0] * workers
        self._predicted_s = [0.0] * workers
        self._seen = [False] * workers
        self._first_tokens = [-1.0] * workers
        """As last read; -1 before."""
        self._sum_s = [0.0] * workers
        self._actual_s = [-1.0] * workers
        """Of those between the last two readings; -1 where that is not known."""
        self._read_s = [0.0] * workers

    def add(self, worker: int, mean_s: float) -> None:
        """A prefill that nobody saw is over, or should be; it was predicted so."""
        self.workers.add(worker)
        self._predicted[worker] += 1
        self._predicted_s[worker] += mean_s

    def saw(self, worker: int) -> None:
        """A stream's first token came: it teaches by itself, and better."""
        self._seen[worker] = True

    def read(self, worker: int, first_tokens: float, sum_s: float, read_s: float) -> Told | None:
        """Take a reading; None where it says nothing new of what nobody saw.

        Counters that fell are of an engine that began anew.
        """
        more, more_s = first_tokens - self._first_tokens[worker], sum_s - self._sum_s[worker]
        if not more:
            return None
        known = self._first_tokens[worker] >= 0.0 and more > 0.0 and more_s >= 0.0
        seen, requests = self._seen[worker], self._predicted[worker]
        predicted_s, before_s = self._predicted_s[worker], self._actual_s[worker]
        between_s = read_s - self._read_s[worker]
        actual_s = more_s / more if known else -1.0
        self._first_tokens[worker], self._sum_s[worker] = first_tokens, sum_s
        self._actual_s[worker], self._read_s[worker] = actual_s, read_s
        self._seen[worker] = False
        self.workers.discard(worker)
        self._predicted[worker], self._predicted_s[worker] = 0, 0.0
        if not known or seen or not requests:
            return None
        growth = 0.0
        if before_s >= 0.0 and between_s > 0.0:
            growth = (actual_s - before_s) / max(between_s, _LEAST_BETWEEN_S)
        return Told(predicted_s / requests, actual_s, growth, requests)
