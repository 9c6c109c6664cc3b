"""Passages of a prompt, separated by headers and paragraphs.

Rules:
- A header (`compressor.text.markers`) is a unit of its own, called furniture. Its cost is added
  with the first kept unit of its section; without kept units it is dropped. A closing tag is
  furniture of the section it closes.
- A section runs from header to header. Its paragraphs are gathered into passages of at most
  PASSAGE_CHARS; without headers, into passages of at least PARAGRAPH_CHARS.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from compressor.text.chars import Ints
from compressor.text.markers import headers
from compressor.text.segment import Ground, Spans, distinct, spans_at

PASSAGE_CHARS: Final = 1500
PARAGRAPH_CHARS: Final = 300


@dataclass(frozen=True, slots=True)
class Passages:
    """The units with headers split off, and each unit's section and passage."""

    spans: Spans
    section: Ints
    """Section of each unit, from 0; furniture is paid once per section."""
    passage: Ints
    """Passage of each unit, from 0."""
    furniture: npt.NDArray[np.bool_]
    rank: Ints
    """Index of each unit within its passage, furniture not counted."""
    plain_marks: int = 0
    """Headers that name a passage."""
    structural_marks: int = 0
    """Headers that only repeat."""


def passages(ground: Ground, spans: Spans, slots: Ints, blocks: list[tuple[int, int]]) -> Passages:
    """Sections and passages of the units; `slots` are where the texts begin, sorted."""
    found = headers(ground, spans, slots, blocks)
    if found:
        begins = spans.starts
        edges = np.array([(header.start, header.end) for header in found], np.int64)
        inner = np.searchsorted(edges[:, 0], begins, "right") - 1
        inside = (inner >= 0) & (begins > edges[inner, 0]) & (begins < edges[inner, 1])
        after = ground.solid_from(edges[:, 1])
        spans = spans_at(ground, distinct(np.concatenate((begins[~inside], after))), blocks)
    total = len(spans.starts)
    furniture, opens = np.zeros(total, np.bool_), np.zeros(total, np.bool_)
    firsts = np.searchsorted(spans.starts, slots)
    opens[firsts[firsts < total]] = True
    if found:
        at = np.searchsorted(spans.starts, edges[:, 0])
        furniture[at] = True
        previous, closed = -2, True
        for index, closes in zip(at.tolist(), [header.closes for header in found], strict=True):
            # A header right after another is part of the same furniture.
            if not closes and (closed or index != previous + 1):
                opens[index] = True
            previous, closed = index, closes
    section = np.cumsum(opens) - 1
    passage = _gathered(ground, spans, section, furniture)
    counted = np.cumsum(~furniture)
    first = np.searchsorted(passage, passage)
    rank = np.maximum(counted - 1 - counted[first] + ~furniture[first], 0)
    plain = sum(header.plain and not header.closes for header in found)
    structural = sum(header.structural for header in found)
    return Passages(spans, section, passage, furniture, rank, plain, structural)


def _gathered(
    ground: Ground, spans: Spans, section: Ints, furniture: npt.NDArray[np.bool_]
) -> Ints:
    """Gather paragraphs, never across sections."""
    opens = np.append(np.ones(1, np.bool_), np.diff(section) > 0)[: len(section)]
    marks = np.flatnonzero(opens | spans.paragraphs)
    at, of, headed = (a.tolist() for a in (spans.starts[marks], section[marks], furniture[marks]))
    breaks, begin, current, titled = [], -1, -1, False
    for index, (start, end, number) in enumerate(
        zip(at, [*at[1:], ground.chars.size], of, strict=True)
    ):
        if number != current:
            titled, current = headed[index], number
        elif end - begin <= PASSAGE_CHARS if titled else start - begin < PARAGRAPH_CHARS:
            continue
        breaks.append(index)
        begin = start
    new = np.zeros(len(section), np.int64)
    new[marks[breaks]] = 1
    return np.cumsum(new) - 1
