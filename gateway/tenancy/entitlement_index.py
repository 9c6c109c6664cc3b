"""The entitlements in force, oldest first. Plain state; cheap with 100,000.

`created` orders the entitlements: older ones keep their reservation when capacity falls.
"""

from collections.abc import Iterator

from sortedcontainers import SortedList

from gateway.records.entitlement import Entitlement
from gateway.tenancy.rights import EntitlementInForce

PagePosition = tuple[int, str]
"""`created` and name: an entitlement's position in the list."""


class EntitlementIndex:
    """Entitlements by name, in order of creation, and by model."""

    def __init__(self) -> None:
        self.entries: dict[str, EntitlementInForce] = {}
        self._order: SortedList[PagePosition] = SortedList()
        self._models: dict[str, SortedList[PagePosition]] = {}
        self._reserving: dict[str, dict[str, Entitlement]] = {}

    def put(self, entry: EntitlementInForce) -> None:
        """Add an entry or replace the one of the same name."""
        terms = entry.terms
        self.remove(terms.name)
        self.entries[terms.name] = entry
        self._order.add(_place(entry))
        self._models.setdefault(terms.model, SortedList()).add(_place(entry))
        if terms.reserves:
            self._reserving.setdefault(terms.model, {})[terms.name] = terms

    def remove(self, name: str) -> None:
        """Forget an entry; unknown names are ignored."""
        entry = self.entries.pop(name, None)
        if entry is not None:
            self._order.remove(_place(entry))
            self._models[entry.terms.model].remove(_place(entry))
            self._reserving.get(entry.terms.model, {}).pop(name, None)

    def terms(self, model: str) -> Iterator[Entitlement]:
        """A model's entitlements, oldest first; safe to iterate during changes."""
        for _, name in tuple(self._models.get(model, ())):
            entry = self.entries.get(name)
            if entry is not None:
                yield entry.terms

    def reserving(self, model: str) -> list[Entitlement]:
        """A model's entitlements that reserve a baseline."""
        return list(self._reserving.get(model, {}).values())

    def after(self, place: PagePosition, count: int) -> list[EntitlementInForce]:
        """Up to `count` entries after a position, oldest first."""
        start = self._order.bisect_right(place)
        return [self.entries[name] for _, name in self._order[start : start + count]]


def _place(entry: EntitlementInForce) -> PagePosition:
    return entry.terms.created, entry.terms.name
