"""Exchanges records between replicas through Redis: the newest record per subject and replica.

Rules:
- Each subject has one hash, `sluice:1:{SUBJECT}:KIND`, whose hash tag keeps all keys of a call in
  one slot of a cluster.
- One pipelined round trip handles all subjects: `lua/exchange.lua` stores this replica's records
  and returns records that others wrote since. Records are opaque here.
- A record carries the number of its exchange. A record that is repeated after a time-out, or
  arrives late from a stalled connection's buffer, changes nothing.
- A living replica drops records that were not renewed for `silent_s`. A subject's key expires
  `ttl_s` after its last exchange. Times are the server's.
- Connecting and each answer take TIMEOUT_S at most, an exchange twice that. A failure closes the
  connection. Nothing here retries: the breaker decides.
- In a cluster, subjects are exchanged separately and concurrently, so an unreachable node affects
  only its own subjects.
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
from gateway.store.redis.route import TIMEOUT_S, close, route_of

_SCRIPT: Final = Path(__file__).with_name("lua").joinpath("exchange.lua").read_text("utf-8")
_SHA: Final = hashlib.sha1(_SCRIPT.encode(), usedforsecurity=False).hexdigest()

_log = logging.getLogger("sluice.state")


class SubjectRecords(NamedTuple):
    """The result of an exchange of one subject."""

    held: bool
    """Whether Redis holds a record of this replica."""
    records: list[tuple[float, bytes]]
    """(age in seconds, record) of each other replica that wrote since the last exchange."""


def key_of(subject: str, kind: str) -> str:
    """The key of a subject, quoted because a brace in a name would end the hash tag."""
    return f"sluice:1:{{{quote(subject, safe=':')}}}:{kind}"


class RedisExchange:
    """Exchanges records of one kind."""

    def __init__(self, url: str, *, kind: str, replica: str, silent_s: int, ttl_s: int) -> None:
        """`url` as in `route`; `replica` must be unique among the replicas."""
        self.replica = replica
        self._kind = kind
        self._silent_s = silent_s
        self._ttl_s = ttl_s
        self._sequence = 0
        self._since: dict[str, int] = {}
        self._route = route_of(url)
        self._connections: dict[str, Connection] = {}
        self._failing = False

    async def exchange(self, records: Mapping[str, bytes]) -> dict[str, SubjectRecords]:
        """Store this replica's records (b"": none) and return the others'.

        Subjects whose cluster node is away are left out. Raises StateFailure if all are.
        """
        self._sequence += 1
        # Forget subjects that are gone, and in a cluster hang up where they were.
        self._since = {s: since for s, since in self._since.items() if s in records}
        if not self._route.one_server:
            for name in [name for name in self._connections if name not in records]:
                await self._hang_up(name)
        subjects = list(records)
        parts = [subjects] if self._route.one_server else [[subject] for subject in subjects]
        answers = await asyncio.gather(*(self._tried(part, records) for part in parts))
        reported: dict[str, SubjectRecords] = {}
        failed: list[Exception] = []
        for part, answer in zip(parts, answers, strict=True):
            if isinstance(answer, Exception):
                failed.append(answer)
                continue
            reported |= {
                s: self._records_of(s, reply) for s, reply in zip(part, answer, strict=True)
            }
        if failed and not reported:
            raise StateFailure(_reason(failed[0])) from failed[0]
        if failed and not self._failing:
            _log.warning("%d of %d keys: %s", len(failed), len(parts), _reason(failed[0]))
        self._failing = bool(failed)
        return reported

    async def close(self) -> None:
        """Close connections, so that a late answer is not taken for the next call's."""
        for name in list(self._connections):
            await self._hang_up(name)

    async def _tried(
        self, subjects: Sequence[str], records: Mapping[str, bytes]
    ) -> list[list[bytes]] | Exception:
        """Answers for the subjects of one server, or the error."""
        name = "" if self._route.one_server else subjects[0]
        try:
            async with asyncio.timeout(2 * TIMEOUT_S):
                return await self._trip(name, subjects, records)
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

    def _records_of(self, subject: str, reply: Sequence[bytes]) -> SubjectRecords:
        revision, held, *rest = reply
        # A lower revision: the server was emptied and its clock set back, so read all again.
        newest = int(revision)
        self._since[subject] = newest if newest >= self._since.get(subject, 0) else 0
        records = [
            (int(age_ms) / 1000, record)
            for age_ms, record in zip(rest[::2], rest[1::2], strict=True)
        ]
        return SubjectRecords(held=bool(int(held)), records=records)

    async def _trip(
        self, name: str, subjects: Sequence[str], records: Mapping[str, bytes]
    ) -> list[list[bytes]]:
        """One round trip; three if the server does not know the script."""
        commands = [
            (
                *("EVALSHA", _SHA, 1, key_of(subject, self._kind)),
                self.replica,
                self._sequence,
                records[subject],
                self._since.get(subject, 0),
                self._silent_s,
                self._ttl_s,
            )
            for subject in subjects
        ]
        connection = self._connections.get(name)
        if connection is None:
            key = key_of(subjects[0] if subjects else "", self._kind)
            connection = self._connections[name] = await self._route.open(key)
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


def _reason(error: Exception) -> str:
    """The error's text for the log; time-outs often have none."""
    if isinstance(error, TimeoutError) or "imeout" in type(error).__name__:
        return f"no answer from Redis within {TIMEOUT_S:g} s"
    return f"Redis: {error}"
