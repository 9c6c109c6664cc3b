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
from gateway.ports import Directory, EntitlementEntry

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

    async def load(self) -> tuple[int, list[EntitlementEntry]]:
        """See Directory."""
        revision, parts = await self._link.parts("directory.load")
        return revision, [entry for part in parts for entry in _entries(part)]

    async def changes(self, since: int) -> tuple[int, list[EntitlementEntry], list[str]]:
        """See Directory."""
        (revision, removed), parts = await self._link.parts("directory.changes", since)
        return revision, [entry for part in parts for entry in _entries(part)], removed

    async def put(self, *entries: EntitlementEntry) -> int:
        """See Directory."""
        return int(await self._link.call("directory.put", entries))

    async def delete(self, name: str) -> int:
        """See Directory."""
        return int(await self._link.call("directory.delete", name))

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
        revision, entries = await self._directory.load()
        return Parts(revision, _sliced(entries))

    async def _changes(self, _session: Session, since: int) -> Parts:
        revision, entries, removed = await self._directory.changes(since)
        return Parts((revision, removed), _sliced(entries))

    async def _put(self, session: Session, value: Any) -> int:
        entries = msgspec.convert(value, list[EntitlementEntry])
        revision = await self._directory.put(*entries)
        await self._changed(session)
        return revision

    async def _delete(self, session: Session, name: str) -> int:
        revision = await self._directory.delete(name)
        await self._changed(session)
        return revision

    async def _changed(self, session: Session) -> None:
        await self._take_over()
        await self._hub.gather(TOPIC, b"", self._hub.others(session), HEARD_S)


def _sliced(entries: Sequence[EntitlementEntry]) -> Iterator[bytes]:
    for start in range(0, len(entries), SLICE):
        yield packed(entries[start : start + SLICE])
