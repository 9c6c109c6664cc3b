"""Select the units to keep, and render their text.

Rules:
- Units are taken by tier, then score, then place; one that does not fit is skipped.
- The first unit of a section pays for the section's furniture.
- A unit costs its bytes and the white space before it, two bytes at least. Kept units that were
  not neighbours are joined by the strongest break that lay between them.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from compressor.text.chars import RUN, WORD, Chars, Ints
from compressor.text.passages import Passages
from compressor.text.segment import Spans
from compressor.text.terms import Floats

GLUE_BYTES: Final = 2
_LINE: Final = 2
_BREAKS: Final = ("", " ", "\n", "\n\n")


@dataclass(frozen=True, slots=True)
class Costs:
    """Bytes of each unit with the white space before it, and of each section's furniture."""

    unit: Ints
    section: Ints


def costs_of(chars: Chars, parts: Passages, firsts: npt.NDArray[np.bool_]) -> Costs:
    """`firsts` marks units that begin a text: they do not pay for the white space before them."""
    spans = parts.spans
    before = np.append(np.zeros(1, np.int64), spans.ends[:-1])
    # A line feed may become a blank line, with its indentation after it.
    glue = chars.bytes_between(before, spans.starts) + (spans.gaps == _LINE)
    glue = np.maximum(glue, GLUE_BYTES)
    unit = chars.bytes_between(spans.starts, spans.ends) + np.where(firsts, GLUE_BYTES, glue)
    # One more: a question at the end has a section of its own, without furniture.
    sections = int(parts.section.max(initial=0)) + 2
    paid = np.bincount(parts.section, np.where(parts.furniture, unit, 0), sections)
    section = paid.astype(np.int64)
    return Costs(np.where(parts.furniture, 0, unit), section)


def selected(
    costs: Costs, section: Ints, tiers: npt.NDArray[np.int8], scores: Floats, budget: int
) -> npt.NDArray[np.bool_]:
    """The units kept within `budget` bytes, furniture included."""
    order = np.lexsort((-scores, tiers))
    unit, furniture = costs.unit.tolist(), costs.section.tolist()
    of = section.tolist()
    chosen = []
    for index in order.tolist():
        cost = unit[index]
        if not cost:
            continue
        cost += furniture[of[index]]
        if cost <= budget:
            budget -= cost
            furniture[of[index]] = 0
            chosen.append(index)
    kept = np.zeros(len(unit), np.bool_)
    kept[chosen] = True
    used = np.zeros(len(furniture), np.bool_)
    used[section[kept]] = True
    kept |= (costs.unit == 0) & used[section]
    return kept


def rendered(chars: Chars, spans: Spans, kept: npt.NDArray[np.bool_], start: int, end: int) -> str:
    """The text at [start, end) reduced to the kept units."""
    text = chars.text
    low, high = np.searchsorted(spans.starts, (start, end)).tolist()
    if low == high:
        return text[start:end]
    mine = np.flatnonzero(kept[low:high]) + low
    head, tail = text[start : spans.starts[low]], text[spans.ends[high - 1] : end]
    if not len(mine):
        return head + tail
    if len(mine) == high - low:
        return text[start:end]
    # Runs of neighbours are copied unchanged.
    gaps = np.flatnonzero(np.diff(mine) > 1)
    firsts, lasts = mine[np.append(0, gaps + 1)], mine[np.append(gaps, len(mine) - 1)]
    begins, ends = spans.starts[firsts].tolist(), spans.ends[lasts].tolist()
    gap = spans.gaps[: int(lasts[-1]) + 1].tolist()
    pieces = [head, text[begins[0] : ends[0]]]
    for index in range(1, len(begins)):
        after = int(firsts[index])
        strongest = max(gap[int(lasts[index - 1]) + 1 : after + 1])
        own = text[spans.ends[after - 1] : begins[index]]
        if strongest == gap[after] and strongest > 0:
            pieces.append(own)
        elif gap[after] == _LINE:
            pieces.append("\n" + own)
        else:
            pieces.append(_BREAKS[strongest] or _space(chars, ends[index - 1], begins[index]))
        pieces.append(text[begins[index] : ends[index]])
    return "".join((*pieces, tail))


def _space(chars: Chars, end: int, start: int) -> str:
    """A space where two words would merge; none in scripts without spaces."""
    left, right = int(chars.classes[end - 1]), int(chars.classes[start])
    return "" if left & RUN or right & RUN or not (left & WORD or right & WORD) else " "
