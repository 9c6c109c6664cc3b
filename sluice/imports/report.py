"""What became of each setting of an imported file: taken, approximated or left out.

Every setting must be accounted for. What no part of the import speaks of, `rest` leaves out.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Final, Literal

from gateway.records.record import Record
from gateway.settings.source import KeyPath, dotted

Fate = Literal["taken", "approximated", "left out"]
_UNSET: Final[tuple[object, ...]] = (None, "", [], {})
"""Values that say nothing, as False does; rows of a database are full of them."""


_HEADS: Final[dict[Fate, str]] = {
    "left out": "Left out ({}): Sluice does nothing of it.",
    "approximated": "Set or check ({}): Sluice does nearly the same.",
}
_SHOWN: Final = 3
"""Places that are named of one reason."""
_WIDTH: Final = 100


class Line(Record, frozen=True, kw_only=True):
    """One setting, or one section, and its fate."""

    file: str
    line: int
    """0 where the file has no lines to speak of, as a dump of keys."""
    path: str
    fate: Fate
    note: str


def told(lines: Sequence[Line], heads: Mapping[Fate, str] = _HEADS) -> Iterator[str]:
    """The lines for a person: losses first, then what to set or check; each reason once."""
    counts = Counter(line.fate for line in lines)
    for fate, head in heads.items():
        groups: dict[tuple[str, str], list[str]] = {}
        for line in lines:
            if line.fate == fate:
                place = f"{line.path} (line {line.line})" if line.line else line.path
                groups.setdefault((line.file, line.note), []).append(place)
        if groups:
            yield head.format(counts[fate])
        for (_, note), places in groups.items():
            more = f", and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
            yield from wrap(note, _WIDTH, initial_indent="- ", subsequent_indent="  ")
            at = f"{', '.join(places[:_SHOWN])}{more}"
            yield from wrap(at, _WIDTH, initial_indent="    ", subsequent_indent="    ")
    yield f"The same as before: {counts['taken']}. Every setting, with its line: --json"


class Report:
    """The lines about one file, in the order of its import until `lines` sorts them."""

    def __init__(self, file: str, line_of: Callable[[KeyPath], int] = lambda _: 0) -> None:
        """`line_of` gives the line of a path."""
        self._file = file
        self._line_of = line_of
        self._lines: list[Line] = []
        self._notes: set[tuple[KeyPath, str]] = set()
        self._told: set[KeyPath] = set()
        self._above: set[KeyPath] = set()
        """Paths of which a part was spoken of."""

    @property
    def lines(self) -> list[Line]:
        """All lines, by place."""
        return sorted(self._lines, key=lambda line: line.line)

    def taken(self, path: KeyPath, note: str) -> None:
        """Sluice does the same."""
        self._add(path, "taken", note)

    def approximated(self, path: KeyPath, note: str) -> None:
        """Sluice does nearly the same; `note` says what differs."""
        self._add(path, "approximated", note)

    def left_out(self, path: KeyPath, note: str) -> None:
        """Sluice does nothing of it."""
        self._add(path, "left out", note)

    def part_of(self, path: KeyPath) -> None:
        """A setting that another line speaks of."""
        self._told.add(path)
        self._above.update(path[:end] for end in range(len(path)))

    def rest(self, data: object, path: KeyPath = ()) -> None:
        """Leave out whatever is set in `data` and was not spoken of, in as few lines as that is.

        A line about a section speaks of all of it, unless other lines speak of parts of it.
        """
        if data is False or data in _UNSET:
            return
        if path not in self._above:
            if path not in self._told:
                self.left_out(path, "Sluice has no such setting")
            return
        if isinstance(data, dict):
            for name, value in data.items():
                self.rest(value, (*path, str(name)))
        for at, value in enumerate(data if isinstance(data, list) else ()):
            self.rest(value, (*path, at))

    def _add(self, path: KeyPath, fate: Fate, note: str) -> None:
        if (path, note) in self._notes:
            return
        self._notes.add((path, note))
        self.part_of(path)
        line = self._line_of(path)
        where = dotted(path) or "the file"
        self._lines.append(Line(file=self._file, line=line, path=where, fate=fate, note=note))
