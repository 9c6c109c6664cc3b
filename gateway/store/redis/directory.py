"""The directory of tenancy in Redis, shared by all gateways.

`lua/directory.lua` writes a change whole, and only if it is based on what is kept. The names of
the last MARKS writes are kept, by which gateways notice that the server lost writes. All keys
share one hash tag, and contain the number of their layout. Nothing here retries: each call takes
TIMEOUT_S at most, and a failure closes the connection. After a write that denies something, a
replica that the server has is waited for, REPLICA_S at most.
"""

import asyncio
import secrets
from typing import Any, Final

import msgspec
from redis.asyncio.connection import Connection
from redis.exceptions import NoScriptError, RedisError

from gateway.errors import StateFailure
from gateway.records.tenancy import Denial, DirectoryChange, DirectoryState, Row, Written
from gateway.store.redis.route import TIMEOUT_S, close, route_of
from gateway.store.redis.scripts import lua, script
from gateway.tenancy.known import content, strictness

MARKS: Final = 10_000
"""Names of the last writes that are kept."""
SCAN_BATCH: Final = 500
READ_MOST: Final = 5_000
"""Most rows, and most denials, in one answer, which has to come within TIMEOUT_S."""
REPLICA_S: Final = 0.5
"""Longest wait for a replica to have a write."""
_PARTS: Final = ("rows", "changed", "denials", "denied", "marks", "revision")
_ROWS: Final = 0
_DENIALS: Final = 2
_encode: Final = msgspec.json.Encoder().encode
_row: Final = msgspec.json.Decoder(Row).decode
_denial: Final = msgspec.json.Decoder(Denial).decode


class RedisDirectory:
    """Directory in Redis."""

    def __init__(self, url: str) -> None:
        """Nothing is opened before the first call."""
        self._keys = tuple(f"sluice:3:{{directory}}:{part}" for part in _PARTS)
        self._route = route_of(url)
        self._script = script("directory", lua("directory"))
        self._connection: Connection | None = None
        self._lock = asyncio.Lock()

    async def read(self, since: int, mark: str) -> DirectoryState | None:
        if since or mark:
            answer = await self._run("read", since, mark, READ_MOST)
            return _state_of(answer, answer[3], answer[4]) if answer[0] else None
        # A hundred thousand rows are more than one call; what changes meanwhile is read again.
        head = await self._run("head", 0, "")
        rows, denials = await self._all(_ROWS), await self._all(_DENIALS)
        return await asyncio.to_thread(_state_of, head, rows, denials)

    async def write(self, change: DirectoryChange, *, floor: int, after: str) -> Written:
        return await self._write("write", change, floor, after)

    async def give_back(self, state: DirectoryState, *, floor: int) -> Written:
        change = DirectoryChange(puts=state.rows, denials=state.denials)
        return await self._write("give_back", change, floor, "")

    async def close(self) -> None:
        async with self._lock:
            await self._disconnect()

    async def _write(self, what: str, change: DirectoryChange, floor: int, after: str) -> Written:
        mark = secrets.token_hex(8)
        asked = {
            "puts": [
                (" ".join(r.id), r.uid, r.revision, r.changed, content(r).decode())
                for r in change.puts
            ],
            "removes": [(" ".join(row.id), row.revision) for row in change.removes],
            "denials": [
                (d.id, d.changed, f"{max(strictness(d), -1e18):.6f}", _encode(d).decode())
                for d in change.denials
            ],
        }
        (revision,) = await self._run(what, mark, floor, after, MARKS, _encode(asked))
        if int(revision) < 0:
            return Written(conflict=True)
        replicated = not change.denials or await self._replicated()
        return Written(revision=int(revision), mark=mark, replicated=replicated)

    async def _replicated(self) -> bool:
        """Whether a replica, where there is one, has the last write. Raises nothing."""
        try:
            role = await self._call("ROLE")
            if role[0] != b"master" or not role[2]:
                return True
            return (
                int(await self._call("WAIT", 1, round(REPLICA_S * 1e3), limit_s=2 * REPLICA_S)) > 0
            )
        except StateFailure:
            return False

    async def _all(self, part: int) -> list[bytes]:
        """All values of a hash; of one that moved meanwhile the last."""
        found: dict[bytes, bytes] = {}
        cursor = b""
        while cursor != b"0":
            at = cursor or b"0"
            cursor, pairs = await self._call("HSCAN", self._keys[part], at, "COUNT", SCAN_BATCH)
            found.update(zip(pairs[::2], pairs[1::2], strict=True))
        return list(found.values())

    async def _run(self, *arguments: object) -> Any:
        command = (len(self._keys), *self._keys, *arguments)
        try:
            return await self._call("EVALSHA", self._script.sha, *command)
        except _Unknown:
            return await self._call("EVAL", self._script.text, *command)

    async def _call(self, *command: object, limit_s: float = TIMEOUT_S) -> Any:
        async with self._lock:
            try:
                if self._connection is None:
                    async with asyncio.timeout(TIMEOUT_S):
                        self._connection = await self._route.open(self._keys[0])
                async with asyncio.timeout(limit_s):
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


def _state_of(answer: list[Any], rows: list[bytes], denials: list[bytes]) -> DirectoryState:
    try:
        return DirectoryState(
            revision=int(answer[1]),
            mark=answer[2].decode(),
            rows=tuple(_versioned(_row(text), at) for at, text in map(_parts, rows)),
            denials=tuple(_versioned(_denial(text), at) for at, text in map(_parts, denials)),
        )
    except (msgspec.MsgspecError, ValueError) as error:
        raise StateFailure(f"Redis holds tenants that are not of this version ({error})") from error


def _parts(kept: bytes) -> tuple[int, bytes]:
    """Revision and JSON of a kept value, with two fields in between."""
    revision, _, _, text = kept.split(b" ", 3)
    return int(revision), text


def _versioned(kept: Any, revision: int) -> Any:
    return msgspec.structs.replace(kept, revision=revision)
