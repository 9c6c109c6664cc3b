"""The directory of entitlements, kept by the parent: what one worker changes all know at once.

A change is answered only when the parent's own token pools and the other workers have taken it
over, or HEARD_S later: an admin's next request may go to any worker.
"""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Final

import msgspec

from gateway.adapters.shared.hub import Hub, Parts, Session
from gateway.adapters.shared.link import Link
from gateway.adapters.shared.wire import packed
from gateway.ports import Directory, EntitlementEntry, Kept, Written

SLICE: Final = 500
"""Entries in one part of a long answer."""
HEARD_S: Final = 0.25
TOPIC: Final = "entitlements"

_entries: Final = msgspec.msgpack.Decoder(list[EntitlementEntry]).decode


class SharedDirectory:
    """Directory of a worker. The file, if there is one, is the parent's."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def when_changed(self, poll: Callable[[], Awaitable[None]]) -> None:
        """Register what takes over the changes that another worker made."""

        async def heard(_: bytes) -> bytes:
            await poll()
            return b""

        self._link.on(TOPIC, heard)

    async def load(self) -> Kept:
        """See Directory."""
        return _whole(*await self._link.parts("directory.load"))

    async def changes(self, since: int, mark: str) -> Kept | None:
        """See Directory."""
        head, parts = await self._link.parts("directory.changes", (since, mark))
        return None if head is None else _whole(head, parts)

    async def put(self, *entries: EntitlementEntry, floor: int = 0, after: str = "") -> Written:
        """See Directory."""
        answer = await self._link.call("directory.put", (entries, floor, after))
        return msgspec.convert(answer, Written)

    async def delete(self, entry: EntitlementEntry, floor: int = 0, after: str = "") -> Written:
        """See Directory."""
        answer = await self._link.call("directory.delete", (entry, floor, after))
        return msgspec.convert(answer, Written)

    async def close(self) -> None:
        """See Directory. The parent keeps it open."""


class DirectoryDesk:
    """Answers the workers from the parent's directory."""

    def __init__(
        self, hub: Hub, directory: Directory, take_over: Callable[[], Awaitable[None]]
    ) -> None:
        """`take_over` has the parent's own token pools follow a change."""
        self._hub = hub
        self._directory = directory
        self._take_over = take_over
        hub.serves("directory.load", self._load)
        hub.serves("directory.changes", self._changes)
        hub.serves("directory.put", self._put)
        hub.serves("directory.delete", self._delete)

    async def _load(self, _session: Session, _value: Any) -> Parts:
        return _parts(await self._directory.load())

    async def _changes(self, _session: Session, value: Any) -> Parts:
        found = await self._directory.changes(*value)
        return Parts(None, iter(())) if found is None else _parts(found)

    async def _put(self, session: Session, value: Any) -> Written:
        entries, floor, after = msgspec.convert(value, tuple[list[EntitlementEntry], int, str])
        written = await self._directory.put(*entries, floor=floor, after=after)
        await self._changed(session)
        return written

    async def _delete(self, session: Session, value: Any) -> Written:
        entry, floor, after = msgspec.convert(value, tuple[EntitlementEntry, int, str])
        written = await self._directory.delete(entry, floor, after)
        await self._changed(session)
        return written

    async def _changed(self, session: Session) -> None:
        await self._take_over()
        await self._hub.gather(TOPIC, b"", self._hub.others(session), HEARD_S)


def _parts(kept: Kept) -> Parts:
    """An answer without its entries, and those in slices."""
    return Parts(msgspec.structs.replace(kept, entries=[]), _sliced(kept.entries))


def _whole(head: Any, parts: Sequence[bytes]) -> Kept:
    entries = [entry for part in parts for entry in _entries(part)]
    return msgspec.structs.replace(msgspec.convert(head, Kept), entries=entries)


def _sliced(entries: Sequence[EntitlementEntry]) -> Iterator[bytes]:
    for start in range(0, len(entries), SLICE):
        yield packed(entries[start : start + SLICE])
