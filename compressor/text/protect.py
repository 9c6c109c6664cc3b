"""Blocks that are kept or dropped as a whole: fenced code, tables, JSON.

Rules:
- A fence opens with three or more backticks or tildes and closes with as many of the same.
  Tildes under a line of text are an RST heading. An unclosed fence runs to the end of its text.
- A table is two or more lines that begin with `|`, or a `| --- |` rule with a line above it.
- JSON is a value of 20 characters or more that the parser accepts from its first bracket on.
Spans are disjoint and in order.
"""

import json
import re
from collections.abc import Iterator
from typing import Final

import numpy as np

from compressor.text.chars import BAR, FENCE, OPENER
from compressor.text.segment import Ground

Block = tuple[int, int]

MIN_JSON_CHARS: Final = 20
_JSON_TRIES: Final = 200
_FENCE: Final = re.compile(r"^[ \t]{0,12}(`{3,}|~{3,})([^\n]*)$", re.MULTILINE)
_RULE: Final = re.compile(r"^[ \t]*\|?[ \t]*:?-+:?[ \t]*\|[-:| \t\r]*$", re.MULTILINE)
_DECODER: Final = json.JSONDecoder()
_OPENERS: Final = np.zeros(128, np.bool_)
_OPENERS[[ord(c) for c in '"[{0123456789-']] = True


def is_json(text: str) -> bool:
    """Whether the whole text is a JSON object or array."""
    stripped = text.strip()
    if not (stripped.startswith(("{", "[")) and stripped.endswith(("}", "]"))):
        return False
    try:
        json.loads(stripped)
    except (ValueError, RecursionError):
        return False
    return True


def blocks(ground: Ground, starts: list[int], ends: list[int]) -> list[Block]:
    """Blocks of the texts at [starts, ends) of one joined text."""
    text = ground.chars.text
    found: list[Block] = []
    codes = ground.chars.codes
    marks = np.flatnonzero((ground.chars.classes & FENCE) != 0)
    if ((codes[marks] == codes[marks + 1]) & (codes[marks] == codes[marks + 2])).any():
        for start, end in zip(starts, ends, strict=True):
            found += _fences(text, start, end)
    found += _tables(ground)
    found += _json(ground)
    return disjoint(found)


def disjoint(found: list[Block]) -> list[Block]:
    """Sort spans and keep the first of overlapping ones."""
    kept: list[Block] = []
    for start, end in sorted(found):
        if end > start and (not kept or start >= kept[-1][1]):
            kept.append((start, end))
    return kept


def _tables(ground: Ground) -> list[Block]:
    chars = ground.chars
    codes, text = chars.codes, chars.text
    pipes = np.flatnonzero((chars.classes & BAR) != 0)
    if not len(pipes):
        return []
    # Lines that begin with a bar, two and more in a row.
    lines = np.append(np.zeros(1, np.int64), ground.newlines + 1)
    solid = ground.solid_from(lines)
    barred = (codes[solid] == ord("|")) & (solid < np.append(lines[1:], chars.size))
    edges = np.flatnonzero(np.diff(np.append(np.append(0, barred), 0)))
    stops = np.append(lines, chars.size + 1)
    found = [
        (int(lines[first]), _trimmed(text, int(lines[first]), int(stops[last]) - 1))
        for first, last in edges.reshape(-1, 2).tolist()
        if last - first > 1
    ]
    # A rule of dashes makes a table of lines that do not begin with a bar.
    near = (codes[pipes - 1] == ord("-")) | (codes[pipes + 1] == ord("-"))
    near |= (codes[pipes - 2] == ord("-")) | (codes[pipes + 2] == ord("-"))
    rows = np.searchsorted(lines, pipes[near], "right") - 1
    end = -1
    for row in dict.fromkeys(rows.tolist()):
        if lines[row] >= end and (match := _RULE.match(text, int(lines[row]))):
            found.append(_ruled(text, *match.span()))
            end = found[-1][1]
    return found


def _ruled(text: str, start: int, end: int) -> Block:
    """The table around a rule: the line above it, and those below that have a bar."""
    begin = text.rfind("\n", 0, max(start - 1, 0)) + 1
    while end < len(text):
        stop = text.find("\n", end + 1)
        stop = len(text) if stop < 0 else stop
        if "|" not in text[end:stop]:
            break
        end = stop
    return begin, _trimmed(text, begin, end)


def _trimmed(text: str, start: int, end: int) -> int:
    return start + len(text[start:end].rstrip())


def _fences(text: str, start: int, end: int) -> Iterator[Block]:
    opened: tuple[int, str] | None = None
    for match in _FENCE.finditer(text, start, end):
        marks, info = match[1], match[2].strip()
        if opened is None:
            if marks[0] == "`" and "`" in info:
                continue
            if marks[0] == "~" and (_underlines(text, start, match.start()) or len(marks) > 3):
                continue
            opened = match.start(), marks
        elif marks.startswith(opened[1]) and not info:
            yield opened[0], match.end()
            opened = None
    if opened and opened[1][0] == "`":
        yield opened[0], _trimmed(text, opened[0], end)


def _underlines(text: str, start: int, at: int) -> bool:
    """Whether the line above `at` has text, which tildes then underline."""
    above = text.rfind("\n", start, max(at - 1, start)) + 1
    return at > start and bool(text[max(above, start) : at].strip())


def _json(ground: Ground) -> Iterator[Block]:
    chars = ground.chars
    at = np.flatnonzero((chars.classes & OPENER) != 0)
    if not len(at):
        return
    following = np.minimum(chars.codes[ground.solid_from(at + 1)], 127)
    done = tries = 0
    for start in at[_OPENERS[following]].tolist():
        # `[12]` and the like are too short to be looked at.
        if start < done or chars.text.find("]", start, start + 5) > 0:
            continue
        tries += 1
        if tries > _JSON_TRIES:
            return
        try:
            _, end = _DECODER.raw_decode(chars.text, start)
        except (ValueError, RecursionError):
            continue
        if end - start >= MIN_JSON_CHARS:
            yield start, end
            done = end
