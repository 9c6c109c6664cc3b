"""A worker process's place beside the others: what it shares with them, and how it hears of them.

What the composition root hands around: the link, the board, and the way that connections come.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final

from gateway.adapters.shared.board import PeerBoard
from gateway.adapters.shared.health import DRAIN
from gateway.adapters.shared.link import Link
from gateway.adapters.shared.way import Way
from gateway.adapters.shared.wire import LAZIER_S, Op, packed, unpacked
from gateway.domain import Record
from gateway.errors import StateFailure
from gateway.policy.homes import Home, ResponseHomes

HOMES: Final = "homes"
GIVE: Final = "give"


class Place(Record, frozen=True, kw_only=True):
    """Which worker a process is, and the descriptors it was given."""

    index: int
    count: int
    """Workers in all."""
    link_fd: int
    way_fd: int


class Seat:
    """A worker that is connected to its parent."""

    def __init__(self, place: Place) -> None:
        """Opens nothing yet."""
        self.index = place.index
        self.processes = place.count
        self.link = Link(place.index)
        self.board = PeerBoard(self.link)
        self._link_fd = place.link_fd
        self._way = Way(socket.socket(fileno=place.way_fd))
        self._ended = 0
        self._answered = 0

    @property
    def replicas(self) -> int:
        """Workers that are live, this one included: each has that share of every gate."""
        return self.link.replicas

    @property
    def leads(self) -> bool:
        """Whether this one does what only one may: the live worker of the lowest index."""
        return self.link.leads

    def open(self) -> None:
        """Connect to the parent; call within the running loop."""
        self.link.open(socket.socket(fileno=self._link_fd))
        self.board.start()

    async def ready(self, serve: Callable[[], asyncio.Protocol]) -> None:
        """Take connections from now on: `serve` makes the protocol of one."""
        self._way.open(serve)
        await self.link.call("ready")

    async def leave(self) -> None:
        """Take no more connections."""
        with contextlib.suppress(StateFailure):
            await self.link.call("leave")
        self._way.close()

    def count(self, now_open: int, answered: int) -> None:
        """Tell the parent what has ended: connections, and requests (of all so far)."""
        ended = max(self._ended, self._way.taken - now_open)
        if ended > self._ended or answered > self._answered:
            ended_now, answered_now = ended - self._ended, answered - self._answered
            if ended_now:  # the next connection goes to who has the fewest
                self.link.post(Op.COUNTS, ended_now, answered_now)
            else:
                self.link.post_lazily(Op.COUNTS, 0, answered_now, within_s=LAZIER_S)
            self._ended, self._answered = ended, answered

    def give_away_with(self, give: Callable[[int], Iterable[socket.socket]]) -> None:
        """Have `give` let go of so many connections when the parent asks for them."""

        def asked(payload: bytes) -> None:
            for connection in give(int(payload)):
                self._way.give_away(connection)

        self.link.on(GIVE, asked)

    async def close(self) -> None:
        """Send what is left and hang up."""
        await self.board.close()
        self.link.close()

    async def ask(self, topic: str, payload: bytes = b"") -> list[bytes]:
        """What the other workers answer."""
        return await self.link.ask(topic, payload)

    def on(self, topic: str, respond: Callable[[bytes], bytes | None]) -> None:
        """Register what answers them."""
        self.link.on(topic, respond)

    async def drain(self, worker: str, *, on: bool) -> None:
        """Have the others take an engine out of the rotation, or return it."""
        with contextlib.suppress(StateFailure):
            await self.link.call(DRAIN, (worker, on))

    def follow_drains(self, drain: Callable[[str, bool], object]) -> None:
        """Have this worker drain what another's admin drains: `drain(worker, on)`."""

        def heard(payload: bytes) -> bytes:
            drain(*unpacked(payload))
            return b""

        self.link.on(DRAIN, heard)

    def share_homes(self, homes: Mapping[str, ResponseHomes]) -> None:
        """Have the other workers know, too, where stored responses live; `homes` by model."""

        def heard(payload: bytes) -> None:
            model, response_id, *home = unpacked(payload)
            homes[model].learn(response_id, Home(*home))

        self.link.on(HOMES, heard)
        for model, known in homes.items():
            known.tell = partial(self._tell_home, model)

    def _tell_home(self, model: str, response_id: str, home: Home) -> None:
        self.link.tell(HOMES, packed((model, response_id, *home)))
