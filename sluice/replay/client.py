"""Send one request through a running gateway, read the answer to its end, and time it."""

import contextlib
import time
from typing import Any, ClassVar, Final

import httpx
import msgspec

from sluice.calibrate.client import EngineClient
from sluice.calibrate.stream import read_stream, trace_of

_POOL: Final = "x-sluice-pool"
_COMPRESSED: Final = "x-sluice-compressed"


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one request; times are on the clock of `time.perf_counter`."""

    due_s: float
    """When it should have been sent; latencies count from here."""
    sent_s: float
    first_s: float | None = None
    """None if no token came."""
    last_s: float | None = None
    prompt_tokens: int = 0
    """Prompt tokens by usage, less cached ones."""
    output_tokens: int = 0
    tpot_s: float | None = None
    pool: str | None = None
    """None if no gateway named a pool."""
    compressed: bool = False
    status: int = 0
    """HTTP status; 0 without an answer."""
    error: str | None = None
    """HTTP status and message, or the connection's error."""

    @property
    def refused(self) -> bool:
        """Whether the gateway refused it for load or for a limit."""
        return self.status in {429, 503}

    @property
    def ttft_s(self) -> float | None:
        """Seconds from due time to first token."""
        return None if self.first_s is None or self.error else self.first_s - self.due_s


class ReplayClient(EngineClient):
    """Client like that of `sluice calibrate`, which also reads the gateway's headers."""

    who: ClassVar[str] = "the gateway"
    key_option: ClassVar[str] = "--api-key-env"

    async def send(
        self, text: str, output_tokens: int, due_s: float, key: str | None = None
    ) -> Answered:
        """Send one request, with a tenant's own `key`; raises nothing but cancellation."""
        parts: list[tuple[float, bytes]] = []
        reported: dict[str, Any] = {"due_s": due_s, "sent_s": time.perf_counter()}
        headers = None if key is None else {"authorization": f"Bearer {key}"}
        body = self._body(text, output_tokens)
        request = self._http.build_request("POST", self.path, json=body, headers=headers)
        try:
            async with contextlib.aclosing(await self._http.send(request, stream=True)) as answer:
                reported["status"] = answer.status_code
                pool = answer.headers.get(_POOL)
                compressed = answer.headers.get(_COMPRESSED, "none") != "none"
                reported |= {"pool": pool, "compressed": compressed}
                if answer.status_code != 200:
                    words = (await answer.aread())[:120].decode("utf-8", "replace")
                    return Answered(error=f"{answer.status_code} {words}", **reported)
                async for part in answer.aiter_raw():
                    parts.append((time.perf_counter(), part))  # noqa: PERF401 - kept if it breaks
        except httpx.HTTPError as error:
            return Answered(error=str(error) or type(error).__name__, **reported)
        seen = read_stream(parts)
        trace = trace_of(seen, reported["sent_s"], 0)
        if trace is None or not trace.ended:
            return Answered(error=seen.error or "a stream without an end", **reported)
        return Answered(
            first_s=trace.first_s,
            last_s=trace.last_s,
            prompt_tokens=trace.prompt_tokens,
            output_tokens=trace.output_tokens,
            tpot_s=trace.tpot_s if trace.output_tokens > trace.tokens[0] else None,
            **reported,
        )

    def _body(self, text: str, output_tokens: int) -> dict[str, Any]:
        body = super()._body(text, output_tokens)
        # Usage once at the end: in every chunk it would double the bytes to read.
        options = body.get("stream_options")
        if options is not None:
            body["stream_options"] = {"include_usage": True}
        return body
