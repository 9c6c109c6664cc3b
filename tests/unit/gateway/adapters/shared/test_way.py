"""A worker's end of the way that connections come by."""

import asyncio
import socket

from gateway.adapters.shared.way import Way


async def test_a_connection_counts_as_taken_once_its_protocol_stands() -> None:
    """Earlier, what a worker has taken less what is open would tell its parent of an end."""
    ours, theirs = socket.socketpair()
    made: list[asyncio.Protocol] = []

    class Client(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            made.append(self)
            transport.close()

    way = Way(theirs)
    way.open(Client)
    for count in range(1, 4):
        client, server = socket.socketpair()
        with client, server:
            socket.send_fds(ours, [b"c"], [server.fileno()])
        async with asyncio.timeout(5.0):
            while way.taken < count:
                assert way.taken <= len(made)
                await asyncio.sleep(0)
        assert len(made) == count
    way.close()
    ours.close()
