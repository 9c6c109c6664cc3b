"""The entitlements of one process: who there is, oldest first, and how the file joins in.

Plain state without I/O. `created` orders the entitlements: the older keep their reservation
when capacity falls.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from gateway.policy.entitlements import Entitlement
from gateway.ports import EntitlementEntry

Place = tuple[int, str]
"""`created` and name: where an entitlement stands in the list."""


class Roster:
    """Entries by name and in order. Cheap at 100,000."""

    def __init__(self) -> None:
        self.entries: dict[str, EntitlementEntry] = {}
        self._order: list[Place] = []
        self._models: dict[str, list[Place]] = {}
        self._reserving: dict[str, dict[str, Entitlement]] = {}

    @property
    def next_created(self) -> int:
        """The number of the next new entitlement."""
        return self._order[-1][0] + 1 if self._order else 1

    def put(self, entry: EntitlementEntry) -> None:
        """Add an entry or replace its namesake."""
        terms = entry.terms
        known = self.entries.get(terms.name)
        if known is not None and _where(known) != _where(entry):
            self.remove(terms.name)
            known = None
        if known is None:
            insort(self._order, _place(entry))
            insort(self._models.setdefault(terms.model, []), _place(entry))
        self.entries[terms.name] = entry
        reserving = self._reserving.setdefault(terms.model, {})
        if terms.reserves:
            reserving[terms.name] = terms
        else:
            reserving.pop(terms.name, None)

    def remove(self, name: str) -> None:
        """Forget an entry; an unknown one is no failure."""
        entry = self.entries.pop(name, None)
        if entry is not None:
            of_model = self._models[entry.terms.model]
            for order in (self._order, of_model):
                del order[bisect_left(order, _place(entry))]
            self._reserving[entry.terms.model].pop(name, None)

    def terms(self, model: str) -> Iterator[Entitlement]:
        """A model's entitlements, oldest first; may be read while they change."""
        for _, name in tuple(self._models.get(model, ())):
            entry = self.entries.get(name)
            if entry is not None:
                yield entry.terms

    def reserving(self, model: str) -> list[Entitlement]:
        """Those of a model that reserve a baseline."""
        return list(self._reserving.get(model, {}).values())

    def after(self, place: Place, count: int) -> list[EntitlementEntry]:
        """Up to `count` entries behind a place, oldest first."""
        start = bisect_right(self._order, place)
        return [self.entries[name] for _, name in self._order[start : start + count]]


def merge(
    file: Sequence[EntitlementEntry], kept: Mapping[str, EntitlementEntry], newest: int
) -> Iterator[EntitlementEntry | str | None]:
    """What the file changes of what is kept: entries to put, names to remove, None for neither.

    - A section of the file that is new or was changed wins over what is kept, but for its
      place in the order and a suspension, which no file can express.
    - An unchanged section leaves what is kept as it is, with an admin's later changes.
    - What came from the file and is no longer in it goes; an admin's own entries stay.

    `newest` is the highest number of `kept`. One step for each entry, so that the caller can
    pause between.
    """
    listed = set()
    for entry in file:
        listed.add(entry.terms.name)
        known = kept.get(entry.terms.name)
        if known is None:
            newest += 1
            yield _entered(entry, created=newest)
        elif known.origin == "file" and known.file_digest == entry.file_digest:
            yield None
        else:
            terms = known.terms
            yield _entered(entry, created=terms.created, suspended=terms.suspended)
    for name, known in kept.items():
        yield name if known.origin == "file" and name not in listed else None


def _entered(entry: EntitlementEntry, *, created: int, suspended: bool = False) -> EntitlementEntry:
    terms = msgspec.structs.replace(entry.terms, created=created, suspended=suspended)
    return msgspec.structs.replace(entry, terms=terms, origin="file")


def _where(entry: EntitlementEntry) -> tuple[int, str]:
    return entry.terms.created, entry.terms.model


def _place(entry: EntitlementEntry) -> Place:
    return entry.terms.created, entry.terms.name
