"""The entitlements of one process, oldest first, and their merge with the configuration file.

Plain state without I/O. `created` orders the entitlements: older ones keep their reservation
when capacity falls.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from gateway.adapters.entitlements.conflicts import changed
from gateway.policy.entitlements.entitlement import Entitlement
from gateway.ports import EntitlementEntry

PagePosition = tuple[int, str]
"""`created` and name: an entitlement's position in the list."""


class EntitlementIndex:
    """Entries by name and in order of creation. Cheap with 100,000 entries."""

    def __init__(self) -> None:
        self.entries: dict[str, EntitlementEntry] = {}
        self._order: list[PagePosition] = []
        self._models: dict[str, list[PagePosition]] = {}
        self._reserving: dict[str, dict[str, Entitlement]] = {}

    @property
    def next_created(self) -> int:
        """The `created` number for the next new entitlement."""
        return self._order[-1][0] + 1 if self._order else 1

    def put(self, entry: EntitlementEntry) -> None:
        """Add an entry or replace the one of the same name."""
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
        """Forget an entry; unknown names are ignored."""
        entry = self.entries.pop(name, None)
        if entry is not None:
            of_model = self._models[entry.terms.model]
            for order in (self._order, of_model):
                del order[bisect_left(order, _place(entry))]
            self._reserving[entry.terms.model].pop(name, None)

    def terms(self, model: str) -> Iterator[Entitlement]:
        """A model's entitlements, oldest first; safe to iterate during changes."""
        for _, name in tuple(self._models.get(model, ())):
            entry = self.entries.get(name)
            if entry is not None:
                yield entry.terms

    def reserving(self, model: str) -> list[Entitlement]:
        """A model's entitlements that reserve a baseline."""
        return list(self._reserving.get(model, {}).values())

    def after(self, place: PagePosition, count: int) -> list[EntitlementEntry]:
        """Up to `count` entries after a position, oldest first."""
        start = bisect_right(self._order, place)
        return [self.entries[name] for _, name in self._order[start : start + count]]


class File(msgspec.Struct, frozen=True):
    """The entitlements of a configuration file."""

    entries: Sequence[EntitlementEntry] = ()
    unix_s: float = 0.0
    """Its modification time; 0 if unknown."""


class Merged(msgspec.Struct, frozen=True):
    """The file's change to one name; at most one field is set."""

    put: EntitlementEntry | None = None
    remove: EntitlementEntry | None = None
    older: str = ""
    """Name that is left alone because the file is older."""


def merge(
    file: File,
    kept: Mapping[str, EntitlementEntry],
    newest: int,
    removed_unix_s: Mapping[str, float],
    new_id: Callable[[], str],
) -> Iterator[Merged]:
    """Yield the file's changes to the entries in the directory (`kept`).

    - A new or changed section of the file wins over the entry, except for its position in the
      order, its suspension (which a file cannot express) and its revoked keys.
    - An unchanged section leaves the entry as it is, with an admin's later changes.
    - Entries that came from the file and are no longer in it are removed; entries that an admin
      created stay.
    - A file does not change an entry that came from a newer file or that a newer file removed
      (`removed_unix_s`, by name).

    `newest` is the highest `created` in `kept`. Yields one step per entry, so that the caller
    can pause between steps.
    """
    listed = set()
    for entry in file.entries:
        name = entry.terms.name
        listed.add(name)
        known = kept.get(name)
        if known is None and removed_unix_s.get(name, 0.0) > file.unix_s:
            yield Merged(older=name)
        elif known is None:
            newest += 1
            terms = msgspec.structs.replace(entry.terms, created=newest, suspended=False)
            first = EntitlementEntry(terms=terms, id=new_id())
            yield Merged(put=_entered(first, entry, file.unix_s))
        elif known.origin == "file" and known.file_digest == entry.file_digest:
            yield Merged()
        elif known.file_unix_s > file.unix_s:
            yield Merged(older=name)
        else:
            yield Merged(put=_entered(known, entry, file.unix_s))
    for name, known in kept.items():
        if known.origin != "file" or name in listed:
            yield Merged()
        elif known.file_unix_s > file.unix_s:
            yield Merged(older=name)
        else:
            yield Merged(remove=msgspec.structs.replace(known, file_unix_s=file.unix_s))


def _entered(
    known: EntitlementEntry, entry: EntitlementEntry, file_unix_s: float
) -> EntitlementEntry:
    """The known entry with the content of the file's entry."""
    return changed(
        known,
        terms=msgspec.structs.replace(
            entry.terms, created=known.terms.created, suspended=known.terms.suspended
        ),
        key_sha256=tuple(d for d in entry.key_sha256 if d not in known.revoked_sha256),
        origin="file",
        file_digest=entry.file_digest,
        file_unix_s=file_unix_s,
    )


def _where(entry: EntitlementEntry) -> tuple[int, str]:
    return entry.terms.created, entry.terms.model


def _place(entry: EntitlementEntry) -> PagePosition:
    return entry.terms.created, entry.terms.name
