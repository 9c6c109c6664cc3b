"""Nothing that a client does refunds delivered tokens, or is held against an engine.

Every way to misbehave, in every phase of an answer, over real sockets. The engine writes each
phase only when it is told to, so a client misbehaves exactly there.
"""

import contextlib
import hashlib
import json
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import httpx
import pytest

from bench.common.fleet import MODEL, Fleet
from tests.running import serving

KEY: Final = "sk-test"
WAIT_S: Final = 10.0
STREAMED_TOKENS: Final = 8
WHOLE_TOKENS: Final = 77
WHOLE_BYTES: Final = 24 * 1024 * 1024
"""More than sockets hold."""


class Engine(socketserver.ThreadingTCPServer):
    """Answers chat; a request whose text names a phase stops there until `go` is set."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.reached = threading.Event()
        self.go = threading.Event()

    def stop_here(self) -> None:
        self.reached.set()
        self.go.wait(WAIT_S)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The gateway hangs up on purpose."""


class _Handler(socketserver.StreamRequestHandler):
    server: Engine

    def handle(self) -> None:
        while line := self.rfile.readline():
            length = 0
            while (header := self.rfile.readline()) not in (b"\r\n", b""):
                name, _, value = header.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            body = self.rfile.read(length)
            if line.startswith(b"GET"):
                card = {"id": MODEL, "object": "model", "max_model_len": 65536}
                self._whole(json.dumps({"object": "list", "data": [card]}).encode())
            else:
                self._chat(json.loads(body))

    def _whole(self, body: bytes) -> None:
        self.wfile.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
            % (len(body), body)
        )

    def _chat(self, asked: dict[str, Any]) -> None:
        phase = asked["messages"][0]["content"]
        if phase == "before the head":
            self.server.stop_here()
        if not asked.get("stream"):
            self._whole(_answer("x" * (WHOLE_BYTES if phase == "being written" else 5)))
            return
        self.wfile.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        self._event({"role": "assistant", "content": ""})
        if phase == "head sent":
            self.server.stop_here()
        for n in range(STREAMED_TOKENS):
            if phase == "mid-stream" and n == STREAMED_TOKENS // 2:
                self.server.stop_here()
            self._event({"content": f"t{n} "}, "stop" if n == STREAMED_TOKENS - 1 else None)
        usage = {"prompt_tokens": 9, "completion_tokens": STREAMED_TOKENS}
        self._chunk({"choices": [], "usage": usage})
        self._write(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, delta: dict[str, str], finish: str | None = None) -> None:
        self._chunk({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

    def _chunk(self, event: dict[str, Any]) -> None:
        event |= {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
        self._write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _write(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))


def _answer(text: str) -> bytes:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "finish_reason": "stop",
    }
    usage = {"prompt_tokens": 9, "completion_tokens": WHOLE_TOKENS}
    return json.dumps({"id": "c", "choices": [choice], "usage": usage}).encode()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine()
    with serving(engine):
        yield engine


@pytest.fixture(scope="module")
def fleet(engine: Engine) -> Iterator[Fleet]:
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    entitlement = {
        "name": "e",
        "tenant": "t",
        "model": MODEL,
        "api_keys": [f"sha256:{digest}"],
    }
    pool = {"max_model_len": 65536, "max_num_seqs": 64, "workers": [engine.url]}
    with Fleet(
        short=0,
        long=0,
        model={"pools": {"only": pool}},
        config={
            "entitlements": [entitlement],
            "health": {"interval_s": 30.0, "timeout_s": 10.0, "eject_after": 1},
        },
    ) as fleet:
        yield fleet


class Client:
    """One connection, and what came on it."""

    def __init__(self, fleet: Fleet) -> None:
        self.socket = socket.create_connection(("127.0.0.1", fleet.port))
        self.socket.settimeout(WAIT_S)
        self.got = b""

    def ask(self, phase: str, request_id: str) -> None:
        stream = phase in ("head sent", "mid-stream")
        messages = [{"role": "user", "content": phase}]
        body = {"model": MODEL, "messages": messages, "stream": stream}
        self.socket.sendall(asked(json.dumps(body).encode(), request_id))

    def read_until(self, mark: bytes) -> None:
        while mark not in self.got:
            data = self.socket.recv(1 << 20)
            assert data, f"closed before {mark!r}: {self.got[-300:]!r}"
            self.got += data

    def read_to_end(self) -> bytes:
        """All of the answer: until the gateway closes, or has sent the last of it."""
        with contextlib.suppress(TimeoutError):
            self.socket.settimeout(0.5 if self._ended() else WAIT_S)
            while data := self.socket.recv(1 << 20):
                self.got += data
                if self._ended():
                    self.socket.settimeout(0.5)
        return self.got

    def _ended(self) -> bool:
        return (
            self.got[-64:].endswith((b"\r\n0\r\n\r\n", b"\r\n00\r\n\r\n"))
            or b'tokens": 77}}' in (self.got[-64:])
        )


def asked(body: bytes, request_id: str) -> bytes:
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %s\r\n"
        b"content-type: application/json\r\nx-request-id: %s\r\ncontent-length: %d\r\n\r\n%s"
        % (KEY.encode(), request_id.encode(), len(body), body)
    )


# Ways to misbehave; those that stay get their whole answer.


def garbage(client: Client) -> None:
    client.socket.sendall(b"\x00\xff no HTTP at all\r\n\r\n" * 100)


def oversized_head(client: Client) -> None:
    client.socket.sendall(b"POST / HTTP/1.1\r\nx: " + b"y" * 100_000)


def second_request(client: Client) -> None:
    client.socket.sendall(asked(b"{}", "second"))


def half_close(client: Client) -> None:
    client.socket.shutdown(socket.SHUT_WR)


def reset(client: Client) -> None:
    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.socket.close()


def time_out(client: Client) -> None:
    """As clients do that waited long enough: they close."""
    time.sleep(0.1)
    client.socket.close()


def stop_reading(client: Client) -> None:
    """And go in the end, with bytes unread."""
    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    time.sleep(0.3)
    client.socket.close()


Way = Callable[[Client], None]
STAYS: Final[list[Way]] = [garbage, oversized_head, second_request, half_close]
LEAVES: Final[list[Way]] = [reset, time_out, stop_reading]
PHASES: Final = ("before the head", "head sent", "mid-stream", "being written", "after the end")


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("way", [*STAYS, *LEAVES], ids=lambda way: way.__name__)
def test_no_tokens_are_refunded_and_no_engine_blamed(
    fleet: Fleet, engine: Engine, way: Way, phase: str, request: pytest.FixtureRequest
) -> None:
    engine.reached.clear()
    engine.go.clear()
    request_id = f"{way.__name__}-{phase}".replace(" ", "-")
    client = Client(fleet)
    request.addfinalizer(client.socket.close)
    client.ask(phase, request_id)
    if phase == "being written":
        client.read_until(b"HTTP/1.1 200")
    elif phase == "after the end":
        client.read_until(b'tokens": 77}}')
    else:
        assert engine.reached.wait(WAIT_S)
        if phase != "before the head":
            client.read_until(b'"role"' if phase == "head sent" else b"t3 ")
    way(client)
    stays = way in STAYS
    time.sleep(0.05)  # what the client did is at the gateway before the engine goes on
    engine.go.set()
    answer = client.read_to_end() if stays else b""
    record = decision_of(fleet, request_id)

    delivered = {"head sent": 0, "mid-stream": STREAMED_TOKENS // 2}.get(phase, WHOLE_TOKENS)
    if stays:
        delivered = STREAMED_TOKENS if phase in ("head sent", "mid-stream") else WHOLE_TOKENS
        assert answer.count(b"HTTP/1.1 ") - answer.count(b"HTTP/1.1 100 ") == 1 or (
            phase == "after the end"
        ), "a second answer is in the first"
        assert b"[DONE]" in answer or b'tokens": 77}}' in answer
        assert record["outcome"] == "ok"
    elif phase == "before the head":
        delivered = 0
    assert record["outcome"] in ("ok", "disconnected")
    assert record["admission"]["charge_tokens"] > 0
    assert record.get("usage", {}).get("completion_tokens", 0) >= delivered
    assert {attempt["result"] for attempt in record["attempts"]} <= {"ok", "cancelled"}
    (worker,) = fleet.admin("/admin/pools").json()[0]["pools"][0]["workers"]
    assert worker["in_rotation"]
    assert worker["ejected_for_s"] == 0
    assert fleet.wait_until_idle() < WAIT_S


def decision_of(fleet: Fleet, request_id: str) -> dict[str, Any]:
    """Of a request that may be running still."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            return fleet.decision(request_id)
        except httpx.HTTPStatusError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
