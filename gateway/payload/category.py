"""Classify a text into one of the estimator's categories by a small sample of it.

Rules:
- The sample has at most SAMPLE_CHARS characters, in windows spread evenly over the text.
- UTF-8 lead bytes tell scripts apart; accented Latin counts as Latin. A script with .6 of
  the letters' bytes names the category; non-Latin scripts with .2 make it `mixed`.
- Within ASCII, the density of symbols, quotes and digits tells kinds apart.
- Text that is mostly digits, hexadecimal or base64 is `mixed`, which keeps it out of the
  ratios of prose and code; JSON of numbers is `json`.
Thresholds were set on samples in `tests/unit/gateway/payload/test_category.py`.
"""

import re
from collections.abc import Sequence
from typing import Final, get_args

from gateway.records.request import Category

SAMPLE_CHARS: Final = 1024
WINDOWS: Final = 4
HEAD_CHARS: Final = 4096
"""Retrieval headers are searched in this many first characters of the longest text."""

_DOMINANT = 0.6
_SUBSTANTIAL = 0.2
_LETTERS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_DIGITS = b"0123456789"
_BRACKETS = b"{}[]"
_OPERATORS = b"()<>=;_*/+&|#$@\\^~`%"
_MARKS = b'",:'
# Maps each kind of byte to one letter, so that one pass counts all kinds; letters are removed.
_KINDS = bytes.maketrans(
    b" \n" + _DIGITS + _BRACKETS + _OPERATORS + _MARKS,
    b"ss"
    + b"d" * len(_DIGITS)
    + b"b" * len(_BRACKETS)
    + b"o" * len(_OPERATORS)
    + b"m" * len(_MARKS),
)
_NOT_LEADS = bytes(range(0x80, 0xC0))
_ASCII = bytes(range(0x80))
# Kana, Han and Hangul (E3-ED), and fullwidth forms (EF).
_CJK = bytes((*range(0xE3, 0xEE), 0xEF))
# Greek to N'Ko (CE-DF), Indic and Thai (E0), Georgian to Khmer (E1; Vietnamese has some).
_OTHER = bytes((*range(0xCE, 0xE2),))
_CATEGORIES: dict[str, Category] = {name: name for name in get_args(Category)}
_NUMBERED = re.compile(
    r"^[ \t]*(?:(?:document|source|passage) )?\[\d{1,3}\]", re.MULTILINE | re.IGNORECASE
)
_PASSAGE = re.compile(
    r"^#{1,4} (?:passage|document|source|context|chunk|excerpt|retrieved|search result)",
    re.MULTILINE | re.IGNORECASE,
)


def category_from_header(value: str | None) -> Category | None:
    """The category that a client's header names; None if it is not a known category."""
    return _CATEGORIES.get(value.strip().lower()) if value else None


def sample(text: str) -> str:
    """At most SAMPLE_CHARS characters of `text`, in windows spread evenly.

    Non-ASCII text gives half as many, because each character takes two to four bytes.
    """
    wanted = SAMPLE_CHARS if text.isascii() else SAMPLE_CHARS // 2
    total = len(text)
    if total <= wanted:
        return text
    window = wanted // WINDOWS
    step = total / WINDOWS
    first = (step - window) / 2
    # The loop over WINDOWS, unrolled.
    a, b, c, d = int(first), int(first + step), int(first + 2 * step), int(first + 3 * step)
    return "\n".join(
        (text[a : a + window], text[b : b + window], text[c : c + window], text[d : d + window])
    )


def classify(text: str) -> Category:
    """The category of a sample; `prose` for empty text."""
    data = text.encode()
    if text.isascii():
        return _ascii_kind(data, len(data)) if data else "prose"
    leads = data.translate(None, _ASCII).translate(None, _NOT_LEADS)
    cjk = len(leads) - len(leads.translate(None, _CJK))
    other = len(leads) - len(leads.translate(None, _OTHER))
    letters = len(data.translate(None, _LETTERS))
    # Shares are of bytes, not characters, because the ratio is bytes per token.
    latin = len(data) - letters + 2 * (len(leads) - cjk - other)
    other_bytes = other * (3 if leads.count(b"\xe0") * 2 > other else 2)
    total = latin + 3 * cjk + other_bytes or 1
    cjk_share, other_share = 3 * cjk / total, other_bytes / total
    if cjk_share >= _DOMINANT:
        return "cjk"
    if other_share >= _DOMINANT:
        return "other-script"
    if cjk_share + other_share >= _SUBSTANTIAL:
        return "mixed"
    return _ascii_kind(data, len(data))


def _ascii_kind(data: bytes, size: int) -> Category:
    """Kind of a Latin text by densities per byte."""
    count = data.translate(_KINDS, _LETTERS).count
    spaces, digits, brackets, operators = count(b"s"), count(b"d"), count(b"b"), count(b"o")
    structure = brackets + count(b"m")
    symbols = brackets + operators
    if structure >= 0.1 * size and operators < 0.25 * structure and symbols > operators:
        return "json"
    if digits >= 0.25 * size or (size >= 200 and spaces < 0.04 * size):
        return "mixed"
    if symbols >= 0.045 * size:
        return "code"
    return "mixed" if symbols >= 0.03 * size else "prose"


def has_retrieval_headers(texts: Sequence[str]) -> bool:
    """Whether the longest text begins with numbered or tagged passages."""
    longest = max(texts, key=len, default="")
    if len(longest) < 200:
        return False
    head = longest[:HEAD_CHARS]
    if "<" in head and ("<document" in head or "<context>" in head or "<passage" in head):
        return True
    if "[" in head and len(_NUMBERED.findall(head)) > 1:
        return True
    return "#" in head and _PASSAGE.search(head) is not None
