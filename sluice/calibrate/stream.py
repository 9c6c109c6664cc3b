"""Parse a streamed completion: when each token came, and the usage."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import orjson

from planner.calibration.traces import StreamTrace

_SAID = ("content", "reasoning_content", "reasoning")
"""Members of a delta that hold text."""


class StreamTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One stream, parsed after it ended: parsing would delay the clocks of other streams."""

    times_s: tuple[float, ...]
    tokens: tuple[int, ...]
    prompt_tokens: int | None
    """Prompt tokens by usage, less cached ones; None if not reported."""
    finished: bool
    """Whether a finish_reason came."""
    error: str | None = None


def read_stream(parts: Sequence[tuple[float, bytes]]) -> StreamTimes:
    """Parse (time, bytes) parts. Tokens are interpolated if chunks carry no usage."""
    times: list[float] = []
    reported: list[int | None] = []
    prompt: int | None = None
    total: int | None = None
    finished = False
    for at_s, event in _events(parts):
        if "error" in event:
            return _failed(event["error"])
        usage = event.get("usage")
        if isinstance(usage, dict):
            total = usage.get("completion_tokens", total)
            prompt = _uncached(usage) or prompt
        choices = event.get("choices") or ()
        if not choices:
            continue
        finished = finished or choices[0].get("finish_reason") is not None
        delta = choices[0].get("delta")
        said = bool(choices[0].get("text") or (delta and any(map(delta.get, _SAID))))
        if said or choices[0].get("finish_reason"):
            times.append(at_s)
            reported.append(usage.get("completion_tokens") if isinstance(usage, dict) else None)
    # Chunks that came at the same time are one entry.
    merged = dict(zip(times, _counted(reported, total), strict=True))
    return StreamTimes(
        times_s=tuple(merged),
        tokens=tuple(merged.values()),
        prompt_tokens=prompt,
        finished=finished,
    )


def trace_of(seen: StreamTimes, submit_s: float, prompt_tokens: int) -> StreamTrace | None:
    """A trace for fitting; None if no token came. `prompt_tokens` applies if usage lacks them."""
    if seen.error is not None or not seen.times_s:
        return None
    return StreamTrace(
        submit_s=submit_s,
        times_s=seen.times_s,
        tokens=seen.tokens,
        prompt_tokens=prompt_tokens if seen.prompt_tokens is None else seen.prompt_tokens,
        ended=seen.finished,
    )


def _events(parts: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, dict[str, Any]]]:
    """JSON events, each with the time at which its line was complete."""
    rest = b""
    for at_s, part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                continue
            try:
                event = orjson.loads(line[5:])
            except orjson.JSONDecodeError:
                continue
            if isinstance(event, dict):
                yield at_s, event


def _uncached(usage: dict[str, Any]) -> int | None:
    prompt = usage.get("prompt_tokens")
    if not prompt:
        return None
    details = usage.get("prompt_tokens_details") or {}
    return max(1, int(prompt) - int(details.get("cached_tokens") or 0))


def _counted(reported: Sequence[int | None], total: int | None) -> list[int]:
    """Tokens by chunk: as reported, else the total spread evenly, else one per chunk."""
    given = [number for number in reported if number is not None]
    if len(given) == len(reported):
        return given
    each = (total or len(reported)) / len(reported)
    return [round(each * (index + 1)) for index in range(len(reported))]


def _failed(error: object) -> StreamTimes:
    words = error.get("message") if isinstance(error, dict) else error
    return StreamTimes(times_s=(), tokens=(), prompt_tokens=None, finished=False, error=str(words))
