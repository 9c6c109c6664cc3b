"""Finds the Redis server: the one named, the sentinels' master, or a cluster's node.

    redis://USER:PASSWORD@HOST:PORT/DB, rediss://...      one server (rediss: TLS)
    redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/DB       the master that sentinels name
    redis+cluster://HOST:PORT,HOST:PORT                   the node that holds a key's slot

A route opens one connection. The caller closes it after any failure and opens another, which
finds a new master or a slot's new owner; a `Session` does that. Nothing here retries.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

from redis.asyncio.connection import Connection, ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError, ResponseError

from gateway.errors import StateFailure
from gateway.records.record import Record

TIMEOUT_S: Final = 0.25
"""Time limit for connecting and for each answer."""


class Script(Record, frozen=True, kw_only=True):
    """One script's text and its SHA-1 for EVALSHA."""

    name: str
    text: bytes
    sha: bytes


def lua(name: str) -> str:
    """The text of `lua/NAME.lua`."""
    return Path(__file__).with_name("lua").joinpath(f"{name}.lua").read_text("utf-8")


def script(name: str, text: str) -> Script:
    """A script with this text."""
    raw = text.encode()
    sha = hashlib.sha1(raw, usedforsecurity=False).hexdigest().encode()
    return Script(name=name, text=raw, sha=sha)


class Route:
    """A way to the server that holds a key."""

    one_server = True
    """Whether all keys are on one server."""

    async def open(self, key: str) -> Connection:
        """A connection to that server. Raises RedisError, OSError, TimeoutError."""
        raise NotImplementedError


def route_of(url: str) -> Route:
    """The route of a validated `state.url`; it does not connect yet."""
    scheme, _, rest = url.partition("://")
    if scheme not in {"redis+sentinel", "redis+cluster"}:
        return _Direct(url)
    authority, _, path = rest.partition("/")
    user, _, nodes = authority.rpartition("@")
    name, _, password = user.partition(":")
    options = {"username": unquote(name) or None, "password": unquote(password) or None}
    seeds = []
    for node in nodes.split(","):
        host, _, port = node.rpartition(":")
        seeds.append((host.strip("[]"), int(port)))
    if scheme == "redis+cluster":
        return _Cluster(seeds, options)
    service, _, db = path.partition("/")
    return _Sentinel(seeds, options, service, int(db or 0))


class _Direct(Route):
    def __init__(self, url: str) -> None:
        self._pool = ConnectionPool.from_url(url, **_options())

    async def open(self, key: str) -> Connection:
        return await _connected(self._pool.connection_class(**self._pool.connection_kwargs))


class _Seeded(Route):
    """Servers to ask in turn, the one that answered last first."""

    def __init__(self, seeds: Sequence[tuple[str, int]], options: dict[str, Any]) -> None:
        self._seeds = list(seeds)
        self._options = options

    async def _ask(self, options: dict[str, Any], *command: object) -> tuple[Any, tuple[str, int]]:
        # One server per call: callers have little time, and call again.
        seed = self._seeds[0]
        self._seeds = [*self._seeds[1:], seed]
        connection = await _connect(seed, **options)
        try:
            await connection.send_command(*command)
            answer = await connection.read_response()
        finally:
            await close(connection)
        self._seeds = [seed, *(s for s in self._seeds if s != seed)]
        return answer, seed


class _Sentinel(_Seeded):
    def __init__(
        self, seeds: Sequence[tuple[str, int]], options: dict[str, Any], service: str, db: int
    ) -> None:
        super().__init__(seeds, options)
        self._service = service
        self._db = db

    async def open(self, key: str) -> Connection:
        # Sentinels that need a password use the servers'.
        options = self._options if self._options["password"] else {}
        answer, _ = await self._ask(options, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)
        if not answer:
            raise RedisConnectionError(f"the sentinels know no service '{self._service}'")
        master = (answer[0].decode(), int(answer[1]))
        connection = await _connect(master, db=self._db, **self._options)
        try:
            await connection.send_command("ROLE")
            if (await connection.read_response())[0] != b"master":
                raise RedisConnectionError("the sentinels' master is none (any more)")
        except BaseException:
            await close(connection)
            raise
        return connection


class _Cluster(_Seeded):
    one_server = False

    async def open(self, key: str) -> Connection:
        slot = key_slot(key.encode())
        slots, seed = await self._ask(self._options, "CLUSTER", "SLOTS")
        for low, high, master, *_ in slots:
            node = (master[0].decode() or seed[0], int(master[1]))
            if node not in self._seeds:
                self._seeds.append(node)
            if low <= slot <= high:
                return await _connect(node, **self._options)
        raise RedisConnectionError(f"no node of the cluster holds slot {slot}")


async def _connect(address: tuple[str, int], **options: Any) -> Connection:
    return await _connected(Connection(host=address[0], port=address[1], **options, **_options()))


async def _connected(connection: Any) -> Connection:
    await connection.connect()
    connected: Connection = connection
    return connected


def _options() -> dict[str, Any]:
    # Callers time out a whole batch, not each answer.
    return {
        "socket_connect_timeout": TIMEOUT_S,
        "socket_timeout": None,
        "retry": Retry(NoBackoff(), 0),
        "health_check_interval": 0,
        "protocol": 2,
        "driver_info": None,
    }


async def close(connection: Connection) -> None:
    """Close at once, so that a late answer is not taken for the next call's. Never raises."""
    with contextlib.suppress(RedisError, OSError, TimeoutError):
        await connection.disconnect(nowait=True)


def reason(error: BaseException) -> str:
    """The error's text for the log; time-outs often have none."""
    if isinstance(error, TimeoutError) or "imeout" in type(error).__name__:
        return f"no answer from Redis within {TIMEOUT_S:g} s"
    return str(error) or type(error).__name__


class Session:
    """Calls to the server of a key, over one connection that any failure closes.

    So a late answer is not taken for the next call's.
    """

    def __init__(self, route: Route, key: str) -> None:
        self._route = route
        self._key = key
        self._connection: Connection | None = None
        self._lock = asyncio.Lock()

    async def call(self, *command: object, limit_s: float = 0.0) -> Any:
        """The answer to one command, within `limit_s` (0: TIMEOUT_S). Raises StateFailure."""
        return (await self.pipeline([command], limit_s))[0]

    async def run(self, named: Script, calls: Sequence[Sequence[Any]]) -> list[Any]:
        """Answers to calls of a script: number of keys, keys and arguments. Raises StateFailure."""
        commands = [("EVALSHA", named.sha, *call) for call in calls]
        try:
            return await self.pipeline(commands)
        except StateFailure as error:
            if not isinstance(error.__cause__, NoScriptError):
                raise
        await self.call("SCRIPT", "LOAD", named.text)
        return await self.pipeline(commands)

    async def pipeline(self, commands: Sequence[Sequence[Any]], limit_s: float = 0.0) -> list[Any]:
        """Answers in one round trip. Raises StateFailure."""
        async with self._lock:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    at = self._connection = self._connection or await self._route.open(self._key)
                answers: list[Any] = []
                async with asyncio.timeout(limit_s or TIMEOUT_S):
                    await at.send_packed_command(at.pack_commands(commands), check_health=False)
                    # All are read, whatever they say: the next call must not get one of them.
                    for _ in commands:
                        try:
                            answers.append(await at.read_response(disable_decoding=True))
                        except ResponseError as error:
                            answers.append(error)
                for answer in answers:
                    if isinstance(answer, ResponseError):
                        raise answer
            except NoScriptError as error:
                raise StateFailure(str(error)) from error
            except (RedisError, OSError, TimeoutError) as error:
                await self._close()
                text = reason(error)
                raise StateFailure(text if "from Redis" in text else f"Redis: {text}") from error
            except BaseException:
                await self._close()
                raise
            else:
                return answers

    async def close(self) -> None:
        """Close the connection, once nothing uses it."""
        async with self._lock:
            await self._close()

    async def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await close(connection)
