"""A text into units: sentences, list items, headings, whole blocks.

Rules:
- A unit is a span without white space at its ends; all other characters are in one unit.
- `.`, `!`, `?` end a sentence before white space, unless what follows begins in lower case,
  or the stop belongs to an abbreviation, an initial or a list number. CJK, Indic and Arabic
  marks end it anywhere. Closing quotes and brackets stay with their sentence.
- A blank line ends a unit, a line feed does when the line is short, ends a heading or a
  clause (`:`), or when the next line begins a list item, heading, quotation or table row.
  Other line feeds are hard wraps.
- Units above MAX_CHARS are cut at a line feed, `;`, `,` or space in their second half; never
  inside a word or before a combining mark.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from compressor.text.chars import (
    BLANK,
    CLOSE,
    HARD,
    NEWLINE,
    RUN,
    SOFT,
    SPACE,
    UPPER,
    WORD,
    Chars,
    Ints,
    folded16,
    hash_table,
)
from compressor.text.lexicon import ABBREVIATIONS

MAX_CHARS: Final = 700
_WRAP_CHARS: Final = 40
"""A line at least this long may have been wrapped."""
_STEPS: Final = 2
_LINE_CHARS: Final = 120
"""A longer line was not hard-wrapped: its end is a paragraph's."""
_MARKERS: Final = np.zeros(128, np.bool_)
_MARKERS[[ord(c) for c in "#|>[<`~\u007f=_"]] = True
_BULLETS: Final = np.zeros(128, np.bool_)
_BULLETS[[ord(c) for c in "-*+"]] = True


@dataclass(frozen=True, slots=True)
class Spans:
    """Units in order; arrays of one entry each."""

    starts: Ints
    ends: Ints
    gaps: npt.NDArray[np.int8]
    """White space before the unit: 0 none, 1 space, 2 line feed, 3 blank line."""
    paragraphs: npt.NDArray[np.bool_]
    """Whether the unit begins a paragraph."""


@dataclass(frozen=True, slots=True)
class Ground:
    """Arrays of a text that several steps share: non-blank characters, lines and words."""

    chars: Chars
    newlines: Ints
    word_starts: Ints
    word_ends: Ints
    blank: npt.NDArray[np.bool_]
    """Which characters are white space, shape (characters + padding,)."""
    solid: Ints
    """Indices of non-blank characters, and one past the end."""

    @property
    def solid_chars(self) -> int:
        """Number of characters that are not white space."""
        return self.chars.size - int(np.count_nonzero(self.blank))

    def solid_from(self, at: Ints) -> Ints:
        """First character that is not white space, from each index on; the size at the end."""
        at = np.minimum(at, self.chars.size)
        for _ in range(_STEPS):
            at = at + self.blank[at]
        rest = np.flatnonzero(self.blank[at])
        if len(rest):
            at[rest] = self.solid[np.searchsorted(self.solid, at[rest])]
        return at

    def solid_before(self, at: Ints) -> Ints:
        """One past the last non-blank character before each index (or 0)."""
        for _ in range(_STEPS):
            at = at - (self.blank[at - 1] & (at > 0))
        rest = np.flatnonzero(self.blank[at - 1] & (at > 0))
        if len(rest):
            ranks = np.searchsorted(self.solid, at[rest])
            at[rest] = np.where(ranks > 0, self.solid[ranks - 1] + 1, 0)
        return at


def ground_of(chars: Chars) -> Ground:
    """The arrays of a text that segmentation and terms share."""
    classes = chars.classes
    words = (classes & WORD) != 0
    edges = np.flatnonzero(words[1:] != words[:-1]) + 1
    if words[0]:
        edges = np.concatenate((np.zeros(1, np.int64), edges))
    newlines = np.flatnonzero((classes[: chars.size] & NEWLINE) != 0)
    blank = (classes & BLANK) != 0
    # A sentinel at the end stops the search for non-blank characters.
    blank[chars.size :] = False
    return Ground(chars, newlines, edges[0::2], edges[1::2], blank, np.flatnonzero(~blank))


def distinct(values: Ints) -> Ints:
    """Sorted distinct values; numpy's own unique hashes first, which is slower here."""
    found = np.sort(values)
    keep = np.ones(len(found), np.bool_)
    np.not_equal(found[1:], found[:-1], out=keep[1:])
    return found[keep]


def segment(ground: Ground, starts: Ints, blocks: list[tuple[int, int]]) -> Spans:
    """Units of the texts that begin at `starts` of one joined text.

    `blocks` are disjoint spans, in order, that stay whole.
    """
    cuts = np.concatenate((starts, _sentence_ends(ground), _line_ends(ground)))
    if blocks:
        edges = np.array(blocks, np.int64)
        inner = np.searchsorted(edges[:, 0], cuts, "right") - 1
        inside = (inner >= 0) & (cuts > edges[inner, 0]) & (cuts < edges[inner, 1])
        cuts = np.concatenate((cuts[~inside], edges.ravel()))
    return spans_at(ground, distinct(ground.solid_from(cuts)), blocks)


def spans_at(ground: Ground, begins: Ints, blocks: list[tuple[int, int]]) -> Spans:
    """Units that begin at `begins` (sorted), with long ones cut."""
    begins = begins[begins < ground.chars.size]
    ends = ground.solid_before(np.append(begins[1:], ground.chars.size))[: len(begins)]
    long = np.flatnonzero(ends - begins > MAX_CHARS)
    if len(long):
        whole = {start for start, _ in blocks}
        more = [
            at
            for i in long.tolist()
            if int(begins[i]) not in whole
            for at in _pieces(ground.chars, int(begins[i]), int(ends[i]))
        ]
        if more:
            begins = distinct(np.append(begins, ground.solid_from(np.array(more, np.int64))))
            begins = begins[begins < ground.chars.size]
            ends = ground.solid_before(np.append(begins[1:], ground.chars.size))
    before = np.append(np.zeros(1, np.int64), ends[:-1])[: len(begins)]
    lines = np.searchsorted(ground.newlines, begins) - np.searchsorted(ground.newlines, before)
    gaps = np.where(lines > 0, np.minimum(lines + 1, 3), begins > before).astype(np.int8)
    wide = _line_lengths(ground, before) > _LINE_CHARS
    return Spans(begins, ends, gaps, (gaps == 3) | ((gaps == 2) & wide))


def _line_lengths(ground: Ground, ends: Ints) -> Ints:
    """Length of the line up to each index."""
    begins = np.append(np.zeros(1, np.int64), ground.newlines + 1)
    found: Ints = ends - begins[np.searchsorted(begins, ends, "right") - 1]
    return found


def _sentence_ends(ground: Ground) -> Ints:
    chars, classes = ground.chars, ground.chars.classes
    at: Ints = np.flatnonzero((classes[: chars.size] & (SOFT | HARD)) != 0)
    at = at[(classes[at + 1] & (SOFT | HARD)) == 0]
    if not len(at):
        return at
    ends = at + 1
    for _ in range(3):
        ends = ends + ((classes[ends] & CLOSE) != 0)
    hard = (classes[at] & HARD) != 0
    open_ended = (classes[ends] & BLANK) != 0
    # A full stop before a lower-case word, or after an abbreviation, ends nothing.
    following = ground.solid_from(ends)
    stops = (chars.codes[at] == ord(".")) | (chars.codes[at] == 0x2026)
    lower = ((classes[following] & (WORD | UPPER)) == WORD) & (chars.codes[following] > 0x60)
    lower &= (classes[following] & RUN) == 0
    cased = chars.codes[following] < 0x530
    refused = stops & ((lower & cased) | _not_final(ground, at, following))
    found: Ints = ends[hard | (open_ended & ~refused)]
    return found


def _not_final(ground: Ground, at: Ints, following: Ints) -> npt.NDArray[np.bool_]:
    """Stops after an abbreviation, an initial, or a number that opens a line."""
    if not len(ground.word_starts):
        return np.zeros(len(at), np.bool_)
    chars = ground.chars
    index = np.minimum(np.searchsorted(ground.word_ends, at), len(ground.word_ends) - 1)
    touching = ground.word_ends[index] == at
    begin = np.where(touching, ground.word_starts[index], at)
    length = at - begin
    first = chars.codes[begin]
    digits = (first >= 0x30) & (first <= 0x39)
    initial = touching & (length == 1) & ~digits
    short = hash_table(ABBREVIATIONS)[folded16(chars.hashes(begin, at))] & (length <= 6)
    before = ground.solid_before(begin)
    opens = np.searchsorted(ground.newlines, begin) > np.searchsorted(ground.newlines, before)
    listed = touching & digits & (length <= 3) & (opens | (before == 0))
    number = (chars.codes[following] >= 0x30) & (chars.codes[following] <= 0x39)
    no = touching & (length == 2) & number & ((first | 0x20) == ord("n"))
    found: npt.NDArray[np.bool_] = initial | (touching & short) | listed | no
    return found


def _line_ends(ground: Ground) -> Ints:
    """Line feeds that end a unit."""
    chars, newlines = ground.chars, ground.newlines
    if not len(newlines):
        return newlines
    codes = chars.codes
    following = ground.solid_from(newlines)
    blank = np.append(newlines[1:], chars.size + 1) < following
    line_starts = np.append(np.zeros(1, np.int64), newlines[:-1] + 1)
    last = np.maximum(newlines - 1, 0)
    first = np.minimum(codes[following], 127)
    second, third = chars.classes[following + 1], codes[np.minimum(following + 2, len(codes) - 1)]
    listed = _MARKERS[first] | (_BULLETS[first] & ((second & SPACE) != 0))
    listed |= codes[following] == 0x2022
    point = (codes[following + 1] == ord(".")) | (codes[following + 1] == ord(")"))
    point |= (third == ord(".")) | (third == ord(")"))
    listed |= (first >= 0x30) & (first <= 0x39) & point
    short = newlines - line_starts < _WRAP_CHARS
    closed = (codes[last] == ord(":")) | ((chars.classes[last] & RUN) != 0)
    heading = codes[ground.solid_from(line_starts)] == ord("#")
    found: Ints = newlines[blank | listed | short | closed | heading]
    return found


def _pieces(chars: Chars, start: int, end: int) -> list[int]:
    """Indices at which a long unit is cut."""
    cuts = []
    while end - start > MAX_CHARS:
        start = _cut_in(chars, start, start + MAX_CHARS, end)
        if start < end:
            cuts.append(start)
    return cuts


def _cut_in(chars: Chars, start: int, limit: int, end: int) -> int:
    text = chars.text
    middle = start + MAX_CHARS // 2
    for mark in ("\n", ";", "\uff1b", "\u060c", "\u3001", "\uff0c", ",", " "):
        at = text.rfind(mark, middle, limit)
        if at >= 0 and not (mark == "," and text[at - 1 : at].isdigit()):
            return at + 1
    # No seam: cut at the next place that splits neither a word nor a mark from its letter.
    classes = chars.classes
    while limit < end and classes[limit] & WORD and classes[limit - 1] & (WORD | RUN):
        limit += 1
    return limit
