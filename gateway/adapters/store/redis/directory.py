"""A directory, of entitlements or of tenants, in Redis, shared by all gateways.

A hash holds the entries, a sorted set the revision of each entry's last write. `lua/directory.lua`
changes both together, and only if a write names the present version. The last RETAINED_REMOVED
removals and names of writes are kept: other gateways learn of removals, and detect by the names
that the server lost writes. All keys share one hash tag. Nothing here retries: each call takes
TIMEOUT_S at most, and a failure closes the connection.

Keys contain the number of their layout.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Final, Generic

import msgspec
from redis.asyncio.connection import Connection
from redis.exceptions import NoScriptError, RedisError

from gateway.adapters.store.directory import new_mark
from gateway.adapters.store.redis.route import TIMEOUT_S, close, route_of
from gateway.adapters.store.redis.scripts import lua, script
from gateway.errors import StateFailure
from gateway.ports import DirectoryState, Entry, Removal, Written

RETAINED_REMOVED: Final = 10_000
SCAN_BATCH: Final = 500
NAMED_BY: Final = 4
"""Number of script arguments per entry."""
_PARTS: Final = ("entries", "changed", "removed", "files", "marks", "revision")
_TAGS: Final = {"entitlements": "directory", "tenants": "tenants"}
"""The hash tag of each kind's keys."""
_encode: Final = msgspec.json.Encoder().encode


class RedisDirectory(Generic[Entry]):
    """Directory in Redis."""

    def __init__(self, url: str, kind: type[Entry], *, of: str = "entitlements") -> None:
        """Nothing is opened before the first call. `of` names the keys."""
        self._of = of
        self._keys = tuple(f"sluice:2:{{{_TAGS[of]}}}:{part}" for part in _PARTS)
        self._decode = msgspec.json.Decoder(kind).decode
        self._route = route_of(url)
        self._script = script("directory", lua("directory"))
        self._connection: Connection | None = None
        self._lock = asyncio.Lock()

    async def load(self) -> DirectoryState[Entry]:
        head = await self._run("removals", 0, "", RETAINED_REMOVED)
        found: dict[bytes, bytes] = {}
        cursor = b""
        while cursor != b"0":
            at = cursor or b"0"
            cursor, pairs = await self._call("HSCAN", self._keys[0], at, "COUNT", SCAN_BATCH)
            found.update(zip(pairs[::2], pairs[1::2], strict=True))
        return self._state_of(head, list(found.values()))

    async def changes(self, since: int, mark: str) -> DirectoryState[Entry] | None:
        answer = await self._run("changes", since, mark, RETAINED_REMOVED)
        return self._state_of(answer, answer[3]) if answer[0] else None

    async def put(self, *entries: Entry, floor: int = 0, after: str = "") -> Written:
        named = [part for e in entries for part in (e.name, e.id, e.version, _encode(e))]
        return await self._write("put", floor, after, *named)

    async def delete(self, entry: Entry, floor: int = 0, after: str = "") -> Written:
        named = (entry.name, entry.id, entry.version, repr(entry.file_unix_s))
        return await self._write("delete", floor, after, *named)

    async def close(self) -> None:
        async with self._lock:
            await self._disconnect()

    async def _write(self, what: str, floor: int, after: str, *named: object) -> Written:
        mark = new_mark()
        revision, conflicts = await self._run(what, mark, floor, RETAINED_REMOVED, after, *named)
        names = tuple(name.decode() for name in conflicts)
        # If all were conflicts, nothing was written and the mark is unknown.
        some = len(names) < len(named) // NAMED_BY
        return Written(revision=int(revision), mark=mark if some else "", conflicts=names)

    async def _run(self, *arguments: object) -> Any:
        command = (len(self._keys), *self._keys, *arguments)
        try:
            return await self._call("EVALSHA", self._script.sha, *command)
        except _Unknown:
            return await self._call("EVAL", self._script.text, *command)

    async def _call(self, *command: object) -> Any:
        async with self._lock:
            try:
                if self._connection is None:
                    async with asyncio.timeout(TIMEOUT_S):
                        self._connection = await self._route.open(self._keys[0])
                async with asyncio.timeout(TIMEOUT_S):
                    await self._connection.send_command(*command, check_health=False)
                    return await self._connection.read_response(disable_decoding=True)
            except NoScriptError as error:
                raise _Unknown(str(error)) from error
            except (RedisError, OSError, TimeoutError) as error:
                await self._disconnect()
                raise StateFailure(f"Redis: {str(error) or 'no answer in time'}") from error
            except BaseException:
                await self._disconnect()
                raise

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await close(connection)

    def _state_of(self, answer: Sequence[Any], entries: Sequence[bytes]) -> DirectoryState[Entry]:
        _, revision, mark, _, removed, complete = answer
        return DirectoryState(
            revision=int(revision),
            mark=mark.decode(),
            entries=self._entries(entries),
            removals=_removals(removed),
            complete_since=int(float(complete)),
        )

    def _entries(self, raw: Sequence[bytes]) -> list[Entry]:
        found: list[Entry] = []
        try:
            for kept in raw:
                version, _, entry = kept.partition(b" ")
                found.append(msgspec.structs.replace(self._decode(entry), version=int(version)))
        except (msgspec.MsgspecError, ValueError) as error:
            raise StateFailure(
                f"Redis holds {self._of} that are not of this version ({error})"
            ) from error
        return found


class _Unknown(StateFailure):
    """The server does not know the script."""


def _removals(raw: Sequence[bytes]) -> list[Removal]:
    found = []
    for tomb, revision, file_unix_s in zip(raw[::3], raw[1::3], raw[2::3], strict=True):
        entry_id, _, name = tomb.decode().partition(":")
        at, unix_s = int(float(revision)), float(file_unix_s)
        found.append(Removal(name=name, id=entry_id, revision=at, file_unix_s=unix_s))
    return found
