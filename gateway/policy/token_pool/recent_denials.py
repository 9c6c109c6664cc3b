"""Tenants that a pool refused of late: each counts once, however often it asked.

Counting attempts would let one tenant's retries lengthen everybody's wait.
"""

from bisect import bisect_left, insort


class Refused:
    """Tenants, each with the weight of its latest refusal."""

    __slots__ = ("_ascending", "weights")

    def __init__(self) -> None:
        self.weights: dict[str, float] = {}
        """By tenant."""
        self._ascending: list[float] = []

    def __len__(self) -> int:
        return len(self.weights)

    def note(self, tenant: str, weight: float, most: int) -> None:
        """A tenant was refused; beyond `most` of them nobody is added."""
        self.forget(tenant)
        if len(self.weights) < most:
            self.weights[tenant] = weight
            insort(self._ascending, weight)

    def forget(self, tenant: str) -> None:
        """Count it no longer, if it was."""
        weight = self.weights.pop(tenant, None)
        if weight is not None:
            del self._ascending[bisect_left(self._ascending, weight)]

    def others_above(self, tenant: str, weight: float) -> int:
        """Other tenants whose request was of at least this weight."""
        count = len(self._ascending) - bisect_left(self._ascending, weight)
        return count - (self.weights.get(tenant, -1.0) >= weight)
