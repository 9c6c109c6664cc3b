"""One connection to Redis, and the queue of calls to the scripts of one model.

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

Calls for which the server was not ready (it lacks the scripts, or the model has more pools there)
are sent once more. The link is up once it is connected, `prepare` has run and the queued posts
were sent. A call therefore waits for two round trips at most.
"""

import asyncio
import contextlib
import logging
import re
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
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
_OWN_ERRORS: Final = ("POOLS ", "ERR ", "WRONGTYPE")
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

    def fail(self, error: RedisAway) -> None:
        """Tell who waits for a call that it failed; who waits for a post need wait no more."""
        if self.done is None or self.done.done():
            return
        if self.lasting:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


class RedisLink:
    """Calls to the scripts of one model."""

    def __init__(
        self,
        route: Route,
        calls: Calls,
        *,
        clock: Callable[[], float],
        chance: Callable[[], float],
        prepare: Callable[["RedisLink"], Awaitable[None]],
        on_up: Callable[[], None],
    ) -> None:
        """`prepare` may only use `ask`; `on_up` is called when the link comes up."""
        self._route = route
        self._calls = calls
        self._clock = clock
        self._chance = chance
        self._prepare = prepare
        self._on_up = on_up
        self._connection: Connection | None = None
        self._client: tuple[str, str] | None = None
        """The last connection's id and address at its server, which may still read from it."""
        self._breaker = Breaker()
        self._queue: deque[Op] = deque()
        self._wake = asyncio.Event()
        """Set while the queue holds anything to send at once."""
        self._timer: asyncio.TimerHandle | None = None
        """Fires when the oldest queued post of COMPANIONS is due."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tried = asyncio.Event()
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
        await self._tried.wait()

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
        await self._disconnect()
        self._fail_calls("the gateway is stopping")

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
            oldest = next(op for op in self._queue if op.lasting)
            self._queue.remove(oldest)
            self.dropped_total += 1
            oldest.fail(RedisAway("too many posts wait"))
        now = done is not None or name not in COMPANIONS or len(self._queue) >= MAX_GROUPED
        if self._loop is None or now:
            self._wake.set()
        elif self._timer is None:
            self._timer = self._loop.call_later(POST_WAIT_S, self._wake.set)
        return op

    async def ask(self, name: str, argument: bytes) -> Any:
        """Call a script within `prepare`. Raises ModelLost and connection errors."""
        async with asyncio.timeout(TIMEOUT_S):
            (answer,) = await self._answers([Op(name, argument)])
        if isinstance(answer, Exception):
            raise answer
        return answer

    # -- the one task

    async def _run(self) -> None:
        while True:
            coming = not self.up
            if coming:
                pause_s = self._breaker.retry_at_s - self._clock()
                if pause_s > 0 and not self._breaker.allows(self._clock()):
                    await asyncio.sleep(pause_s)
            elif not self._wake.is_set():
                await self._wake.wait()
                continue
            elif not self._queue:
                self._stop_waiting()
                continue
            try:
                await (self._come_up() if coming else self._send())
            except (RedisError, OSError, TimeoutError, StateFailure) as error:
                await self._broken(error)
            except Exception as error:  # noqa: BLE001 - a defect must not end the task
                _log.exception("%s failed", "preparing Redis" if coming else "calling Redis")
                await self._broken(error)
            else:
                self._breaker.succeeded()
                if coming:
                    self.up = True
                    self._on_up()
                    if self._away:
                        self._away = False
                        _log.info("Redis is back")
            self._tried.set()

    async def _come_up(self) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await self._connect()
        async with asyncio.timeout(TIMEOUT_S):
            await self._load_scripts()
        await self._prepare(self)
        while self._queue:
            await self._send()

    async def _send(self) -> None:
        """One round trip of what waits; on failure, posts return to the queue and calls fail."""
        batch = [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]
        if not self._queue:
            self._stop_waiting()
        ops = [op for op in batch if op.lasting or op.done is None or not op.done.done()]
        try:
            async with asyncio.timeout(TIMEOUT_S):
                answered = list(zip(ops, await self._answers(ops), strict=True))
            for _, answer in answered:
                if isinstance(answer, ModelLost):
                    raise answer
        except BaseException as error:
            self._queue.extendleft(op for op in reversed(ops) if op.lasting)
            for op in ops:
                op.fail(RedisAway(reason(error), sent=True))
            raise
        for op, answer in answered:
            if isinstance(answer, Exception):
                if op.name not in self._complained:
                    self._complained.add(op.name)
                    _log.error("the script %s failed: %s", op.name, answer)
                op.fail(RedisAway(str(answer)))
            elif op.done is not None and not op.done.done():
                op.done.set_result(answer)

    def _stop_waiting(self) -> None:
        self._wake.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _broken(self, error: Exception) -> None:
        self.up = False
        if not isinstance(error, ModelLost):
            self.failures_total += 1
            self._breaker.failed(self._clock(), self._chance())
            await self._disconnect()
        self._fail_calls(reason(error))
        if not self._away and (isinstance(error, ModelLost) or not self._breaker.closed):
            self._away = True
            _log.info("Redis is away: %s", reason(error))

    def _fail_calls(self, why: str) -> None:
        for op in self._queue:
            op.fail(RedisAway(why, sent=op.sent))
        self._queue = deque(op for op in self._queue if op.lasting)

    # -- the connection; these raise RedisError, OSError, TimeoutError

    async def _connect(self) -> None:
        """Connect, unless it is connected.

        The server is told to read nothing more from the connection before: a call that timed out
        in it must not be executed after what undoes it.
        """
        if self._connection is not None:
            return
        self._connection = connection = await self._route.open(self._calls.key)

        async def asked(*command: str) -> object:
            """The server's answer; None where it does not know the command, or forbids it."""
            await connection.send_command(*command)
            try:
                return await connection.read_response(disable_decoding=True)
            except ResponseError:
                return None

        if self._client is not None:
            client_id, address = self._client
            await asked("CLIENT", "KILL", "ID", client_id, "ADDR", address)
        answer = await asked("CLIENT", "INFO")
        match = _CLIENT.match(answer) if isinstance(answer, bytes) else None
        self._client = None if match is None else (match[1].decode(), match[2].decode())

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await close(connection)

    async def _load_scripts(self) -> None:
        connection = self._connection
        if connection is None:
            return
        scripts = self._calls.scripts.all.values()
        exist = connection.pack_command("SCRIPT", "EXISTS", *(s.sha for s in scripts))
        await connection.send_packed_command(exist, check_health=False)
        loaded = await connection.read_response()
        for script in (s for s, held in zip(scripts, loaded, strict=True) if not held):
            load = connection.pack_command("SCRIPT", "LOAD", script.text)
            await connection.send_packed_command(load, check_health=False)
            await connection.read_response()

    async def _answers(self, ops: Sequence[Op]) -> list[Any]:
        """Answers in order; a script's own error, or ModelLost, takes the answer's place."""
        answers = await self._pipeline(ops)
        again = []
        for i, answer in enumerate(answers):
            if isinstance(answer, ResponseError):
                if (text := str(answer)).startswith("POOLS "):
                    self._calls.widen(int(text.split()[1]))
                elif not isinstance(answer, NoScriptError):
                    continue
                again.append(i)
        if again:
            await self._load_scripts()
            for i, answer in zip(again, await self._pipeline([ops[i] for i in again]), strict=True):
                answers[i] = answer
        return answers

    async def _pipeline(self, ops: Sequence[Op]) -> list[Any]:
        connection = self._connection
        if connection is None or not ops:
            return []
        for op in ops:
            op.sent = True
        packed, groups = self._calls.packed, grouped_ops(ops)
        sent = [
            packed("calls", *(part for op in group for part in (op.name.encode(), op.argument)))
            if group[0].name in GROUPED
            else packed(group[0].name, group[0].argument)
            for group in groups
        ]
        await connection.send_packed_command(b"".join(sent), check_health=False)
        answers: list[Any] = []
        read = connection.read_response
        for group in groups:
            try:
                answer = await read(disable_decoding=True)
            except ResponseError as error:
                text = str(error)
                if text.startswith("NOSTATE"):
                    failure: Exception = ModelLost("Redis does not know the model")
                elif isinstance(error, NoScriptError) or text.startswith(_OWN_ERRORS):
                    failure = error
                else:  # MOVED, CLUSTERDOWN, READONLY, OOM, NOAUTH ...: find the server again
                    raise
                answers += [failure] * len(group)
                continue
            answers += answer if group[0].name in GROUPED else [answer]
        return answers


def grouped_ops(ops: Sequence[Op]) -> list[list[Op]]:
    """Split calls into scripts, in order: consecutive calls of GROUPED share one."""
    groups: list[list[Op]] = []
    for op in ops:
        last = groups[-1] if groups else [op]
        joins = op.name in GROUPED and last[0].name in GROUPED and len(last) < MAX_GROUPED
        if groups and joins:
            last.append(op)
        else:
            groups.append([op])
    return groups
