"""Units that repeat an earlier one inside a run of copied units.

A sentence that stands alone under another heading says something else there ("The permit was
granted."), however often it occurs. Copies are only

- a unit right after an equal one;
- the overlap of two chunks: the units that end one section begin a later one, and both sections
  have other units as well;
- a section that repeats an earlier one, header and all.
"""

from bisect import bisect_left

import numpy as np
import numpy.typing as npt

from compressor.text.chars import Ints
from compressor.text.passages import Passages
from compressor.text.segment import Ground

MIN_OVERLAP = 2
"""Units of an overlap; a single one may be a fact of each section."""
_NEAREST = 8
"""Earlier sections that one is compared with."""
Flags = npt.NDArray[np.bool_]


def copies(ground: Ground, parts: Passages) -> Flags:
    """The copied units, by hash and length."""
    starts, ends = parts.spans.starts, parts.spans.ends
    keys = ground.chars.hashes(starts, ends).astype(np.int64) << 20 | ((ends - starts) & 0xFFFFF)
    found = np.zeros(len(keys), np.bool_)
    found[1:] = keys[1:] == keys[:-1]
    order = np.argsort(keys, kind="stable")
    again = np.zeros(len(keys), np.bool_)
    again[order[1:]] = keys[order[1:]] == keys[order[:-1]]
    again &= ~parts.furniture
    if not again.any():
        return found
    sections = np.unique(parts.section[again])
    # Runs are looked for only at sections that begin with a repeated unit.
    firsts = np.searchsorted(parts.section, sections)
    seen: dict[int, list[int]] = {}
    for first in firsts.tolist():
        _mark_section(first, keys, again, parts, found, seen)
    return found


def _mark_section(
    first: int, keys: Ints, again: Flags, parts: Passages, found: Flags, seen: dict[int, list[int]]
) -> None:
    """Mark what the section at `first` repeats of earlier ones."""
    own = _plain(parts, int(parts.section[first]))
    if not len(own) or not again[own[0]]:
        return
    if not seen:
        _index(keys, parts, seen)
    words = keys[own].tolist()
    having = seen.get(words[0], [])
    stop = bisect_left(having, int(parts.section[first]))
    for other in reversed(having[max(0, stop - _NEAREST) : stop]):
        theirs = _plain(parts, other)
        before = keys[theirs].tolist()
        if before == words:
            if _header(parts, keys, other) == _header(parts, keys, int(parts.section[first])):
                found[own] = True
                return
            continue
        for size in range(min(len(words), len(before)) - 1, MIN_OVERLAP - 1, -1):
            if before[-size:] == words[:size]:
                found[own[:size]] = True
                return


def _index(keys: Ints, parts: Passages, seen: dict[int, list[int]]) -> None:
    """Sections by the key of each of their units."""
    plain = np.flatnonzero(~parts.furniture)
    for key, section in zip(keys[plain].tolist(), parts.section[plain].tolist(), strict=True):
        of = seen.setdefault(key, [])
        if not of or of[-1] != section:
            of.append(section)


def _plain(parts: Passages, section: int) -> Ints:
    low, high = np.searchsorted(parts.section, (section, section + 1)).tolist()
    own: Ints = np.arange(low, high)[~parts.furniture[low:high]]
    return own


def _header(parts: Passages, keys: Ints, section: int) -> list[int]:
    low, high = np.searchsorted(parts.section, (section, section + 1)).tolist()
    found: list[int] = keys[low:high][parts.furniture[low:high]].tolist()
    return found
