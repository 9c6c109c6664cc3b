"""A warning that clients can cause as often as they like, and that is written now and then."""

import logging
import time
from collections.abc import Callable
from math import inf
from typing import Final

EVERY_S: Final = 60.0


class RareLog:
    """One kind of warning: at most one line in `EVERY_S`, which says how many it stands for."""

    def __init__(
        self, log: logging.Logger, what: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`what` happened, as a line says it; `clock` in seconds."""
        self._log = log
        self._what = what
        self._clock = clock
        self._silent_since_s = -inf
        self._unsaid = 0

    def note(self, who: str) -> None:
        """It happened, because of `who`."""
        now_s = self._clock()
        if now_s - self._silent_since_s < EVERY_S:
            self._unsaid += 1
            return
        unsaid, self._unsaid, self._silent_since_s = self._unsaid, 0, now_s
        self._log.warning("%s from %s (%d more since the last line)", self._what, who, unsaid)
