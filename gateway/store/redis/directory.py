"""The directory of tenancy in Redis, shared by all gateways.

`lua/directory.lua` writes a change whole, and only if it is based on what is kept. The names of
the last MARKS writes are kept, by which gateways notice that the server lost writes. All keys
share one hash tag, and contain the number of their layout. Nothing here retries. After a write that
denies something, a replica that the server has is waited for, REPLICA_S at most.
"""

import asyncio
import secrets
from typing import Any, Final

import msgspec

from gateway.errors import StateFailure
from gateway.records.tenancy import Denial, DirectoryChange, DirectoryState, Row, Written
from gateway.store.redis.route import Session, lua, route_of, script
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
        self._session = Session(route_of(url), self._keys[0])
        self._script = script("directory", lua("directory"))

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
        await self._session.close()

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
            role = await self._session.call("ROLE")
            if role[0] != b"master" or not role[2]:
                return True
            wait = ("WAIT", 1, round(REPLICA_S * 1e3))
            return int(await self._session.call(*wait, limit_s=2 * REPLICA_S)) > 0
        except StateFailure:
            return False

    async def _all(self, part: int) -> list[bytes]:
        """All values of a hash; of one that moved meanwhile the last."""
        values: dict[bytes, bytes] = {}
        cursor = b""
        while cursor != b"0":
            at = cursor or b"0"
            scan = ("HSCAN", self._keys[part], at, "COUNT", SCAN_BATCH)
            cursor, pairs = await self._session.call(*scan)
            values.update(zip(pairs[::2], pairs[1::2], strict=True))
        return list(values.values())

    async def _run(self, *arguments: object) -> Any:
        call = (len(self._keys), *self._keys, *arguments)
        return (await self._session.run(self._script, [call]))[0]


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


def _parts(value: bytes) -> tuple[int, bytes]:
    """Revision and JSON of a kept value, with two fields in between."""
    revision, _, _, text = value.split(b" ", 3)
    return int(revision), text


def _versioned(record: Any, revision: int) -> Any:
    return msgspec.structs.replace(record, revision=revision)
