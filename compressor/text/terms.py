"""A sparse matrix of units and terms: words, or n-grams in scripts without spaces.

Terms are 16-bit hashes. One sort of unit * 2**16 + term gives the rows in order.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from compressor.text.chars import RUN, VOCABULARY, Ints, folded16, hash_table
from compressor.text.lexicon import STOP_WORDS
from compressor.text.segment import Ground, Spans

Floats = npt.NDArray[np.float64]

_STEM_CHARS: Final = 6
"""Letters kept of a word outside Latin script: inflection is at its end."""
_LATIN_END: Final = 0x250
_UNI: Final = np.uint32(0x963EE407)
_BI: Final = np.uint32(0x1E98DF25)


@dataclass(frozen=True, slots=True)
class TermMatrix:
    """The matrix in coordinates, sorted by unit, then term; `count` is the frequency.

    Terms are numbered from 0 in the order of their hashes, so that tables of them are small.
    """

    units: int
    unit: Ints
    term: Ints
    count: Floats
    lengths: Floats
    """Number of terms in each unit, without stop words, shape (units,)."""
    spread: Ints
    """Number of units that hold each term, shape (distinct terms,)."""
    hashes: Ints
    """The 16-bit hash of each term, shape (distinct terms,)."""


def sums(index: Ints, weights: Floats, size: int) -> Floats:
    """Sum of the weights of each index below `size`."""
    return np.bincount(index, weights, size).astype(np.float64, copy=False)


def terms_of(ground: Ground, spans: Spans) -> TermMatrix:
    """The terms of each unit, without stop words."""
    total = len(spans.starts)
    groups = [_numbered(spans, at, term) for at, term in _occurrences(ground)]
    keys = np.concatenate([unit * VOCABULARY + term for unit, term in groups])
    if total < VOCABULARY:
        # Sorting half the width takes half the time.
        keys = keys.astype(np.uint32)
    keys.sort()
    first = np.empty(len(keys), np.bool_)
    first[:1] = True
    np.not_equal(keys[1:], keys[:-1], out=first[1:])
    places = np.flatnonzero(first)
    count = np.diff(np.append(places, len(keys))).astype(np.float64)
    keys = keys[places].astype(np.int64)
    rows, columns = keys >> 16, keys & (VOCABULARY - 1)
    lengths = sums(rows, count, total)
    present = np.zeros(VOCABULARY, np.bool_)
    present[columns] = True
    hashes = np.flatnonzero(present)
    places = np.empty(VOCABULARY, np.int32)
    places[hashes] = np.arange(len(hashes), dtype=np.int32)
    columns = places[columns].astype(np.int64)
    spread = np.bincount(columns, minlength=len(hashes))
    return TermMatrix(total, rows, columns, count, lengths, spread, hashes)


def _numbered(
    spans: Spans, at: Ints, term: npt.NDArray[np.uint32]
) -> tuple[Ints, npt.NDArray[np.uint32]]:
    """The unit of each term; `at` is sorted."""
    bounds = np.append(np.searchsorted(at, spans.starts), len(at))
    return np.repeat(np.arange(len(spans.starts)), np.diff(bounds)), term[bounds[0] :]


def _occurrences(ground: Ground) -> list[tuple[Ints, npt.NDArray[np.uint32]]]:
    """Indices and hashes of words, of single characters and of pairs, each in order."""
    chars = ground.chars
    starts, ends = ground.word_starts, ground.word_ends
    codes = chars.codes
    # Drop the plural s of Latin words, so that `tokens` meets `token`; `class` and `status` stay.
    last, before = codes[ends - 1], codes[ends - 2]
    plural = (last == ord("s")) & (ends - starts >= 4)
    plural &= (before != ord("s")) & (before != ord("u")) & (before != ord("i"))
    ends = ends - plural
    if chars.wide is not None:
        foreign = codes[starts] >= _LATIN_END
        ends = np.where(foreign, np.minimum(ends, starts + _STEM_CHARS), ends)
    hashes = folded16(chars.hashes(starts, ends))
    keep = ~hash_table(STOP_WORDS)[hashes]
    starts, hashes = starts[keep], hashes[keep]
    if chars.wide is None or not (runs := np.flatnonzero((chars.classes & RUN) != 0)).size:
        return [(starts, hashes)]
    here = codes[runs].astype(np.uint32)
    single = folded16(here * _UNI)
    pairs = np.flatnonzero(np.diff(runs) == 1)
    double = folded16(here[pairs] * _UNI + here[pairs + 1] * _BI)
    return [(starts, hashes), (runs, single), (runs[pairs], double)]
