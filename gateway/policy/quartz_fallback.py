"""When predictions fail: the safe baseline, entered and left with hysteresis.

QUARTZ, section 3.5. The miss rate is the share of prefills that took longer than their
calibrated quantile, over the predictor's window; 1 - alpha is what it should be. Prediction
goes on in the shadow, or the way back would never be found.
"""


class Fallback:
    """Whether the baseline is in force."""

    __slots__ = ("_enter", "_leave", "active", "entered_total")

    def __init__(self, enter: float, leave: float) -> None:
        self._enter = enter
        self._leave = leave
        self.active = False
        self.entered_total = 0

    def update(self, miss_rate: float | None) -> None:
        """Note the present miss rate; None while there is none to speak of."""
        if miss_rate is None:
            return
        if self.active:
            self.active = miss_rate >= self._leave
        elif miss_rate > self._enter:
            self.active = True
            self.entered_total += 1
