"""The bench of several gateways measures what it says."""

import asyncio
import json
from pathlib import Path

from bench.common.raw_client import RawClient
from bench.replicas.books import SentRequest, exported


def sent(begin_s: float, end_s: float, status: int = 200) -> SentRequest:
    return SentRequest(
        tenant="t", gateway=0, at_s=begin_s, length_s=end_s - begin_s, status=status, reason=""
    )


def test_an_exported_line_counts_once_and_since_when_it_is_asked(tmp_path: Path) -> None:
    line = {"id": "a", "time_unix_s": 5.0, "entitlement": "e", "charge_tokens": 7}
    later = {**line, "id": "b", "time_unix_s": 9.0, "charge_tokens": 2}
    file = tmp_path / "usage.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in (line, line, later)))
    assert exported([file, tmp_path / "none.jsonl"]) == {"e": 9}
    assert exported([file], since_unix_s=6.0) == {"e": 2}


async def answered(reply: bytes) -> tuple[int, bytes]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with RawClient(url) as client:
            answer = await client.post("/", b"")
            return answer.status, answer.body


async def test_the_client_reads_answers_of_known_and_unknown_length() -> None:
    whole = b"HTTP/1.1 429 No\r\nContent-Length: 2\r\n\r\nno"
    assert await answered(whole) == (429, b"no")
    parts = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n2\r\nbc\r\n0\r\n\r\n"
    assert await answered(parts) == (200, b"abc")
