"""The ranks' KV load by request class and age: the input of the look-ahead.

The histogram is updated per request as tokens stream, so that the look-ahead over all workers
is one matrix product (simulator.barrier.survival_forecast) however many requests run.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def _edges(most: int = 65_536) -> tuple[int, ...]:
    """Ages at which a bucket begins: one each up to 4, then four buckets per doubling."""
    edges = [0, 1, 2, 3, 4]
    while edges[-1] < most:
        edges.append(edges[-1] + max(1, 1 << max(0, edges[-1].bit_length() - 3)))
    return tuple(edges)


AGE_EDGES: Final = _edges()
"""In tokens streamed; the last bucket has no end."""


def middle_ages(edges: Sequence[int] = AGE_EDGES) -> Floats:
    """The representative age of each bucket, in tokens."""
    ages = np.array(edges, dtype=np.float64)
    ages[:-1] += (np.diff(ages) - 1) / 2
    return ages


class LoadHistogram:
    """Resident tokens and active requests of each worker, by class and age bucket.

    The caller keeps each request's class, tokens and age, and passes those it passed last.
    """

    __slots__ = ("_active", "_edges", "_tokens", "classes", "workers")

    def __init__(self, workers: int, classes: int = 1, edges: Sequence[int] = AGE_EDGES) -> None:
        if workers < 1 or classes < 1:
            raise ValueError("a load histogram has at least one worker and one class")
        self.workers = workers
        self.classes = classes
        self._edges = tuple(edges)
        shape = (workers, classes, len(edges))
        self._tokens: Floats = np.zeros(shape)
        self._active: Floats = np.zeros(shape)

    @property
    def load(self) -> Floats:
        """Tokens resident on each worker, shape (G,)."""
        found: Floats = self._tokens.sum(axis=(1, 2))
        return found

    @property
    def active(self) -> Floats:
        """Requests active on each worker, shape (G,)."""
        found: Floats = self._active.sum(axis=(1, 2))
        return found

    def add(self, worker: int, kind: int, tokens: float, age: int = 0) -> None:
        """Add a request of class `kind` with `tokens` resident, `age` of them streamed."""
        bucket = bisect_right(self._edges, age) - 1
        self._tokens[worker, kind, bucket] += tokens
        self._active[worker, kind, bucket] += 1

    def remove(self, worker: int, kind: int, tokens: float, age: int) -> None:
        """Remove a request that left its worker."""
        bucket = bisect_right(self._edges, age) - 1
        self._tokens[worker, kind, bucket] -= tokens
        self._active[worker, kind, bucket] -= 1

    def grow(self, worker: int, kind: int, tokens: float, age: int, more: int) -> None:
        """Record `more` tokens streamed to a request."""
        self.remove(worker, kind, tokens, age)
        self.add(worker, kind, tokens + more, age + more)

    def ahead(self, alive: Floats) -> Floats:
        """Expected load now and in H steps, shape (G, H+1).

        `alive`: share of each class and age bucket that is still active after h steps, shape
        (classes, buckets, H+1), from `lookahead.still_alive`.
        """
        steps = alive.shape[2]
        cells = self.classes * len(self._edges)
        both = np.concatenate((self._tokens, self._active)).reshape(2 * self.workers, cells)
        expected = both @ alive.reshape(cells, steps)
        found: Floats = expected[: self.workers] + np.arange(steps) * expected[self.workers :]
        return found
