"""Cheap GETs of an engine's own pages (health, models, metrics).

They use the kept-alive connections of `gateway.upstream`. With thousands of engines, a
general HTTP client's work per call would take most of a core.
"""

import asyncio
from typing import Final

from gateway.errors import UpstreamFailure
from gateway.fleet.engine_metrics import read_page
from gateway.ports import Upstream, UpstreamCall
from gateway.records.attempt import PhaseTimeouts, WorkerAddress
from gateway.records.record import Record

MAX_PAGE_BYTES: Final = 8 * 1024 * 1024
"""Longest page; a longer one is ignored."""
_LINES: Final = b"accept: */*\r\nuser-agent: sluice\r\n"

LOOKS: Final = 3
LOOK_EVERY_S: Final = 1.0
Counted = tuple[float | None, float | None]
"""Tokens of prompts and of answers, as an engine counts them."""

NOT_HAD: Final = (UpstreamFailure, OSError)
"""The exceptions that `EnginePages.get` raises; a time-out is an OSError."""


class Page(Record, frozen=True):
    """An engine's response."""

    status: int
    body: bytes


class EnginePages:
    """Gets pages of engines, each whole response within `timeout_s`."""

    def __init__(self, upstream: Upstream, timeout_s: float) -> None:
        self._upstream = upstream
        self._calls: dict[str, UpstreamCall] = {}
        self._looks: dict[str, asyncio.Task[bool]] = {}
        """By URL of the engine: all who ask at once share the answer."""
        self.limit(timeout_s)

    def limit(self, timeout_s: float) -> None:
        """Set the time limit of a page."""
        self._timeout_s = timeout_s
        self._timeouts = PhaseTimeouts(
            connect_s=timeout_s, first_byte_s=timeout_s, idle_s=timeout_s
        )
        self._calls.clear()

    async def get(
        self, address: WorkerAddress, path: str, most_bytes: int = MAX_PAGE_BYTES
    ) -> Page | None:
        """Get a page; None if it is longer than `most_bytes`. Raises exceptions in `NOT_HAD`."""
        async with asyncio.timeout(self._timeout_s):
            if (call := self._calls.get(path)) is None:
                call = self._calls[path] = UpstreamCall(
                    method="GET", path=path, lines=_LINES, body=b"", timeouts=self._timeouts
                )
            answer = await self._upstream.open(address, call)
            try:
                pieces: list[bytes] = []
                length = 0
                while data := await answer.read():
                    pieces.append(data)
                    length += len(data)
                    if length > most_bytes:
                        answer.abort()
                        return None
            except BaseException:
                answer.abort()
                raise
        return Page(answer.status, b"".join(pieces))

    async def metrics(self, address: WorkerAddress) -> bytes | None:
        """An engine's /metrics page; None if it cannot be had. No answer makes it raise."""
        try:
            page = await self.get(address, "/metrics", MAX_PAGE_BYTES)
        except NOT_HAD:
            return None
        return page.body if page is not None and page.status == 200 else None

    async def counted(self, address: WorkerAddress) -> Counted | None:
        """An engine's own counters of tokens; None if it does not tell them."""
        body = await self.metrics(address)
        if body is None:
            return None
        sample = read_page(body)
        return sample.prompt_tokens_total, sample.generation_tokens_total

    async def generates(self, address: WorkerAddress) -> bool:
        """Whether an engine's counters of tokens move, looked at for a few seconds."""

        async def moves() -> bool:
            first = await self.counted(address)
            for _ in range(LOOKS if first is not None else 0):
                await asyncio.sleep(LOOK_EVERY_S)
                now = await self.counted(address)
                if now is not None and now != first:
                    return True
            return False

        look = self._looks.get(address.url)
        if look is None:
            look = self._looks[address.url] = asyncio.ensure_future(moves())
            look.add_done_callback(lambda _: self._looks.pop(address.url, None))
        return await asyncio.shield(look)
