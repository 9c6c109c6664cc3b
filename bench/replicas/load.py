"""Load on several gateways: closed-loop clients, and the result of every request."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from random import Random
from typing import Final

import msgspec

from bench.common.fleet import MODEL
from bench.common.raw_client import RawClient

CHAT: Final = "/v1/chat/completions"
HUNG_S: Final = 30.0
"""Nobody waits longer for an answer; such a request hangs."""
_TEXT: Final = "The river rose in the night and by morning the lower road was gone. "


class SentRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `at_s` monotonic; status 0: broken or hung, -1: its client left."""

    tenant: str
    gateway: int
    at_s: float
    length_s: float
    status: int
    reason: str

    @property
    def end_s(self) -> float:
        """When it was over."""
        return self.at_s + self.length_s


class LoadShape(msgspec.Struct, frozen=True, kw_only=True):
    """How clients ask."""

    output_tokens: int
    pause_s: tuple[float, float]
    """After a refusal, at random between these."""
    streamed: float = 0.25
    leaving: float = 0.0
    """Share of requests whose client leaves early."""


class ClientLoad:
    """Clients that each ask, wait for the answer and ask again, until told to stop."""

    def __init__(self, urls: Sequence[str], shape: LoadShape) -> None:
        """`urls` of the gateways."""
        self.sent: list[SentRequest] = []
        self.unfinished = 0
        self._urls = urls
        self._shape = shape
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, tenants: Iterable[tuple[str, int]]) -> None:
        """Add a client for each (entitlement, gateway)."""
        for tenant, gateway in tenants:
            draw = Random(f"{tenant}/{gateway}/{len(self._tasks)}")
            self._tasks.append(asyncio.create_task(self._client(tenant, gateway, draw)))

    async def stop(self) -> None:
        """Let every client finish what it has asked."""
        self._stop.set()
        await asyncio.gather(*self._tasks)

    def statuses(self, sent: Iterable[SentRequest] | None = None) -> Counter[str]:
        """How many ended how: `200`, `429 tokens`, ..."""
        chosen = self.sent if sent is None else sent
        return Counter(f"{s.status} {s.reason}".strip() for s in chosen)

    async def _client(self, tenant: str, gateway: int, draw: Random) -> None:
        shape = self._shape
        await asyncio.sleep(draw.uniform(0, 0.5))  # they do not come as one
        async with RawClient(self._urls[gateway], f"key-of-{tenant}") as client:
            while not self._stop.is_set():
                leaves = draw.random() < shape.leaving
                limit_s = draw.uniform(0.05, 0.6) if leaves else HUNG_S
                body = body_of(shape.output_tokens, stream=draw.random() < shape.streamed)
                found = await self._ask(client, tenant, gateway, body, limit_s)
                if found.status != 200:
                    with_pause = self._stop.wait()
                    try:
                        await asyncio.wait_for(with_pause, draw.uniform(*shape.pause_s))
                    except TimeoutError:
                        continue

    async def _ask(
        self, client: RawClient, tenant: str, gateway: int, body: bytes, limit_s: float
    ) -> SentRequest:
        at_s = time.monotonic()
        self.unfinished += 1
        try:
            async with asyncio.timeout(limit_s):
                answer = await client.post(CHAT, body)
        except TimeoutError:
            status, reason = (0, "hung") if limit_s == HUNG_S else (-1, "left")
        except (OSError, EOFError) as error:
            status, reason = 0, type(error).__name__
        else:
            status, reason = answer.status, answer.headers.get("x-sluice-reason", "")
            if status == 200 and not _whole(answer.body):
                status, reason = 0, "cut off"
        self.unfinished -= 1
        length_s = time.monotonic() - at_s
        found = SentRequest(
            tenant=tenant,
            gateway=gateway,
            at_s=at_s,
            length_s=length_s,
            status=status,
            reason=reason,
        )
        self.sent.append(found)
        return found


def body_of(output_tokens: int, *, stream: bool) -> bytes:
    """A chat of so many tokens."""
    return msgspec.json.encode(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": _TEXT * 3}],
            "max_tokens": output_tokens,
            "mock_output_tokens": output_tokens,
            "stream": stream,
        }
    )


def _whole(body: bytes) -> bool:
    """Whether an answer came to its end without an error."""
    if body.startswith(b"{"):
        return b'"choices"' in body
    return body.rstrip().endswith(b"data: [DONE]") and b'"error"' not in body


def most_at_once(sent: Iterable[SentRequest]) -> int:
    """Most requests that were served at the same time, as their clients saw it."""
    served = [one for one in sent if one.status == 200]
    moments = sorted((at_s, n) for one in served for at_s, n in ((one.at_s, 1), (one.end_s, -1)))
    return max(accumulate(n for _, n in moments), default=0)
