"""The directory of entitlements as one process knows it: how far, and what was deleted.

A write names the last one that is known here. A directory that does not know that one has lost
writes, and takes none until all was read and brought together.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from gateway.adapters.entitlements.conflicts import Grave
from gateway.adapters.entitlements.guarded_directory import GuardedDirectory
from gateway.ports import EntitlementEntry, Kept, Removal

GRAVES: Final = 10_000
"""Deleted entitlements that are remembered, so that they stay deleted."""
PUT_AT_ONCE: Final = 500


class Raced(Exception):
    """Another gateway changed the same entitlements first: nothing was changed here."""


class KnownDirectory:
    """Reads and writes that go on from what is known. One caller at a time."""

    def __init__(self, directory: GuardedDirectory) -> None:
        self.graves: OrderedDict[Grave, Removal] = OrderedDict()
        """Deleted entitlements, oldest first."""
        self._directory = directory
        self._revision = 0
        self._mark = ""
        """The last write that is known here."""
        self._lost = False
        """The directory does not know that write."""
        self._wrote = False
        """That write was made here, since something was read."""

    @property
    def up(self) -> bool:
        """Whether it answers."""
        return self._directory.up

    def check(self) -> None:
        """Whether it may be asked now. Raises StateFailure while the breaker is open."""
        self._directory.check()

    async def load(self) -> Kept:
        """All that is kept: writes go on from it. `know` it once it was taken over."""
        kept = await self._directory.load()
        self._lost, self._mark, self._wrote = True, kept.mark, False
        self._bury(kept.removals)
        return kept

    async def changes(self) -> Kept | None:
        """What is not known yet, to be passed to `know`; None: load all, writes were lost."""
        if self._lost:
            return None
        self._wrote = False
        kept = await self._directory.changes(self._revision, self._mark)
        if kept is not None:
            self._bury(kept.removals)
        return kept

    def know(self, kept: Kept) -> None:
        """Take note that what was read is acted on."""
        self._revision, self._lost = kept.revision, False
        if not self._wrote:
            self._mark = kept.mark

    async def put(self, entries: Sequence[EntitlementEntry]) -> list[EntitlementEntry]:
        """Keep entries: as they are kept. Raises Raced when any was not, StateFailure."""
        found: list[EntitlementEntry] = []
        raced = False
        for start in range(0, len(entries), PUT_AT_ONCE):
            part = entries[start : start + PUT_AT_ONCE]
            written = await self._directory.put(*part, after=self._mark)
            raced = raced or bool(written.conflicts)
            self._note(written.mark)
            found += [msgspec.structs.replace(e, version=written.revision) for e in part]
            await asyncio.sleep(0)
        if raced:
            raise Raced
        return found

    async def delete(self, entry: EntitlementEntry) -> None:
        """Forget an entry for good. Raises Raced, StateFailure."""
        written = await self._directory.delete(entry, after=self._mark)
        if written.conflicts:
            raise Raced
        self._note(written.mark)
        self._bury([Removal(name=entry.terms.name, id=entry.id, file_unix_s=entry.file_unix_s)])

    async def close(self) -> None:
        """Let go of files and connections."""
        await self._directory.close()

    def _note(self, mark: str) -> None:
        """A write of this name was made; none where it is empty."""
        if mark:
            self._mark, self._wrote = mark, True

    def _bury(self, removals: Iterable[Removal]) -> None:
        for removal in removals:
            self.graves[removal.name, removal.id] = removal
        while len(self.graves) > GRAVES:
            self.graves.popitem(last=False)
