"""One table of what engines answer: how a stream ends, what its first token is, what usage counts.

The relay, settlement and errors read this table; none of them knows an endpoint by name. Shapes
that it does not know are relayed as they come and counted by their bytes.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Final

import msgspec

from gateway.records.attempt import Usage
from gateway.records.endpoint import Endpoint

_BACKSLASH = b"\\"


class TextFields:
    """The members of events that hold generated text, by which delivered tokens are counted.

    An engine sends as many tokens an event as it likes, so events are no measure: it is the text's
    bytes by the tenant's ratio, and at least one token for each piece.
    """

    __slots__ = ("_any", "_usual")

    def __init__(self, names: Sequence[str]) -> None:
        """`names`: of the members, the usual one first."""
        self._usual = b'"%b":"' % names[0].encode()
        self._any = re.compile(rb'"(?:%b)"\s*:\s*"((?:[^"\\]++|\\.)*+)"' % "|".join(names).encode())

    def measure(self, said: bytes, events: int) -> tuple[int, int]:
        """Bytes of text in so many events, and its pieces."""
        at = said.find(self._usual)
        if at >= 0 and events == 1:  # as nearly always
            begin = at + len(self._usual)
            end = said.find(b'"', begin)
            if end > begin and said.find(_BACKSLASH, begin, end) < 0:
                return end - begin, 1
        pieces = [piece for piece in self._any.findall(said) if piece]
        return sum(map(_size, pieces)), len(pieces)


def _size(piece: bytes) -> int:
    """Bytes of a JSON string's text, without its escapes."""
    if _BACKSLASH not in piece:
        return len(piece)
    try:
        return len(msgspec.json.decode(b'"%b"' % piece, type=str).encode())
    except (msgspec.DecodeError, UnicodeEncodeError):
        return len(piece)


_ANY_TEXT: Final = TextFields(("content", "text", "delta"))


@dataclass(frozen=True, kw_only=True)
class StreamShape:
    """How the stream of an endpoint is read."""

    ends: re.Pattern[bytes]
    """What an event that may end a choice contains; JSON strings cannot contain it unescaped."""
    last: frozenset[str] = frozenset()
    """Types of events after which nothing follows."""
    preamble: re.Pattern[bytes] | None = None
    """What events before the first token contain."""
    in_chunks: bool = False
    """Whether clients wait for [DONE], and get usage in a chunk of its own, if they ask for it."""
    must_end: bool = True
    """Whether a stream that was closed without an end of its own is cut."""
    text: TextFields = _ANY_TEXT
    """Where generated text stands."""
    is_data: bool = False
    """Whether clients use the body as it comes, also where they did not ask for a stream."""


_FINISH_REASON: Final = re.compile(rb'"finish_reason"\s*:\s*"')
_ROLE_ONLY: Final = re.compile(
    rb'"delta"\s*:\s*\{\s*"role"\s*:\s*"assistant"\s*'
    rb'(?:,\s*"[a-z_]{1,32}"\s*:\s*(?:""|null|\[\s*\])\s*)*\}'
)
_CHOICES: Final = StreamShape(
    ends=_FINISH_REASON, in_chunks=True, text=TextFields(("text", "reasoning"))
)
_DELTA: Final = TextFields(
    ("content", "reasoning_content", "reasoning", "arguments", "name", "refusal")
)
_AUDIO: Final = StreamShape(
    text=TextFields(("delta",)),
    ends=re.compile(rb'"finish_reason"\s*:\s*"|"(?:transcript\.text|speech\.audio)\.done"'),
    last=frozenset({"transcript.text.done", "speech.audio.done"}),
    must_end=False,
)
_SHAPES: Final = {
    "chat": replace(_CHOICES, preamble=_ROLE_ONLY, text=_DELTA),
    "completions": _CHOICES,
    "messages": StreamShape(
        ends=re.compile(rb'"message_(?:delta|stop)"'),
        last=frozenset({"message_stop"}),
        preamble=re.compile(rb'"(?:message_start|ping)"'),
        text=TextFields(("text", "thinking", "partial_json")),
    ),
    "responses": StreamShape(
        ends=re.compile(rb'"response\.(?:completed|incomplete|failed)"'),
        last=frozenset({"response.completed", "response.incomplete", "response.failed"}),
        preamble=re.compile(rb'"response\.(?:created|queued|in_progress)"'),
        text=TextFields(("delta",)),
    ),
    "speech": replace(_AUDIO, is_data=True),
    "transcriptions": _AUDIO,
    "translations": _AUDIO,
}
OTHER: Final = StreamShape(ends=_FINISH_REASON, must_end=False)
"""The row of everything else, which ends with its body."""


def stream_shape(endpoint: Endpoint) -> StreamShape:
    """The endpoint's row of the table."""
    return _SHAPES.get(endpoint.name, OTHER)


# -- framing

_ERROR: Final = re.compile(
    rb'\s*(?:data:)?\s*\{\s*"(?:error"\s*:\s*(?!null)|(?:object|type)"\s*:\s*"error")'
)
_LINE: Final = re.compile(rb"\s*\{[^\r\n]*\}\r?\n")
_EVENTS: Final = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:data|event|id|retry|):")


def is_event_stream(kind: bytes) -> bool:
    """Whether a content type is that of server-sent events."""
    return kind[:17].lower() == b"text/event-stream"


def begins_events(first: bytes) -> bool:
    """Whether a body of another type begins like server-sent events."""
    return _EVENTS.match(first) is not None


def begins_error(said: bytes, at: int = 0) -> bool:
    """Whether the JSON that begins here is an engine's error, whatever its status."""
    return _ERROR.match(said, at) is not None


def is_json(kind: bytes) -> bool:
    """Whether a content type says that the body is one JSON text."""
    media = kind.partition(b";")[0].strip().lower()
    return media == b"application/json" or media.endswith(b"+json")


def begins_whole(endpoint: Endpoint, first: bytes) -> bool:
    """Whether what claims to be JSON is used only when all of it is there: no line is (NDJSON)."""
    if begins_error(first):
        return True
    return not stream_shape(endpoint).is_data and _LINE.match(first) is None


# -- usage


def usage_of(usage: object) -> Usage | None:
    """What a usage object of any endpoint says; None if it counts no tokens (or zero of all).

    It is known by its fields' names. Only of messages are cached tokens no part of the input, and
    of any engine that reports more of them than of the prompt. Counts that are not non-negative
    integers are read as absent.
    """
    if not isinstance(usage, dict):
        return None
    prompt = _count(usage, "prompt_tokens")
    if prompt is None and (prompt := _count(usage, "input_tokens")) is not None:
        read = _count(usage, "cache_read_input_tokens")
        prompt += (read or 0) + (_count(usage, "cache_creation_input_tokens") or 0)
    completion = _count(usage, "completion_tokens", "output_tokens")
    if completion is None:
        total = _count(usage, "total_tokens") or 0
        if prompt is None:
            prompt = total
        else:
            completion = max(0, total - prompt)
    if not prompt and not completion:
        return None
    cached = None if prompt is None else _cached(usage)
    prompt = prompt or 0
    return Usage(
        prompt_tokens=prompt + (cached if cached and cached > prompt else 0),
        completion_tokens=completion or 0,
        cached_tokens=cached or 0,
        cached_reported=cached is not None,
    )


def later_usage(before: Usage | None, later: Usage | None) -> Usage | None:
    """Usage of a stream that reports it in parts; each part replaces what it counts anew.

    `message_start` has the prompt, before the engine knows what it held of it, and each
    `message_delta` the output so far and perhaps the prompt once more.
    """
    if before is None or later is None:
        return later or before
    prompt = later if later.prompt_tokens else before
    return Usage(
        prompt_tokens=prompt.prompt_tokens,
        completion_tokens=later.completion_tokens or before.completion_tokens,
        cached_tokens=prompt.cached_tokens,
        cached_reported=before.cached_reported or later.cached_reported,
    )


def by_bytes(size: int, bytes_per_token: float) -> int:
    """Tokens of an answer that does not report them, by its size."""
    return ceil(size / bytes_per_token)


def _cached(usage: dict[str, Any]) -> int | None:
    for name in ("prompt_tokens_details", "input_tokens_details"):
        details = usage.get(name)
        if isinstance(details, dict):
            cached = _count(details, "cached_tokens")
            if cached is not None:
                return cached
    return _count(usage, "cache_read_input_tokens", "cached_tokens", "prompt_cache_hit_tokens")


def _count(holder: dict[str, Any], *names: str) -> int | None:
    for name in names:
        value = holder.get(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    return None
