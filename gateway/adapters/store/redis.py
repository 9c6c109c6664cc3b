"""What estimators learned, shared by replicas through Redis (7 days after the last exchange).

Rules:
- One hash per model and estimator profile, `sluice:1:{PROFILE:MODEL}:learned`, with a hash
  tag, so a cluster keeps all that a call touches in one slot. It holds one record a replica.
- One pipelined round trip a second for all models: `lua/exchange.lua` stores this replica's
  record and returns those that others wrote since. Merging is done by the reader, in
  `gateway.policy.learned`, which says why order and repetition do not matter.
- A record carries the number of its exchange. One that was repeated after a time-out, or comes
  late out of a stalled connection's buffer, changes nothing.
- A record that was silent for SILENT_S is dropped by a living replica; a model's key vanishes
  TTL_S after its last exchange. Time is the server's.
- Connecting and each answer take TIMEOUT_S at most and an exchange twice that; after a failure
  the connection is closed. There are no retries here: the breaker decides (`learning.py`).
"""

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import msgspec
from redis.asyncio.connection import Connection
from redis.exceptions import NoScriptError, RedisError, ResponseError

from gateway.adapters.store.redis_route import TIMEOUT_S, close, route_of
from gateway.errors import StateFailure
from gateway.policy.learned import Learned, Peer, Sums
from gateway.ports import Heard

INTERVAL_S: Final = 1.0
SILENT_S: Final = 600
TTL_S: Final = 7 * 86400
MAX_RECORD_BYTES: Final = 1 << 20

_SCRIPT: Final = Path(__file__).with_name("lua").joinpath("exchange.lua").read_text("utf-8")
_SHA: Final = hashlib.sha1(_SCRIPT.encode(), usedforsecurity=False).hexdigest()
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(dict[str, Sums]).decode

_log = logging.getLogger("sluice.state")


def key_of(subject: str) -> str:
    """The hash of a model. Quoted, because a brace in a name would end the hash tag."""
    return f"sluice:1:{{{quote(subject, safe=':')}}}:learned"


class RedisState:
    """EstimatorState shared through one Redis server."""

    interval_s = INTERVAL_S

    def __init__(self, url: str, *, replica: str | None = None) -> None:
        """`url` as `redis_route` has it; `replica` unique among those that share it."""
        self.replica = replica or secrets.token_hex(8)
        self._sequence = 0
        self._since: dict[str, int] = {}
        self._warned = False
        self._route = route_of(url)
        self._connections: dict[str, Connection] = {}

    async def exchange(self, records: Mapping[str, Learned | None]) -> Heard:
        """See EstimatorState."""
        self._sequence += 1
        subjects = list(records)
        calls = [
            (
                self.replica,
                self._sequence,
                b"" if record is None else _encode(record),
                self._since.get(subject, 0),
                SILENT_S,
                TTL_S,
            )
            for subject, record in records.items()
        ]
        try:
            async with asyncio.timeout(2 * TIMEOUT_S):
                replies = await self._call(subjects, calls)
        except (RedisError, OSError, TimeoutError) as error:
            await self._disconnect()
            raise StateFailure(_reason(error)) from error
        return self._heard(subjects, replies)

    async def close(self) -> None:
        """See EstimatorState."""
        await self._disconnect()

    async def _call(
        self, subjects: Sequence[str], calls: Sequence[tuple[Any, ...]]
    ) -> list[list[bytes]]:
        """One round trip to each server; three when it does not know the script."""
        if self._route.one_server:
            return await self._trip(subjects, calls)
        replies = []
        for subject, arguments in zip(subjects, calls, strict=True):
            replies += await self._trip([subject], [arguments])
        return replies

    async def _trip(
        self, subjects: Sequence[str], calls: Sequence[tuple[Any, ...]]
    ) -> list[list[bytes]]:
        connection = await self._connected(subjects)
        commands = [
            ("EVALSHA", _SHA, 1, key_of(subject), *arguments)
            for subject, arguments in zip(subjects, calls, strict=True)
        ]
        for _ in range(2):
            await connection.send_packed_command(
                connection.pack_commands(commands), check_health=False
            )
            replies, failed = [], None
            for _ in commands:
                try:
                    replies.append(await connection.read_response(disable_decoding=True))
                except ResponseError as error:
                    failed = failed or error
            if failed is None:
                return replies
            if not isinstance(failed, NoScriptError):
                raise failed
            await connection.send_command("SCRIPT", "LOAD", _SCRIPT, check_health=False)
            await connection.read_response()
        raise RedisError("the server forgets its scripts")

    async def _connected(self, subjects: Sequence[str]) -> Connection:
        """The connection to the server that holds these subjects."""
        name = "" if self._route.one_server or not subjects else subjects[0]
        found = self._connections.get(name)
        if found is None:
            key = key_of(subjects[0] if subjects else "")
            found = self._connections[name] = await self._route.open(key)
        return found

    def _heard(self, subjects: Sequence[str], replies: Sequence[Sequence[bytes]]) -> Heard:
        peers: dict[str, tuple[Peer, ...]] = {}
        missing = set()
        for subject, (revision, held, *rest) in zip(subjects, replies, strict=True):
            # A server that was emptied, and then had its clock put back, begins anew.
            newest = int(revision)
            self._since[subject] = newest if newest >= self._since.get(subject, 0) else 0
            if not int(held):
                missing.add(subject)
            found = [
                peer
                for age_ms, record in zip(rest[::2], rest[1::2], strict=True)
                if (peer := self._peer(age_ms, record)) is not None
            ]
            if found:
                peers[subject] = tuple(found)
        return Heard(peers=peers, missing=frozenset(missing))

    def _peer(self, age_ms: bytes, record: bytes) -> Peer | None:
        try:
            if len(record) <= MAX_RECORD_BYTES:
                return Peer(age_s=int(age_ms) / 1000, parts=_decode(record))
        except msgspec.MsgspecError:
            pass
        if not self._warned:
            self._warned = True
            _log.warning("ignoring records in Redis that are not of this version")
        return None

    async def _disconnect(self) -> None:
        """Close connections, so that no late answer is taken for the next call's."""
        connections, self._connections = self._connections, {}
        for connection in connections.values():
            await close(connection)


def _reason(error: Exception) -> str:
    """What went wrong, for the log; time-outs often have no text of their own."""
    if isinstance(error, TimeoutError) or "imeout" in type(error).__name__:
        return f"no answer from Redis within {TIMEOUT_S:g} s"
    return f"Redis: {error}"
