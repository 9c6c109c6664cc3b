"""The HTTP protocol under a real uvicorn: bad heads, clients that leave, connections bounded."""

import asyncio
import gc
from collections.abc import Awaitable, Callable
from weakref import WeakSet

import orjson
import pytest

from gateway.http import client_connection
from gateway.http.protocol import GatewayProtocol
from gateway.payload.head import digest_of
from gateway.records.endpoint import CHAT
from tests.plane import MAX_HEAD, SOON_S, Connection, Gateway, request, until

# -- heads that come again


class Parsed:
    """How many headers the parser has told of."""

    def __init__(self) -> None:
        self.headers = 0


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Parsed:
    seen = Parsed()
    reported = GatewayProtocol.on_header

    def on_header(self: GatewayProtocol, name: bytes, value: bytes) -> None:
        seen.headers += 1
        reported(self, name, value)

    monkeypatch.setattr(GatewayProtocol, "on_header", on_header)
    return seen


async def known(gateway: Gateway, parsed: Parsed, extra: bytes = b"") -> Connection:
    """A client whose head has come twice."""
    client = await gateway.connect()
    for _ in range(2):
        await client.send(request(b"x", extra=extra))
        await client.answer()
    parsed.headers = 0
    return client


async def test_a_head_that_came_twice_is_not_parsed_again(gateway: Gateway, parsed: Parsed) -> None:
    client = await known(gateway, parsed, b"Authorization: Bearer one\r\n")
    for size in (1, 9, 10, 99, 100, 70_000):
        await client.send(request(b"x" * size, extra=b"Authorization: Bearer one\r\n"))
        assert (await client.answer())[2] == b"%d" % size
    assert {head.key_digest for head in gateway.pipeline.heads} == {digest_of(b"one")}
    # The last of them came in several reads.
    assert parsed.headers <= 4
    await client.leave()


async def test_a_client_that_sends_head_and_body_apart_is_known_too(
    gateway: Gateway, parsed: Parsed
) -> None:
    client = await gateway.connect()
    for number in range(4):
        head, _, body = request(b"x" * (number + 1)).partition(b"\r\n\r\n")
        await client.send(head + b"\r\n\r\n", body)
        assert (await client.answer())[2] == b"%d" % (number + 1)
    assert parsed.headers == 2 * 3


async def test_a_body_that_does_not_come_behind_a_known_head_is_waited_for_only_so_long(
    gateway: Gateway, parsed: Parsed
) -> None:
    client = await known(gateway, parsed)
    await client.send(request(b"abc")[:-2])
    await until(lambda: only_connection(gateway)._inbound_since_s is not None)
    gateway.sweep(client_connection.INBOUND_TIMEOUT_S - 1)
    await asyncio.sleep(0.02)
    assert gateway.connections()
    gateway.sweep(client_connection.INBOUND_TIMEOUT_S + 1)
    assert (await client.answer())[0] == 408
    assert await client.closed() == b""


async def test_a_gateway_that_shuts_down_refuses_known_heads_too(
    gateway: Gateway, parsed: Parsed
) -> None:
    client = await known(gateway, parsed)
    gateway.plane.draining = True
    await client.send(request(b"x"))
    assert (await client.answer())[0] == 503


async def test_a_client_that_leaves_a_request_with_a_known_head_cancels_it(
    gateway: Gateway, parsed: Parsed
) -> None:
    client = await known(gateway, parsed)
    await client.send(request(b"hang"))
    await until(lambda: gateway.pipeline.started == 3)
    await client.leave()
    await until(lambda: gateway.pipeline.cancelled == [b"hang"])


# -- bad heads


async def test_leave_to_send_a_body_is_given_each_time_it_is_asked_for(gateway: Gateway) -> None:
    client = await gateway.connect()
    for extra in (b"", b"Expect: 100-continue\r\n", b"Expect: 100-continue\r\n", b""):
        head, _, body = request(b"abc", extra=extra).partition(b"\r\n\r\n")
        await client.send(head + b"\r\n\r\n")
        if extra:
            leave = await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), SOON_S)
            assert leave.startswith(b"HTTP/1.1 100 ")
        await client.send(body)
        assert (await client.answer())[::2] == (200, b"3")


@pytest.mark.parametrize(
    "sent",
    [
        [request(extra=b"x-big: " + b"y" * MAX_HEAD + b"\r\n")],
        [b"POST / HTTP/1.1\r\n", *[b"x-%d: %s\r\n" % (n, b"y" * 500) for n in range(9)]],
    ],
    ids=["one large line", "no end"],
)
async def test_oversized_headers_get_a_431_in_openais_shape(
    gateway: Gateway, sent: list[bytes]
) -> None:
    client = await gateway.connect()
    await client.send(*sent)
    status, headers, body = await client.answer()
    assert (status, headers["x-sluice-reason"]) == (431, "headers_too_large")
    assert orjson.loads(body)["error"]["code"] == "headers_too_large"
    assert await client.closed() == b""
    assert gateway.pipeline.started == 0


@pytest.mark.parametrize("cut", [0, 1, 2, 3, 4, 5])
async def test_a_large_body_behind_a_head_is_no_large_head(gateway: Gateway, cut: int) -> None:
    """Also where the head's end came in two pieces."""
    client = await gateway.connect()
    whole = request(b"x" * 50_000)
    at = whole.index(b"\r\n\r\n") + 4 - cut if cut else 0
    await client.send(whole[:at], whole[at:])
    assert (await client.answer())[2] == b"50000"


async def test_each_head_is_counted_from_zero_and_bounded(gateway: Gateway) -> None:
    client = await gateway.connect()
    for _ in range(4):
        await client.send(request(extra=b"x-some: " + b"y" * (MAX_HEAD // 2) + b"\r\n"))
        assert (await client.answer())[0] == 200
    await client.send(request(extra=b"x-big: " + b"y" * MAX_HEAD + b"\r\n"))
    assert (await client.answer())[0] == 431


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS hello on a plain port
        b"hello\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nno colon here\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: x\r\n\r\n",
        b"CONNECT x:443 HTTP/1.1\r\nhost: x:443\r\n\r\n",
    ],
)
async def test_what_is_not_http_gets_a_400_in_openais_shape(
    gateway: Gateway, garbage: bytes
) -> None:
    client = await gateway.connect()
    await client.send(garbage)
    status, headers, body = await client.answer()
    assert (status, headers["content-type"]) == (400, "application/json")
    assert orjson.loads(body)["error"]["type"] == "invalid_request_error"
    assert headers["connection"] == "close"
    assert await client.closed() == b""


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("begun", [b"", b"P", b"POST /v1", request(b"x" * 99)[:-1]])
async def test_a_request_that_does_not_arrive_is_waited_for_only_so_long(
    gateway: Gateway, begun: bytes, before: int
) -> None:
    client = await gateway.connect()
    for _ in range(before):
        await client.send(request())
        await client.answer()
    await client.send(begun)
    gateway.sweep(client_connection.INBOUND_TIMEOUT_S - 1)
    await client.send(b"")
    assert not client.reader.at_eof()
    gateway.sweep(client_connection.INBOUND_TIMEOUT_S + 20)
    if begun:
        status, _, body = await client.answer()
        assert (status, orjson.loads(body)["error"]["code"]) == (408, "request_timeout")
    assert await client.closed() == b""
    assert gateway.plane.running == 0


@pytest.mark.parametrize("behind", [b"", b"POST /v1"])
async def test_a_request_that_has_arrived_may_run_as_long_as_it_takes(
    gateway: Gateway, behind: bytes
) -> None:
    """Half a request behind it does not end it."""
    client = await gateway.connect()
    await client.send(request(b"hang"))
    await until(lambda: gateway.pipeline.started)
    await client.send(behind)
    gateway.sweep(1e9)
    await client.send(b"")
    assert gateway.pipeline.cancelled == []
    assert gateway.plane.running == 1


async def test_a_connection_that_idles_between_requests_is_left_alone(gateway: Gateway) -> None:
    client = await gateway.connect()
    await client.send(request())
    await client.answer()
    gateway.sweep(GatewayProtocol.keep_alive_s - 1)
    await client.send(request())
    assert (await client.answer())[0] == 200


@pytest.mark.parametrize(
    ("head", "refused"),
    [
        (b"content-length: 50000000\r\n\r\n", 413),
        (b"transfer-encoding: chunked\r\n\r\n" + b"200000\r\n", 413),
        (b"x-padding: " + b"x" * 2 * MAX_HEAD, 431),
    ],
)
async def test_who_is_refused_while_sending_can_read_why(
    gateway: Gateway, head: bytes, refused: int
) -> None:
    """A connection that is closed with bytes unread is reset, and what was written is lost."""
    client = await gateway.connect()
    client.writer.write(b"POST %s HTTP/1.1\r\nhost: x\r\n%s" % (CHAT.path.encode(), head))
    for _ in range(40):
        client.writer.write(b"x" * 65_536)
        await client.writer.drain()
        await asyncio.sleep(0.001)
    status, headers, _ = await client.answer()
    assert (status, headers["connection"]) == (refused, "close")
    assert await client.closed() == b"", "nothing follows"
    assert not client.writer.is_closing()
    assert gateway.pipeline.started == 0
    gateway.sweep(client_connection.LINGER_S + 1.0)
    await until(lambda: not gateway.connections())


# -- clients that leave


async def test_a_client_that_leaves_cancels_its_request_and_no_other(gateway: Gateway) -> None:
    leaving, staying = await gateway.connect(), await gateway.connect()
    await leaving.send(request(b"hang 1"))
    await staying.send(request(b"hang 2"))
    await until(lambda: gateway.pipeline.started == 2)
    await leaving.leave()
    await until(lambda: gateway.pipeline.cancelled)
    assert gateway.pipeline.cancelled == [b"hang 1"]
    assert gateway.plane.running == 1
    await staying.leave()
    await until(lambda: gateway.plane.running == 0)


async def test_a_client_that_leaves_before_its_request_has_begun_leaves_a_trace(
    gateway: Gateway,
) -> None:
    await gateway.connect()
    await until(lambda: gateway._server.server_state.connections)
    connection = only_connection(gateway)
    connection.data_received(request(b"hang on"))
    connection.connection_lost(None)  # in the same turn of the loop
    assert gateway.pipeline.started == 0
    await until(lambda: gateway.pipeline.cancelled)
    assert (gateway.pipeline.started, gateway.pipeline.cancelled) == (1, [b"hang on"])
    await until(lambda: gateway.plane.running == 0)


@pytest.mark.parametrize(
    "sent", [request(b"hang"), request(b"stream"), request(b"x"), request(b"x" * 99)[:-9], b"POST"]
)
async def test_a_client_that_left_does_not_wait_for_the_garbage_collector(
    gateway: Gateway, sent: bytes
) -> None:
    """The collector hardly looks at what is old, as connections are."""

    def connections() -> WeakSet[GatewayProtocol]:
        return WeakSet(found for found in gc.get_objects() if isinstance(found, GatewayProtocol))

    before = connections()
    client = await gateway.connect()
    await client.send(sent)
    await until(lambda: connections() - before)
    held = connections() - before
    gc.disable()
    try:
        client.writer.transport.abort()
        await until(lambda: not held)
    finally:
        gc.enable()


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize(
    ("body", "url"),
    [
        *((body, CHAT.path.encode()) for body in (b"hang" + b"x" * 900_000, b"stream")),
        *(
            (b"hang", url)
            for url in (b"http://x:80" + CHAT.path.encode(), b"/v1/chat%2Fcompletions")
        ),
    ],
    ids=len,
)
async def test_a_client_that_leaves_cancels_its_request(
    gateway: Gateway, body: bytes, url: bytes, before: int
) -> None:
    """Reading is paused while a large body comes in; it goes on, or the leaving is not seen."""
    client = await gateway.connect()
    for _ in range(before):
        await client.send(request())
        await client.answer()
    await client.send(request(body).replace(CHAT.path.encode(), url, 1))
    await until(lambda: gateway.pipeline.started == before + 1)
    client.writer.transport.abort()
    await until(lambda: gateway.pipeline.cancelled == [body[:16]])
    await until(lambda: gateway.plane.running == 0)


async def test_a_client_that_does_not_read_stops_the_stream_and_is_cut_off(
    start: Callable[..., Awaitable[Gateway]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_connection, "WRITE_STALL_S", 0.2)
    gateway = await start()
    client = await gateway.connect()
    await client.send(request(b"stream"))
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await until(lambda: gateway.pipeline.cancelled)
    assert gateway.pipeline.written < 64 << 20, "bounded by the sockets' buffers"
    client.writer.transport.abort()


# -- connections


async def test_beyond_the_connections_it_may_hold_the_gateway_says_so(
    start: Callable[..., Awaitable[Gateway]],
) -> None:
    gateway = await start(max_connections=2)
    served, running = await gateway.connect(), await gateway.connect()
    await served.send(request())
    assert (await served.answer())[0] == 200
    await running.send(request(b"hang"))
    third = await gateway.connect()
    status, _, body = await third.answer()
    assert (status, orjson.loads(body)["error"]["code"]) == (503, "too_many_connections")
    await served.send(request())
    assert (await served.answer())[0] == 200
    await served.leave()
    await asyncio.sleep(0.02)
    fourth = await gateway.connect()
    await fourth.send(request())
    assert (await fourth.answer())[0] == 200


@pytest.mark.parametrize("sent", [b"", b"POST /v1", request(b"who"), request(b"abc")[:-1]])
async def test_connections_without_a_served_request_give_way_to_others(
    start: Callable[..., Awaitable[Gateway]], sent: bytes
) -> None:
    """Silent ones, half a request, a refused key: one address cannot keep the others out."""
    gateway = await start(max_connections=8)
    served = await gateway.connect()
    await served.send(request())
    assert (await served.answer())[0] == 200
    gateway.pipeline.known = False
    for _ in range(20):
        await (await gateway.connect()).send(sent)
        assert len(gateway.connections()) <= 8
    gateway.pipeline.known = True
    late = await gateway.connect()
    for client in (late, served):
        await client.send(request())
        assert (await client.answer())[0] == 200


def only_connection(gateway: Gateway) -> GatewayProtocol:
    (connection,) = gateway._server.server_state.connections
    assert isinstance(connection, GatewayProtocol)
    return connection
