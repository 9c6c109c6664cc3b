"""Code points as numpy arrays: classes, folding, UTF-8 offsets, hashes of spans.

Rules:
- Tables cover the basic plane; code points above it get the class of a stand-in.
- A carriage return is a space: CRLF is one line feed, not a blank line.
- Arrays have PAD line feeds after the text, so that looking ahead never leaves them.
- A span's hash is the difference of a prefix sum of fold(c) * P**i, shifted back by the
  inverse power (odd P is invertible modulo 2**32), and folded to 16 bits.
"""

import unicodedata
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Codes = npt.NDArray[np.uint32] | npt.NDArray[np.uint8]

PAD: Final = 4
VOCABULARY: Final = 1 << 16

# Classes are bits, so that one mask asks for several.
WORD, RUN, SPACE, NEWLINE, SOFT, HARD, CLOSE, UPPER = (1 << i for i in range(8))
DIGIT, BRACKET, OPENER, BAR, FENCE = (1 << i for i in range(8, 13))
BLANK: Final = SPACE | NEWLINE

_BASE: Final = 0x9E3779B1
_INVERSE: Final = pow(_BASE, -1, 1 << 32)
_MIX: Final = np.uint32(0x85EBCA6B)
_SOFT: Final = ".!?\u2026\u203c\u2047\u2048\u2049"
_HARD: Final = "\u3002\uff01\uff1f\uff61\u0964\u0965\u061f\u06d4\u1362\u104b"
_CLOSERS: Final = "\"')]}\u201d\u2019\u00bb\u300d\u300f\uff09\u3011\u300b*_`"
# Scripts written without spaces: kana, Han, Hangul, Thai, Lao, Myanmar, Khmer; terms are n-grams.
_RUNS: Final = (
    (0x0E00, 0x0EFF),
    (0x1000, 0x109F),
    (0x1780, 0x17FF),
    (0x3005, 0x3007),
    (0x3040, 0x30FF),
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xAC00, 0xD7AF),
    (0xF900, 0xFAFF),
    (0xFF66, 0xFF9F),
)
_HAN, _LETTER, _SIGN = 0x4E00, 0x61, 0x2603
_LATIN_END: Final = 0x250


@dataclass(frozen=True, slots=True)
class Tables:
    """Class and folded code point of each code point of the basic plane."""

    classes: npt.NDArray[np.uint16]
    folds: npt.NDArray[np.uint32]
    """One more than the folded code point, as summed in hashes."""


@cache
def tables() -> Tables:
    """Build the tables once, in about 40 ms."""
    classes = np.zeros(VOCABULARY, np.uint16)
    folds = np.arange(VOCABULARY, dtype=np.uint32)
    for code in range(VOCABULARY):
        char = chr(code)
        if char.isalnum():
            classes[code] = WORD | (UPPER if char.isupper() else 0)
            folds[code] = _folded(char, code)
        elif char.isspace():
            classes[code] = NEWLINE if char in "\n\v\f\x85\u2028\u2029" else SPACE
        elif unicodedata.category(char)[0] == "M":
            classes[code] = WORD
    for low, high in _RUNS:
        span = classes[low : high + 1]
        span[span != 0] = RUN
    for char in "_\u200c\u200d":
        classes[ord(char)] = WORD
    for chars, kind in ((_SOFT, SOFT), (_HARD, HARD), (_CLOSERS.replace("_", ""), CLOSE)):
        classes[[ord(c) for c in chars]] = kind
    for chars, kind in (
        ("0123456789", DIGIT),
        ("(){}[]=<>;", BRACKET),
        ("{[", OPENER),
        ("|", BAR),
        ("`~", FENCE),
    ):
        classes[[ord(c) for c in chars]] |= kind
    return Tables(classes, folds + np.uint32(1))


def _folded(char: str, code: int) -> int:
    """Lower case, full width to ASCII, Latin without accents."""
    if 0xFF01 <= code <= 0xFF5E:
        char = chr(code - 0xFEE0)
    char = char.lower()[0]
    if ord(char) < _LATIN_END:
        char = unicodedata.normalize("NFD", char)[0]
    return ord(char)


_MAX_RETAINED: Final = 1 << 21
"""Most powers kept between calls: 16 MiB."""


class _Powers:
    """P**i and its inverse for i below a grown bound."""

    def __init__(self) -> None:
        self.forward = np.ones(0, np.uint32)
        self.back = np.ones(0, np.uint32)

    def upto(self, size: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
        if len(self.forward) >= size:
            return self.forward, self.back
        size = max(1 << 17, 1 << size.bit_length())
        forward = np.cumprod(np.full(size, _BASE, np.uint32), dtype=np.uint32)
        back = np.cumprod(np.full(size, _INVERSE, np.uint32), dtype=np.uint32)
        if size <= _MAX_RETAINED:
            self.forward, self.back = forward, back
        return forward, back


_POWERS: Final = _Powers()


@dataclass(frozen=True, slots=True)
class Chars:
    """A text of n characters as arrays of n + PAD entries (`sums`: one more)."""

    text: str
    codes: Codes
    classes: npt.NDArray[np.uint16]
    sums: npt.NDArray[np.uint32]
    wide: Ints | None
    """Indices of non-ASCII characters; None if there are none."""
    surplus: Ints
    """UTF-8 bytes beyond one per character: cumulated before each wide character, and in all."""

    @property
    def size(self) -> int:
        """Characters, padding not included."""
        return len(self.text)

    def bytes_between(self, starts: Ints, ends: Ints) -> Ints:
        """UTF-8 bytes of spans."""
        if self.wide is None:
            return ends - starts
        before = self.surplus[np.searchsorted(self.wide, starts)]
        return ends - starts + self.surplus[np.searchsorted(self.wide, ends)] - before

    def hashes(self, starts: Ints, ends: Ints) -> npt.NDArray[np.uint32]:
        """32-bit hashes of spans, letter case and accents folded."""
        _, back = _POWERS.upto(len(self.codes))
        found: npt.NDArray[np.uint32] = (self.sums[ends] - self.sums[starts]) * back[starts]
        return found


def chars_of(text: str) -> Chars:
    """The arrays of `text`; any string, lone surrogates included."""
    known = tables()
    wide: Ints | None = None
    surplus = np.zeros(1, np.int64)
    codes: Codes
    if text.isascii():
        codes = np.frombuffer(text.encode() + b"\n" * PAD, np.uint8)
        classes, folds = (
            known.classes.take(codes, mode="clip"),
            known.folds.take(codes, mode="clip"),
        )
    else:
        raw = (text + "\n" * PAD).encode("utf-32-le", "surrogatepass")
        codes = np.frombuffer(raw, np.uint32)
        classes, folds = _looked_up(codes, known)
        wide = np.flatnonzero(codes > 0x7F)
        above = codes[wide]
        widths = 1 + (above > 0x7FF).astype(np.int64) + (above > 0xFFFF)
        surplus = np.append(0, np.cumsum(widths))
    forward, _ = _POWERS.upto(len(codes))
    sums = np.zeros(len(codes) + 1, np.uint32)
    folds *= forward[: len(codes)]
    np.cumsum(folds, out=sums[1:])
    return Chars(text, codes, classes, sums, wide, surplus)


def _looked_up(
    codes: Codes, known: Tables
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint32]]:
    if codes.max() <= 0xFFFF:
        return known.classes.take(codes, mode="clip"), known.folds.take(codes, mode="clip")
    high = codes > 0xFFFF
    plain = codes.copy()
    above = codes[high]
    stand_in = np.where(above >= 0x20000, _HAN, np.where(above >= 0x1F000, _SIGN, _LETTER))
    plain[high] = np.where(above >= 0xE0000, _LETTER, stand_in)
    folds = known.folds[plain]
    folds[high] = above
    return known.classes[plain], folds


def folded16(hashes: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Hashes in [0, VOCABULARY)."""
    return (hashes * _MIX) >> np.uint32(16)


def hash_of(word: str) -> int:
    """The 16-bit hash that `word` has in any text."""
    chars = chars_of(word)
    zero, end = np.zeros(1, np.int64), np.full(1, len(word), np.int64)
    return int(folded16(chars.hashes(zero, end))[0])


@cache
def hash_table(words: tuple[str, ...]) -> npt.NDArray[np.bool_]:
    """Which 16-bit hashes belong to `words`, shape (VOCABULARY,)."""
    table = np.zeros(VOCABULARY, np.bool_)
    table[[hash_of(word) for word in words]] = True
    return table
