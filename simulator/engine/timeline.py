"""End times of iterations while the batch stays the same.

An iteration lasts t = W + H n, or W + h x resident tokens, and prompt tokens add to it. Between
changes of the batch all iterations are alike, so the k-th one after time tau0 ends at
tau0 + k a + b k (k - 1) / 2: a is the first one's length, b the growth from one to the next (0,
unless resident tokens are timed while they grow, or a prompt's attention is). Stepping and jumping
both use this formula, so their times are equal to the last bit.
"""

from math import sqrt


class Timeline:
    """The formula from one change of the batch on; iterations are numbered by v."""

    __slots__ = ("_a", "_b", "_tau0", "_v0")

    def __init__(self) -> None:
        self._v0, self._tau0, self._a, self._b = 0, 0.0, 0.0, 0.0

    def anchor(self, v: int, now_s: float, length_s: float, growth_s: float) -> None:
        """Iteration v ended by now; the next one lasts `length_s`, each later one more."""
        self._v0, self._tau0, self._a, self._b = v, now_s, length_s, growth_s

    def shift(self, v: int, now_s: float) -> None:
        """The iteration after v starts now, whenever v ended; all else stays."""
        if now_s != self.end_s(v):
            self.anchor(v, now_s, self._a + self._b * (v - self._v0), self._b)

    def end_s(self, v: int) -> float:
        """When iteration v ends."""
        k = v - self._v0
        end_s = self._tau0 + k * self._a
        return end_s + self._b * (k * (k - 1) // 2) if self._b else end_s

    def last_ended(self, until_s: float, first: int, before: int) -> int:
        """The last iteration that ends by `until_s`, within first <= v < before."""
        elapsed_s, a, b = until_s - self._tau0, self._a, self._b
        if b:
            half = a - b / 2
            k = int((sqrt(half * half + 2 * b * max(elapsed_s, 0.0)) - half) / b)
        else:
            k = int(elapsed_s / a)
        v = max(first, min(before - 1, self._v0 + k))
        while v + 1 < before and self.end_s(v + 1) <= until_s:
            v += 1
        while v > first and self.end_s(v) > until_s:
            v -= 1
        return v
