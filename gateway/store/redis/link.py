"""One connection to Redis, and the queue of calls for it.

Calls that arrive during a round trip, or in the same iteration of the event loop, share the next
one: a single task writes them all and reads their answers. A round trip takes TIMEOUT_S at most.
A failure closes the connection, so that a late answer is not taken for another call's, and the
breaker decides when to try again.

- A *call* needs its answer now. It raises `RedisAway` while the link is down and when its round
  trip fails.
- A *post* must arrive eventually. Posts are queued (MAX_POSTS at most, then the oldest are
  dropped), sent in order, and sent again if their delivery is uncertain, so their effect must be
  idempotent. A post in COMPANIONS waits up to POST_WAIT_S to share a call's script, unless
  somebody waits to hear of it; until then Redis counts its lease as held, so no limit is exceeded.

One round trip carries many calls (`RedisWire`). Calls for which the server was not ready (it lacks
the scripts, or the model has more pools there) are sent once more.

The link is up once it is connected, `prepare` has run and the queued posts were sent. A call
therefore waits for two round trips at most.
"""

import asyncio
import contextlib
import logging
import re
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Final

import msgspec
from redis.asyncio.connection import Connection
from redis.exceptions import NoScriptError, RedisError, ResponseError

from gateway.errors import StateFailure
from gateway.fleet.breaker import Breaker
from gateway.store.redis.route import TIMEOUT_S, Route, close, reason
from gateway.store.redis.scripts import GROUPED, MAX_GROUPED, Calls, argument

BATCH: Final = 256
MAX_CALLS: Final = 4_096
"""Most waiting calls; further ones fail at once, as a round trip or two could not serve them."""
MAX_POSTS: Final = 100_000
COMPANIONS: Final = frozenset({"resize", "settle"})
"""Posts that no caller waits for and that can share a script with calls."""
POST_WAIT_S: Final = 0.005
CLOSE_LIMIT_S: Final = 1.0

_log = logging.getLogger("sluice.state")
_CLIENT: Final = re.compile(rb"id=(\d+) addr=(\S+)")


class RedisAway(StateFailure):
    """Redis did not answer a call. With `sent`, it may have executed the call nevertheless."""

    def __init__(self, message: str, *, sent: bool = False) -> None:
        super().__init__(message)
        self.sent = sent


class ModelLost(StateFailure):
    """The server does not know the model, because it is new or was emptied."""


class Op(msgspec.Struct, eq=False):
    """One script call."""

    name: str
    argument: bytes
    done: "asyncio.Future[Any] | None" = None
    """Future of a call's answer; of a post, that it arrived, where somebody waits for that."""
    lasting: bool = True
    """A post: sent again until it arrives."""
    sent: bool = False


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
        return self._calls.packed(
            "calls", *(a for op in group for a in (op.name.encode(), op.argument))
        )

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


class RedisLink:
    """Calls to the scripts of one model."""

    def __init__(
        self,
        wire: RedisWire,
        *,
        clock: Callable[[], float],
        chance: Callable[[], float],
        prepare: Callable[["RedisLink"], Awaitable[None]],
        on_up: Callable[[], None],
    ) -> None:
        """`prepare` may only use `ask`; `on_up` is called when the link comes up."""
        self._wire = wire
        self._clock = clock
        self._chance = chance
        self._prepare = prepare
        self._on_up = on_up
        self._breaker = Breaker()
        self._queue: deque[Op] = deque()
        self._wake = asyncio.Event()
        """Set while the queue holds anything to send at once."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        """Fires when the oldest queued post of COMPANIONS is due."""
        self._settled = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._away = False
        self._complained: set[str] = set()
        self.up = False
        self.failures_total = 0
        self.dropped_total = 0
        """Posts dropped because too many waited."""

    async def start(self) -> None:
        """Connect in the background; returns after the first attempt, successful or not."""
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._run())
        await self._settled.wait()

    async def close(self) -> None:
        """Send queued posts once, within a time limit, and close the connection."""
        if self._task is None:
            return
        with contextlib.suppress(TimeoutError, RedisAway):
            async with asyncio.timeout(CLOSE_LIMIT_S):
                # Its answer comes after everything that was queued before it.
                await self.call("view", argument(names=()))
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._task = None
        self._stop_waiting()
        await self._wire.close()
        self._fail_calls(RedisAway("the gateway is stopping"))

    async def call(self, name: str, argument: bytes) -> Any:
        """Call a script and return its answer. Raises RedisAway: `sent` tells whether to undo it.

        A call that is cancelled after it was sent may have been executed, too (see `Op.sent` of
        `begin`).
        """
        op = self.begin(name, argument)
        assert op.done is not None  # noqa: S101 - a call has one
        return await op.done

    def begin(self, name: str, argument: bytes) -> Op:
        """Start a call, whose answer is awaited at `done`. Raises RedisAway while it is down."""
        if not self.up:
            raise RedisAway("Redis is away")
        if len(self._queue) >= MAX_CALLS:
            raise RedisAway("Redis is too slow")
        op = Op(name, argument, asyncio.get_running_loop().create_future(), lasting=False)
        self._queue.append(op)
        self._wake.set()
        return op

    def post(self, name: str, argument: bytes, *, heard: bool = False) -> Op:
        """Queue a script call that needs no answer. Never raises.

        With `heard` it is sent at once, and `done` is set when it arrived, or when the link went
        down: it is delivered later then.
        """
        done = None if self._loop is None or not (heard and self.up) else self._loop.create_future()
        op = Op(name, argument, done)
        self._queue.append(op)
        if len(self._queue) > MAX_POSTS:
            self._drop()
        now = done is not None or name not in COMPANIONS or len(self._queue) >= MAX_GROUPED
        if self._loop is None or now:
            self._wake.set()
        elif self._timer is None:
            self._timer = self._loop.call_later(POST_WAIT_S, self._wake.set)
        return op

    async def ask(self, name: str, argument: bytes) -> Any:
        """Call a script within `prepare`. Raises ModelLost and connection errors."""
        op = Op(name, argument)
        async with asyncio.timeout(TIMEOUT_S):
            (answer,) = await self._wire.answers([op])
        if isinstance(answer, Exception):
            raise answer
        return answer

    # -- the one task

    async def _run(self) -> None:
        while True:
            if not self.up:
                await self._come_up()
                self._settled.set()
            elif not self._wake.is_set():
                await self._wake.wait()
            elif self._queue:
                await self._round_trip()
            else:
                self._stop_waiting()

    async def _come_up(self) -> None:
        pause_s = self._breaker.retry_at_s - self._clock()
        if pause_s > 0 and not self._breaker.allows(self._clock()):
            await asyncio.sleep(pause_s)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._wire.open()
            async with asyncio.timeout(TIMEOUT_S):
                await self._wire.load()
            await self._prepare(self)
            while self._queue:
                await self._send(self._batch())
        except (RedisError, OSError, TimeoutError, StateFailure) as error:
            await self._broken(error)
        except Exception as error:  # noqa: BLE001 - a defect must not end the task
            _log.exception("preparing Redis failed")
            await self._broken(error)
        else:
            self._breaker.succeeded()
            self.up = True
            self._on_up()
            if self._away:
                self._away = False
                _log.info("Redis is back")

    async def _round_trip(self) -> None:
        try:
            await self._send(self._batch())
        except (RedisError, OSError, TimeoutError, StateFailure) as error:
            await self._broken(error)
        else:
            self._breaker.succeeded()

    def _batch(self) -> list[Op]:
        batch = [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]
        if not self._queue:
            self._stop_waiting()
        return batch

    def _stop_waiting(self) -> None:
        self._wake.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _send(self, ops: Sequence[Op]) -> None:
        """One round trip; on failure, posts return to the queue and calls fail."""
        ops = [op for op in ops if op.lasting or op.done is None or not op.done.done()]
        try:
            async with asyncio.timeout(TIMEOUT_S):
                answers = await self._wire.answers(ops)
            for answer in answers:
                if isinstance(answer, ModelLost):
                    raise answer
        except BaseException as error:
            self._queue.extendleft(op for op in reversed(ops) if op.lasting)
            message = reason(error)
            for op in ops:
                _fail(op, RedisAway(message, sent=True))
            raise
        for op, answer in zip(ops, answers, strict=True):
            if isinstance(answer, Exception):
                if op.name not in self._complained:
                    self._complained.add(op.name)
                    _log.error("the script %s failed: %s", op.name, answer)
                _fail(op, RedisAway(str(answer)))
            elif op.done is not None and not op.done.done():
                op.done.set_result(answer)

    # -- failure

    async def _broken(self, error: Exception) -> None:
        self.up = False
        if not isinstance(error, ModelLost):
            self.failures_total += 1
            self._breaker.failed(self._clock(), self._chance())
            await self._wire.close()
        self._fail_calls(RedisAway(reason(error)))
        if not self._away and (isinstance(error, ModelLost) or not self._breaker.closed):
            self._away = True
            _log.info("Redis is away: %s", reason(error))

    def _fail_calls(self, error: RedisAway) -> None:
        for op in self._queue:
            _fail(op, RedisAway(str(error), sent=op.sent))
        self._queue = deque(op for op in self._queue if op.lasting)

    def _drop(self) -> None:
        for op in self._queue:
            if op.lasting:
                self._queue.remove(op)
                self.dropped_total += 1
                _fail(op, RedisAway("too many posts wait"))
                return


def _fail(op: Op, error: RedisAway) -> None:
    """Tell who waits for a call that it failed, and who waits for a post not to wait any more."""
    if op.done is None or op.done.done():
        return
    if op.lasting:
        op.done.set_result(None)
    else:
        op.done.set_exception(error)


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
