"""TextRank without a similarity matrix.

With X the units' L2-normalised term frequencies, similarities are X Xᵀ less its diagonal, so
one step of PageRank is two passes over the terms:
x <- (1 - d) / n + d (X(Xᵀz) - z), z = x / deg, deg = X(Xᵀ1) - 1.
Mihalcea and Tarau, 2004; damping .85. A unit similar to no other keeps the minimum.
"""

from typing import Final

import numpy as np

from compressor.text.terms import Floats, TermMatrix, sums

DAMPING: Final = 0.85
STEPS: Final = 4
_MIN_DEGREE: Final = 1e-9


def textrank(terms: TermMatrix) -> Floats:
    """Centrality of each unit in [0, 1], the highest being 1; shape (units,)."""
    total = terms.units
    shared = np.flatnonzero(terms.spread[terms.term] > 1)
    if not len(shared):
        return np.zeros(total)
    squares = sums(terms.unit, terms.count * terms.count, total)
    unit, value = terms.unit[shared], terms.count[shared]
    value = value / np.sqrt(squares[unit])
    # Terms of a single unit only add to the subtracted diagonal, so they are left out.
    common = np.flatnonzero(terms.spread > 1)
    places = np.empty(len(terms.spread), np.int64)
    places[common] = np.arange(len(common))
    term, width = places[terms.term[shared]], len(common)
    own = sums(unit, value * value, total)

    def step(weights: Floats) -> Floats:
        down = sums(term, value * weights[unit], width)
        return sums(unit, value * down[term], total) - own * weights

    degrees = step(np.ones(total))
    inverse = np.where(degrees > _MIN_DEGREE, 1 / np.maximum(degrees, _MIN_DEGREE), 0.0)
    ranks_now = np.full(total, 1 / total)
    for _ in range(STEPS):
        ranks_now = (1 - DAMPING) / total + DAMPING * step(ranks_now * inverse)
    scaled: Floats = ranks_now / ranks_now.max()
    return scaled
