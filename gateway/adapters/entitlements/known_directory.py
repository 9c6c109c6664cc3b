"""A directory as one process knows it: its last write and its deletions.

Each write names the last write that this process knows. A directory that does not know that
write has lost some, and refuses new ones until the caller has loaded and merged everything.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final, Generic

import msgspec

from gateway.adapters.entitlements.conflicts import DeletedId
from gateway.adapters.entitlements.guarded_directory import GuardedDirectory
from gateway.ports import DirectoryState, Entry, Removal

MAX_TOMBSTONES: Final = 10_000
"""Deleted entries remembered, so that they stay deleted."""
PUT_BATCH: Final = 500


class Raced(Exception):
    """Another gateway changed the same entries first; nothing was changed here."""


class KnownDirectory(Generic[Entry]):
    """Reads and writes based on the last known write. One caller at a time."""

    def __init__(self, directory: GuardedDirectory[Entry]) -> None:
        self.tombstones: OrderedDict[DeletedId, Removal] = OrderedDict()
        """Deleted entries, oldest first."""
        self._directory = directory
        self._revision = 0
        self._mark = ""
        """Name of the last write that this process knows."""
        self._lost = False
        """Whether everything must be loaded anew, because the directory lost writes."""
        self._wrote = False
        """Whether this process made that write since the last read."""

    @property
    def up(self) -> bool:
        """Whether the directory answers."""
        return self._directory.up

    def check(self) -> None:
        """Raise StateFailure while the breaker is open."""
        self._directory.check()

    async def load(self) -> DirectoryState[Entry]:
        """Load everything; later writes are based on it. Pass it to `know` once it is applied."""
        state = await self._directory.load()
        self._lost, self._mark, self._wrote = True, state.mark, False
        self._bury(state.removals)
        return state

    async def changes(self) -> DirectoryState[Entry] | None:
        """New changes, to pass to `know`; None if writes were lost and all must be loaded."""
        if self._lost:
            return None
        self._wrote = False
        state = await self._directory.changes(self._revision, self._mark)
        if state is not None:
            self._bury(state.removals)
        return state

    def know(self, state: DirectoryState[Entry]) -> None:
        """Note that the content read was applied."""
        self._revision, self._lost = state.revision, False
        if not self._wrote:
            self._mark = state.mark

    async def put(self, entries: Sequence[Entry]) -> list[Entry]:
        """Write entries and return them with their new version.

        Raises StateFailure, and Raced if any was not written.
        """
        found: list[Entry] = []
        raced = False
        for start in range(0, len(entries), PUT_BATCH):
            part = entries[start : start + PUT_BATCH]
            written = await self._directory.put(*part, after=self._mark)
            raced = raced or bool(written.conflicts)
            self._note(written.mark)
            found += [msgspec.structs.replace(e, version=written.revision) for e in part]
            await asyncio.sleep(0)
        if raced:
            raise Raced
        return found

    async def delete(self, entry: Entry) -> None:
        """Delete an entry for good. Raises Raced, StateFailure."""
        written = await self._directory.delete(entry, after=self._mark)
        if written.conflicts:
            raise Raced
        self._note(written.mark)
        self._bury([Removal(name=entry.name, id=entry.id, file_unix_s=entry.file_unix_s)])

    async def close(self) -> None:
        """Close files and connections."""
        await self._directory.close()

    def _note(self, mark: str) -> None:
        """Note the name of a write made here; an empty name means that nothing was written."""
        if mark:
            self._mark, self._wrote = mark, True

    def _bury(self, removals: Iterable[Removal]) -> None:
        for removal in removals:
            self.tombstones[removal.name, removal.id] = removal
        while len(self.tombstones) > MAX_TOMBSTONES:
            self.tombstones.popitem(last=False)
