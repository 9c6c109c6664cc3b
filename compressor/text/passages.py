"""Passages of a prompt, separated by retrieval headers, headings and paragraphs.

Rules:
- A header (`[4] Title`, `Document [4](Title: ...)`, `<document id=4>`, `### Title`) is a unit of
  its own, called furniture. Its cost is added with the first kept unit of its section; without
  kept units it is dropped. A closing tag is furniture of the section it closes.
- A section runs from header to header. Its paragraphs are gathered into passages of at most
  PASSAGE_CHARS; without headers, into passages of at least PARAGRAPH_CHARS.
"""

import re
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from compressor.text.chars import Ints, folded16, hash_table
from compressor.text.segment import Ground, Spans, distinct, spans_at

PASSAGE_CHARS: Final = 1500
PARAGRAPH_CHARS: Final = 300
_TITLE_CHARS: Final = 120
_FIRST: Final = np.zeros(0x10000, np.bool_)
_FIRST[[ord(c) for c in "[<#=文资資段パ参"]] = True
_NOUN: Final = (
    r"document|doc|passage|source|context|chunk|excerpt|article|result|snippet|reference|section"
    r"|search result|文档|文書|文章|资料|資料|段落|パッセージ|参考"
)
_HEADER: Final = re.compile(
    r"(?P<heading>\#{1,6}[ \t]+[^\n]*)"
    r"|(?P<tag></?(?:documents?|docs?|passages?|sources?|contexts?|chunks?|results?|articles?|page"
    r"|snippet|item|title)\b[^<>\n]{0,200}>)"
    rf"|(?P<noun>(?:[-=*]{{2,}}[ \t]*)?(?:{_NOUN})[ \t]*(?:no\.?|\#)?[ \t]*[\[(]?\d{{1,4}}[\])]?"
    r"(?:[ \t]*\((?:title|source|id|url)\b[^)\n]{0,200}\))?"
    r"[ \t]*(?:[:：.)=*-]+|(?=\n|\Z)|(?<=\)))[ \t]*)"
    r"|(?P<number>\[\^?\d{1,4}\][:.]?[ \t]*)"
    r"|(?P<title>title[ \t]*:[^\n]{0,200})",
    re.IGNORECASE,
)
_NOUNS: Final = (
    *("document", "doc", "passage", "source", "context", "chunk", "excerpt", "article"),
    *("result", "snippet", "reference", "section", "search", "title"),
)
_ENDERS: Final = (".", "!", "?", "。", "！", "？", "।", "؟", "۔", ";")


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


def passages(ground: Ground, spans: Spans, slots: Ints, blocks: list[tuple[int, int]]) -> Passages:
    """Sections and passages of the units; `slots` are where the texts begin, sorted."""
    headers = _headers(ground, spans, slots, blocks)
    if headers:
        begins = spans.starts
        edges = np.array([(start, end) for start, end, _ in headers], np.int64)
        inner = np.searchsorted(edges[:, 0], begins, "right") - 1
        inside = (inner >= 0) & (begins > edges[inner, 0]) & (begins < edges[inner, 1])
        after = ground.solid_from(edges[:, 1])
        spans = spans_at(ground, distinct(np.concatenate((begins[~inside], after))), blocks)
    total = len(spans.starts)
    furniture, opens = np.zeros(total, np.bool_), np.zeros(total, np.bool_)
    firsts = np.searchsorted(spans.starts, slots)
    opens[firsts[firsts < total]] = True
    if headers:
        at = np.searchsorted(spans.starts, edges[:, 0])
        furniture[at] = True
        previous, closed = -2, True
        for index, (_, _, closes) in zip(at.tolist(), headers, strict=True):
            # A header right after another is part of the same furniture.
            if not closes and (closed or index != previous + 1):
                opens[index] = True
            previous, closed = index, closes
    section = np.cumsum(opens) - 1
    passage = _gathered(ground, spans, section, furniture)
    counted = np.cumsum(~furniture)
    first = np.searchsorted(passage, passage)
    rank = np.maximum(counted - 1 - counted[first] + ~furniture[first], 0)
    return Passages(spans, section, passage, furniture, rank)


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


def _headers(
    ground: Ground, spans: Spans, slots: Ints, blocks: list[tuple[int, int]]
) -> list[tuple[int, int, bool]]:
    """(start, end, closes) of each header."""
    chars, starts = ground.chars, spans.starts
    text = chars.text
    leads = spans.gaps >= 2
    firsts = np.searchsorted(starts, slots)
    leads[firsts[firsts < len(starts)]] = True
    starts = starts[leads]
    first = np.minimum(chars.codes[starts].astype(np.int64), 0xFFFF)
    whole = {start for start, _ in blocks}
    found: list[tuple[int, int, bool]] = []
    for start in starts[_FIRST[first] | _nouns(ground, starts)].tolist():
        match = _HEADER.match(text, start)
        if match is None or start in whole or (found and start < found[-1][1]):
            continue
        found.append((start, _header_end(text, match), text.startswith("</", start)))
        while (match := _HEADER.match(text, found[-1][1])) and match["tag"]:
            # Tags on one line: `<document><title>`.
            found.append((match.start(), match.end(), text.startswith("</", match.start())))
    return found


def _nouns(ground: Ground, starts: Ints) -> npt.NDArray[np.bool_]:
    """Whether the word at each index is one that begins headers."""
    if not len(ground.word_starts):
        return np.zeros(len(starts), np.bool_)
    index = np.minimum(np.searchsorted(ground.word_starts, starts), len(ground.word_starts) - 1)
    ends = np.where(ground.word_starts[index] == starts, ground.word_ends[index], starts)
    found: npt.NDArray[np.bool_] = hash_table(_NOUNS)[folded16(ground.chars.hashes(starts, ends))]
    return found


def _header_end(text: str, match: re.Match[str]) -> int:
    """The header's end; includes the rest of its line if that is a title."""
    end = match.end()
    if match["heading"] or match["title"]:
        return match.start() + len(match[0].rstrip())
    if not match["tag"]:
        stop = text.find("\n", end)
        stop = len(text) if stop < 0 else stop
        rest = text[end:stop].rstrip()
        alone = text[stop + 1 : stop + 2] in ("", "\n")
        if len(rest) <= _TITLE_CHARS and not rest.endswith(_ENDERS) and not alone:
            return end + len(rest) if rest else match.start() + len(match[0].rstrip())
    return match.start() + len(match[0].rstrip())
