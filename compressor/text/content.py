"""Detects content that must not be extracted from: code, numbers, encoded data.

Shares are of the characters that are not white space, outside blocks. Thresholds were set on
documentation and sources of the standard library; `tests/unit/compressor/text/test_content.py` has
samples of each kind.
"""

from typing import Final

import numpy as np

from compressor.result import Reason
from compressor.text.chars import BRACKET, DIGIT
from compressor.text.segment import Ground

DIGITS: Final = 0.30
"""Share of digits: tables of numbers have .6 and more, hexadecimal .6, dated prose under .1."""
ENCODED: Final = 0.20
"""Share in words of 16 and more letters and digits that mix both: base64 has .6."""
CODE_BRACKETS: Final = 0.04
"""Share of brackets, `=` and `;`: sources have .044 to .14."""
CODE_LINES: Final = 0.40
"""Share of lines that end like code: sources have .4 to .9, documentation up to .35."""
BLOCKS: Final = 0.6
_LONG_WORD: Final = 16
_KINDS: Final[dict[str, Reason]] = {"`": "code", "~": "code", "{": "json", "[": "json"}
_MIN_LINES: Final = 8
_LINE_ENDS: Final = np.zeros(128, np.bool_)
_LINE_ENDS[[ord(c) for c in "{};\\):,]("]] = True


def unfit(ground: Ground, blocks: list[tuple[int, int]]) -> tuple[Reason, str] | None:
    """Why a text must not be extracted from; None if it may."""
    chars = ground.chars
    solid = max(ground.solid_chars, 1)
    held = sum(int(np.count_nonzero(~ground.blank[start:end])) for start, end in blocks)
    if held > BLOCKS * solid:
        largest = max(blocks, key=lambda block: block[1] - block[0])
        kind = _KINDS.get(chars.text[largest[0]], "tables")
        return kind, f"{held / solid:.0%} of the text is in blocks that stay whole"
    digits = (chars.classes & DIGIT) != 0
    share = float(np.count_nonzero(digits) / solid)
    if share > DIGITS:
        return "digits", f"{share:.0%} of the characters are digits"
    long = np.flatnonzero(ground.word_ends - ground.word_starts >= _LONG_WORD)
    if len(long):
        at = np.flatnonzero(digits)
        starts, ends = ground.word_starts[long], ground.word_ends[long]
        mixed = np.searchsorted(at, ends) > np.searchsorted(at, starts)
        share = int((ends - starts)[mixed].sum()) / solid
        if share > ENCODED:
            return "encoded", f"{share:.0%} of the characters are in encoded words"
    if _is_code(ground, blocks, solid - held):
        return "code", "its lines end and its brackets stand as in code"
    return None


def _is_code(ground: Ground, blocks: list[tuple[int, int]], solid: int) -> bool:
    chars = ground.chars
    brackets = (chars.classes & BRACKET) != 0
    ends = ground.solid_before(ground.newlines)
    if blocks:
        edges = np.array(blocks, np.int64)
        inner = np.searchsorted(edges[:, 0], ends, "right") - 1
        ends = ends[(inner < 0) | (ends > edges[inner, 1])]
        for start, end in blocks:
            brackets[start:end] = False
    if len(ends) < _MIN_LINES or np.count_nonzero(brackets) < CODE_BRACKETS * solid:
        return False
    return float(_LINE_ENDS[np.minimum(chars.codes[ends - 1], 127)].mean()) >= CODE_LINES
