"""The parent's end: a session for each worker process, and what they say to one another.

The hub knows nothing of what it carries: the desks (`leases_desk`, `calls`) register what answers
which message. A worker that is gone is told to every desk, at once and once.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

from gateway.adapters.shared.link import ASK_LIMIT_S
from gateway.adapters.shared.wire import Message, Op, Wire, unpacked
from gateway.errors import SluiceError

MAX_BOARD_BYTES: Final = 1024 * 1024
"""One worker's note on the board; a longer one is not kept."""
MAX_BOARD_NAMES: Final = 64

_log = logging.getLogger("sluice.workers")


class Session:
    """One worker, as long as it is connected."""

    def __init__(self, index: int, owner: str, hub: "Hub") -> None:
        """`owner` names it in leases; no two sessions have the same."""
        self.index = index
        self.owner = owner
        self.leases: dict[str, None] = {}
        """Ids of its leases in force, oldest first."""
        self.board: dict[str, bytes] = {}
        self.wire = Wire(lambda message: hub.received(self, message), lambda: hub.lost(self))
        self.asked: dict[int, asyncio.Future[Any]] = {}
        """Questions of other workers that wait for its answer."""


Desk = Callable[[Session, Message], None]
Call = Callable[[Session, Any], Awaitable[object]]


class Parts:
    """An answer too long for one frame."""

    def __init__(self, last: object, parts: Iterable[bytes]) -> None:
        """`parts`: payloads, made one by one as they are sent; `last` ends the answer."""
        self.last = last
        self.parts = parts


class Hub:
    """Sessions by worker index."""

    def __init__(self) -> None:
        self.sessions: dict[int, Session] = {}
        self._desks: dict[int, Desk] = {
            Op.ANSWER: self._answer,
            Op.ASK: self._ask,
            Op.TELL: self._tell,
            Op.BOARD: self._publish,
            Op.CALL: self._call,
        }
        self._calls: dict[str, Call] = {}
        self._joined: list[Callable[[Session], None]] = []
        self._gone: list[Callable[[Session], None]] = []
        self._number = 0
        self._owners = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def desk(self, op: Op, heard: Desk) -> None:
        """Register what hears messages of one kind; it must not raise for long."""
        self._desks[op] = heard

    def serves(self, name: str, call: Call) -> None:
        """Register what answers a call; it is told the session and the call's value."""
        self._calls[name] = call

    def when_joined(self, told: Callable[[Session], None]) -> None:
        """Register what is told of a new worker, before it hears anything else."""
        self._joined.append(told)

    def when_gone(self, told: Callable[[Session], None]) -> None:
        """Register what is told that a worker is gone."""
        self._gone.append(told)

    def attach(self, sock: socket.socket, index: int) -> Session:
        """Take the parent's end of a worker's socket; call within the running loop."""
        self._owners += 1
        session = Session(index, f"worker-{index}-{self._owners}", self)
        session.wire.open(sock)
        self.sessions[index] = session
        for told in self._joined:
            told(session)
        for other in self.sessions.values():
            if other is not session and other.board:
                session.wire.send(Op.BOARD, 0, other.index, other.board)
        self._roster()
        return session

    async def close(self) -> None:
        """Hang up on everybody."""
        for session in list(self.sessions.values()):
            session.wire.close()
        await asyncio.sleep(0)  # the loop closes them in its next turn

    @property
    def leader(self) -> Session | None:
        """The live worker of the lowest index."""
        return self.sessions[min(self.sessions)] if self.sessions else None

    @property
    def owners(self) -> set[str]:
        """Of all sessions."""
        return {session.owner for session in self.sessions.values()}

    def others(self, session: Session | None) -> list[Session]:
        """All sessions but this one, by index."""
        found = [self.sessions[index] for index in sorted(self.sessions)]
        return [other for other in found if other is not session]

    async def gather(
        self, topic: str, payload: bytes, asked: list[Session], limit_s: float = ASK_LIMIT_S
    ) -> dict[int, bytes]:
        """What these workers answer within the limit, by index; None and silence left out."""
        waiting: dict[asyncio.Future[Any], tuple[Session, int]] = {}
        for session in asked:
            self._number += 1
            future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            session.asked[self._number] = future
            waiting[future] = (session, self._number)
            session.wire.send(Op.ASK, self._number, topic, payload)
        if waiting:
            await asyncio.wait(waiting, timeout=limit_s)
        found = {}
        for future, (session, number) in waiting.items():
            session.asked.pop(number, None)
            if future.done() and future.result() is not None:
                found[session.index] = future.result()
        return found

    # -- the wire's other end

    def received(self, session: Session, message: Message) -> None:
        """A message of a worker."""
        desk = self._desks.get(message[0])
        if desk is None:
            _log.error("a message of no known kind: %s", message[0])
        else:
            desk(session, message)

    def lost(self, session: Session) -> None:
        """A worker is gone."""
        if self.sessions.get(session.index) is session:
            del self.sessions[session.index]
        for future in session.asked.values():
            if not future.done():
                future.set_result(None)
        session.asked.clear()
        for told in self._gone:
            told(session)
        for other in self.sessions.values():
            other.wire.send(Op.GONE, 0, session.index)
        self._roster()

    # -- inside

    def _roster(self) -> None:
        live = sorted(self.sessions)
        for session in self.sessions.values():
            session.wire.send(Op.LIVE, 0, live)

    def _answer(self, session: Session, message: Message) -> None:
        future = session.asked.pop(message[1], None)
        if future is not None and not future.done():
            future.set_result(message[2])

    def _ask(self, session: Session, message: Message) -> None:
        _, number, topic, payload = message
        self.answer(session, number, self._gathered(session, topic, payload))

    async def _gathered(self, session: Session, topic: str, payload: bytes) -> list[bytes]:
        return list((await self.gather(topic, payload, self.others(session))).values())

    def _tell(self, session: Session, message: Message) -> None:
        for other in self.others(session):
            other.wire.send(Op.TELL, 0, message[2], message[3])

    def _publish(self, session: Session, message: Message) -> None:
        notes = {n: p for n, p in message[2].items() if len(p) <= MAX_BOARD_BYTES}
        if len(session.board.keys() | notes.keys()) > MAX_BOARD_NAMES:
            _log.error("worker %d has too many notes on the board", session.index)
            return
        session.board |= notes
        for other in self.others(session):
            other.wire.send(Op.BOARD, 0, session.index, notes)

    def _call(self, session: Session, message: Message) -> None:
        _, number, name, payload = message
        call = self._calls.get(name)
        if call is None:
            session.wire.send(Op.FAILED, number, f"the parent has no {name}")
        else:
            self.answer(session, number, call(session, unpacked(payload)))

    def answer(self, session: Session, number: int, work: Awaitable[object]) -> None:
        """Answer once the work is done."""
        task = asyncio.ensure_future(self._answered(session, number, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answered(self, session: Session, number: int, work: Awaitable[object]) -> None:
        try:
            value = await work
        except SluiceError as error:
            session.wire.send(Op.FAILED, number, str(error))
        except Exception:  # noqa: BLE001 - whoever asked has to hear something
            _log.exception("a worker's call failed")
            session.wire.send(Op.FAILED, number, "the parent failed on this call; see its log")
        else:
            if isinstance(value, Parts):
                for part in value.parts:
                    session.wire.send(Op.PART, number, part)
                    await asyncio.sleep(0)
                value = value.last
            session.wire.send(Op.ANSWER, number, value)
