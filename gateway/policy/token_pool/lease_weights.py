"""The weights of a pool's leases, so that the least is known at any time.

Equal weights are counted; the different ones are a list of short ascending lists. So entering and
taking out cost a few microseconds at most, whatever the number of leases, and nothing is ever put
in order as a whole. A heap that keeps the dead would be shorter, but has to be rebuilt, which with
100,000 leases keeps requests for a tenth of a second.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from typing import Final

MOST_IN_PART: Final = 512
"""Weights of a part; one that grows beyond is halved."""


class LeaseWeights:
    """Weights of leases in force, with how often each is there."""

    __slots__ = ("_counts", "_first", "_parts")

    def __init__(self) -> None:
        self._counts: dict[float, int] = {}
        self._parts: list[list[float]] = []
        """Each different weight once, ascending; no part is empty."""
        self._first: list[float] = []
        """The first weight of each part."""

    def __len__(self) -> int:
        return sum(self._counts.values())

    def __iter__(self) -> Iterator[float]:
        """Ascending, equal ones too."""
        for part in self._parts:
            for weight in part:
                for _ in range(self._counts[weight]):
                    yield weight

    @property
    def longest_part(self) -> int:
        """Weights of the longest part: what one change moves at most."""
        return max(map(len, self._parts), default=0)

    def add(self, weight: float) -> None:
        """A lease of this weight begins."""
        count = self._counts.get(weight, 0)
        self._counts[weight] = count + 1
        if not count:
            self._enter(weight)

    def discard(self, weight: float) -> None:
        """One of them ends; none of this weight is no failure."""
        count = self._counts.get(weight, 0)
        if count > 1:
            self._counts[weight] = count - 1
        elif count:
            del self._counts[weight]
            self._leave(weight)

    def least(self) -> float:
        """The least weight; 0 when there is none."""
        return self._first[0] if self._first else 0.0

    def _enter(self, weight: float) -> None:
        parts, first = self._parts, self._first
        if not parts:
            parts.append([weight])
            first.append(weight)
            return
        at = bisect_right(first, weight) - 1
        if at < 0:
            at = 0
            first[0] = weight
        part = parts[at]
        insort(part, weight)
        if len(part) > MOST_IN_PART:
            half = len(part) // 2
            parts.insert(at + 1, part[half:])
            first.insert(at + 1, part[half])
            del part[half:]

    def _leave(self, weight: float) -> None:
        at = bisect_right(self._first, weight) - 1
        part = self._parts[at]
        place = bisect_left(part, weight)
        del part[place]
        if not part:
            del self._parts[at], self._first[at]
        elif not place:
            self._first[at] = part[0]
