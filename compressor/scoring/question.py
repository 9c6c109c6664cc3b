"""Find the question in the last user message, and its terms.

Rules, for the units of that message, without blocks and headers:
- A short message without headers is all question.
- Else the text after a marker (`Question:`) near either end; else units that end with a question
  mark near either end, with the rest of a short last paragraph; else the short last and first
  paragraphs.
- Terms are those units' words without stop words and words of asking; if none is left, those
  of the nearest earlier user message that has some.

`sentences_asked` is stricter: it takes nothing for a question that neither ends with a question
mark nor follows a marker of one, and nothing that may be a passage's own words.
"""

import re
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from compressor.text.chars import Ints, hash_table
from compressor.text.lexicon import ASKING_WORDS
from compressor.text.segment import Spans
from compressor.text.terms import TermMatrix

SHORT_BYTES: Final = 600
NEAR: Final = 6
"""Units from either end in which a question is looked for."""
_HEAD_ASKED, _TAIL_ASKED = 2, 3
_BARE_CHARS: Final = 16
"""A marker up to this long has its question in the next unit."""
_MARK: Final = re.compile(
    r"(?:#++\s*+|\*++|<)?+(?:user\s++)?+(?:question|query|q|task|instructions?|request"
    r"|问题|問題|質問|вопрос|pregunta"
    r"|frage|domanda|pergunta|سؤال|السؤال|प्रश्न|질문|câu hỏi)\s*+\d*+\s*+\**+(?:[:：>]|$)",
    re.IGNORECASE,
)
_ASKED_MARK: Final = re.compile(
    r"(?:#++\s*+|\*++|<)?+(?:user\s++)?+(?:question|query|q|问题|問題|質問|вопрос|pregunta"
    r"|frage|domanda|pergunta|سؤال|السؤال|प्रश्न|질문|câu hỏi)\s*+\d*+\s*+\**+(?:[:：>]|$)",
    re.IGNORECASE,
)
_MARKS: Final = ("?", "？", "؟", "\u037e", "\u1367")
_TRAILER_CHARS: Final = 160
"""A last paragraph up to this long may stand after the question ("Answer:", "Be brief.")."""
_ASKING_UNITS: Final = 4
"""Most sentences of a paragraph that asks; a longer one is a text."""
_TRAIL: Final = "\"')]}*_`”’»」』）"


@dataclass(frozen=True, slots=True)
class QuestionTerms:
    """The units of the question, and its terms."""

    units: Ints
    terms: Ints


def asking_units(text: str, spans: Spans, own: Ints, plain: npt.NDArray[np.bool_]) -> Ints:
    """Units that ask, among the message's units `own`; `plain` excludes blocks and headers."""
    headed = len(own) > 0 and not plain[own[0]]
    total = len(own)
    own = own[plain[own]]
    if not len(own):
        return own
    starts, ends = spans.starts, spans.ends
    if len(own) == total and int(ends[own[-1]] - starts[own[0]]) <= SHORT_BYTES:
        return own
    head, tail = own[:NEAR].tolist(), own[NEAR:][-NEAR:].tolist()
    marked = _marked(text, spans, head, limit=2) or []
    marked += _marked(text, spans, tail, limit=3) or []
    if marked:
        return np.unique(np.array(marked, np.int64))

    def asks(unit: int) -> bool:
        return text[starts[unit] : ends[unit]].rstrip(_TRAIL).endswith(_MARKS)

    asked = [u for u in head if asks(u)][:_HEAD_ASKED] + [u for u in tail if asks(u)][-_TAIL_ASKED:]
    last = _paragraph(spans, own, len(own) - 1)
    if asked:
        if any(u in last for u in asked):
            asked += last
        return np.unique(np.array(asked, np.int64))
    first = [] if headed else _paragraph(spans, own, 0)
    return np.unique(np.array([*(last or own[-2:].tolist()), *first], np.int64))


def sentences_asked(
    text: str, spans: Spans, own: Ints, furniture: npt.NDArray[np.bool_], *, apart: bool
) -> list[int]:
    """Units of one text that ask: question marks, or what follows a marker such as `Question:`.

    They are looked for in the paragraph before the first header and in the last one, or the one
    before that where the last is short; `apart`: in all of a short text that stands apart from
    the passages.
    """
    if apart:
        regions = [own.tolist()]
    else:
        heads = np.flatnonzero(furniture[own])
        head = own[: int(heads[0])].tolist() if len(heads) else []
        regions = [_paragraph_around(spans, head, 0), _paragraph_around(spans, head, -1)]
        regions += _last_paragraphs(text, spans, own, heads)
    found: set[int] = set()
    for units in regions:
        for index, unit in enumerate(units):
            start, end = int(spans.starts[unit]), int(spans.ends[unit])
            if _ASKED_MARK.match(text, start, end):
                alone = end - start < _BARE_CHARS and index + 1 < len(units)
                found.add(units[index + 1] if alone else unit)
            elif text[start:end].rstrip(_TRAIL).endswith(_MARKS):
                found.add(unit)
    return sorted(found)


def _last_paragraphs(text: str, spans: Spans, own: Ints, heads: Ints) -> list[list[int]]:
    """The last paragraph of a text; with one more before it, if that is short.

    The text after the last header belongs to a passage, unless the header closes or separates.
    """
    tail = own[int(heads[-1]) + 1 :].tolist() if len(heads) else own.tolist()
    first = tail[0] if tail else -1
    if len(heads):
        header = int(own[heads[-1]])
        header_text = text[int(spans.starts[header]) : int(spans.ends[header])]
        if header_text.startswith("</") or not any(map(str.isalnum, header_text)):
            first = -1
    last = _paragraph_around(spans, tail, -1)
    if not last or last[0] == first:
        return []
    before = _paragraph_around(spans, tail[: tail.index(last[0])], -1)
    short = int(spans.ends[last[-1]] - spans.starts[last[0]]) <= _TRAILER_CHARS
    return [last, before] if short and before and before[0] != first else [last]


def _paragraph_around(spans: Spans, units: list[int], at: int) -> list[int]:
    """The paragraph that begins or ends `units`, if it is no longer than a question."""
    if not units:
        return []
    breaks = [index for index in range(1, len(units)) if spans.gaps[units[index]] >= 2]
    found = units[: breaks[0]] if breaks and at == 0 else units[breaks[-1] :] if breaks else units
    return found if len(found) <= _ASKING_UNITS else []


def _marked(text: str, spans: Spans, units: list[int], limit: int) -> list[int]:
    """Units from a marker on, at most `limit`."""
    for index, unit in enumerate(units):
        if _MARK.match(text, int(spans.starts[unit]), int(spans.ends[unit])):
            return units[index : index + limit]
    return []


def _paragraph(spans: Spans, own: Ints, at: int) -> list[int]:
    """The paragraph of the message's unit `at`, if it is short and not the whole message."""
    first = at
    while first > 0 and spans.gaps[own[first]] < 2:
        first -= 1
    last = at
    while last + 1 < len(own) and spans.gaps[own[last + 1]] < 2:
        last += 1
    units = own[first : last + 1]
    short = int(spans.ends[units[-1]] - spans.starts[units[0]]) <= SHORT_BYTES
    return units.tolist() if short and len(units) < len(own) else []


def asked(terms: TermMatrix, units: Ints, earlier: list[Ints]) -> QuestionTerms:
    """The question's terms; `earlier` are units of earlier user messages, the nearest first."""
    for source in (units, *earlier):
        found = _content(terms, source)
        if len(found):
            return QuestionTerms(units, found)
    return QuestionTerms(units, np.zeros(0, np.int64))


def _content(terms: TermMatrix, units: Ints) -> Ints:
    mask = np.zeros(terms.units, np.bool_)
    mask[units] = True
    table = np.zeros(len(terms.spread), np.bool_)
    table[terms.term[mask[terms.unit]]] = True
    table &= ~hash_table(ASKING_WORDS)[terms.hashes]
    return np.flatnonzero(table)
