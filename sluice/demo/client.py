"""Requests of the sample traffic over HTTP, and what their answers told."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self
from uuid import uuid4

import httpx
import msgspec

from sluice.demo.config import KEYS, MODEL
from sluice.demo.prompts import Message

_TIMEOUT_S = 60.0


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One request as its client saw it."""

    who: str
    """Its tenant's service class."""
    what: str
    """What was asked, in a word."""
    request_id: str
    status: int = 0
    """0: no answer came."""
    whole: bool = False
    """It ended as it should."""
    pool: str = ""
    worker: str = ""
    prefill_worker: str = ""
    """Where another engine computed the prompt."""
    ttft_s: float | None = None
    """Streams only."""
    took_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    compressed: str = "none"
    """`none`, or tokens before and after, as `9812->8110`."""
    queue_ms: int = 0
    reason: str = ""
    """Of a refusal, or the fault of a failure."""
    retry_after_s: float = 1.0

    @property
    def served(self) -> bool:
        """Answered to the end."""
        return self.status == 200 and self.whole

    @property
    def tpot_ms(self) -> float | None:
        """Mean time per further token of a stream, ms; None without one that was served."""
        if not self.served or self.ttft_s is None or self.completion_tokens < 2:
            return None
        return 1000 * (self.took_s - self.ttft_s) / (self.completion_tokens - 1)

    @property
    def refused(self) -> bool:
        """Refused for load, with a wait that the client was told."""
        return self.status == 429

    @property
    def failed(self) -> bool:
        """Neither served nor refused."""
        return not self.served and not self.refused


class Client:
    """A client of one gateway, with every tenant's key."""

    def __init__(self, url: str) -> None:
        self.url = url
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(
            base_url=url, timeout=_TIMEOUT_S, limits=limits, trust_env=False
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def ask(
        self,
        who: str,
        what: str,
        messages: Sequence[Message],
        *,
        max_tokens: int,
        stream: bool = True,
        model: str = MODEL,
        compress: bool = True,
        whole_length: bool = False,
    ) -> Answer:
        """Send one request; never raises for what becomes of it.

        `whole_length`: the answer takes all of `max_tokens`.
        """
        body: dict[str, Any] = {"model": model, "messages": messages, "max_tokens": max_tokens}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if whole_length:
            body["ignore_eos"] = True
        request_id = f"demo-{uuid4().hex[:12]}"
        headers = {"authorization": f"Bearer {KEYS[who]}", "x-request-id": request_id}
        if not compress:
            headers["x-sluice-compress"] = "off"
        told = Answer(who=who, what=what, request_id=request_id)
        begin_s, first_s, data = time.perf_counter(), None, bytearray()
        try:
            async with self._http.stream(
                "POST", "/v1/chat/completions", json=body, headers=headers
            ) as response:
                told = _headed(told, response.status_code, response.headers)
                async for chunk in response.aiter_bytes():
                    first_s = first_s or time.perf_counter()
                    data += chunk
        except httpx.HTTPError as error:
            return msgspec.structs.replace(told, reason=type(error).__name__)
        ttft_s = None if first_s is None or not stream else first_s - begin_s
        told = msgspec.structs.replace(told, ttft_s=ttft_s, took_s=time.perf_counter() - begin_s)
        return _ended(told, bytes(data), stream=stream)

    async def page(self, path: str) -> str:
        """GET a page of the gateway's own."""
        return (await self._http.get(path)).raise_for_status().text


def _headed(told: Answer, status: int, headers: Mapping[str, str]) -> Answer:
    return msgspec.structs.replace(
        told,
        status=status,
        pool=headers.get("x-sluice-pool", ""),
        worker=headers.get("x-sluice-worker", ""),
        prefill_worker=headers.get("x-sluice-prefill-worker", ""),
        compressed=headers.get("x-sluice-compressed", "none"),
        queue_ms=int(headers.get("x-sluice-queue-ms", "0")),
        reason=headers.get("x-sluice-reason", ""),
        retry_after_s=float(headers.get("retry-after", "1")),
    )


def _ended(told: Answer, data: bytes, *, stream: bool) -> Answer:
    """The answer with its usage; a stream has to end with [DONE]."""
    if told.status != 200:
        return told
    events = [line for line in data.split(b"\n") if line.startswith(b"data: {")]
    try:
        last = json.loads(events[-1][6:] if stream and events else data)
    except ValueError:
        return told
    usage = last.get("usage") or {}
    return msgspec.structs.replace(
        told,
        whole=b"data: [DONE]" in data if stream else True,
        prompt_tokens=usage.get("prompt_tokens", 0),
        completion_tokens=usage.get("completion_tokens", 0),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
    )
