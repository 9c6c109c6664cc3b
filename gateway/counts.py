"""Plain numbers behind metrics: counts and histograms by label values; rendered only when scraped.

Counting on the request path is a dict or list update: no locks (one event loop), no label
objects. Series are bounded: a counter that a client could grow stops at `MAX_SERIES` and
counts the rest under "other".
"""

from bisect import bisect_left

MAX_SERIES = 2000


class Counter:
    """A family of monotonic counts by label values."""

    __slots__ = ("help", "labels", "name", "values")

    def __init__(self, name: str, text: str, labels: tuple[str, ...] = ()) -> None:
        self.name = name
        self.help = text
        self.labels = labels
        self.values: dict[tuple[str, ...], float] = {}

    def add(self, *labels: str, by: float = 1) -> None:
        """Count; `labels` in the family's order."""
        values = self.values
        held = values.get(labels)
        if held is None:
            if len(values) >= MAX_SERIES:
                labels = ("other",) * len(self.labels)
            held = values.get(labels, 0)
        values[labels] = held + by


class Histogram:
    """A family of cumulative histograms by label values."""

    __slots__ = ("bounds", "help", "labels", "name", "series")

    def __init__(
        self, name: str, text: str, labels: tuple[str, ...], bounds: tuple[float, ...]
    ) -> None:
        self.name = name
        self.help = text
        self.labels = labels
        self.bounds = bounds
        self.series: dict[tuple[str, ...], list[float]] = {}

    def observe(self, value: float, *labels: str) -> None:
        """Add one value; `labels` in the family's order."""
        row = self.series.get(labels)
        if row is None:
            if len(self.series) >= MAX_SERIES:
                return
            row = self.series[labels] = [0.0] * (len(self.bounds) + 2)
        row[bisect_left(self.bounds, value)] += 1
        row[-1] += value
