"""A data plane over real sockets with a scripted pipeline, and clients of it."""

import asyncio
import contextlib
from collections.abc import Callable

import uvicorn

from gateway.errors import Unauthorized
from gateway.http.body_bytes import BodyBytes
from gateway.http.data_plane import DataPlane, Receive, Scope, Send
from gateway.http.protocol import GatewayProtocol
from gateway.ports import ClientReply
from gateway.records.endpoint import CHAT
from gateway.records.request import OPEN, Incoming, Principal, RequestHead

SOON_S = 20.0
MAX_HEAD = 4096


class FakePipeline:
    """Answers at once, later or never, or streams without end, by what the body says."""

    def __init__(self) -> None:
        self.started = 0
        self.cancelled: list[bytes] = []
        self.heads: list[RequestHead] = []
        self.written = 0
        self.go = asyncio.Event()
        """Ends the wait of bodies that begin with "wait" or "steps"."""
        self.known = True
        """Any key is; without, none."""
        self.open = False
        """Whether no key is asked for."""
        self.looked_up = 0

    def know(self, head: RequestHead) -> Principal:
        self.looked_up += 1
        if not self.known:
            raise Unauthorized("no", reason="invalid_api_key", code="invalid_api_key")
        if self.open:
            return OPEN
        name = "anybody" if head.key_digest is None else head.key_digest.hex()
        return Principal(entitlement=name, tenant=name)

    async def serve(self, incoming: Incoming, reply: ClientReply) -> None:
        self.started += 1
        self.heads.append(incoming.head)
        try:
            if incoming.body.startswith(b"hang"):
                await asyncio.get_running_loop().create_future()
            if incoming.body.startswith(b"who") and not self.known:
                refusal = Unauthorized("no", reason="invalid_api_key", code="invalid_api_key")
                await reply.refuse(refusal, b"")
                return
            if incoming.body.startswith(b"wait"):
                await self.go.wait()
            if incoming.body.startswith(b"steps"):
                await reply.start(200, b"content-type: text/event-stream\r\n")
                await reply.write(b"one ")
                await self.go.wait()
                await reply.write(b"two ")
                await reply.finish()
                return
            if incoming.body.startswith(b"stream"):
                await reply.start(200, b"content-type: text/event-stream\r\n")
                while True:
                    await reply.write(b"x" * 65_536)
                    self.written += 65_536
                    await asyncio.sleep(0)
            await reply.send(200, b"content-type: text/plain\r\n", b"%d" % len(incoming.body))
        except asyncio.CancelledError:
            self.cancelled.append(incoming.body[:16])
            raise


async def no_control(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("no test asks the control plane")


class Gateway:
    """A served data plane."""

    def __init__(self, pipeline: FakePipeline, plane: DataPlane, server: uvicorn.Server) -> None:
        self.pipeline = pipeline
        self.plane = plane
        self.port: int = server.servers[0].sockets[0].getsockname()[1]
        self._server = server
        self.clients: list[Connection] = []

    async def connect(self) -> "Connection":
        client = Connection(*await asyncio.open_connection("127.0.0.1", self.port))
        self.clients.append(client)
        return client

    def connections(self) -> set[object]:
        """Those that are open."""
        return set(self._server.server_state.connections)

    def bodies(self) -> BodyBytes:
        """What is held of requests."""
        kind: type[GatewayProtocol] = self._server.config.http_protocol_class  # type: ignore[assignment]
        return kind.bodies

    def unproven_held(self) -> int:
        """Bytes of requests that are still coming in, without a key."""
        return self.bodies().unproven

    def sweep(self, after_s: float) -> None:
        """What the server does now and then, so much later."""
        now_s = asyncio.get_running_loop().time()
        for connection in list(self._server.server_state.connections):
            assert isinstance(connection, GatewayProtocol)
            connection.sweep(now_s + after_s)


class Connection:
    """The client's side of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(0.005)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the next answer."""
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), SOON_S)
        first, *lines = head.decode().strip().split("\r\n")
        headers = {n.lower(): v for n, v in (line.split(": ", 1) for line in lines)}
        body = await self.reader.readexactly(int(headers["content-length"]))
        return int(first.split()[1]), headers, body

    async def closed(self) -> bytes:
        """What comes until the gateway closes."""
        try:
            return await asyncio.wait_for(self.reader.read(), SOON_S)
        except ConnectionError:
            return b""

    async def leave(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


def request(body: bytes = b"{}", *, extra: bytes = b"") -> bytes:
    return (
        b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n%s"
        b"content-length: %d\r\n\r\n%s" % (CHAT.path.encode(), extra, len(body), body)
    )


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(SOON_S):
        while not condition():  # noqa: ASYNC110 - the condition is any expression
            await asyncio.sleep(0.002)
