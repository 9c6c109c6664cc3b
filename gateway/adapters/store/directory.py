"""A directory in memory."""

import secrets
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

import msgspec

from gateway.ports import DirectoryState, Entry, Removal, Written

TOMBSTONES: Final = 10_000
"""Removals and names of writes remembered."""

_T = TypeVar("_T")


class MemoryDirectory(Generic[Entry]):
    """Directory without persistence."""

    def __init__(self) -> None:
        self._revision = 0
        self._marks: OrderedDict[str, None] = OrderedDict()
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        """By name, in order of their last write."""
        self._removals: OrderedDict[tuple[str, str], Removal] = OrderedDict()
        """By name and id, oldest first."""

    async def load(self) -> DirectoryState[Entry]:
        return self._since(0)

    async def changes(self, since: int, mark: str) -> DirectoryState[Entry] | None:
        return self._since(since) if mark in self._marks or not (mark or since) else None

    async def put(self, *entries: Entry, floor: int = 0, after: str = "") -> Written:
        known = self._known(after)
        taken = {e.name: e for e in entries if known and not self._conflicts(e)}
        if taken:
            self._write(floor)
        for name, entry in taken.items():
            self._entries[name] = msgspec.structs.replace(entry, version=self._revision)
            self._entries.move_to_end(name)
        mark = self._mark if taken else ""
        conflicts = tuple(e.name for e in entries if e.name not in taken)
        return Written(revision=self._revision, mark=mark, conflicts=conflicts)

    async def delete(self, entry: Entry, floor: int = 0, after: str = "") -> Written:
        name = entry.name
        based = self._version(name) == entry.version != 0
        if not (based and self._known(after)):
            return Written(revision=self._revision, mark="", conflicts=(name,))
        self._write(floor)
        del self._entries[name]
        self._removals[name, entry.id] = Removal(
            name=name, id=entry.id, revision=self._revision, file_unix_s=entry.file_unix_s
        )
        if len(self._removals) > TOMBSTONES:
            self._removals.popitem(last=False)
        return Written(revision=self._revision, mark=self._mark)

    async def close(self) -> None:
        """See Directory."""

    def _known(self, mark: str) -> bool:
        return not mark or mark in self._marks

    def _version(self, name: str) -> int:
        known = self._entries.get(name)
        return 0 if known is None else known.version

    def _conflicts(self, entry: Entry) -> bool:
        name = entry.name
        return self._version(name) != entry.version or (name, entry.id) in self._removals

    def _write(self, floor: int) -> None:
        self._revision = max(self._revision, floor) + 1
        self._marks[new_mark()] = None
        if len(self._marks) > TOMBSTONES:
            self._marks.popitem(last=False)

    @property
    def _mark(self) -> str:
        return next(reversed(self._marks), "")

    def _since(self, since: int) -> DirectoryState[Entry]:
        entries = newer(self._entries, since, lambda entry: entry.version)
        removals = newer(self._removals, since, lambda removal: removal.revision)
        full = len(self._removals) >= TOMBSTONES
        oldest = next(iter(self._removals.values())).revision if full else 0
        return DirectoryState(
            revision=self._revision,
            mark=self._mark,
            entries=entries,
            removals=removals,
            complete_since=oldest,
        )


def new_mark() -> str:
    """A unique name for a write."""
    return secrets.token_hex(8)


def newer(kept: OrderedDict[Any, _T], since: int, revision: Callable[[_T], int]) -> list[_T]:
    """Values with a revision after `since`, oldest first; `kept` is in order of revision."""
    found = []
    for value in reversed(kept.values()):
        if revision(value) <= since:
            break
        found.append(value)
    return found[::-1]
