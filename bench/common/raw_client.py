"""HTTP/1.1 over one connection, with little CPU: many clients in one process of a bench."""

import asyncio
from typing import Self
from urllib.parse import urlsplit

import msgspec


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
