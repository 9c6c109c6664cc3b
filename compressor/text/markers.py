"""Find the headers that separate a prompt's passages.

Rules:
- Plain marks name a passage: `[4] Title`, `Document [4](Title: ...)`, `Passage 3:`,
  `<document id=4>`, `Source: ...`. Two of them make a retrieval prompt.
- Structural marks need no word of any language, only repetition: a line prefix with a running
  number (`Extrait 3 :`, `【資料3】`, `3. Title`), a repeated key (`Fonte: ...`), `###` or deeper
  headings of one level, lines of dashes. They count from MIN_STRUCTURAL on, with long texts
  between them. Contracts and reports look the same, so whoever relies on these marks must compare
  the passages' words.
- A closing tag is a header that closes its passage.
"""

import re
from collections import defaultdict
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from compressor.text.chars import DIGIT, Ints, folded16, hash_table
from compressor.text.segment import Ground, Spans

MIN_PLAIN: Final = 2
MIN_STRUCTURAL: Final = 3
LONG_BYTES: Final = 160
"""Median length of the texts between structural marks: lists and dialogues have shorter ones."""
_BLANK_LINE: Final = 3
_TITLE_CHARS: Final = 120
_PREFIX_CHARS: Final = 32
_FIRST: Final = np.zeros(0x10000, np.bool_)
_FIRST[[ord(c) for c in "[<#=文资資段パ参("]] = True
_LEAD: Final = np.zeros(0x10000, np.bool_)
_LEAD[[ord(c) for c in "【〔《「:："]] = True
_NOUN: Final = (
    r"document|doc|passage|source|context|chunk|excerpt|article|result|snippet|reference|section"
    r"|search result|文档|文書|文章|资料|資料|段落|パッセージ|参考"
)
_PLAIN: Final = re.compile(
    r"(?P<heading>\#{1,6}[ \t]+[^\n]*)"
    r"|(?P<tag></?(?:documents?|docs?|passages?|sources?|contexts?|chunks?|results?|articles?|page"
    r"|snippet|item|title)\b[^<>\n]{0,200}>)"
    rf"|(?P<noun>(?:[-=*]{{2,}}[ \t]*)?[\[(]?(?:{_NOUN})[ \t]*(?:no\.?|\#)?[ \t]*"
    r"[\[(]?\d{1,4}[\])]?(?:[ \t]*\((?:title|source|id|url)\b[^)\n]{0,200}\))?"
    r"[ \t]*(?:[:：.)=*-]+|(?=\n|\Z)|(?<=[\])]))[ \t]*)"
    r"|(?P<number>\[\^?(?P<bare>\d{1,4})\][:.]?[ \t]*)"
    rf"|(?P<title>(?:title|url|{_NOUN})[ \t]*[:：][^\n]{{0,200}})",
    re.IGNORECASE,
)
_NOUNS: Final = (
    *("document", "doc", "passage", "source", "context", "chunk", "excerpt", "article"),
    *("result", "snippet", "reference", "section", "search", "title", "url"),
)
_CLAUSE: Final = re.compile(r"(?:section|article)", re.IGNORECASE)
"""Nouns that contracts and laws number as well: structural, not plain."""
_LEVEL: Final = re.compile(r"\#+")
_MIN_LEVEL: Final = 3
_SAME_LEVEL: Final = 0.8
_RUNNING: Final = re.compile(
    r"(?P<open>[-=*]{2,}[ \t]*|[\[(【〔《「][ \t]*)?"
    r"(?P<stem>[^\W\d_][^\d\n:：\[\]()]{0,24}?)?[ \t]*(?:\#|№)?[\[(]?(?P<number>\d{1,4})"
    r"(?P<close>[\])】〕》」]?[ \t]*(?:[:：.)=*-]+|(?=\n))|[\]】〕》」])[ \t]*"
)
_KEY: Final = re.compile(
    r"(?P<key>[^\W\d_][^\n:：.?!]{0,24})[ \t]*[:：](?:[ \t]+|(?=[^\x00-\x7f]))"
)
_RULE: Final = re.compile(r"(?P<rule>[-=*_])(?P=rule){2,}[ \t]*(?=\n|\Z)")
_ENDERS: Final = (".", "!", "?", "。", "！", "？", "।", "؟", "۔", ";")


class Header(NamedTuple):
    """One header in the text, at [start, end)."""

    start: int
    end: int
    closes: bool = False
    plain: bool = False
    structural: bool = False


def headers(
    ground: Ground, spans: Spans, slots: Ints, blocks: list[tuple[int, int]]
) -> list[Header]:
    """The headers in order; `slots` are where the texts begin, sorted."""
    text, starts = ground.chars.text, spans.starts
    leads = spans.gaps >= 2
    firsts = np.searchsorted(starts, slots)
    leads[firsts[firsts < len(starts)]] = True
    blank = spans.gaps == _BLANK_LINE
    blank[firsts[firsts < len(starts)]] = True
    opening, starts = starts[blank], starts[leads]
    whole = {start for start, _ in blocks}
    found = _named_headers(ground, starts, whole)
    if sum(header.plain for header in found) >= MIN_PLAIN:
        return found
    if not _one_level(text, found):
        found = [header._replace(structural=False) for header in found]
    elif sum(header.structural for header in found) >= MIN_STRUCTURAL:
        return found
    # Where there are paragraphs, headers open them.
    lines = opening if len(opening) > MIN_STRUCTURAL else starts
    taken = [*whole, *(header.start for header in found)]
    structural = _structural(ground, lines[~np.isin(lines, taken)], slots)
    return structural if len(structural) > len(found) else found


def _named_headers(ground: Ground, starts: Ints, whole: set[int]) -> list[Header]:
    """Headings and the headers that name a passage, of the lines at `starts`."""
    text = ground.chars.text
    found: list[Header] = []
    bare: dict[int, int] = {}
    for start in starts[_named(ground, starts)].tolist():
        match = _PLAIN.match(text, start)
        if match is None or start in whole or (found and start < found[-1].end):
            continue
        clause = bool(match["heading"] or _CLAUSE.match(match["noun"] or ""))
        closes = text.startswith("</", start)
        found.append(Header(start, _end(text, match), closes, not clause, structural=clause))
        if match["number"]:
            bare[start] = int(match["bare"])
        tagged = match["tag"]
        while tagged and (match := _PLAIN.match(text, found[-1].end)) and match["tag"]:
            # Tags on one line: `<document><title>`.
            closes = text.startswith("</", match.start())
            found.append(Header(match.start(), match.end(), closes, plain=True))
    numbers = list(bare.values())
    if numbers and (numbers[0] > 1 or not _runs(numbers)):
        # Footnotes begin anywhere, and again; the numbers of one list do not.
        found = [h._replace(plain=h.plain and h.start not in bare) for h in found]
    return found


def _one_level(text: str, found: list[Header]) -> bool:
    """Whether the headings are those of passages: a document's first one is above the others."""
    levels = [len(match[0]) for h in found if (match := _LEVEL.match(text, h.start))]
    if not levels:
        return True
    return levels[0] >= _MIN_LEVEL and levels.count(levels[0]) >= _SAME_LEVEL * len(levels)


def _named(ground: Ground, starts: Ints) -> npt.NDArray[np.bool_]:
    """Whether the character or the word at each index is one that begins plain marks."""
    first = np.minimum(ground.chars.codes[starts].astype(np.int64), 0xFFFF)
    if not len(ground.word_starts):
        found: npt.NDArray[np.bool_] = _FIRST[first]
        return found
    index = np.minimum(np.searchsorted(ground.word_starts, starts), len(ground.word_starts) - 1)
    ends = np.where(ground.word_starts[index] == starts, ground.word_ends[index], starts)
    nouns: npt.NDArray[np.bool_] = hash_table(_NOUNS)[folded16(ground.chars.hashes(starts, ends))]
    return nouns | _FIRST[first]


def _structural(ground: Ground, starts: Ints, slots: Ints) -> list[Header]:
    """Headers of the line prefix that separates the most long texts; [] without one."""
    text = ground.chars.text
    groups: dict[tuple[str, ...], list[tuple[int, int, int]]] = defaultdict(list)
    for start in starts[_marked(ground, starts)].tolist():
        if (key := _prefix(text, start)) is not None:
            prefix, number, end = key
            groups[prefix].append((start, end, number))
    best: list[Header] = []
    for marks in groups.values():
        if len(marks) < max(MIN_STRUCTURAL, len(best) + 1) or not _runs([n for *_, n in marks]):
            continue
        ends = np.append([start for start, *_ in marks[1:]], _slot_end(marks[-1][0], slots, text))
        starts_of_texts = np.array([end for _, end, _ in marks], np.int64)
        if np.median(ground.chars.bytes_between(starts_of_texts, ends)) >= LONG_BYTES:
            best = [Header(start, end, structural=True) for start, end, _ in marks]
    return best


def _marked(ground: Ground, starts: Ints) -> npt.NDArray[np.bool_]:
    """Lines that begin like a rule, or have a digit, colon or bracket near their beginning."""
    chars = ground.chars
    window = np.minimum(starts[:, None] + np.arange(_PREFIX_CHARS), len(chars.codes) - 1)
    codes = np.minimum(chars.codes[window], np.uint16(0xFFFF))
    near = (((chars.classes[window] & DIGIT) != 0) | _LEAD[codes]).any(axis=1)
    first = codes[:, 0]
    rules = (first == ord("-")) | (first == ord("=")) | (first == ord("*")) | (first == ord("_"))
    found: npt.NDArray[np.bool_] = near | rules
    return found


def _prefix(text: str, start: int) -> tuple[tuple[str, ...], int, int] | None:
    """The kind of line prefix, its number (-1 without one) and its end; None without a prefix."""
    if match := _RULE.match(text, start):
        return ("rule", match["rule"]), -1, match.end()
    if match := _RUNNING.match(text, start):
        parts = (match["open"] or "", match["stem"] or "", match["close"])
        kind = ("number", *(part.strip().casefold() for part in parts))
        return kind, int(match["number"]), _title_end(text, match)
    if match := _KEY.match(text, start):
        return ("key", match["key"].casefold()), -1, _title_end(text, match)
    return None


def _runs(numbers: list[int]) -> bool:
    """Whether the numbers run up by one, as marks' do; marks without numbers have -1."""
    steps = sum(b == a + 1 for a, b in pairwise(numbers))
    return numbers[0] < 0 or steps >= 0.8 * (len(numbers) - 1)


def _slot_end(start: int, slots: Ints, text: str) -> int:
    after = int(np.searchsorted(slots, start, "right"))
    return int(slots[after]) if after < len(slots) else len(text)


def _end(text: str, match: re.Match[str]) -> int:
    """The header's end; includes the rest of its line if that is a title."""
    if match["heading"] or match["title"]:
        return match.start() + len(match[0].rstrip())
    return match.start() + len(match[0].rstrip()) if match["tag"] else _title_end(text, match)


def _title_end(text: str, match: re.Match[str]) -> int:
    end = match.end()
    stop = text.find("\n", end)
    stop = len(text) if stop < 0 else stop
    rest = text[end:stop].rstrip()
    alone = text[stop + 1 : stop + 2] in ("", "\n")
    if len(rest) <= _TITLE_CHARS and not rest.endswith(_ENDERS) and not alone:
        return end + len(rest) if rest else match.start() + len(match[0].rstrip())
    return match.start() + len(match[0].rstrip())
