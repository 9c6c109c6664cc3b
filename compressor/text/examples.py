"""Few-shot prompts: records of lines with the same prefixes, the last of which is to be completed.

No word is known: a line of the last paragraph (`Sentiment:`, `A:`, `Output ->`) has the prefix
that earlier lines have, too. A question over passages ends with a prefix of its own.
"""

import re
from typing import Final

import numpy as np

from compressor.text.chars import Ints
from compressor.text.segment import Spans

MIN_EARLIER: Final = 2
"""Earlier lines with the prefix of one of the last."""
_LAST: Final = 3
_LINE, _BLANK_LINE = 2, 3
_PREFIX: Final = re.compile(r"(?P<key>[^\W\d_][^\n:：]{0,30}?)[ \t]*\d{0,3}[ \t]*(?:[:：]|[-=]>|→)")


def shows_examples(text: str, spans: Spans, own: Ints) -> bool:
    """Whether the units `own`, headers left out, end like a record that earlier ones are."""
    starts = spans.starts.tolist()
    begins = spans.gaps[own] >= _LINE
    begins[:1] = True
    lines = own[begins]
    breaks = np.flatnonzero(spans.gaps[lines] == _BLANK_LINE)
    last = max(int(breaks[-1]) if len(breaks) else 0, len(lines) - _LAST)
    ending = {_key(text, starts[unit]) for unit in lines[last:].tolist()} - {""}
    earlier = [starts[unit] for unit in lines[:last].tolist()] if ending else []
    return any(_holds(text, earlier, key) for key in ending)


def _holds(text: str, starts: list[int], key: str) -> bool:
    """Whether enough of the lines at `starts` have the prefix `key`."""
    size = len(key)
    alike = [start for start in starts if text[start : start + size].casefold() == key]
    return sum(_key(text, start) == key for start in alike) >= MIN_EARLIER


def _key(text: str, start: int) -> str:
    match = _PREFIX.match(text, start)
    return match["key"].casefold() if match else ""
