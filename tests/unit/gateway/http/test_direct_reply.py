"""An answer's end that meets a client who has just left."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest
import uvloop
from uvicorn.protocols.http.flow_control import FlowControl

from gateway.errors import Unavailable
from gateway.http.data_plane import DirectReply
from gateway.records.endpoint import CHAT


class _Connection(asyncio.Protocol):
    """A client's connection on uvloop, whose closed transports raise."""

    def __init__(self) -> None:
        self.made = asyncio.get_running_loop().create_future()
        self.lost = asyncio.get_running_loop().create_future()
        self.answers = 0

    @property
    def flow(self) -> FlowControl:
        return FlowControl(self.transport)

    @property
    def transport(self) -> asyncio.Transport:
        found: asyncio.Transport = self.made.result()
        return found

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.made.set_result(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set_result(None)

    def wrong_key_delay_s(self) -> float:
        return 0.0

    def finished(self) -> None:
        self.answers += 1

    def ended(self, reply: DirectReply) -> None:
        return


class _Slow:
    """A client that takes what is written only when it is asked to."""

    def __init__(self) -> None:
        self.flow = self
        self.transport = self
        self.write_paused = True
        self.unread = self.most = self.answers = 0

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        self.unread += len(data)
        self.most = max(self.most, self.unread)

    async def drain(self) -> None:
        await asyncio.sleep(0)
        self.unread = 0

    def finished(self) -> None:
        self.answers += 1


async def test_a_large_answer_is_written_as_the_client_takes_it() -> None:
    client = _Slow()
    reply = DirectReply(CHAT, client)  # type: ignore[arg-type]
    sending = asyncio.ensure_future(reply.send(200, b"", bytes(300_000)))
    await asyncio.sleep(0)
    assert not sending.done(), "its lease lasts as long"
    await sending
    assert client.answers == 1
    assert client.most <= 65_536


async def _streamed(reply: DirectReply) -> None:
    await reply.start(200, b"content-type: text/event-stream\r\n")
    await reply.write(b"data: {}\n\n")
    await reply.finish()


async def _whole(reply: DirectReply) -> None:
    await reply.send(200, b"", b"{}")


async def _refused(reply: DirectReply) -> None:
    await reply.refuse(Unavailable("no", reason="none", code="none"), b"")


async def _broken_off(reply: DirectReply) -> None:
    await reply.break_off(Unavailable("no", reason="none", code="none"))


@pytest.mark.parametrize("answer", [_streamed, _whole, _refused, _broken_off])
def test_to_a_client_that_has_gone_nothing_is_written(
    answer: Callable[[DirectReply], Awaitable[None]],
) -> None:
    async def scenario() -> None:
        connection = _Connection()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: connection, "127.0.0.1", 0)
        with socket.create_connection(server.sockets[0].getsockname()):
            await connection.made
        server.close()
        await connection.lost
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError):
            connection.transport.write(b"x")
        reply = DirectReply(CHAT, connection)
        await answer(reply)
        assert reply.finished
        assert connection.answers == 1

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(scenario(), 5.0))
