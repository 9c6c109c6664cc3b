"""Novelty of a unit: the terms that it mentions first."""

import numpy as np

from compressor.text.terms import Floats, TermMatrix


def novelty(terms: TermMatrix) -> Floats:
    """Share of a unit's distinct terms that no earlier unit has, in [0, 1]; shape (units,)."""
    first = np.empty(len(terms.spread), np.int64)
    # Assigned from the end: the earliest unit is written last.
    first[terms.term[::-1]] = terms.unit[::-1]
    new = first[terms.term] == terms.unit
    distinct = np.bincount(terms.unit, minlength=terms.units)
    fresh = np.bincount(terms.unit[new], minlength=terms.units)
    share: Floats = fresh / np.maximum(distinct, 1)
    return share
