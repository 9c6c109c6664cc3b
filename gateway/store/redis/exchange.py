"""The notes of replicas in Redis: the newest per name and replica (`gateway.replicas.bus`).

Rules:
- Each name has one hash, `sluice:1:{NAME}:KIND`, whose hash tag keeps all keys of a call in one
  slot of a cluster.
- One pipelined round trip handles all names: `lua/exchange.lua` stores this replica's notes and
  returns those that others wrote since. Notes are opaque here.
- A note carries the number of its exchange. One that is repeated after a time-out, or arrives late
  from a stalled connection's buffer, changes nothing.
- A living replica drops notes that were not renewed for `silent_s`. A key expires `ttl_s` after its
  last exchange. Times are the server's.
- Connecting and each answer take TIMEOUT_S at most, an exchange twice that. A failure closes the
  connection. Nothing here retries: the breaker decides.
- In a cluster, names are exchanged separately and concurrently, so an unreachable node affects
  only its own names.
"""

import asyncio
import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote

from redis.asyncio.connection import Connection
from redis.exceptions import NoScriptError, RedisError, ResponseError

from gateway.errors import StateFailure
from gateway.replicas.bus import LASTING, SILENT_S, Received
from gateway.store.redis.route import TIMEOUT_S, close, reason, route_of

_SCRIPT: Final = Path(__file__).with_name("lua").joinpath("exchange.lua").read_text("utf-8")
_SHA: Final = hashlib.sha1(_SCRIPT.encode(), usedforsecurity=False).hexdigest()

_log = logging.getLogger("sluice.state")


class Kind(NamedTuple):
    """How long notes of a kind are kept; its name changes with their layout."""

    name: str
    silent_s: int
    ttl_s: int


LASTING_SILENT_S: Final = 600
LASTING_TTL_S: Final = 7 * 86400
LASTING_KIND: Final = Kind("learned", silent_s=LASTING_SILENT_S, ttl_s=LASTING_TTL_S)
KIND: Final = Kind("notes3", silent_s=SILENT_S, ttl_s=60)


def kind_of(name: str) -> Kind:
    """The kind of a note."""
    return LASTING_KIND if name.startswith(LASTING) else KIND


def key_of(name: str) -> str:
    """The key of a name, quoted because a brace in it would end the hash tag."""
    return f"sluice:1:{{{quote(name.removeprefix(LASTING), safe=':')}}}:{kind_of(name).name}"


class RedisExchange:
    """NoteStore in Redis."""

    every_s = 0.5
    away = "replicas do not hear of one another"
    back = "replicas hear of one another again"

    def __init__(self, url: str, replica: str) -> None:
        """`url` as in `route`; `replica` must be unique among the replicas."""
        self._replica = replica
        self._sequence = 0
        self._since: dict[str, int] = {}
        self._route = route_of(url)
        self._connections: dict[str, Connection] = {}
        self._failing = False

    async def exchange(self, notes: Mapping[str, bytes]) -> dict[str, Received]:
        self._sequence += 1
        # Forget names that are gone, and in a cluster hang up where they were.
        self._since = {name: since for name, since in self._since.items() if name in notes}
        if not self._route.one_server:
            for name in [name for name in self._connections if name not in notes]:
                await self._hang_up(name)
        parts = [list(notes)] if self._route.one_server else [[name] for name in notes]
        answers = await asyncio.gather(*(self._tried(part, notes) for part in parts))
        reported: dict[str, Received] = {}
        failed: list[Exception] = []
        for part, answer in zip(parts, answers, strict=True):
            if isinstance(answer, Exception):
                failed.append(answer)
                continue
            reported |= {n: self._received(n, reply) for n, reply in zip(part, answer, strict=True)}
        if failed and not reported:
            raise StateFailure(reason(failed[0])) from failed[0]
        if failed and not self._failing:
            _log.warning("%d of %d keys: %s", len(failed), len(parts), reason(failed[0]))
        self._failing = bool(failed)
        return reported

    async def close(self) -> None:
        """Close connections, so that a late answer is not taken for the next call's."""
        for name in list(self._connections):
            await self._hang_up(name)

    async def _tried(
        self, names: Sequence[str], notes: Mapping[str, bytes]
    ) -> list[list[bytes]] | Exception:
        """Answers for the names of one server, or the error."""
        name = "" if self._route.one_server else names[0]
        try:
            async with asyncio.timeout(2 * TIMEOUT_S):
                return await self._trip(name, names, notes)
        except (RedisError, OSError, TimeoutError) as error:
            await self._hang_up(name)
            return error
        except BaseException:
            await self._hang_up(name)
            raise

    async def _hang_up(self, name: str) -> None:
        connection = self._connections.pop(name, None)
        if connection is not None:
            await close(connection)

    def _received(self, name: str, reply: Sequence[bytes]) -> Received:
        revision, held, *rest = reply
        # A lower revision: the server was emptied and its clock set back, so read all again.
        newest = int(revision)
        self._since[name] = newest if newest >= self._since.get(name, 0) else 0
        notes = [(int(ms) / 1000, note) for ms, note in zip(rest[::2], rest[1::2], strict=True)]
        return Received(held=bool(int(held)), notes=notes)

    async def _trip(
        self, server: str, names: Sequence[str], notes: Mapping[str, bytes]
    ) -> list[list[bytes]]:
        """One round trip; three if the server does not know the script."""
        commands = [
            (
                *("EVALSHA", _SHA, 1, key_of(name), self._replica, self._sequence, notes[name]),
                *(self._since.get(name, 0), *kind_of(name)[1:]),
            )
            for name in names
        ]
        connection = self._connections.get(server)
        if connection is None:
            key = key_of(names[0] if names else "")
            connection = self._connections[server] = await self._route.open(key)
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
