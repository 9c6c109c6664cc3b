"""What the data plane refuses itself, ids of requests, bugs behind it, and whose bytes count."""

import itertools
from collections.abc import Awaitable, Callable

import orjson
import pytest

from gateway.errors import RateLimited
from gateway.http.data_plane import DataPlane, Receive, Scope, Send
from gateway.ports import ClientReply
from gateway.records.endpoint import CHAT, MESSAGES
from gateway.records.request import Incoming, Principal, RequestHead
from tests.plane import Gateway

JSON = b"content-type: application/json\r\n"
BODY = b'{"model":"m"}'

Behaviour = Callable[[Incoming, ClientReply], Awaitable[None]]


async def say_ok(incoming: Incoming, reply: ClientReply) -> None:
    await reply.send(200, b"x-request-id: %b\r\n" % incoming.request_id.encode(), b"ok")


class Plane:
    """A served data plane over a pipeline that behaves as it is told."""

    def __init__(self, start: Callable[..., Awaitable[Gateway]]) -> None:
        ids = itertools.count(1)
        self.start = start
        self.behave: Behaviour = say_ok
        self.seen: list[Incoming] = []
        self.handed_on: list[str] = []
        self.app = DataPlane(
            self.serve,
            lambda head: Principal(entitlement=f"e-{head.entitlement}", tenant="t"),
            self._control,
            new_id=lambda: f"new-{next(ids)}",
            max_body_bytes=100,
        )

    async def serve(self, incoming: Incoming, reply: ClientReply) -> None:
        self.seen.append(incoming)
        await self.behave(incoming, reply)

    async def _control(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.handed_on.append(scope["path"])
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def ask(
        self, body: bytes | list[bytes] = BODY, lines: bytes = JSON, *, about: str = ""
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the answer; `about`: method and path."""
        gateway = await self.start(data_plane=self.app, bodies=self.app.bodies)
        client = await gateway.connect()
        framing = b"content-length: %d" % len(body)
        if isinstance(body, list):
            framing = b"transfer-encoding: chunked"
            body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (*body, b""))
        first = (about or f"POST {CHAT.path}").encode()
        ends = b"host: x\r\nconnection: close\r\n" + framing
        await client.send(b"%b HTTP/1.1\r\n%b%b\r\n\r\n%b" % (first, lines, ends, body))
        head, _, said = (await client.closed()).partition(b"\r\n\r\n")
        status, *pairs = head.decode().split("\r\n")
        assert self.app.running == 0
        headers = dict(pair.split(": ", 1) for pair in pairs)
        return int(status.split()[1]), headers, said


@pytest.fixture
def plane(start: Callable[..., Awaitable[Gateway]]) -> Plane:
    return Plane(start)


async def test_a_request_reaches_the_pipeline_with_its_body_and_headers(plane: Plane) -> None:
    status, headers, said = await plane.ask(
        [b'{"a"', b":1", b"}"], JSON + b"x-request-id: mine\r\n"
    )
    (seen,) = plane.seen
    assert (seen.body, seen.endpoint, seen.head.request_id) == (b'{"a":1}', CHAT, "mine")
    assert (status, said, headers["content-length"]) == (200, b"ok", "2")


async def test_other_paths_go_to_the_control_plane(plane: Plane) -> None:
    for path in ("/health/", "/v1/chat"):
        assert (await plane.ask(about=f"POST {path}"))[0] == 404
    assert plane.handed_on == ["/health", "/v1/chat"]
    assert plane.seen == []


# -- refusals of its own


async def test_another_method_is_405_in_the_dialect_of_its_endpoint_and_with_its_id(
    plane: Plane,
) -> None:
    own = JSON + b"x-request-id: mine\r\n"
    status, headers, said = await plane.ask(lines=own, about=f"GET {CHAT.path}")
    assert (status, orjson.loads(said)["error"]["code"]) == (405, "method_not_allowed")
    assert headers["x-request-id"] == "mine"
    decoded = orjson.loads((await plane.ask(about=f"GET {MESSAGES.path}"))[2])
    assert (decoded["type"], set(decoded["error"])) == ("error", {"type", "message"})
    status, headers, said = await plane.ask(b"", about=f"OPTIONS {CHAT.path}")
    assert (status, headers["allow"], said) == (204, "POST, OPTIONS", b"")


@pytest.mark.parametrize(
    ("body", "fits"),
    [
        *((b"x" * 100, True), ([b"x" * 50] * 2, True), (b"x" * 101, False)),
        *(([b"x" * 101], False), ([b"x" * 60, b"x" * 41], False)),
    ],
)
async def test_a_body_that_is_too_large_is_413(
    plane: Plane, body: bytes | list[bytes], fits: bool
) -> None:
    status, _, said = await plane.ask(body)
    assert status == (200 if fits else 413)
    assert (b"request_too_large" in said) == (not fits)
    assert len(plane.seen) == fits


@pytest.mark.parametrize(
    ("line", "status"),
    [
        *((b"content-encoding: " + coding, 415) for coding in (b"gzip", b"br")),
        *((b"content-type: text/plain", 415), (b"content-type: multipart/form-data; b=x", 415)),
        *((b"content-type: application/json; charset=utf-8", 200), (b"accept: */*", 200)),
        *((b"content-type: Application/JSON", 200), (b"content-encoding: identity", 200)),
    ],
)
async def test_what_is_not_plain_json_is_415(plane: Plane, line: bytes, status: int) -> None:
    found, _, said = await plane.ask(lines=line + b"\r\n")
    assert found == status
    assert len(plane.seen) == (status == 200)
    assert (b"unsupported_content" in said) == (status == 415)


# -- request ids


@pytest.mark.parametrize(
    ("name", "stays"),
    [
        *((name, True) for name in ("a", "req-1", "x" * 128, "~!@#/:")),
        *((name, False) for name in ("", "x" * 129, "a b", "a\tb", "é")),
    ],
)
async def test_the_clients_request_id_is_kept_unless_it_could_harm(
    plane: Plane, name: str, stays: bool
) -> None:
    _, headers, _ = await plane.ask(lines=JSON + f"x-request-id: {name}\r\n".encode())
    assert headers["x-request-id"] == (name if stays else "new-1")
    assert plane.seen[0].request_id == headers["x-request-id"]


async def test_requests_with_the_same_id_are_told_apart_inside(plane: Plane) -> None:
    """The client chooses its request id; the lease's is ours."""
    for _ in range(2):
        await plane.ask(lines=JSON + b"x-request-id: same\r\n")
    one, two = plane.seen
    assert one.request_id == two.request_id == "same"
    assert len({one.lease_id, two.lease_id, "same"}) == 3


@pytest.mark.parametrize("begun", [False, True])
async def test_a_bug_is_told_in_openais_shape_without_anything_of_it(
    plane: Plane, begun: bool
) -> None:
    async def bug(incoming: Incoming, reply: ClientReply) -> None:
        if begun:
            await reply.start(200, b"")
        raise ZeroDivisionError("secret")

    plane.behave = bug
    status, _, said = await plane.ask()
    assert status == (200 if begun else 500)
    assert b"internal_error" in said
    assert b"secret" not in said


async def test_bodies_count_for_the_tenant_whichever_entitlement_they_are_of(plane: Plane) -> None:
    shares = [plane.app.share(RequestHead(entitlement=name)) for name in "abcd"]
    most = plane.app.bodies._most
    shares[0].cover(most // 4)
    shares[1].cover(most // 4)
    with pytest.raises(RateLimited):
        shares[2].cover(most // 4)
