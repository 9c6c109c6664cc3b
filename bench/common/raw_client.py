"""HTTP/1.1 over one connection, with little CPU: many clients in one process of a bench."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Final, Self
from urllib.parse import urlsplit

import msgspec
import orjson

from bench.common.fleet import MODEL


class RawAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What came back, whole. Names of headers are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


class RawClient:
    """One connection to one server; opened when needed, closed by whatever goes wrong."""

    def __init__(self, url: str, key: str = "") -> None:
        """`key` is sent as a bearer token."""
        address = urlsplit(url)
        self._host, self._port = address.hostname or "", address.port or 80
        self._head = f"host: {self._host}:{self._port}\r\ncontent-type: application/json\r\n"
        if key:
            self._head += f"authorization: Bearer {key}\r\n"
        self._said = ""
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.asked = False
        """Whether the last request was sent whole: who leaves while connecting asked nothing."""

    def say(self, name: str, value: str) -> None:
        """Send one more header with the requests that follow; a later one takes its place."""
        self._said = f"{name}: {value}\r\n"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def post(self, path: str, body: bytes) -> RawAnswer:
        """Send and read to the end. Raises OSError, EOFError; cancelling leaves the server."""
        whole = self.asked = False
        try:
            if self._streams is None:
                self._streams = await asyncio.open_connection(self._host, self._port)
            reader, writer = self._streams
            length = f"content-length: {len(body)}\r\n\r\n"
            writer.write(
                f"POST {path} HTTP/1.1\r\n{self._head}{self._said}{length}".encode() + body
            )
            self.asked = True
            answer = await _read(reader)
            whole = True
            return answer
        finally:
            if not whole:
                if self._streams is not None and self._streams[1].transport.get_write_buffer_size():
                    self.asked = False
                self.close()

    def close(self) -> None:
        """Leave the server at once."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None


async def _read(reader: asyncio.StreamReader) -> RawAnswer:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").splitlines()
    headers = {}
    for line in filter(None, lines):
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    if "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    else:
        body = await _chunks(reader)
    return RawAnswer(status=int(first.split()[1]), headers=headers, body=body)


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    parts: list[bytes] = []
    while True:
        line = await reader.readline()
        if not line:
            raise EOFError("the answer broke off")
        length = int(line, 16)
        part = await reader.readexactly(length + 2)
        if not length:
            return b"".join(parts)
        parts.append(part[:-2])


# -- an open loop: requests that are due at a time, over connections of their own, and how they went


_WORDS: Final = (
    *("river", "road", "night", "lower", "bridge", "water", "morning", "letter", "harbour"),
    *("engine", "stone", "garden", "winter", "market", "paper", "signal", "window", "mountain"),
    *("captain", "question", "answer", "history", "council", "record", "number", "valley"),
)
_WORD_TOKENS: Final = 1.27
"""Of the mock's tokenizer, a word of this list and its space."""
_LIMIT_S: Final = 120.0


class TimedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request: when it is due (seconds of the run), what it says, what it may take."""

    at_s: float
    client: str
    """Its key is `sk-CLIENT`."""
    body: bytes
    slo_s: float = 0.0


class TimedAnswer(msgspec.Struct, kw_only=True):
    """How it went. Seconds since it was sent; `first_s` is the first text, None without any."""

    ask: TimedRequest
    status: int = 0
    first_s: float | None = None
    sent_s: float = 0.0
    """Of the run."""
    ended_s: float = 0.0
    whole: bool = False
    head: bytes = b""
    """In lower case."""


@cache
def text(name: str, tokens: int) -> str:
    """About so many tokens, always the same for a name."""
    draw = Random(name)
    return " ".join(draw.choices(_WORDS, k=max(1, round(tokens / _WORD_TOKENS))))


def chat_body(messages: Sequence[tuple[str, str]], output_tokens: int) -> bytes:
    """A streamed chat of (role, text) with so long an answer."""
    return orjson.dumps(
        {
            "model": MODEL,
            "messages": [{"role": role, "content": said} for role, said in messages],
            "max_tokens": output_tokens,
            "mock_output_tokens": output_tokens,
            "stream": True,
        }
    )


class TimedLoad:
    """Sends requests and notes when their answers begin."""

    def __init__(self, urls: Sequence[str]) -> None:
        """Each client's requests go to the `urls` by turns."""
        self._addresses = [url.removeprefix("http://").partition(":")[::2] for url in urls]
        self._turns: Counter[str] = Counter()
        self._begin_s = 0.0
        self.seen: list[TimedAnswer] = []
        self.late_s = 0.0
        """The latest that a request was sent after it was due."""

    @property
    def now_s(self) -> float:
        """Of the run."""
        return time.monotonic() - self._begin_s

    async def open_loop(self, asks: Sequence[TimedRequest]) -> None:
        """Each when it is due, whatever became of earlier ones."""
        self._begin_s = time.monotonic()

        async def one(ask: TimedRequest) -> None:
            await asyncio.sleep(ask.at_s - self.now_s)
            self.late_s = max(self.late_s, self.now_s - ask.at_s)
            await self._send(ask)

        await asyncio.gather(*(one(ask) for ask in asks))

    async def closed_loops(self, loops: Sequence[Sequence[TimedRequest]], pause_s: float) -> None:
        """Each loop's requests one after the other, a pause in between."""

        async def one(place: int, asks: Sequence[TimedRequest]) -> None:
            await asyncio.sleep(pause_s * place / max(1, len(loops)))
            for ask in asks:
                await self._send(ask)
                await asyncio.sleep(pause_s)

        self._begin_s = time.monotonic()
        await asyncio.gather(*(one(place, asks) for place, asks in enumerate(loops)))

    async def _send(self, ask: TimedRequest) -> None:
        seen = TimedAnswer(ask=ask, sent_s=self.now_s)
        self.seen.append(seen)
        host, port = self._addresses[self._turns[ask.client] % len(self._addresses)]
        self._turns[ask.client] += 1
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}:{port}\r\n"
            f"content-type: application/json\r\nauthorization: Bearer sk-{ask.client}\r\n"
            f"connection: close\r\ncontent-length: {len(ask.body)}\r\n\r\n"
        )
        begin_s = time.monotonic()
        try:
            async with asyncio.timeout(_LIMIT_S):
                reader, writer = await asyncio.open_connection(host, int(port))
                try:
                    writer.write(head.encode() + ask.body)
                    seen.head = (await reader.readuntil(b"\r\n\r\n")).lower()
                    seen.status = int(seen.head[9:12])
                    tail = b""
                    while data := await reader.read(65536):
                        if seen.first_s is None and _has_text(data):
                            seen.first_s = time.monotonic() - begin_s
                        tail = (tail + data)[-64:]
                    seen.whole = b"[DONE]" in tail
                finally:
                    writer.close()
        except (OSError, EOFError, TimeoutError):
            seen.whole = False
        seen.ended_s = time.monotonic() - begin_s


def _has_text(data: bytes) -> bool:
    """Whether a piece of a stream carries some; the chunk with the role does not."""
    return b'"content":"' in data.replace(b'"content":""', b"")


def write_profile(folder: Path, profile: Any) -> Path:
    """An engine profile as `sluice mock --profile-file` reads it."""
    file = folder / "engine.json"
    file.write_bytes(msgspec.json.encode(profile))
    return file


def lag_s(pages: Sequence[dict[str, float]]) -> float:
    """How late mock engines wrote their tokens at most (P99), by their metrics."""
    series = (pair for page in pages for pair in page.items())
    return max(value for name, value in series if name.startswith("mock_lag_p99_seconds"))
