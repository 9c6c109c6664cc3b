"""BM25 scores of units and of their passages against the question.

Robertson and Zaragoza, 2009: idf ln(1 + (N - df + .5) / (df + .5)), k1 1.2, b .75.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from compressor.text.chars import Ints
from compressor.text.terms import Floats, TermMatrix, sums

K1: Final = 1.2
B: Final = 0.75
NEIGHBOUR: Final = 0.3
"""Share of the better neighbour's score that a unit adds: answers often follow their subject."""
MASS: Final = 2.0
"""Matched IDF at which the question has half its weight; a single rare word has more."""


@dataclass(frozen=True, slots=True)
class Relevance:
    """Scores in [0, 1], shape (units,)."""

    sentence: Floats
    passage: Floats
    weight: float
    """Reliability of the question, 0 to 1, by the IDF of its terms that occur."""
    matched: Ints
    """The question's terms that occur outside it."""


def relevance(
    terms: TermMatrix, wanted: Ints, passages: Ints, asking: npt.NDArray[np.bool_]
) -> Relevance:
    """How well units and their passages match the sorted terms `wanted`.

    `passages` numbers each unit's passage from 0; `asking` marks the question's own units, which
    are not scored.
    """
    none = np.zeros(terms.units)
    table = np.zeros(len(terms.spread), np.bool_)
    table[wanted] = True
    hits = np.flatnonzero(table[terms.term] & ~asking[terms.unit])
    if not len(hits):
        return Relevance(none, none, 0.0, np.zeros(0, np.int64))
    # Replace terms by their indices in `wanted`.
    term = np.searchsorted(wanted, terms.term[hits])
    unit, count = terms.unit[hits], terms.count[hits]
    lengths = np.where(asking, 0.0, terms.lengths)
    by_unit, mass = _bm25(unit, term, count, lengths)
    width, pages = len(wanted), int(passages[-1]) + 1
    counts = sums(passages[unit] * width + term, count, pages * width)
    pairs = np.flatnonzero(counts)
    by_passage, _ = _bm25(
        pairs // width, pairs % width, counts[pairs], sums(passages, lengths, pages)
    )
    weight = mass / (mass + MASS)
    sentence = _with_neighbours(by_unit / by_unit.max(), passages)
    passage = (by_passage / by_passage.max())[passages]
    passage = np.where(asking, 0.0, passage)
    return Relevance(weight * sentence, weight * passage, weight, wanted[np.unique(term)])


def _bm25(row: Ints, term: Ints, count: Floats, lengths: Floats) -> tuple[Floats, float]:
    """Scores by row, and the summed IDF of all terms that matched."""
    rows = max(int(np.count_nonzero(lengths)), 1)
    spread = np.bincount(term)
    idf = np.log1p((rows - spread + 0.5) / (spread + 0.5))
    mean = lengths.sum() / rows
    norm = K1 * (1 - B + B * lengths[row] / max(mean, 1e-9))
    part = idf[term] * count * (K1 + 1) / (count + norm)
    return sums(row, part, len(lengths)), float(idf[spread > 0].sum())


def _with_neighbours(scores: Floats, passages: Ints) -> Floats:
    same = passages[1:] == passages[:-1]
    best = np.zeros(len(scores))
    best[1:] = np.where(same, scores[:-1], 0)
    best[:-1] = np.maximum(best[:-1], np.where(same, scores[1:], 0))
    mixed: Floats = scores + NEIGHBOUR * best
    mixed /= mixed.max()
    return mixed
