"""The estimator's categories, from one cheap look at a sample of the text.

Rules:
- At most SAMPLE_CHARS characters are looked at, in windows spread over the text by length.
- Scripts are told apart by UTF-8 lead bytes; Latin with accents counts as Latin. A script
  names the category from .6 of the letters' bytes, and makes it `mixed` from .2.
- Within ASCII, kinds are told apart by the density of symbols, quotes and digits.
- Text that is mostly digits, hexadecimal or base64 is `mixed`, so that it pollutes no
  ratio of its neighbours; JSON of numbers is `json`.
Thresholds were set on samples in `tests/unit/gateway/policy/request/test_category.py`.
"""

import re
from collections.abc import Sequence
from typing import Final, get_args

from gateway.records.request import Category

SAMPLE_CHARS: Final = 1024
WINDOWS: Final = 4
HEAD_CHARS: Final = 4096
"""Where retrieval headers are looked for: the beginning of the longest text."""

_DOMINANT = 0.6
_SUBSTANTIAL = 0.2
_LETTERS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_DIGITS = b"0123456789"
_BRACKETS = b"{}[]"
_OPERATORS = b"()<>=;_*/+&|#$@\\^~`%"
_MARKS = b'",:'
# What is counted, a letter each, so that one pass tells all kinds apart; letters are left out.
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
    """The category that a client's header names, or None when it names none of ours."""
    return _CATEGORIES.get(value.strip().lower()) if value else None


def sample(text: str) -> str:
    """At most SAMPLE_CHARS characters of `text`, in windows spread evenly.

    Half as many when they are not ASCII: each is two to four bytes to look at.
    """
    wanted = SAMPLE_CHARS if text.isascii() else SAMPLE_CHARS // 2
    total = len(text)
    if total <= wanted:
        return text
    window = wanted // WINDOWS
    step = total / WINDOWS
    first = (step - window) / 2
    # WINDOWS of them, written out.
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
    # Bytes, not characters: they are what the ratio divides.
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
