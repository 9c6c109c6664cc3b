"""Observe mode is a bare relay: the engine receives exactly the bytes that were sent.

10,000 bodies with odd spacing, needless escapes, unknown fields, numbers in every notation. All
entitlements are far over their limits. The bench's own engine records the hash of every body.
"""

import asyncio
import hashlib
import json
from collections import Counter
from typing import Any, Final

import msgspec

from bench.common.fleet import MODEL, Fleet
from bench.common.raw_client import RawClient
from bench.common.report import Row, at_least, equals
from bench.common.steps import scaled
from bench.replicas.bodies import request
from bench.replicas.books import entitlement

REQUESTS: Final = scaled(10_000, 2_000)
CLIENTS: Final = 64
TENANTS: Final = {"one-at-a-time": "elastic", "one-a-second": "elastic", "spot": "spot"}


class Relayed(msgspec.Struct, kw_only=True):
    """What was sent, what came of it, what arrived."""

    sent: Counter[bytes] = msgspec.field(default_factory=Counter)
    arrived: Counter[bytes] = msgspec.field(default_factory=Counter)
    """Hashes of bodies."""
    statuses: Counter[str] = msgspec.field(default_factory=Counter)
    would_deny: dict[str, float] = msgspec.field(default_factory=dict)


def rows() -> list[Row]:
    """All rows."""
    found = Relayed()
    asyncio.run(_scenario(found))
    changed = (found.sent - found.arrived).total()
    unknown = (found.arrived - found.sent).total()
    refused = sum(n for status, n in found.statuses.items() if status != "200")
    ended = ", ".join(f"{n} x {k}" for k, n in found.statuses.most_common())
    why = ", ".join(f"{k} {n:.0f}" for k, n in sorted(found.would_deny.items()))
    return [
        equals("observe: requests sent", found.sent.total(), REQUESTS),
        equals("observe: bodies that did not arrive as they were sent", changed, 0),
        equals("observe: bodies that arrived as nobody sent them", unknown, 0),
        equals("observe: requests refused or failed", refused, 0, ended),
        at_least("observe: would have been refused", sum(found.would_deny.values()), 1_000, why),
    ]


async def _scenario(found: Relayed) -> None:
    engine = Recorder(found)
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0, limit=1 << 20)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    pool = {"max_model_len": 8192, "max_num_seqs": 4, "workers": [url]}
    fleet = Fleet(
        short=0,
        long=0,
        model={"mode": "observe", "pools": {"only": pool}},
        config={
            "entitlements": [
                entitlement("one-at-a-time", "elastic", max_concurrency=1),
                entitlement("one-a-second", "elastic", tokens_per_second=1.0),
                entitlement("spot", "spot", max_concurrency=2),
            ]
        },
    )
    async with server:
        await asyncio.to_thread(fleet.__enter__)
        try:
            bodies = iter(range(REQUESTS))
            await asyncio.gather(*(_client(fleet, found, bodies, n) for n in range(CLIENTS)))
            page = await asyncio.to_thread(fleet.metrics)
        finally:
            await asyncio.to_thread(fleet.__exit__)
    for series, count in page.items():
        if series.startswith("sluice_admission_total{") and 'decision="would_deny"' in series:
            reason = series.partition('reason="')[2].partition('"')[0]
            found.would_deny[reason] = found.would_deny.get(reason, 0.0) + count


async def _client(fleet: Fleet, found: Relayed, numbers: Any, which: int) -> None:
    tenant = list(TENANTS)[which % len(TENANTS)]
    async with RawClient(fleet.url, f"key-of-{tenant}") as client:
        for number in numbers:
            path, body = request(number)
            found.sent[hashlib.sha256(body).digest()] += 1
            try:
                async with asyncio.timeout(30.0):
                    answer = await client.post(path, body)
            except (OSError, EOFError, TimeoutError) as error:
                found.statuses[type(error).__name__] += 1
                continue
            reason = answer.headers.get("x-sluice-reason", "")
            found.statuses[f"{answer.status} {reason}".strip()] += 1


class Recorder:
    """An engine that remembers what it was sent, and answers a little."""

    def __init__(self, found: Relayed) -> None:
        self._found = found

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                body = await reader.readexactly(_length(head))
                if head.startswith(b"post "):
                    self._found.arrived[hashlib.sha256(body).digest()] += 1
                writer.write(_answer(head, body))
        except (EOFError, OSError):
            pass
        finally:
            writer.close()


def _length(head: bytes) -> int:
    _, found, rest = head.partition(b"content-length:")
    if not found and head.startswith(b"post "):
        raise EOFError("a body of unknown length")
    return int(rest.partition(b"\r\n")[0]) if found else 0


def _answer(head: bytes, body: bytes) -> bytes:
    if not head.startswith(b"post "):
        return b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-type: application/json\r\n\r\n{}"
    chat = b"chat" in head.partition(b"\r\n")[0]
    usage = {"prompt_tokens": 20, "completion_tokens": 2, "total_tokens": 22}
    base = {
        "id": "r",
        "created": 1,
        "model": MODEL,
        "object": "chat.completion" if chat else "text",
    }
    asked = json.loads(body)
    if not asked.get("stream"):
        shown = {"message": {"role": "assistant", "content": "a b"}} if chat else {"text": "a b"}
        choice = {"index": 0, "finish_reason": "stop", **shown}
        text = json.dumps({**base, "choices": [choice], "usage": usage}).encode()
        return _head("application/json", len(text)) + text
    events = []
    for part in ("a", " b"):
        shown = {"delta": {"content": part}} if chat else {"text": part}
        events.append({**base, "choices": [{"index": 0, "finish_reason": None, **shown}]})
    if (asked.get("stream_options") or {}).get("include_usage"):
        events.append({**base, "choices": [], "usage": usage})
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in events).encode()
    text += b"data: [DONE]\n\n"
    return _head("text/event-stream", len(text)) + text


def _head(kind: str, length: int) -> bytes:
    return f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n\r\n".encode()
