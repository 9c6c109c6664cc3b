"""An engine that lies in every way: no traceback, no wrong charge, no other request delayed."""

import asyncio
import contextlib
import gzip
import json
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
import yaml

from bench.common.fleet import ADMIN_KEY, GatewayProcess
from sluice.children import Children, free_ports
from tests.asking import until
from tests.builders import OVERFLOWS, answer_body, chunk, error_answer, event, usage_chunk

pytestmark = pytest.mark.alone

CHAT = "/v1/chat/completions"
CAP = 16
MAX_CHARGE = 200
"""Of a prompt of two letters, generously estimated, and CAP tokens."""
SOON_S = 0.75
"""Within which the honest engine's answer comes back while the other one lies."""

JSON = b"content-type: application/json\r\n"
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"
HUGE = 10**30


def sized(body: bytes, status: bytes = b"200 OK", head: bytes = JSON) -> bytes:
    """A whole answer."""
    return b"HTTP/1.1 %b\r\n%bcontent-length: %d\r\n\r\n%b" % (status, head, len(body), body)


def chunked(*pieces: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + end


def streamed(*pieces: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    return SSE + chunked(*pieces, end=end)


def used(**usage: object) -> bytes:
    choice = {"index": 0, "message": {"content": "hi"}, "finish_reason": "stop"}
    return sized(json.dumps({"id": "c", "choices": [choice], "usage": usage}).encode())


def stream_used(**usage: object) -> bytes:
    said = event({"choices": [], "usage": usage})
    return streamed(chunk("hi"), chunk(finish="stop"), said, DONE)


OK = sized(answer_body())
START = b"HTTP/1.1 200 OK\r\n" + JSON
CHUNKED = START + b"transfer-encoding: chunked\r\n\r\n"
ERROR = event({"error": {"message": "out of memory", "code": 500}})
FLOOD = b"x-flood: " + b"y" * 1000 + b"\r\n"
REPEATED = b"*"
"""After this piece the next one is repeated until the gateway has enough."""
SILENCE = b""
"""Says nothing more, and keeps the connection."""

LIES: dict[str, list[bytes]] = {
    # what is no HTTP
    "closes at once": [],
    "silent": [SILENCE],
    "another protocol": [b"SSH-2.0-OpenSSH_9.6\r\n"],
    "binary": [bytes(range(256)) * 8],
    "half a status line": [b"HTTP/1.1 20"],
    "a status of letters": [b"HTTP/1.1 abc OK\r\n\r\n"],
    "a status of one digit": [sized(b"{}", b"2 OK")],
    "a status beyond all": [sized(b"{}", b"999 Beyond")],
    "version 9.9": [OK.replace(b"HTTP/1.1", b"HTTP/9.9")],
    "HTTP/2 preface": [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"],
    "head without an end": [START],
    "head without an end, silent": [START, SILENCE],
    "a NUL in a header": [START + b"x: a\0b\r\n\r\n"],
    "a header without a colon": [START + b"nonsense\r\n\r\n"],
    "a space before the colon": [START + b"x : y\r\n\r\n"],
    "header flood": [b"HTTP/1.1 200 OK\r\n", REPEATED, FLOOD],
    "a header without an end": [b"HTTP/1.1 200 OK\r\nx: ", REPEATED, b"y" * 1000],
    "a status line without an end": [b"HTTP/1.1 200 ", REPEATED, b"O" * 1000],
    "interim flood": [REPEATED, b"HTTP/1.1 100 Continue\r\n\r\n" * 40],
    "switches protocols": [b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n"],
    # lengths
    "two lengths": [START + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}"],
    "length and chunks": [CHUNKED.replace(b"transfer", b"content-length: 2\r\ntransfer") + b"{}"],
    "a negative length": [START + b"content-length: -1\r\n\r\n{}"],
    "a length of letters": [START + b"content-length: two\r\n\r\n{}"],
    "a length beyond all": [START + b"content-length: %d\r\n\r\n{}" % HUGE],
    "a length too long, closes": [START + b"content-length: 99\r\n\r\n{}"],
    "a length too long, silent": [START + b"content-length: 99\r\n\r\n{}", SILENCE],
    "a length too short": [OK + b"tail of the answer"],
    "a second answer": [OK + sized(b'{"other": "tenant"}')],
    "no length, cut": [START + b"\r\n" + answer_body()[:30]],
    # chunks and trailers
    "a chunk size of letters": [CHUNKED + b"zz\r\n{}"],
    "a chunk size beyond all": [CHUNKED + b"f" * 40 + b"\r\n{}"],
    "a chunk longer than said": [CHUNKED + b"1\r\n{}\r\n0\r\n\r\n"],
    "chunks without an end": [CHUNKED + chunked(answer_body(), end=b"")],
    "a chunk extension without an end": [CHUNKED + b"1;", REPEATED, b"x" * 1000],
    "trailer flood": [CHUNKED + chunked(answer_body(), end=b"0\r\n"), REPEATED, FLOOD],
    "a trailer without an end": [CHUNKED + chunked(b"{}", end=b"0\r\nx: "), REPEATED, b"y" * 999],
    "trailers that are headers": [
        CHUNKED + chunked(answer_body(), end=b"0\r\ncontent-length: 0\r\n\r\n")
    ],
    # statuses and encodings that are no answer
    "no content": [b"HTTP/1.1 204 No Content\r\n\r\n"],
    "moved": [b"HTTP/1.1 301 Moved\r\nlocation: http://127.0.0.1/\r\ncontent-length: 0\r\n\r\n"],
    "not modified": [b"HTTP/1.1 304 Not Modified\r\n\r\n"],
    "compressed unasked": [
        sized(gzip.compress(answer_body()), head=JSON + b"content-encoding: gzip\r\n")
    ],
    # JSON
    "an empty answer": [sized(b"")],
    "cut JSON": [sized(answer_body()[:-5])],
    "HTML": [sized(b"<html>502</html>", head=b"content-type: text/html\r\n")],
    "a list": [sized(b"[1, 2]")],
    "100,000 deep": [sized(b'{"choices": ' + b"[" * 100_000 + b"]" * 100_000 + b"}")],
    "no UTF-8": [sized(answer_body().replace(b"hi", b"\xff\xfe"))],
    "choices of another kind": [sized(b'{"choices": {"a": 1}, "usage": []}')],
    "an error of another kind": [sized(b'{"error": [[]]}', b"400 Bad")],
    "an error without words": [sized(b"", b"400 Bad")],
    "an overflow that is none": [sized(error_answer(OVERFLOWS[1]), b"400 Bad")],
    # usage
    "usage beyond all": [used(prompt_tokens=HUGE, completion_tokens=HUGE)],
    "more than the window": [used(prompt_tokens=10**6, completion_tokens=5)],
    "more output than asked for": [used(prompt_tokens=10, completion_tokens=5000)],
    "more cached than there was": [
        used(
            prompt_tokens=10,
            completion_tokens=3,
            prompt_tokens_details={"cached_tokens": 999_999},
        )
    ],
    "negative usage": [used(prompt_tokens=-5, completion_tokens=-5)],
    "usage of strings": [used(prompt_tokens="1000000", completion_tokens=[])],
    "usage of fractions": [used(prompt_tokens=1e308, completion_tokens=0.5)],
    "usage in a stream beyond all": [stream_used(prompt_tokens=HUGE, completion_tokens=HUGE)],
    "more output than was streamed": [stream_used(prompt_tokens=10, completion_tokens=9_000)],
    "negative usage in a stream": [stream_used(prompt_tokens=-1, completion_tokens=-1)],
    # streams
    "an empty stream": [streamed()],
    "a stream of comments": [streamed(*[b": ping\n\n"] * 100)],
    "comments without an end": [SSE, REPEATED, chunked(b": ping\n\n", end=b"")],
    "only done": [streamed(DONE)],
    "a stream without a finish": [streamed(chunk("a"), DONE)],
    "a stream that is cut": [SSE + chunked(chunk("a"), end=b"")],
    "a stream that stalls": [SSE + chunked(chunk("a"), end=b""), SILENCE],
    "an event without an end": [SSE, REPEATED, chunked(b"data: " + b"x" * 60_000, end=b"")],
    "an error event first": [streamed(ERROR, DONE)],
    "an error event later": [streamed(chunk("a"), ERROR, DONE)],
    "a finish in broken JSON": [streamed(b'data: {"finish_reason":"stop"\n\n', DONE)],
    "a finish 100,000 deep": [
        streamed(b'data: {"finish_reason":"stop","x":' + b"[" * 100_000 + b"\n\n", DONE)
    ],
    "lines of every kind": [
        streamed(b": c\n\n" + chunk("a", end=b"\r\n\r\n") + b"\r\r\n\n", chunk(finish="stop"))
    ],
    "events after done": [streamed(chunk(finish="stop"), DONE, chunk("a") * 50, usage_chunk())],
    "a stream with a broken chunk": [SSE + chunked(chunk("a"), end=b"zz\r\n")],
}
STREAMS = {name for name, lie in LIES.items() if lie and lie[0].startswith(SSE)}


class Liar:
    """An engine on a thread of its own: it lies as the request's `user` says."""

    def __init__(self) -> None:
        self.port = free_ports(1)[0]
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._run()))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(10)
        self._loop.close()

    async def _run(self) -> None:
        server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        await self._ended.wait()
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.05)  # until transports are closed

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._answer(reader, writer)
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lines = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
                body = await reader.readexactly(int(lines.get(b"content-length", b"0")))
                if head.startswith(b"GET"):
                    writer.write(sized(b"{}"))
                    continue
                lie = json.loads(body)["user"]
                if lie == "honest":
                    writer.write(OK)
                    continue
                async for piece in told(LIES[lie]):
                    writer.write(piece)
                    await writer.drain()
                break


async def told(lie: list[bytes]) -> AsyncIterator[bytes]:
    """The pieces, one after the other."""
    repeat = False
    for piece in lie:
        if piece == REPEATED:
            repeat = True
        elif piece == SILENCE:
            await asyncio.sleep(30)
        else:
            yield piece
            for _ in range(200_000 if repeat else 0):
                yield piece
                await asyncio.sleep(0)


class Gateway:
    """A gateway before the liar, which is also an honest model's engine."""

    def __init__(self, folder: Path, engine: Liar) -> None:
        port = free_ports(1)[0]
        pool = {"max_model_len": 8192, "max_num_seqs": 64}
        url = f"http://127.0.0.1:{engine.port}"
        config: dict[str, Any] = {
            "version": 1,
            "server": {"host": "127.0.0.1", "port": port, "admin_key": ADMIN_KEY},
            "timeouts": {"connect_s": 2, "first_byte_s": 1, "idle_s": 1},
            "retry": {"max_attempts": 1},
            "models": [
                {"name": "lies", "pools": {"only": {**pool, "workers": [f"{url}/lies"]}}},
                {"name": "honest", "pools": {"only": {**pool, "workers": [f"{url}/honest"]}}},
            ],
        }
        file = folder / "sluice.yaml"
        file.write_text(yaml.safe_dump(config), encoding="utf-8")
        self.log = folder / "log"
        self.replica = GatewayProcess(port, config)
        self.url = self.replica.url
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sluice", "serve", "-c", str(file)], stderr=log, stdout=log
            )

    def ask(self, lie: str, *, model: str = "lies", stream: bool = False) -> httpx.Response:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": CAP,
            "stream": stream,
            "user": lie,
        }
        return httpx.post(self.url + CHAT, json=body, timeout=20, trust_env=False)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with Liar() as engine, Children() as children:
        gateway = Gateway(tmp_path_factory.mktemp("lies"), engine)
        try:
            children.wait_for(f"{gateway.url}/ready")
            yield gateway
        finally:
            gateway.process.terminate()
            gateway.process.wait(20)


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_costs_nobody_else_anything(gateway: Gateway, lie: str) -> None:
    answers: list[httpx.Response] = []

    def lied() -> None:
        # An answer that breaks off breaks the client's, too.
        with contextlib.suppress(httpx.RemoteProtocolError):
            answers.append(gateway.ask(lie, stream=lie in STREAMS))

    lying = threading.Thread(target=lied)
    lying.start()
    slowest_s = 0.0
    while lying.is_alive() or not slowest_s:
        began = time.monotonic()
        honest = gateway.ask("honest", model="honest")
        slowest_s = max(slowest_s, time.monotonic() - began)
        assert honest.content == answer_body()
        assert slowest_s < SOON_S
        lying.join(0.02)
    (answer,) = answers
    assert answer.status_code in (200, 400, 502, 503, 504), answer.text
    assert b"tenant" not in answer.content
    if answer.status_code != 200:
        assert isinstance(answer.json()["error"], dict)
    record = gateway.replica.admin(f"/admin/decisions/{answer.headers['x-request-id']}").json()
    charge = record.get("admission", {}).get("charge_tokens")
    assert charge is None or 0 < charge <= MAX_CHARGE, record
    if answer.status_code != 200:
        assert charge is None, "an error is not charged"


def test_after_all_lies_nothing_is_held_and_nothing_was_a_bug(gateway: Gateway) -> None:
    until(lambda: gateway.replica.leases() == 0)
    assert gateway.ask("honest", model="honest").status_code == 200
    assert httpx.get(f"{gateway.url}/health", trust_env=False).status_code == 200
    said = gateway.log.read_text()
    assert "Traceback" not in said
    assert "internal_error" not in said
