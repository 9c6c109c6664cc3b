"""State of BF-IO's solver: the workers while slots are filled, and the waiting items."""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

_sum = np.add.reduce
_max = np.maximum.reduce


def matrix_of(load: ArrayLike, growth: ArrayLike | None) -> tuple[Floats, Floats]:
    """A copy of the load as (G, H+1), and the growth over it."""
    matrix = np.array(load, dtype=np.float64, order="C")
    if matrix.ndim == 1:
        matrix = matrix[:, None]
    steps = matrix.shape[1]
    if growth is None:
        return matrix, np.arange(steps, dtype=np.float64)
    return matrix, np.asarray(growth, dtype=np.float64)


def imbalance(load: Floats) -> float:
    """G x max - sum, over all steps of a load matrix."""
    return float(len(load) * _sum(_max(load, axis=0)) - _sum(load, axis=None))


class WorkerLoads:
    """The workers' loads while slots are filled."""

    __slots__ = ("caps", "free", "grown", "load", "most", "rank", "slots", "weight")

    def __init__(
        self, load: ArrayLike, cap: ArrayLike, growth: ArrayLike | None, most: int
    ) -> None:
        self.load, self.grown = matrix_of(load, growth)
        self.free = [int(c) for c in np.asarray(cap)]
        # Slots beyond the number of items make no difference.
        self.caps = [min(c, most) for c in self.free]
        self.slots = sum(self.caps)
        self.most: Floats = _max(self.load, axis=0)
        caps = np.array(self.caps, dtype=np.float64)
        # Workers without a slot rank as infinitely loaded: they are never the neediest.
        self.rank: Floats = np.where(caps > 0, _sum(self.load, axis=1), np.inf)
        self.weight: Floats = np.maximum(caps, 1.0)

    def place(self, worker: int, size: float) -> None:
        """Add an item and take a slot."""
        row = self.load[worker]
        row += size + self.grown
        np.maximum(self.most, row, out=self.most)
        self.caps[worker] -= 1
        self.free[worker] -= 1
        self.slots -= 1
        left = self.caps[worker]
        self.rank[worker] = _sum(row) if left else np.inf
        self.weight[worker] = max(left, 1)

    def neediest(self) -> int:
        """The worker with the most room below the fullest, per free slot."""
        return int(((_sum(self.most) - self.rank) / self.weight).argmax())

    def others(self, worker: int) -> Floats:
        """The maximum load of the other workers at each step."""
        row = self.load[worker].copy()
        self.load[worker] = -np.inf
        most: Floats = _max(self.load, axis=0)
        self.load[worker] = row
        return most

    def room(self, worker: int) -> Floats:
        """Tokens that fit below the other workers' maximum at each step."""
        row = self.load[worker]
        attains = row >= self.most
        fullest = np.where(attains, self.others(worker), self.most) if attains.any() else self.most
        room: Floats = fullest - row
        return room


class Pool:
    """Waiting items sorted by size; equal sizes keep their order."""

    __slots__ = ("items", "sizes")

    def __init__(self, sizes: Sequence[float], items: Sequence[int]) -> None:
        # Plain floats: comparing numpy's scalars one by one is several times slower.
        keyed = sorted((float(sizes[i]), i) for i in items)
        self.sizes = [size for size, _ in keyed]
        self.items = [item for _, item in keyed]

    def around(self, target: float) -> list[int]:
        """Indexes of the largest size below `target` and of the least at or above it."""
        right = bisect_left(self.sizes, target)
        found = []
        if right:
            found.append(bisect_left(self.sizes, self.sizes[right - 1], 0, right))
        if right < len(self.sizes):
            found.append(right)
        return found

    def nearest(self, target: float) -> int:
        """Index of the size nearest to `target`; of two as near, the smaller."""
        return min(self.around(target), key=lambda at: abs(self.sizes[at] - target))

    def take(self, at: int) -> tuple[int, float]:
        """Remove an item; returns it and its size."""
        return self.items.pop(at), self.sizes.pop(at)

    def give(self, item: int, size: float) -> None:
        """Put an item back."""
        at = bisect_left(self.sizes, size)
        while at < len(self.sizes) and self.sizes[at] == size and self.items[at] < item:
            at += 1
        self.sizes.insert(at, size)
        self.items.insert(at, item)
