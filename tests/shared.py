"""A parent and its workers in one process, over real sockets: for tests of what they share."""

import asyncio
import socket
from collections.abc import Callable

from gateway.adapters.shared.hub import Hub
from gateway.adapters.shared.link import Link


class Family:
    """A hub, and links of workers that joined it."""

    def __init__(self) -> None:
        self.hub = Hub()
        self.links: list[Link] = []

    async def join(
        self, index: int | None = None, prepare: Callable[[Link], object] = lambda _: None
    ) -> Link:
        """One more worker; `prepare` sees its link before that hears anything."""
        index = len(self.links) if index is None else index
        theirs, ours = socket.socketpair()
        link = Link(index)
        prepare(link)
        self.hub.attach(theirs, index)
        link.open(ours)
        self.links.append(link)
        await self.quiet(link)
        return link

    async def quiet(self, *links: Link) -> None:
        """Return once all that these (or all) workers said has been heard."""
        for link in links or self.links:
            if link.up:
                await link.ask("nobody asks this")

    async def die(self, link: Link) -> None:
        """End a worker as if it were killed: its end of the socket just closes."""
        gone = asyncio.Event()
        self.hub.when_gone(lambda session: gone.set() if session.index == link.index else None)
        link.close()
        await asyncio.wait_for(gone.wait(), 5)

    async def close(self) -> None:
        """Let go of all sockets."""
        for link in self.links:
            link.close()
        await self.hub.close()
        await asyncio.sleep(0.01)
