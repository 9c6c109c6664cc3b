"""The data plane as ASGI: what it refuses itself, ids, bodies, and clients that leave."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest

from gateway.errors import RateLimited
from gateway.http.data_plane import DataPlane, Message, Receive, Scope, Send
from gateway.ports import ClientReply
from gateway.records.endpoint import CHAT, MESSAGES
from gateway.records.request import Incoming, Principal, RequestHead

JSON = {"content-type": "application/json"}
BODY = b'{"model":"m"}'

Behaviour = Callable[[Incoming, ClientReply], Awaitable[None]]


async def say_ok(incoming: Incoming, reply: ClientReply) -> None:
    await reply.send(200, b"x-request-id: %b\r\n" % incoming.request_id.encode(), b"ok")


class Plane:
    """A data plane over a pipeline that behaves as it is told."""

    def __init__(self, behave: Behaviour = say_ok) -> None:
        ids = itertools.count(1)
        self.behave = behave
        self.seen: list[Incoming] = []
        self.handed_on: list[Scope] = []
        self.app = DataPlane(
            self.serve,
            self.know,
            self._control,
            new_id=lambda: f"new-{next(ids)}",
            max_body_bytes=100,
        )

    def know(self, head: RequestHead) -> Principal:
        return Principal(entitlement=f"e-{head.entitlement}", tenant="t")

    async def serve(self, incoming: Incoming, reply: ClientReply) -> None:
        self.seen.append(incoming)
        await self.behave(incoming, reply)

    async def _control(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.handed_on.append(scope)
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    async def ask(
        self,
        body: bytes | list[bytes] = BODY,
        headers: Any = None,
        *,
        method: str = "POST",
        path: str = CHAT.path,
    ) -> httpx.Response:
        async def pieces() -> AsyncIterator[bytes]:
            for piece in body:
                yield piece  # type: ignore[misc]  # of a list

        app: Any = self.app
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url="http://gateway"
        ) as client:
            answer = await client.request(
                method,
                path,
                content=body if isinstance(body, bytes) else pieces(),
                headers=JSON if headers is None else headers,
            )
        assert self.app.running == 0
        return answer


def code(answer: httpx.Response) -> Any:
    return answer.json()["error"]["code"]


async def test_a_request_reaches_the_pipeline_with_its_body_and_headers() -> None:
    plane = Plane()
    answer = await plane.ask([b'{"a"', b":1", b"}"], {**JSON, "x-request-id": "mine"})
    (seen,) = plane.seen
    assert (seen.body, seen.endpoint, seen.head.request_id) == (b'{"a":1}', CHAT, "mine")
    assert (answer.status_code, answer.content) == (200, b"ok")
    assert answer.headers["content-length"] == "2"


async def test_other_paths_and_other_protocols_go_to_the_control_plane() -> None:
    plane = Plane()
    for path in ("/health", "/v1/chat"):
        await plane.ask(path=path)
    await plane.app({"type": "lifespan"}, leaving([]), nowhere)
    assert [scope.get("path") for scope in plane.handed_on] == ["/health", "/v1/chat", None]
    assert plane.seen == []


# -- refusals of its own


async def test_another_method_is_405_in_the_dialect_of_its_endpoint_and_with_its_id() -> None:
    answer = await Plane().ask(headers={"x-request-id": "mine"}, method="GET")
    assert (answer.status_code, code(answer)) == (405, "method_not_allowed")
    assert answer.headers["x-request-id"] == "mine"
    decoded = (await Plane().ask(method="GET", path=MESSAGES.path)).json()
    assert (decoded["type"], set(decoded["error"])) == ("error", {"type", "message"})


@pytest.mark.parametrize(
    ("body", "announced"),
    [
        *((b"x" * 101, None), (BODY, "101"), ([b"x" * 101], "5"), ([b"x" * 50] * 100, "5")),
        *(([b"x" * 60, b"x" * 41], "5"), ([b"x" * 60, b"x" * 41, b""], "5")),
    ],
)
async def test_a_body_that_is_too_large_is_413_whatever_was_announced(
    body: bytes | list[bytes], announced: str | None
) -> None:
    plane = Plane()
    more = {} if announced is None else {"content-length": announced}
    answer = await plane.ask(body, JSON | more)
    assert (answer.status_code, code(answer)) == (413, "request_too_large")
    assert answer.headers["connection"] == "close"
    assert plane.seen == []
    for fits in (b"x" * 100, [b"x" * 50] * 2):
        assert (await plane.ask(fits)).status_code == 200


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ({"content-encoding": "gzip"}, 415),
        ({"content-encoding": "br"}, 415),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "multipart/form-data; boundary=x"}, 415),
        ({}, 200),
        ({"content-type": "application/json; charset=utf-8"}, 200),
        ({"content-type": "Application/JSON"}, 200),
        ({"content-encoding": "identity"}, 200),
    ],
)
async def test_what_is_not_plain_json_is_415(header: dict[str, str], status: int) -> None:
    plane = Plane()
    answer = await plane.ask(headers=header)
    assert answer.status_code == status
    assert len(plane.seen) == (status == 200)
    assert status == 200 or code(answer).startswith("unsupported_content")


# -- request ids


@pytest.mark.parametrize(
    ("name", "stays"),
    [
        *((name, True) for name in ("a", "req-1", "x" * 128, "~!@#/:")),
        *((name, False) for name in ("", "x" * 129, "a b", "a\r\nb: c", "a\x00", "é")),
    ],
)
async def test_the_clients_request_id_is_kept_unless_it_could_harm(name: str, stays: bool) -> None:
    plane = Plane()
    answer = await plane.ask(headers={**JSON, "x-request-id": name.encode()})
    assert answer.headers["x-request-id"] == (name if stays else "new-1")
    assert plane.seen[0].request_id == answer.headers["x-request-id"]


async def test_requests_with_the_same_id_are_told_apart_inside() -> None:
    """The client chooses its request id; the lease's is ours."""
    plane = Plane()
    for _ in range(2):
        await plane.ask(headers={**JSON, "x-request-id": "same"})
    one, two = plane.seen
    assert one.request_id == two.request_id == "same"
    assert len({one.lease_id, two.lease_id, "same"}) == 3


# -- streams and bugs


@pytest.mark.parametrize("begun", [False, True])
async def test_a_bug_is_told_in_openais_shape_without_anything_of_it(begun: bool) -> None:
    async def bug(incoming: Incoming, reply: ClientReply) -> None:
        if begun:
            await reply.start(200, b"")
        raise ZeroDivisionError("secret")

    answer = await Plane(bug).ask()
    assert answer.status_code == (200 if begun else 500)
    assert b"internal_error" in answer.content
    assert b"secret" not in answer.content


# -- clients that leave


def leaving(messages: list[Message], left: asyncio.Event | None = None) -> Receive:
    """What a client sends before it leaves, at once or when it is told to."""
    rest = iter(messages)

    async def receive() -> Message:
        for message in rest:
            return message
        if left is not None:
            await left.wait()
        return {"type": "http.disconnect"}

    return receive


async def nowhere(_: Message) -> None:
    return


SCOPE: Scope = {
    "type": "http",
    "method": "POST",
    "path": CHAT.path,
    "headers": [(b"content-type", b"application/json")],
}


@pytest.mark.parametrize("sent", [[], [{"type": "http.request", "body": b"{", "more_body": True}]])
async def test_a_client_that_leaves_before_its_body_came_is_not_answered(
    sent: list[Message],
) -> None:
    plane, answers = Plane(), list[Message]()

    async def send(message: Message) -> None:
        answers.append(message)

    await plane.app(SCOPE, leaving(sent), send)
    assert (answers, plane.seen) == ([], [])


@pytest.mark.parametrize("leaves", [True, False])
async def test_a_client_that_leaves_cancels_its_request_and_so_does_the_server(
    leaves: bool,
) -> None:
    begun, left, ends = asyncio.Event(), asyncio.Event(), list[str]()

    async def hanging(incoming: Incoming, reply: ClientReply) -> None:
        begun.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ends.append("cancelled")

    before = asyncio.all_tasks()
    receive = leaving([{"type": "http.request", "body": BODY}], left)
    task = asyncio.ensure_future(Plane(hanging).app(SCOPE, receive, nowhere))
    await begun.wait()
    if leaves:
        left.set()
        await task
    else:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
    assert ends == ["cancelled"]
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
