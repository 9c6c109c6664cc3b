"""The data plane as ASGI: what it refuses itself, ids, bodies, and clients that leave."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
import pytest

from gateway.errors import RateLimited
from gateway.http.data_plane import DataPlane, Message, Receive, Scope, Send
from gateway.payload.head import read_head
from gateway.ports import ClientReply
from gateway.records.endpoint import CHAT, MESSAGES
from gateway.records.request import Incoming, Principal, RequestHead

JSON = [(b"content-type", b"application/json")]
BODY = b'{"model":"m"}'

Behaviour = Callable[[Incoming, ClientReply], Awaitable[None]]


async def say_ok(incoming: Incoming, reply: ClientReply) -> None:
    await reply.send(200, b"x-request-id: %b\r\n" % incoming.request_id.encode(), b"ok")


class Hanging:
    """A pipeline that hangs and notes its cancellation."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.cancelled = False

    async def __call__(self, incoming: Incoming, reply: ClientReply) -> None:
        self.started.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.cancelled = True
            raise


class FakePipeline:
    """What the data plane hands its requests to; behaves as it is told."""

    def __init__(self, behave: Behaviour) -> None:
        self.behave = behave
        self.seen: list[Incoming] = []

    def know(self, head: RequestHead) -> Principal:
        """See Serve."""
        return Principal(entitlement=f"e-{head.entitlement}", tenant="t")

    async def serve(self, incoming: Incoming, reply: ClientReply) -> None:
        """See Serve."""
        self.seen.append(incoming)
        await self.behave(incoming, reply)


class Client:
    """One ASGI call made by hand: the messages to receive, and those that were sent."""

    def __init__(self, *messages: Message) -> None:
        self.messages = list(messages)
        self.sent: list[Message] = []
        self.received = 0
        self.waiting = asyncio.Event()
        """Set when there is nothing more to receive, until the client leaves."""
        self.leave = asyncio.Event()

    async def receive(self) -> Message:
        self.received += 1
        if self.messages:
            return self.messages.pop(0)
        self.waiting.set()
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        status: int = self.sent[0]["status"]
        return status

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(m["body"] for m in self.sent[1:])

    @property
    def error(self) -> Any:
        return orjson.loads(self.body)["error"]


def part(body: bytes = BODY, *, more: bool = False) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


def scope(
    headers: list[tuple[bytes, bytes]] | None = None,
    *,
    method: str = "POST",
    path: str = CHAT.path,
) -> Scope:
    found = JSON if headers is None else headers
    return {"type": "http", "method": method, "path": path, "headers": found}


class Plane:
    """A data plane over a fake pipeline."""

    def __init__(self, behave: Behaviour = say_ok) -> None:
        ids = itertools.count(1)
        self.pipeline = FakePipeline(behave)
        self.handed_on: list[Scope] = []
        self.app = DataPlane(
            self.pipeline,
            self._control,
            new_id=lambda: f"new-{next(ids)}",
            max_body_bytes=100,
        )

    async def _control(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.handed_on.append(scope)

    async def ask(self, client: Client, asked: Scope | None = None) -> Client:
        await self.app(asked or scope(), client.receive, client.send)
        assert self.app.running == 0
        return client


async def test_a_request_reaches_the_pipeline_with_its_body_and_headers() -> None:
    plane = Plane()
    client = await plane.ask(Client(part(b'{"a"', more=True), part(b":1", more=True), part(b"}")))
    seen = plane.pipeline.seen[0]
    assert (seen.body, seen.endpoint, seen.head) == (b'{"a":1}', CHAT, read_head(JSON))
    assert (client.status, client.body) == (200, b"ok")
    assert client.headers[b"content-length"] == b"2"


async def test_other_paths_and_other_protocols_go_to_the_control_plane() -> None:
    plane = Plane()
    others: list[Scope] = [scope(path="/health"), scope(path="/v1/chat"), {"type": "lifespan"}]
    for other in others:
        await plane.app(other, Client().receive, Client().send)
    assert plane.handed_on == others
    assert plane.pipeline.seen == []


# -- refusals of its own


async def test_another_method_is_405_in_the_dialect_of_its_endpoint_and_with_its_id() -> None:
    asked = scope([(b"x-request-id", b"mine")], method="GET")
    client = await Plane().ask(Client(part()), asked)
    assert (client.status, client.error["code"]) == (405, "method_not_allowed")
    assert client.headers[b"x-request-id"] == b"mine"
    client = await Plane().ask(Client(part()), scope(method="GET", path=MESSAGES.path))
    decoded = orjson.loads(client.body)
    assert (decoded["type"], set(decoded["error"])) == ("error", {"type", "message"})


async def test_a_body_announced_as_too_large_is_413_before_it_is_read() -> None:
    plane = Plane()
    client = await plane.ask(Client(part()), scope([*JSON, (b"content-length", b"101")]))
    assert (client.status, client.error["code"]) == (413, "request_too_large")
    assert client.received == 0
    assert client.headers[b"connection"] == b"close"
    assert plane.pipeline.seen == []


@pytest.mark.parametrize(
    "messages",
    [
        [part(b"x" * 101)],
        [part(b"x" * 60, more=True), part(b"x" * 41)],
        [part(b"x" * 60, more=True), part(b"x" * 41, more=True), part(b"")],
        [part(b"x" * 50, more=True)] * 100,
    ],
)
async def test_a_body_that_is_too_large_is_413_whatever_was_announced(
    messages: list[Message],
) -> None:
    client = await Plane().ask(Client(*messages), scope([*JSON, (b"content-length", b"5")]))
    assert client.status == 413


@pytest.mark.parametrize("pieces", [[part(b"x" * 100)], [part(b"x" * 50, more=True)] * 2])
async def test_a_body_of_exactly_the_limit_is_served(pieces: list[Message]) -> None:
    messages = [*pieces[:-1], {**pieces[-1], "more_body": False}]
    assert (await Plane().ask(Client(*messages))).status == 200


@pytest.mark.parametrize(
    "header",
    [
        (b"content-encoding", b"gzip"),
        (b"content-encoding", b"br"),
        (b"content-type", b"text/plain"),
        (b"content-type", b"multipart/form-data; boundary=x"),
    ],
)
async def test_what_is_not_plain_json_is_415(header: tuple[bytes, bytes]) -> None:
    plane = Plane()
    client = await plane.ask(Client(part()), scope([header]))
    assert client.status == 415
    assert client.error["code"].startswith("unsupported_content")
    assert plane.pipeline.seen == []


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"content-type", b"application/json; charset=utf-8")],
        [(b"content-type", b"Application/JSON")],
        [(b"content-encoding", b"identity")],
    ],
)
async def test_json_in_its_usual_spellings_is_served(headers: list[tuple[bytes, bytes]]) -> None:
    assert (await Plane().ask(Client(part()), scope(headers))).status == 200


async def test_while_draining_new_requests_are_503_that_say_to_retry() -> None:
    plane = Plane()
    plane.app.draining = True
    client = await plane.ask(Client(part()))
    assert (client.status, client.error["code"]) == (503, "shutting_down")
    assert client.headers[b"x-should-retry"] == b"true"
    assert client.headers[b"retry-after"] == b"1"
    assert client.headers[b"connection"] == b"close"
    assert plane.pipeline.seen == []
    await plane.ask(Client(), scope(method="GET", path="/ready"))
    assert len(plane.handed_on) == 1, "the control plane still answers"


# -- request ids


@pytest.mark.parametrize("name", [b"a", b"req-1", b"x" * 128, b"~!@#/:"])
async def test_the_clients_request_id_is_kept(name: bytes) -> None:
    plane = Plane()
    client = await plane.ask(Client(part()), scope([*JSON, (b"x-request-id", name)]))
    assert plane.pipeline.seen[0].request_id.encode() == name
    assert client.headers[b"x-request-id"] == name


@pytest.mark.parametrize("name", [b"", b"x" * 129, b"a b", b"a\r\nb: c", b"a\x00", "é".encode()])
async def test_a_request_id_that_could_harm_is_replaced(name: bytes) -> None:
    client = await Plane().ask(Client(part()), scope([*JSON, (b"x-request-id", name)]))
    assert client.headers[b"x-request-id"] == b"new-1"


async def test_requests_with_the_same_id_are_told_apart_inside() -> None:
    """The client chooses its request id; the lease's is ours."""
    plane = Plane()
    for _ in range(2):
        await plane.ask(Client(part()), scope([*JSON, (b"x-request-id", b"same")]))
    one, two = plane.pipeline.seen
    assert one.request_id == two.request_id == "same"
    assert len({one.lease_id, two.lease_id, "same"}) == 3


# -- streams


async def test_a_stream_is_sent_piece_by_piece() -> None:
    async def streaming(incoming: Incoming, reply: ClientReply) -> None:
        await reply.start(200, b"content-type: text/event-stream\r\n")
        assert reply.started
        await reply.write(b"a")
        await reply.write(b"b")
        await reply.finish()

    client = await Plane(streaming).ask(Client(part()))
    assert [(m.get("body"), m.get("more_body")) for m in client.sent[1:]] == [
        (b"a", True),
        (b"b", True),
        (b"", False),
    ]
    assert b"content-length" not in client.headers


# -- bugs


async def test_a_bug_is_a_500_in_openais_shape_that_tells_nothing_of_it() -> None:
    async def bug(incoming: Incoming, reply: ClientReply) -> None:
        raise ZeroDivisionError("secret")

    client = await Plane(bug).ask(Client(part()))
    assert (client.status, client.error["code"]) == (500, "internal_error")
    assert b"secret" not in client.body


async def test_a_bug_in_a_stream_ends_it_with_an_error_event() -> None:
    async def bug(incoming: Incoming, reply: ClientReply) -> None:
        await reply.start(200, b"")
        raise ZeroDivisionError("secret")

    client = await Plane(bug).ask(Client(part()))
    assert orjson.loads(client.body.removeprefix(b"data: "))["error"]["code"] == "internal_error"
    assert client.sent[-1]["more_body"] is False


# -- clients that leave


async def test_a_client_that_leaves_before_its_body_came_is_not_answered() -> None:
    plane = Plane()
    for messages in ([], [part(b"{", more=True)]):
        client = Client(*messages)
        client.leave.set()
        await plane.ask(client)
        assert client.sent == []
    assert plane.pipeline.seen == []


async def test_a_cancellation_that_is_not_a_disconnect_goes_on() -> None:
    hanging = Hanging()
    plane = Plane(hanging)
    task = asyncio.create_task(plane.ask(Client(part())))
    await hanging.started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert plane.app.running == 0


async def test_a_client_that_leaves_cancels_its_request() -> None:
    hanging = Hanging()
    plane, client = Plane(hanging), Client(part())
    task = asyncio.create_task(plane.ask(client))
    await hanging.started.wait()
    client.leave.set()
    await task
    assert hanging.cancelled


async def test_the_watcher_ends_with_its_request() -> None:
    before = asyncio.all_tasks()
    await Plane().ask(Client(part()))
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


def test_bodies_count_for_the_tenant_whichever_entitlement_they_are_of() -> None:
    plane = Plane().app
    shares = [plane.share(RequestHead(entitlement=name)) for name in "abcd"]
    most = plane.bodies._most
    shares[0].cover(most // 4)
    shares[1].cover(most // 4)
    with pytest.raises(RateLimited):
        shares[2].cover(most // 4)
