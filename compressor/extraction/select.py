"""Select the units to keep, and render their text.

Rules:
- Units are taken by tier, then score, then place; one that does not fit is skipped.
- The first unit of a section pays for the section's furniture.
- A unit costs its bytes and the white space before it, two bytes at least. Kept units that were
  not neighbours are joined by the strongest break that lay between them.
- A mark stands once in each gap; every gap costs MARK_BYTES.
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
MARK: Final = "[...]"
MARK_BYTES: Final = len(MARK) + GLUE_BYTES
"""A mark and the break before it; the break after it is the following unit's."""
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
    costs: Costs,
    section: Ints,
    tiers: npt.NDArray[np.int8],
    scores: Floats,
    budget: int,
    firsts: npt.NDArray[np.bool_] | None = None,
) -> npt.NDArray[np.bool_]:
    """The units kept within `budget` bytes, furniture included.

    With `firsts`, which marks units that begin a text, every gap in a text costs MARK_BYTES.
    """
    mark = MARK_BYTES if firsts is not None else 0
    unit, furniture = costs.unit.tolist(), costs.section.tolist()
    texts = np.zeros(len(unit), np.int64) if firsts is None else np.cumsum(firsts)
    # Walls stand between texts. Where a unit is open, a gap ends at its neighbours.
    places = np.arange(len(unit)) + texts + 1
    opened = np.zeros(int(places[-1]) + 2 if len(places) else 0, np.uint8)
    opened[places] = 1
    gaps, place = bytearray(opened.tobytes()), places.tolist()
    headers = _headers(costs, section)
    budget -= mark * int(texts[-1]) if len(texts) else 0
    of, chosen = section.tolist(), []
    for index in np.lexsort((-scores, tiers)).tolist():
        cost = unit[index]
        if not cost:
            continue
        at, number = place[index], of[index]
        with_it = [place[h] for h in headers[number]] if furniture[number] else ()
        if with_it:
            cost += furniture[number] + mark * _closed(gaps, with_it)
        cost += mark * (gaps[at - 1] + gaps[at + 1] - 1)
        if cost <= budget:
            budget -= cost
            furniture[number] = gaps[at] = 0
            chosen.append(index)
        elif with_it:
            for header in with_it:
                gaps[header] = 1
    kept = np.zeros(len(unit), np.bool_)
    kept[chosen] = True
    used = np.zeros(len(furniture), np.bool_)
    used[section[kept]] = True
    kept |= (costs.unit == 0) & used[section]
    return kept


def _headers(costs: Costs, section: Ints) -> dict[int, list[int]]:
    """The headers of each section that has some."""
    found: dict[int, list[int]] = {}
    at = np.flatnonzero(costs.unit == 0)
    for index, number in zip(at.tolist(), section[at].tolist(), strict=True):
        found.setdefault(number, []).append(index)
    return found


def _closed(gaps: bytearray, places: list[int]) -> int:
    """Keep the units at some places; returns by how many the gaps rise."""
    rise = 0
    for at in places:
        gaps[at] = 0
        rise += gaps[at - 1] + gaps[at + 1] - 1
    return rise


def rendered(
    chars: Chars,
    spans: Spans,
    kept: npt.NDArray[np.bool_],
    start: int,
    end: int,
    *,
    mark: bool = False,
) -> str:
    """The text at [start, end) reduced to the kept units; `mark`: with MARK in each gap."""
    text = chars.text
    low, high = np.searchsorted(spans.starts, (start, end)).tolist()
    if low == high:
        return text[start:end]
    mine = np.flatnonzero(kept[low:high]) + low
    head, tail = text[start : spans.starts[low]], text[spans.ends[high - 1] : end]
    if not len(mine):
        return head + (MARK if mark else "") + tail
    if len(mine) == high - low:
        return text[start:end]
    # Runs of neighbours are copied unchanged.
    gaps = np.flatnonzero(np.diff(mine) > 1)
    firsts, lasts = mine[np.append(0, gaps + 1)], mine[np.append(gaps, len(mine) - 1)]
    begins, ends = spans.starts[firsts].tolist(), spans.ends[lasts].tolist()
    gap = spans.gaps.tolist()
    pieces = [head]
    if mark and int(mine[0]) > low:
        pieces += [MARK, _BREAKS[max(gap[low + 1 : int(mine[0]) + 1])]]
    pieces.append(text[begins[0] : ends[0]])
    for index in range(1, len(begins)):
        before, after = int(lasts[index - 1]), int(firsts[index])
        strongest = max(gap[before + 1 : after + 1])
        if mark:
            pieces += [_BREAKS[gap[before + 1]] or _space(chars, ends[index - 1], -1), MARK]
        own = text[spans.ends[after - 1] : begins[index]]
        if strongest == gap[after] and strongest > 0:
            pieces.append(own)
        elif gap[after] == _LINE:
            pieces.append("\n" + own)
        else:
            pieces.append(_BREAKS[strongest] or _space(chars, ends[index - 1], begins[index]))
        pieces.append(text[begins[index] : ends[index]])
    if mark and int(mine[-1]) < high - 1:
        pieces += [_BREAKS[gap[int(mine[-1]) + 1]] or _space(chars, ends[-1], -1), MARK]
    return "".join((*pieces, tail))


def _space(chars: Chars, end: int, start: int) -> str:
    """A space where two words would merge; none in scripts without spaces."""
    left, right = int(chars.classes[end - 1]), int(chars.classes[start]) if start >= 0 else WORD
    return "" if left & RUN or right & RUN or not (left & WORD or right & WORD) else " "
