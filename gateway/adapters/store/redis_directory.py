"""The directory of entitlements in Redis, shared by all gateways.

One hash of entries, and the revision of each one's last change; `lua/directory.lua` changes
them together. The names of the last REMOVED_KEPT removals are remembered, so that others hear of
them. All keys have one hash tag. There are no retries here: each call takes TIMEOUT_S at most,
and after a failure the connection is closed.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from redis.asyncio.connection import Connection
from redis.exceptions import NoScriptError, RedisError

from gateway.adapters.store.redis_route import TIMEOUT_S, close, route_of
from gateway.adapters.store.redis_scripts import lua, script
from gateway.errors import StateFailure
from gateway.ports import EntitlementEntry

REMOVED_KEPT: Final = 10_000
SCANNED_AT_ONCE: Final = 500
_KEYS: Final = tuple(
    f"sluice:1:{{directory}}:{name}" for name in ("entries", "changed", "removed", "revision")
)
_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(EntitlementEntry).decode


class RedisDirectory:
    """Directory in Redis."""

    def __init__(self, url: str) -> None:
        """Nothing is opened before the first call."""
        self._route = route_of(url)
        self._script = script("directory", lua("directory"))
        self._connection: Connection | None = None
        self._lock = asyncio.Lock()

    async def load(self) -> tuple[int, list[EntitlementEntry]]:
        """See Directory. What changes meanwhile is among the changes after the revision."""
        revision = int(await self._call("GET", _KEYS[3]) or 0)
        found: dict[bytes, bytes] = {}
        cursor = b"0"
        while True:
            answer = await self._call("HSCAN", _KEYS[0], cursor, "COUNT", SCANNED_AT_ONCE)
            cursor, pairs = answer
            found.update(zip(pairs[::2], pairs[1::2], strict=True))
            if cursor == b"0":
                return revision, _entries(list(found.values()))

    async def changes(self, since: int) -> tuple[int, list[EntitlementEntry], list[str]]:
        """See Directory."""
        revision, entries, removed = await self._run("changes", since)
        return int(revision), _entries(entries), [name.decode() for name in removed]

    async def put(self, *entries: EntitlementEntry) -> int:
        """See Directory."""
        named = [part for e in entries for part in (e.terms.name, _encode(e))]
        return int(await self._run("put", REMOVED_KEPT, *named))

    async def delete(self, name: str) -> int:
        """See Directory."""
        return int(await self._run("delete", REMOVED_KEPT, name))

    async def close(self) -> None:
        """See Directory."""
        async with self._lock:
            await self._disconnect()

    async def _run(self, *arguments: object) -> Any:
        command = (len(_KEYS), *_KEYS, *arguments)
        try:
            return await self._call("EVALSHA", self._script.sha, *command)
        except _Unknown:
            return await self._call("EVAL", self._script.text, *command)

    async def _call(self, *command: object) -> Any:
        async with self._lock:
            try:
                if self._connection is None:
                    async with asyncio.timeout(TIMEOUT_S):
                        self._connection = await self._route.open(_KEYS[0])
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


class _Unknown(StateFailure):
    """The server does not know the script."""


def _entries(raw: Sequence[bytes]) -> list[EntitlementEntry]:
    try:
        return [_decode(entry) for entry in raw]
    except msgspec.MsgspecError as error:
        raise StateFailure(
            f"Redis holds entitlements that are not of this version ({error})"
        ) from error
