"""What clients may send and do, with a key and without: it costs little, and spoils no answer."""

import asyncio
import gc
import logging
import time
import tracemalloc
from collections.abc import Awaitable, Callable

import httptools
import orjson
import pytest

from gateway.http import protocol, wrong_keys
from gateway.http.body_bytes import BodyBytes, LargeBodies
from gateway.records.endpoint import CHAT
from tests.plane import MAX_HEAD, Connection, Gateway, request, until

Start = Callable[..., Awaitable[Gateway]]
CHUNKED = (
    b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b"transfer-encoding: chunked\r\n\r\n" % CHAT.path.encode()
)


# -- trailers and framing


async def test_trailers_are_not_read(gateway: Gateway) -> None:
    client = await gateway.connect()
    await client.send(CHUNKED, b"3\r\nabc\r\n0\r\n", b"authorization: Bearer one\r\nx: y\r\n\r\n")
    assert (await client.answer())[2] == b"3"
    assert gateway.pipeline.heads[0].key_digest is None
    await client.send(request(b"ab"))
    assert (await client.answer())[2] == b"2"


@pytest.mark.parametrize(
    ("begun", "line"),
    [
        (b"3\r\nabc\r\n0\r\n", b"x: yyyyyyyy\r\n"),
        (b"3\r\nabc\r\n0\r\n", b"x: " + b"y" * 90_000),
        (b"3\r\nabc\r\n0\r\n", b"y"),
        (b"3;", b"x"),
    ],
    ids=["many", "long", "endless", "beside the size of a chunk"],
)
async def test_trailers_and_framing_are_bounded(
    gateway: Gateway, begun: bytes, line: bytes
) -> None:
    client = await gateway.connect()
    await client.send(CHUNKED, begun)
    await flood(client, line * (2_000_000 // len(line)))
    status, headers, body = await client.answer()
    assert (status, headers["connection"]) == (431, "close")
    assert orjson.loads(body)["error"]["code"] == "headers_too_large"
    assert gateway.pipeline.started == 0


async def test_short_chunks_earn_no_room_for_trailers(gateway: Gateway) -> None:
    client = await gateway.connect()
    await client.send(CHUNKED)
    await flood(client, b"20\r\n%s\r\n" % (b"x" * 32) * 20_000)
    await client.send(b"0\r\n")
    await flood(client, b"x: yyyyyyyy\r\n" * 80_000)
    assert (await client.answer())[0] == 431
    assert gateway.pipeline.started == 0


@pytest.mark.parametrize("opened", [True, False])
async def test_trailers_count_as_held(gateway: Gateway, opened: bool) -> None:
    gateway.pipeline.open = opened
    client = await gateway.connect()
    await client.send(CHUNKED, b"3\r\nabc\r\n0\r\n", b"x: " + b"y" * 3000)
    await until(lambda: gateway.unproven_held() > 3000)
    await client.send(b"\r\n\r\n")
    assert (await client.answer())[2] == b"3"
    assert gateway.unproven_held() == 0


async def test_a_refused_body_is_not_asked_for(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    client = await gateway.connect()
    head = CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0").replace(
        b"host", b"expect: 100-continue\r\nhost"
    )
    with caplog.at_level(logging.ERROR):
        await client.send(head + b"zz\r\n")
        assert (await client.answer())[0] == 400
        await asyncio.sleep(0.05)
    assert "Traceback" not in caplog.text


async def flood(client: Connection, data: bytes) -> None:
    """Send until nobody listens."""
    for at in range(0, len(data), 65_536):
        client.writer.write(data[at : at + 65_536])
        await asyncio.sleep(0.001)


async def test_a_head_has_only_so_many_lines(gateway: Gateway) -> None:
    """Each takes thirty times its bytes."""
    client = await gateway.connect()
    most = protocol.MAX_HEADERS - 3  # host, content-type and content-length are three
    await client.send(request(b"x", extra=b"a:b\r\n" * most))
    assert (await client.answer())[0] == 200
    await client.send(request(b"x", extra=b"a:b\r\n" * (most + 2)))
    assert (await client.answer())[0] == 431


# -- memory


async def test_a_body_in_tiny_chunks_takes_little_more_than_its_bytes(gateway: Gateway) -> None:
    gateway.pipeline.open = True  # or it would not be counted
    client = await gateway.connect()
    chunks = b"20\r\n%s\r\n" % (b"x" * 32) * 3_125
    await client.send(CHUNKED + b"1\r\nx\r\n")
    await until(gateway.connections)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        await client.send(chunks)
        held = gateway.unproven_held
        await until(lambda: held() >= 100_000)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 10 * 100_000
    finally:
        tracemalloc.stop()
    await client.send(b"0\r\n\r\n")
    assert (await client.answer())[2] == b"100001"


async def test_a_body_in_chunks_needs_a_key_before_any_of_it_is_parsed(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[bytes] = []
    monkeypatch.setattr(protocol.GatewayProtocol, "on_body", lambda _, body: parsed.append(body))
    gateway.pipeline.known = False
    client = await gateway.connect()
    await client.send(CHUNKED + b"1\r\nx\r\n" * 10_000)
    status, headers, _ = await client.answer()
    assert (status, headers["connection"]) == (401, "close")
    assert gateway.pipeline.started == 0
    assert parsed == []


@pytest.mark.parametrize("path", [CHAT.path, "/v1/models", "/admin/reload"])
async def test_tiny_chunks_are_refused_after_a_few(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    parsed: list[bytes] = []
    real = protocol.GatewayProtocol.on_body

    def on_body(self: protocol.GatewayProtocol, body: bytes) -> None:
        parsed.append(body)
        real(self, body)

    async def waits(*_: object) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(protocol.GatewayProtocol, "on_body", on_body)
    monkeypatch.setattr(gateway.plane, "_control", waits)
    client = await gateway.connect()
    await client.send(CHUNKED.replace(CHAT.path.encode(), path.encode()) + b"1\r\nx\r\n" * 40_000)
    status, headers, body = await client.answer()
    assert (status, headers["connection"]) == (400, "close")
    assert orjson.loads(body)["error"]["code"] == "chunks_too_small"
    assert len(parsed) <= protocol.FREE_CHUNKS + protocol.FREE_CHUNKS // 16


@pytest.mark.parametrize("size", [1, 40, 3000])
async def test_bodies_in_usual_chunks_are_served(gateway: Gateway, size: int) -> None:
    client = await gateway.connect()
    count = min(1000, 400_000 // size) if size < 32 else 400_000 // size
    await client.send(CHUNKED, b"%x\r\n%s\r\n" % (size, b"x" * size) * count, b"0\r\n\r\n")
    assert (await client.answer())[2] == b"%d" % (size * count)


@pytest.mark.parametrize(
    "coding", [b"gzip, chunked", b",chunked", b"gzip\r\ntransfer-encoding: chunked"]
)
@pytest.mark.parametrize("path", [CHAT.path, "/v1/models"])
async def test_a_transfer_coding_that_is_not_read_is_refused(
    gateway: Gateway, coding: bytes, path: str
) -> None:
    client = await gateway.connect()
    head = CHUNKED.replace(b"chunked", coding).replace(CHAT.path.encode(), path.encode())
    await client.send(head, b"3\r\nabc\r\n0\r\n\r\n")
    assert (await client.answer())[0] == 400
    assert gateway.pipeline.started == 0


@pytest.mark.parametrize("size", [40, 40_000])
async def test_a_wrong_key_is_looked_up_once_however_many_pieces_come(
    gateway: Gateway, size: int
) -> None:
    gateway.pipeline.known = False
    client = await gateway.connect()
    whole = request(b"x" * size)
    head = len(whole) - size
    await client.send(whole[:head], *(whole[at : at + 1] for at in range(head, head + 20)))
    assert gateway.pipeline.looked_up == 1
    await client.leave()


async def test_what_is_held_without_a_key_is_bounded_over_all_connections(start: Start) -> None:
    gateway = await start(bodies=BodyBytes(most_unproven_bytes=300_000), max_head_bytes=65_536)
    gateway.pipeline.known = False
    small = await gateway.connect()
    await small.send(request(b"small")[:-1])
    greedy = [await gateway.connect() for _ in range(8)]
    for n, client in enumerate(greedy):
        if n % 2:
            await client.send(b"POST / HTTP/1.1\r\nx: " + b"y" * 60_000)
        else:
            await client.send(request(b"x" * 90_000)[:60_000])
        assert gateway.unproven_held() <= 300_000
    refused = [client for client in greedy if client.reader._buffer]  # type: ignore[attr-defined]
    assert len(refused) >= 3
    for client in refused:
        status, _, body = await client.answer()
        assert (status, orjson.loads(body)["error"]["code"]) == (503, "too_much_unsent")
    await small.send(b"l")
    assert (await small.answer())[0] == 200
    for client in greedy:
        client.writer.transport.abort()
    await until(lambda: gateway.unproven_held() == 0)


def keyed(key: bytes, body: bytes) -> bytes:
    return request(body, extra=b"authorization: Bearer %s\r\n" % key)


async def test_bodies_of_one_key_leave_room_for_other_keys(start: Start) -> None:
    gateway = await start(bodies=BodyBytes(404_000))
    gateway.plane.bodies = gateway.bodies()
    body = b"wait" + b"x" * 99_996
    running = [await gateway.connect() for _ in range(2)]
    for client in running:
        await client.send(keyed(b"greedy", body))
    await until(lambda: gateway.pipeline.started == 2)
    for sent in (keyed(b"greedy", body)[:-50_000], _chunked(b"greedy", body)):
        refused = await gateway.connect()
        await refused.send(sent)  # the first is refused by what it announces
        status, headers, answer = await refused.answer()
        assert (status, headers["retry-after"]) == (429, "2")
        assert orjson.loads(answer)["error"]["type"] == "requests"
        assert orjson.loads(answer)["error"]["code"] == "too_many_body_bytes"
    other = await gateway.connect()
    await other.send(keyed(b"other", b"x" * 100_000))
    assert (await other.answer())[0] == 200
    gateway.pipeline.go.set()
    for client in running:
        assert (await client.answer())[0] == 200
    for _ in range(3):  # the head is known by then
        await other.send(keyed(b"greedy", body))
        assert (await other.answer())[0] == 200
    await until(lambda: gateway.bodies().total == 0)


async def test_what_waits_behind_a_known_head_counts_as_held(start: Start) -> None:
    gateway = await start(bodies=BodyBytes(130_000))
    gateway.plane.bodies = gateway.bodies()
    clients = [await gateway.connect() for _ in range(4)]
    for client in clients:
        for _ in range(3):
            await client.send(keyed(b"one", b"x"))
            assert (await client.answer())[0] == 200
        await client.send(keyed(b"one", b"x" * 40_000)[:-1])
        assert 40_000 < gateway.bodies().total < 65_000
    await clients[0].send(b"x")
    assert (await clients[0].answer())[0] == 200
    assert [(await client.answer())[0] for client in clients[1:]] == [429, 429, 429]
    await until(lambda: gateway.bodies().total == 0)


async def test_an_idle_connection_keeps_no_large_head(start: Start) -> None:
    gateway = await start(max_head_bytes=65_536)
    clients = [await gateway.connect() for _ in range(5)]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for client in clients:
            for n in range(3):
                large = b"".join(b"x-%d-%d: %s\r\n" % (n, line, b"y" * 500) for line in range(50))
                await client.send(request(b"x", extra=large))
                assert (await client.answer())[0] == 200
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("sent", ["announced", "half", "whole"])
async def test_whoever_leaves_holds_no_bytes(gateway: Gateway, sent: str) -> None:
    client = await gateway.connect()
    whole = keyed(b"one", b"hang" + b"x" * 500_000)
    size = {"announced": 300, "half": 250_000, "whole": len(whole)}[sent]
    await client.send(whole[:size])
    await until(lambda: gateway.bodies().total > 500_004)  # the head counts, too
    await client.leave()
    await until(lambda: gateway.bodies().total == 0)


async def test_large_bodies_come_in_whole_beside_each_other(start: Start) -> None:
    gateway = await start(large_bodies=LargeBodies(turn_bytes=100_000))
    gateway.plane.max_body_bytes = 8 << 20
    clients = [await gateway.connect() for _ in range(6)]

    async def send(client: Connection, number: int) -> None:
        body = b"%d" % number * (3_000_000 + number)
        await client.send(keyed(b"one", body) if number % 2 else _chunked(b"one", body))
        assert (await client.answer())[2] == b"%d" % len(body)

    async with asyncio.TaskGroup() as group:
        for number, client in enumerate(clients):
            group.create_task(send(client, number))
    await until(lambda: gateway.bodies().total == 0)


def _chunked(key: bytes, body: bytes) -> bytes:
    head = CHUNKED.replace(b"host", b"authorization: Bearer %s\r\nhost" % key)
    return head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


# -- behind a request that is answered


@pytest.mark.parametrize(
    "behind",
    [
        *(b"\r\n", b"\x00garbage\r\n\r\n", request(b"wait")),
        b"POST / HTTP/1.1\r\nx: " + b"y" * 2 * MAX_HEAD,
    ],
)
async def test_what_comes_behind_a_running_request_is_not_answered(
    gateway: Gateway, behind: bytes
) -> None:
    client = await gateway.connect()
    await client.send(request(b"wait"), behind)
    await until(lambda: gateway.pipeline.started)
    gateway.pipeline.go.set()
    assert (await client.answer())[::2] == (200, b"4")
    if behind == b"\r\n":  # as some clients end a body
        await client.send(request(b"four"))
        assert (await client.answer())[0] == 200
        return
    assert await client.closed() == b""
    assert gateway.pipeline.started == 1
    assert gateway.pipeline.cancelled == []


async def test_who_sends_without_end_behind_a_request_is_cut_off(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "_MAX_SURPLUS_BYTES", 500_000)
    client = await gateway.connect()
    await client.send(request(b"hang"))
    await until(lambda: gateway.pipeline.started)
    await flood(client, b"x" * 1_000_000)
    await until(lambda: gateway.pipeline.cancelled)


# -- half closed


async def test_a_client_that_says_no_more_is_answered(gateway: Gateway) -> None:
    client = await gateway.connect()
    await client.send(request(b"wait"))
    client.writer.write_eof()
    await until(lambda: gateway.pipeline.started)
    await asyncio.sleep(0.05)
    gateway.pipeline.go.set()
    interim = await client.reader.readuntil(b"\r\n\r\n")
    assert interim.startswith(b"HTTP/1.1 100 ")
    assert (await client.answer())[::2] == (200, b"4")
    assert await client.closed() == b""
    assert gateway.pipeline.cancelled == []


async def test_a_stream_goes_on_for_a_client_that_says_no_more(gateway: Gateway) -> None:
    client = await gateway.connect()
    await client.send(request(b"steps"))
    got = await client.reader.readuntil(b"one ")
    client.writer.write_eof()
    await asyncio.sleep(0.05)
    gateway.pipeline.go.set()
    seen = bytearray()

    class Told:
        def on_body(self, body: bytes) -> None:
            seen.extend(body)

    httptools.HttpResponseParser(Told()).feed_data(got + await client.closed())
    assert seen == b"one two "


@pytest.mark.parametrize("body", [b"hang", b"steps"])
async def test_a_client_that_says_no_more_and_goes_cancels_its_request(
    gateway: Gateway, body: bytes
) -> None:
    client = await gateway.connect()
    await client.send(request(body))
    await until(lambda: gateway.pipeline.started)
    began_s = time.monotonic()
    await client.leave()
    await until(lambda: gateway.pipeline.cancelled == [body])
    assert time.monotonic() - began_s < 2.0


@pytest.mark.parametrize("begun", [b"", b"POST /v1", request(b"x" * 99)[:-1]])
async def test_half_a_request_is_not_waited_for_when_no_more_can_come(
    gateway: Gateway, begun: bytes
) -> None:
    client = await gateway.connect()
    await client.send(begun)
    client.writer.write_eof()
    assert await client.closed() == b""


# -- wrong keys


async def test_who_tries_keys_waits_and_nobody_else(gateway: Gateway) -> None:
    """From one address; on one connection or on many."""
    trying = await gateway.connect()
    gateway.pipeline.known = False
    for _ in range(wrong_keys.FREE):
        await trying.send(request(b"who"))
        status, headers, _ = await trying.answer()
        assert status == 401
        if headers.get("connection") == "close":
            trying = await gateway.connect()
    for _ in range(2):
        await trying.send(request(b"who"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await trying.reader.readexactly(1)
        trying = await gateway.connect()
    gateway.pipeline.known = True
    known = await gateway.connect()
    async with asyncio.timeout(0.5):
        await known.send(request(b"x"))
        assert (await known.answer())[0] == 200


@pytest.mark.parametrize("end", ["leaves", "says no more", "sends on"])
async def test_a_client_that_does_not_wait_for_its_refusal_leaves_nothing(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(gateway.plane, "wrong_keys", Waits(0.2 if end != "leaves" else 100.0))
    gateway.pipeline.known = False
    client = await gateway.connect()
    await client.send(request(b"who"))
    await until(lambda: gateway.pipeline.started and not gateway.plane.running)
    if end == "leaves":
        await client.leave()
    elif end == "sends on":
        await client.send(request(b"who"))
        assert (await client.answer())[0] == 401
        assert await client.closed() == b""
        await client.leave()
    else:
        client.writer.write_eof()
        assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        assert (await client.answer())[0] == 401
        assert await client.closed() == b""
        await client.leave()
    await until(lambda: not gateway.connections())
    assert gateway.pipeline.started == 1


class Waits(wrong_keys.WrongKeys):
    """Has every refusal wait."""

    def __init__(self, wait_s: float) -> None:
        super().__init__()
        self.wait_s = wait_s

    def delay_s(self, address: str) -> float:
        return self.wait_s


# -- other protocols


@pytest.mark.parametrize("wish", [b"h2c", b"websocket", b"TLS/1.3"])
async def test_a_request_that_wishes_for_another_protocol_is_served_in_this_one(
    gateway: Gateway, wish: bytes
) -> None:
    client = await gateway.connect()
    extra = (
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %s\r\nHTTP2-Settings: AAMAAABk\r\n" % wish
    )
    for _ in range(3):
        await client.send(request(b"a body", extra=extra + b"Authorization: Bearer one\r\n"))
        assert (await client.answer())[::2] == (200, b"6")
    head = CHUNKED.replace(b"host", extra + b"host")
    await client.send(head, b"3\r\nabc\r\n", b"0\r\n\r\n")
    assert (await client.answer())[::2] == (200, b"3")
    whole = request(b"abcdefgh", extra=b"Connection: close\r\n" + extra)
    await client.send(whole[:-4], whole[-4:])
    status, headers, said = await client.answer()
    assert (status, headers["connection"], said) == (200, "close", b"8")
    assert await client.closed() == b""
    assert gateway.pipeline.heads[0].key_digest is not None


# -- the log


async def test_what_is_not_http_does_not_fill_the_log(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        for n in range(20):
            client = await gateway.connect()
            await client.send(b"hello\r\n\r\n" if n % 2 else request(b"x").replace(b"host", b"h t"))
            assert (await client.answer())[0] == 400
    assert len(caplog.records) <= 1
