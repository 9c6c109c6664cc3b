"""A text's units, for tests of the steps."""

import numpy as np

from compressor.text.chars import Ints, chars_of
from compressor.text.passages import Passages, passages
from compressor.text.protect import blocks
from compressor.text.segment import Ground, Spans, ground_of, segment
from compressor.text.terms import TermMatrix, terms_of


def ground(text: str) -> Ground:
    return ground_of(chars_of(text))


def spans(text: str) -> Spans:
    base = ground(text)
    return segment(base, np.zeros(1, np.int64), blocks(base, [0], [len(text)]))


def units(text: str) -> list[str]:
    found = spans(text)
    return [text[a:b] for a, b in zip(found.starts.tolist(), found.ends.tolist(), strict=True)]


def parts(text: str) -> Passages:
    base = ground(text)
    whole = blocks(base, [0], [len(text)])
    start = np.zeros(1, np.int64)
    return passages(base, segment(base, start, whole), start, whole)


def terms(text: str) -> TermMatrix:
    return terms_of(ground(text), spans(text))


def ids(found: TermMatrix, text: str) -> Ints:
    """Terms of a unit that says `text`, which the matrix must hold."""
    from compressor.text.chars import folded16

    base = ground(text)
    hashes = folded16(base.chars.hashes(base.word_starts, base.word_ends))
    return np.unique(np.searchsorted(found.hashes, hashes))
