"""A worker process's end of the connection to its parent, and through it to the other workers.

- `call` asks the parent, `post` tells it. `ask` collects answers of the other workers, `tell`
  tells them. Answers to them come from what was registered with `on`.
- When the parent is gone nothing can be decided any more: calls fail, and `on_lost` is told, so
  that the process ends.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Final

from gateway.adapters.shared.wire import LAZIER_S, LAZY_S, Message, Op, Wire, packed
from gateway.errors import StateFailure

ASK_LIMIT_S: Final = 1.0
"""How long the other workers have for an answer."""

Answer = bytes | None
Responder = Callable[[bytes], Answer | Awaitable[Answer]]
_log = logging.getLogger("sluice.workers")


class Link:
    """The connection of one worker."""

    def __init__(self, index: int) -> None:
        """`index`: which of the workers this is, from 0."""
        self.index = index
        self.live: tuple[int, ...] = (index,)
        """Workers that are connected now, this one included."""
        self.on_lost: Callable[[], None] = lambda: None
        self.evict: Callable[[str], None] = lambda _: None
        self._wire = Wire(self._received, self._lost)
        self._number = 0
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._parts: dict[int, list[bytes]] = {}
        self._responders: dict[str, Responder] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self._heard: dict[int, Callable[[Message], None]] = {
            Op.ANSWER: self._answered,
            Op.FAILED: self._failed,
            Op.PART: lambda m: self._parts.setdefault(m[1], []).append(m[2]),
            Op.EVICT: lambda m: self.evict(m[2]),
            Op.LIVE: self._roster,
            Op.ASK: self._asked,
            Op.TELL: self._told,
        }

    def open(self, sock: socket.socket) -> None:
        """Take the socket whose other end is the parent's; call within the running loop."""
        self._wire.open(sock)

    def close(self) -> None:
        """Hang up; `on_lost` is not told."""
        self._closing = True
        self._wire.close()

    @property
    def up(self) -> bool:
        """Whether the parent is there."""
        return self._wire.up

    @property
    def replicas(self) -> int:
        """Workers that share everything, this one included."""
        return max(1, len(self.live))

    @property
    def leads(self) -> bool:
        """Whether this one does what only one may: the live worker of the lowest index."""
        return self.index == min(self.live, default=self.index)

    def hears(self, op: Op, heard: Callable[[Message], None]) -> None:
        """Register what hears the parent's messages of one kind."""
        self._heard[op] = heard

    def on(self, topic: str, respond: Responder) -> None:
        """Register what answers, or hears, the other workers on a topic."""
        self._responders[topic] = respond

    # -- the parent

    def post(self, op: Op, *arguments: object) -> None:
        """Tell the parent; never waits, never raises."""
        self._wire.send(op, 0, *arguments)

    def post_lazily(self, op: Op, *arguments: object, within_s: float = LAZY_S) -> None:
        """The same, of what may be told a little later, but not after what is said next."""
        self._wire.send_lazily(op, 0, *arguments, within_s=within_s)

    def gathers(self, gathered: Callable[[], tuple[object, ...] | None]) -> None:
        """Register what gives a message that precedes whatever is said; None: there is none."""
        self._wire.gathered = gathered

    def expect(self, within_s: float) -> None:
        """Something is gathered: it leaves with whatever does, or so much later."""
        self._wire.expect(within_s)

    def hasten(self) -> None:
        """Send in this turn of the loop what waits."""
        self._wire.hasten()

    def begin(self, op: Op, *arguments: object, within_s: float = 0.0) -> "asyncio.Future[Any]":
        """Ask the parent, or within such a time; the future fails with StateFailure."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if not self._wire.up:
            future.set_exception(StateFailure("the parent process is gone"))
            return future
        self._number += 1
        self._waiting[self._number] = future
        if within_s:
            self._wire.send_lazily(op, self._number, *arguments, within_s=within_s)
        else:
            self._wire.send(op, self._number, *arguments)
        return future

    async def call(self, name: str, value: object = None) -> Any:
        """Ask for what is not asked for with each request. Raises StateFailure."""
        return await self.begin(Op.CALL, name, packed(value))

    async def call_lazily(self, name: str, value: object = None) -> Any:
        """The same of what can wait LAZIER_S for something to leave with."""
        return await self.begin(Op.CALL, name, packed(value), within_s=LAZIER_S)

    async def parts(self, name: str, value: object = None) -> tuple[Any, list[bytes]]:
        """The same, of an answer in parts: what it ends with, and the parts."""
        future = self.begin(Op.CALL, name, packed(value))
        number = self._number
        try:
            return await future, self._parts.get(number, [])
        finally:
            self._parts.pop(number, None)

    # -- the other workers

    async def ask(self, topic: str, payload: bytes = b"") -> list[bytes]:
        """What the others answer, as far as they do within ASK_LIMIT_S. Raises nothing."""
        try:
            found: list[bytes] = await self.begin(Op.ASK, topic, payload)
        except StateFailure:
            return []
        return found

    def tell(self, topic: str, payload: bytes) -> None:
        """Tell the others; never waits, never raises."""
        self._wire.send(Op.TELL, 0, topic, payload)

    # -- inside

    def _received(self, message: Message) -> None:
        heard = self._heard.get(message[0])
        if heard is not None:
            heard(message)

    def _answered(self, message: Message) -> None:
        future = self._waiting.pop(message[1], None)
        if future is not None and not future.done():
            future.set_result(message[2])

    def _failed(self, message: Message) -> None:
        future = self._waiting.pop(message[1], None)
        if future is not None and not future.done():
            future.set_exception(StateFailure(message[2]))

    def _roster(self, message: Message) -> None:
        self.live = tuple(message[2])

    def _told(self, message: Message) -> None:
        self._run(0, message[2], message[3])

    def _asked(self, message: Message) -> None:
        self._run(message[1], message[2], message[3])

    def _run(self, number: int, topic: str, payload: bytes) -> None:
        task = asyncio.ensure_future(self._respond(number, topic, payload))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _respond(self, number: int, topic: str, payload: bytes) -> None:
        answer: Answer = None
        respond = self._responders.get(topic)
        try:
            if respond is not None:
                found = respond(payload)
                answer = found if found is None or isinstance(found, bytes) else await found
        except Exception:  # noqa: BLE001 - the other worker goes without this answer
            _log.exception("answering another worker failed")
        if number:
            self._wire.send(Op.ANSWER, number, answer)

    def _lost(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(StateFailure("the parent process is gone"))
        if not self._closing:
            self.on_lost()
