"""Output lengths: P(output > tokens) by class, learned online.

Kaplan and Meier's estimator ("Nonparametric Estimation from Incomplete Observations", 1958) on
tokens instead of time: an answer that was cancelled, or cut at its limit, is censored, which means
it counts as at risk up to its length. Old observations decay. Tokens are counted in cells that
grow by a tenth, so a class takes a few kilobytes however many answers it has seen.
"""

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

LONGEST: Final = 1 << 20
"""Longest counted output, in tokens; longer answers count as this long."""
MAX_CLASSES: Final = 256
OTHER: Final = ""
"""Name for answers without a class, counted only in the curve of all classes."""
DEFAULT_HALF_LIFE: Final = 2000.0
ENOUGH: Final = 50.0
"""Effective observations from which a class's own curve is used."""
_REFRESH: Final = 16
"""Observations between two computations of a curve."""


def _edges() -> tuple[int, ...]:
    found, value = [], 1.0
    while value < LONGEST:
        found.append(int(value))
        value = max(value + 1, value * 1.1)
    return (*dict.fromkeys(found), LONGEST)


EDGES: Final = _edges()
"""Upper ends of the cells: cell i holds EDGES[i - 1] < tokens <= EDGES[i]."""


class _Curve:
    """The curve of one class: weights of ended and of cut answers in each cell."""

    __slots__ = ("_dirty", "_growth", "_weight", "cut", "ended", "survival", "total")

    def __init__(self, half_life: float) -> None:
        self.ended = [0.0] * len(EDGES)
        self.cut = [0.0] * len(EDGES)
        self.total = 0.0
        self.survival = [1.0] * len(EDGES)
        self._growth = 2.0 ** (1.0 / half_life)
        self._weight = 1.0
        self._dirty = 0

    @property
    def effective(self) -> float:
        """Effective number of observations, after decay."""
        return self.total / self._weight

    def add(self, tokens: int, *, cut: bool) -> None:
        """Count an answer; growing weights for new answers stand in for decay of old ones."""
        self._weight *= self._growth
        cell = bisect_left(EDGES, tokens)
        (self.cut if cut else self.ended)[cell] += self._weight
        self.total += self._weight
        if self._weight > 1e12:
            for weights in (self.ended, self.cut):
                weights[:] = [value / self._weight for value in weights]
            self.total /= self._weight
            self._weight = 1.0
        self._dirty += 1
        if self._dirty >= _REFRESH or self.effective < 4 * _REFRESH:
            self._refresh()

    def _refresh(self) -> None:
        """S after each cell: the product of the survival shares of the cells up to it."""
        self._dirty = 0
        at_risk, share = self.total, 1.0
        for i, (ended, cut) in enumerate(zip(self.ended, self.cut, strict=True)):
            # An answer cut within a cell is at risk for half of it, on average.
            exposed = at_risk - cut / 2
            if ended > 0.0 and exposed > 0.0:
                share *= max(0.0, 1.0 - ended / exposed)
            self.survival[i] = share
            at_risk -= ended + cut


class OutputSurvival:
    """S_c(a) = P(output > a tokens | class c); bounded memory; no clock.

    `half_life` is in observations of a class, > 0, else ValueError. Classes beyond MAX_CLASSES
    replace the least recently observed one. For an unknown class, or one with fewer than ENOUGH
    effective observations, the curve of all classes is used.
    """

    __slots__ = ("_all", "_classes", "_half_life")

    def __init__(self, half_life: float = DEFAULT_HALF_LIFE) -> None:
        if not half_life > 0:
            raise ValueError("half_life must be above 0 observations")
        self._half_life = half_life
        self._all = _Curve(half_life)
        self._classes: OrderedDict[str, _Curve] = OrderedDict()

    def __len__(self) -> int:
        return len(self._classes)

    def observe(self, name: str, tokens: int, *, censored: bool) -> None:
        """Learn from an answer's length.

        `censored`: it was cancelled or cut at its limit, so its full length is unknown. Negative
        lengths are ignored.
        """
        if tokens < 0:
            return
        tokens = min(max(tokens, 1), LONGEST)
        self._all.add(tokens, cut=censored)
        if name == OTHER:
            return
        curve = self._classes.get(name)
        if curve is None:
            if len(self._classes) >= MAX_CLASSES:
                self._classes.popitem(last=False)
            curve = self._classes[name] = _Curve(self._half_life)
        self._classes.move_to_end(name)
        curve.add(tokens, cut=censored)

    def survival(self, name: str, tokens: float) -> float:
        """P(output > tokens), 0..1 and falling in tokens; 1 before any observation.

        Interpolated within a cell.
        """
        return _at(self._curve(name).survival, tokens)

    def _curve(self, name: str) -> _Curve:
        curve = self._classes.get(name)
        return self._all if curve is None or curve.effective < ENOUGH else curve


def _at(survival: Sequence[float], tokens: float) -> float:
    if tokens < 1:
        return 1.0
    cell = bisect_right(EDGES, tokens)  # EDGES[cell - 1] <= tokens < EDGES[cell]
    before = survival[cell - 1]
    if cell == len(EDGES):
        return before
    low, high = EDGES[cell - 1], EDGES[cell]
    return before + (survival[cell] - before) * (tokens - low) / (high - low)
