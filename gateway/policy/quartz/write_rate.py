"""Which workers' prefix caches were written most lately, beside the others'.

An uncached prefill evicts what others would have hit, the more so where much was written: there
the cache's memory is short. So its price (psi) goes by the worker's part of what was lately
assigned, uncached, to all. Counters decay by growing the unit instead: their ratios, which are
all that is asked for, need no update while time passes.
"""

from collections.abc import Sequence
from math import exp
from typing import Final

EVEN_TOKENS: Final = 1024
"""Counted for every worker beside what was written: a few requests say little."""
LEAST: Final = 0.1
MOST: Final = 10.0
_RESCALE_AT: Final = 200.0
"""In tau: exp of it is far from the largest float."""


class RecentWrites:
    """Uncached tokens assigned to each worker, fading by 1/e in `tau_s`."""

    __slots__ = ("_even", "_start_s", "_tau_s", "_total", "_written")

    def __init__(self, workers: int, tau_s: float) -> None:
        self._written = [0.0] * workers
        self._total = 0.0
        self._even = float(EVEN_TOKENS)  # in the unit of the last assignment
        self._tau_s = tau_s
        self._start_s = 0.0

    def add(self, worker: int, tokens: int, now_s: float) -> None:
        """Assign a prefill."""
        age = (now_s - self._start_s) / self._tau_s
        if age > _RESCALE_AT:
            self._rescale(age, now_s)
            age = 0.0
        unit = exp(age) if age > 0.0 else 1.0
        weight = tokens * unit
        self._even = EVEN_TOKENS * unit
        self._written[worker] += weight
        self._total += weight

    def levels(self) -> tuple[Sequence[float], float, float]:
        """What was written to each, what is counted beside it for all alike, the mean of both.

        A worker's factor is the first two over the third, held within LEAST ... MOST; 1 at first.
        """
        even = self._even
        return self._written, even, self._total / len(self._written) + even

    def _rescale(self, age: float, now_s: float) -> None:
        scale = exp(-min(age, 700.0))
        self._written = [value * scale for value in self._written]
        self._total = sum(self._written)
        self._start_s = now_s
