"""The same bytes get the same answer by every way they may take through the gateway.

Directly or in the plainest way over ASGI, with heads that are recognised or all of them parsed: the
same requests reach the pipeline, and the same statuses and bodies come back, however they are cut.
"""

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import httptools
import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st
from uvicorn.server import ServerState

from gateway.errors import Refusal
from gateway.http import data_plane, protocol
from gateway.http.data_plane import DataPlane, Receive, Scope, Send
from gateway.http.problems import error_body
from gateway.http.protocol import GatewayProtocol
from gateway.payload.head import pairs_of, read_head
from gateway.ports import ClientReply, Lines
from gateway.records.endpoint import CHAT
from gateway.records.request import Incoming, Principal, RequestHead

Read = tuple[bytes, bool]
"""What one read brings, and whether all is answered that can be before the next one."""
Reached = list[tuple[str, RequestHead, bytes]]
"""Requests that the pipeline was given."""
Answers = list[tuple[int, bytes]]


# -- the byte streams

CHAT_PATH = CHAT.path.encode()
OTHER_PATHS = [CHAT_PATH + b"?x=1", b"/v1/completions", b"/v1/chat%2Fcompletions", b"/health"]
MAX_CUTS = st.sampled_from([0, 0, 0, 2])
LINES = [
    b"Authorization: Bearer one",
    b"authorization:Bearer  two ",
    b"AUTHORIZATION: basic three",
    b"X-API-Key: four",
    b"api-key: ",
    b"Content-Type: application/json",
    b"content-type: text/plain",
    b"Content-Encoding: gzip",
    b"User-Agent: \xe9",
    b"TraceParent: 00-1-2-01",
    b"Accept: */*",
    b"Cookie: secret",
    b"X-Request-ID: mine",
    b"x-sluice-category: code",
    b"X-Sluice-Compress: off",
    b"x-stainless-read-timeout: 30",
    b"Connection: keep-alive",
    b"Connection: close",
    b"Connection: upgrade\r\nUpgrade: h2c",
    b"Expect: 100-continue",
]


Head = tuple[bytes, bytes]
"""Up to where the length of the body is told, and from there on."""


@st.composite
def heads(draw: st.DrawFn) -> Head:
    """Any head."""
    method = draw(st.sampled_from([b"POST"] * 8 + [b"GET", b"HEAD"]))
    path = draw(st.sampled_from([CHAT_PATH] * 6 + OTHER_PATHS))
    version = draw(st.sampled_from([b"1.1"] * 8 + [b"1.0"]))
    lines = [b"Host: x", *draw(st.lists(st.sampled_from(LINES), max_size=4))]
    at = draw(st.integers(0, len(lines)))
    before, after = (
        b"".join(b"%b\r\n" % line for line in part) for part in (lines[:at], lines[at:])
    )
    return b"%b %b HTTP/%b\r\n%b" % (method, path, version, before), after + b"\r\n"


@st.composite
def variants(draw: st.DrawFn, head: Head) -> Head:
    """A head in which one byte is another."""
    side = draw(st.integers(0, 1))
    at = draw(st.integers(0, len(head[side]) - 1))
    byte = draw(st.sampled_from([b"a", b"A", b"1", b" ", b":", b"\n"]))
    changed = head[side][:at] + byte + head[side][at + 1 :]
    return (changed, head[1]) if side == 0 else (head[0], changed)


@st.composite
def messages(draw: st.DrawFn, head: Head) -> bytes:
    """A request with this head."""
    body = draw(st.binary(max_size=40)) or draw(st.sampled_from([b"", b"stream", b"x" * 20_000]))
    before, after = head
    framing = draw(st.sampled_from([b"Content-Length: %d"] * 5 + [b"content-length:0%d ", b""]))
    if framing:
        return b"%b%b\r\n%b%b" % (before, framing % len(body), after, body)
    at = draw(st.integers(0, len(body)))
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(c), c) for c in (body[:at], body[at:]) if c)
    return b"%bTransfer-Encoding: chunked\r\n%b%b0\r\n\r\n" % (before, after, chunks)


@st.composite
def streams(draw: st.DrawFn) -> list[Read]:
    """Requests of one head and some much like it, one after the other, cut anywhere."""
    head = draw(heads())
    sent = [draw(messages(head)) for _ in range(draw(st.integers(1, 3)))]
    sent += [
        draw(messages(draw(st.sampled_from([head, draw(variants(head))]))))
        for _ in range(draw(st.integers(0, 3)))
    ]
    cuts: dict[int, bool] = {}
    at = 0
    for message in sent:
        for cut in draw(st.lists(st.integers(1, len(message)), max_size=draw(MAX_CUTS))):
            cuts[at + cut] = draw(st.booleans())
        at += len(message)
        if draw(st.sampled_from([True] * 7 + [False])):  # else it is pipelined
            cuts[at] = draw(st.sampled_from([True] * 7 + [False]))
    cuts[at] = True
    data = b"".join(sent)
    ends = sorted(cuts)
    return [(data[a:b], cuts[b]) for a, b in zip([0, *ends], ends, strict=False)]


# -- what they are sent to


class Echo:
    """Answers with the body, whole or streamed."""

    def __init__(self) -> None:
        self.reached: Reached = []

    def know(self, head: RequestHead) -> Principal:
        return Principal(entitlement="anybody", tenant="anybody")

    async def serve(self, incoming: Incoming, reply: ClientReply) -> None:
        self.reached.append((incoming.endpoint.path, incoming.head, incoming.body))
        if not incoming.body.startswith(b"stream"):
            await reply.send(200, b"content-type: text/plain\r\n", incoming.body)
            return
        await reply.start(200, b"content-type: text/event-stream\r\n")
        await reply.write(incoming.body[:3])
        await asyncio.sleep(0)
        await reply.write(incoming.body[3:])
        await reply.finish()


class OverAsgi:
    """The data plane with uvicorn reading requests and writing answers."""

    def __init__(self, plane: DataPlane, echo: Echo) -> None:
        self.plane = plane
        self.echo = echo

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = data_plane.endpoint_of(scope["path"])
        if endpoint is None or scope["method"] == "OPTIONS":
            await self.plane(scope, receive, send)
            return
        head, headers, body = read_head(scope["headers"]), dict(scope["headers"]), b""
        length = headers.get(b"content-length", b"0")
        reply: Any = AsgiReply(send)
        try:
            method, announced = scope["method"].encode(), int(length) if length.isdigit() else 0
            self.plane.check(method, endpoint, head, announced)
        except Refusal as refusal:
            closes = b"connection: close\r\n"
            await reply.send(refusal.status, closes, error_body(refusal, endpoint.dialect))
            return
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return
            body += message["body"]
            if not message["more_body"]:
                break
        incoming = Incoming(
            request_id="",
            lease_id="",
            endpoint=endpoint,
            head=head,
            body=body,
            received_s=0.0,
            received_unix_s=0.0,
        )
        await self.echo.serve(incoming, reply)


class AsgiReply:
    def __init__(self, send: Send) -> None:
        self._send = send

    async def start(self, status: int, lines: Lines) -> None:
        headers = pairs_of(lines)
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def finish(self) -> None:
        await self.write(b"", more=False)

    async def send(self, status: int, lines: Lines, body: bytes) -> None:
        await self.start(status, lines + b"content-length: %d\r\n" % len(body))
        await self.write(body, more=False)


async def control(scope: Scope, receive: Receive, send: Send) -> None:
    """The control plane: has nothing."""
    empty = [(b"content-length", b"0")]
    await send({"type": "http.response.start", "status": 404, "headers": empty})
    await send({"type": "http.response.body", "body": b""})


class Memory(asyncio.Transport):
    """A client's connection that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False
        self.ended = False
        """No more answers come."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = self.ended = True

    abort = close

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """It is never full."""

    def pause_reading(self) -> None:
        """No more is sent than was drawn."""

    def resume_reading(self) -> None:
        """See pause_reading."""


class Collected:
    """Answers as an HTTP client reads them, interim ones left out."""

    def __init__(self, data: bytes) -> None:
        self.answers: Answers = []
        self._parser = httptools.HttpResponseParser(self)
        self._parser.feed_data(data)

    def on_headers_complete(self) -> None:
        if (status := self._parser.get_status_code()) != 100:
            self.answers.append((status, b""))

    def on_body(self, body: bytes) -> None:
        status, before = self.answers[-1]
        self.answers[-1] = (status, before + body)


async def answers_to(reads: Sequence[Read], *, direct: bool) -> tuple[Reached, Answers, bool]:
    """What the pipeline was given, what came back, and whether that was all."""
    echo = Echo()
    plane = DataPlane(echo.serve, echo.know, control, new_id=lambda: "new", max_body_bytes=1 << 20)
    app: Any = plane if direct else OverAsgi(plane, echo)
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off")
    kind = type("Bound", (GatewayProtocol,), {"data_plane": plane})
    client, transport = kind(config, ServerState(), {}), Memory()
    client.connection_made(transport)
    never = nullcontext() if direct else patch.object(protocol, "endpoint_of", return_value=None)
    for data, settle in reads:
        if transport.closed:
            break
        with never:
            client.data_received(data)
        for _ in range(20 if settle else 0):
            await asyncio.sleep(0)
    assert not client.answering
    ended = transport.ended
    client.connection_lost(None)
    await asyncio.sleep(0)
    return echo.reached, Collected(transport.written).answers, ended


# -- the same


@settings(max_examples=500)
@given(streams())
def test_directly_and_over_asgi(reads: list[Read]) -> None:
    direct, asgi = (asyncio.run(answers_to(reads, direct=direct)) for direct in (True, False))
    assert direct == asgi


@settings(max_examples=500)
@given(streams())
def test_with_heads_recognised_and_parsed(reads: list[Read]) -> None:
    recognised = asyncio.run(answers_to(reads, direct=True))
    with patch.object(protocol, "learn", return_value=None):
        parsed = asyncio.run(answers_to(reads, direct=True))
    assert recognised == parsed


@pytest.mark.parametrize("direct", [True, False])
def test_an_answer_to_head_has_no_body(direct: bool) -> None:
    request = b"HEAD /v1/chat/completions HTTP/1.1\r\nHost: x\r\n\r\n"
    found = asyncio.run(answers_to([(request, True)], direct=direct))
    assert found == ([], [(405, b"")], True)
