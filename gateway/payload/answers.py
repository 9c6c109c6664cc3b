"""What engines answer: one table of the dialects, and what a whole answer or an event says in JSON.

- The table tells how a stream ends, what comes before its first token and where text stands; the
  relay, settlement and errors read it, and none of them knows an endpoint by name. Shapes that it
  does not know are relayed as they come and counted by their bytes.
- Only the members that count are decoded; all others are skipped, which takes 2 to 5 ms per MiB on
  the event loop. So JSON over DECODED_BYTES is searched for them instead, at about 1 ms per MiB,
  and an answer that is too large to hold piece by piece, as it passes.
- JSON that the standard does not allow (NaN, -Infinity) is read like the rest: engines write it.
"""

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Final, NamedTuple

import msgspec

from gateway.payload import schema
from gateway.payload.schema import Inner, Said
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


def handed_over(body: bytes) -> bytes:
    """Where a prefill's answer says that the KV cache of its prompt is; b"" if it says nothing."""
    try:
        params = bytes(msgspec.json.decode(body, type=schema.Prefilled).kv_transfer_params)
    except msgspec.DecodeError:
        return b""
    return params if params.startswith(b"{") else b""


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


# -- whole answers, and the data of events

DECODED_BYTES: Final = 1024 * 1024
"""Larger JSON is not decoded."""
_MAX_MEMBER_BYTES: Final = 4096
_MAX_TRIES: Final = 32
"""Members named like the wanted one, without its value, that a search passes over."""
_ENDS: Final = frozenset({"completed", "incomplete", "failed"})
"""Statuses of a response that has ended."""
_ODD: Final = (msgspec.DecodeError, RecursionError)
_RESPONSE_ID: Final = re.compile(rb'"id":\s*"(resp_[A-Za-z0-9_-]{1,128})"')
_OBJECT: Final = re.compile(rb"\s*:\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})")
_WORD: Final = re.compile(rb'\s*:\s*("[A-Za-z_-]{1,64}")')
_FIRST_TYPE: Final = re.compile(rb'(?:data:)?\s*\{\s*"type"\s*:\s*"([a-z_.]{1,64})"')
_LAST_TYPE: Final = re.compile(rb'"type"\s*:\s*"([a-z_.]{1,64})"\s*\}\s*$')
_NOT_JSON: Final = re.compile(rb"(?<=[\[:,\s])-?(?:Infinity|NaN)(?=[\],}\s])")


_decode: Final = msgspec.json.Decoder(Said).decode


class Answer(NamedTuple):
    """What a whole answer, or the data of a stream's event, says."""

    usage: Usage | None = None
    ends: tuple[tuple[int, str], ...] = ()
    """(choice, finish reason) of choices that ended."""
    id: str | None = None
    type: str = ""
    generated_bytes: int = 0
    """Size of what was generated, for an answer without usage."""
    is_error: bool = False
    """Whether it is an error and no answer, whatever its status."""

    @property
    def finish_reason(self) -> str | None:
        """Of the first choice that ended."""
        return self.ends[0][1] if self.ends else None


def response_id(head: bytes) -> str | None:
    """The response id in an answer's first bytes; None if there is none."""
    match = _RESPONSE_ID.search(head)
    return None if match is None else match[1].decode("ascii")


def read_answer(body: bytes) -> Answer:
    """Read an answer, or the data of an event, of at most DECODED_BYTES."""
    try:
        said = _decode(body)
    except _ODD:
        try:
            said = _decode(_NOT_JSON.sub(b"null", body))
        except _ODD:
            return search_answer(body)._replace(is_error=begins_error(body))
    usage, ends, kind = _usage(said), _ends(said), said.type or ""
    if usage is not None:
        return Answer(usage, ends, said.id, kind)
    generated = [part for choice in said.choices or () for part in (choice.message, choice.text)]
    size = sum(map(len, (*generated, said.content, said.output)))
    # A response that failed says why in `error`, too, and is an answer.
    failed = bytes(said.error) not in (b"", b"null") and said.object != "response"
    is_error = not size and (failed or said.object == "error")
    return Answer(None, ends, said.id, kind, size or len(body), is_error)


def search_answer(part: bytes, name: str = "") -> Answer:
    """What is found of JSON that is too large or odd to decode, or of a part of it.

    Quotes inside a JSON string are escaped, so names never match generated text. `name` is the
    event's own, if it has one.
    """
    if not name:
        match = _FIRST_TYPE.match(part) or _LAST_TYPE.search(part, len(part) - 128)
        name = "" if match is None else match[1].decode("ascii")
    finish = next((str(word) for word in _search(part, b'"finish_reason"', _WORD)), None)
    return Answer(
        next(filter(None, map(usage_of, _search(part, b'"usage"', _OBJECT))), None),
        ((0, finish),) if finish else _end_of(name),
        response_id(part[:_MAX_MEMBER_BYTES]),
        name,
        len(part),
    )


def _ends(said: Said) -> tuple[tuple[int, str], ...]:
    """Where an endpoint says that a choice ended."""
    if said.choices:
        return tuple((c.index, c.finish_reason) for c in said.choices if c.finish_reason)
    reason = said.delta.stop_reason if isinstance(said.delta, Inner) else said.stop_reason
    if said.object == "response" and said.status in _ENDS:
        reason = str(said.status)
    return ((0, reason),) if reason else _end_of(said.type or "")


def _end_of(kind: str) -> tuple[tuple[int, str], ...]:
    """The end that an event's type alone says."""
    prefix, _, status = kind.rpartition(".")
    if prefix == "response" and status in _ENDS:
        return ((0, status),)
    return ((0, "stop"),) if kind in {"transcript.text.done", "speech.audio.done"} else ()


def _usage(said: Said) -> Usage | None:
    """Usage from wherever an endpoint puts it."""
    if said.usage is not None:
        return usage_of(said.usage)
    inner = said.response or said.message
    if isinstance(inner, Inner) and inner.usage is not None:
        return usage_of(inner.usage)
    meta = said.meta or {}  # rerank as Cohere has it
    return usage_of(meta.get("tokens")) or usage_of(meta.get("billed_units"))


def _search(body: bytes, name: bytes, value: re.Pattern[bytes]) -> Iterator[Any]:
    """The values of members of this name, the last first."""
    at = len(body)
    for _ in range(_MAX_TRIES):
        at = body.rfind(name, 0, at + len(name) - 1)
        if at < 0:
            break
        behind = at + len(name)
        if match := value.match(body, behind, behind + _MAX_MEMBER_BYTES):
            with contextlib.suppress(*_ODD):
                yield msgspec.json.decode(match[1])
