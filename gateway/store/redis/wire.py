"""Sends script calls to Redis, pipelined over one connection; loads scripts as needed.

One round trip carries many calls. Calls for which the server was not ready (it lacks the scripts,
or the model has more pools there) are sent once more. The caller bounds the time and closes the
connection after any failure, so that a late answer is not taken for another call's.
"""

import asyncio
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from redis.asyncio.connection import Connection
from redis.exceptions import NoScriptError, ResponseError

from gateway.errors import StateFailure
from gateway.store.redis.route import Route, close
from gateway.store.redis.scripts import GROUPED, MAX_GROUPED, Calls

_CLIENT: Final = re.compile(rb"id=(\d+) addr=(\S+)")


class ModelLost(StateFailure):
    """The server does not know the model, because it is new or was emptied."""


class Op:
    """One script call."""

    __slots__ = ("argument", "done", "lasting", "name", "sent", "tag")

    def __init__(
        self,
        name: str,
        argument: bytes,
        done: "asyncio.Future[Any] | None" = None,
        *,
        lasting: bool = True,
    ) -> None:
        self.name = name
        self.tag = name.encode()
        self.argument = argument
        self.done = done
        """Future of a call's answer; of a post, that it arrived, where somebody waits for that."""
        self.lasting = lasting
        """A post: sent again until it arrives."""
        self.sent = False


class RedisWire:
    """Calls to the scripts of one model. Methods raise RedisError, OSError, TimeoutError."""

    def __init__(self, route: Route, calls: Calls) -> None:
        self._route = route
        self._calls = calls
        self._connection: Connection | None = None
        self._known_as: tuple[str, str] | None = None
        """The last connection's id and address at its server, which may still read from it."""

    async def open(self) -> None:
        """Connect, unless it is connected.

        The server is told to read nothing more from the connection before: a call that timed out
        in it must not be executed after what undoes it.
        """
        if self._connection is None:
            self._connection = connection = await self._route.open(self._calls.key)
            if self._known_as is not None:
                client_id, address = self._known_as
                await _told(connection, "CLIENT", "KILL", "ID", client_id, "ADDR", address)
            said = await _told(connection, "CLIENT", "INFO")
            found = _CLIENT.match(said) if isinstance(said, bytes) else None
            self._known_as = None if found is None else (found[1].decode(), found[2].decode())

    async def close(self) -> None:
        """Close the connection. Never raises."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await close(connection)

    async def answers(self, ops: Sequence[Op]) -> list[Any]:
        """Answers in order; a script's own error, or ModelLost, takes the answer's place."""
        answers = await self._pipeline(ops)
        again = [i for i, answer in enumerate(answers) if self._repeatable(answer)]
        if not again:
            return answers
        await self.load()
        for i, answer in zip(again, await self._pipeline([ops[i] for i in again]), strict=True):
            answers[i] = answer
        return answers

    async def _pipeline(self, ops: Sequence[Op]) -> list[Any]:
        connection = self._connection
        if connection is None or not ops:
            return []
        for op in ops:
            op.sent = True
        groups = list(_groups(ops))
        await connection.send_packed_command(
            b"".join([self._packed(group) for group in groups]), check_health=False
        )
        answers: list[Any] = []
        read = connection.read_response
        for group in groups:
            try:
                answer = await read(disable_decoding=True)
            except ResponseError as error:
                answers += [_meant(error)] * len(group)
                continue
            answers += answer if group[0].name in GROUPED else [answer]
        return answers

    def _packed(self, group: Sequence[Op]) -> bytes:
        first = group[0]
        if first.name not in GROUPED:
            return self._calls.packed(first.name, first.argument)
        return self._calls.packed("calls", *(a for op in group for a in (op.tag, op.argument)))

    def _repeatable(self, answer: object) -> bool:
        if not isinstance(answer, ResponseError):
            return False
        if str(answer).startswith("POOLS "):
            self._calls.widen(int(str(answer).split()[1]))
            return True
        return isinstance(answer, NoScriptError)

    async def load(self) -> None:
        """Load every script into the server."""
        connection = self._connection
        if connection is None:
            return
        scripts = self._calls.scripts.all.values()
        await connection.send_packed_command(
            connection.pack_command("SCRIPT", "EXISTS", *(s.sha for s in scripts)),
            check_health=False,
        )
        known = await connection.read_response()
        missing = [s for s, held in zip(scripts, known, strict=True) if not held]
        for script in missing:
            await connection.send_packed_command(
                connection.pack_command("SCRIPT", "LOAD", script.text), check_health=False
            )
            await connection.read_response()


async def _told(connection: Connection, *command: str) -> object:
    """The server's answer; None where it does not know the command, or forbids it."""
    await connection.send_command(*command)
    try:
        return await connection.read_response(disable_decoding=True)
    except ResponseError:
        return None


def _groups(ops: Sequence[Op]) -> Iterator[list[Op]]:
    """Split calls into scripts, in order: consecutive calls of GROUPED share one."""
    group: list[Op] = []
    for op in ops:
        joins = group and op.name in GROUPED and group[0].name in GROUPED
        if group and (not joins or len(group) >= MAX_GROUPED):
            yield group
            group = []
        group.append(op)
    if group:
        yield group


def _meant(error: ResponseError) -> Exception:
    """Translate an error answer; errors that concern the server are raised."""
    text = str(error)
    if text.startswith("NOSTATE"):
        return ModelLost("Redis does not know the model")
    if isinstance(error, NoScriptError) or text.startswith(("POOLS ", "ERR ", "WRONGTYPE")):
        return error
    # MOVED, CLUSTERDOWN, READONLY, OOM, NOAUTH ...: find the server again.
    raise error
