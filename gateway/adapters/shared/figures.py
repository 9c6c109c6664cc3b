"""What the worker processes counted, brought together when a page is asked for.

Every worker sends its counts each FIGURES_EVERY_S, so that little is lost with one that dies; a
page takes what the others count at that moment. What dead workers counted stays in the sum.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from gateway.adapters.shared.hub import Hub, Parts, Session
from gateway.adapters.shared.link import Link
from gateway.errors import StateFailure

FIGURES_EVERY_S: Final = 1.0
TOPIC: Final = "figures"


class SharedFigures:
    """A worker's side."""

    def __init__(
        self, link: Link, counts: Callable[[], bytes], figures: Callable[[], bytes]
    ) -> None:
        """`counts`: what is left when this process dies; `figures`: all that a page shows."""
        self._link = link
        self._counts = counts
        self._sent = b""
        self._task: asyncio.Task[None] | None = None
        link.on(TOPIC, lambda _: figures())

    async def others(self) -> Sequence[bytes]:
        """The figures of all other workers, and of those that are gone."""
        try:
            _, found = await self._link.parts(TOPIC)
        except StateFailure:
            return ()
        return found

    def start(self) -> None:
        """Begin to send; call within the running loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Send the last counts."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        await self._send(self._link.call)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(FIGURES_EVERY_S)
            await self._send(self._link.call_lazily)

    async def _send(self, call: Callable[[str, object], Awaitable[Any]]) -> None:
        counts = self._counts()
        if counts != self._sent:
            with contextlib.suppress(StateFailure):
                await call("counts", counts)
                self._sent = counts


class FiguresDesk:
    """The parent's side. It reads nothing of what it keeps but to add up what dead workers left."""

    def __init__(
        self,
        hub: Hub,
        merge: Callable[[Sequence[bytes]], bytes],
        own: Callable[[], bytes],
    ) -> None:
        """`merge` makes one payload of several; `own` gives what the parent itself counted."""
        self._hub = hub
        self._merge = merge
        self._own = own
        self._counts: dict[str, bytes] = {}
        """By session owner."""
        self._departed: bytes | None = None
        hub.serves("counts", self._keep)
        hub.serves(TOPIC, self._others)
        hub.when_gone(self._gone)

    async def _keep(self, session: Session, counts: bytes) -> None:
        self._counts[session.owner] = counts

    async def _others(self, session: Session, _value: Any) -> Parts:
        others = self._hub.others(session)
        told = await self._hub.gather(TOPIC, b"", others)
        found = [self._own()]
        for other in others:
            payload = told.get(other.index)
            if payload is None and other.owner in self._hub.owners:
                payload = self._counts.get(other.owner)  # it is busy: as it was
            if payload is not None:
                found.append(payload)
        if self._departed is not None:
            found.append(self._departed)
        return Parts(None, found)

    def _gone(self, session: Session) -> None:
        counts = self._counts.pop(session.owner, None)
        if counts is not None:
            known = [] if self._departed is None else [self._departed]
            self._departed = self._merge([*known, counts])
