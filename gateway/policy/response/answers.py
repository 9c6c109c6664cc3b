"""Read what an engine says in JSON: a whole answer, or the data of a stream's event.

- Only the members that count are decoded; all others are skipped, which takes 2 to 5 ms per MiB on
  the event loop. So JSON over DECODED_BYTES is searched for them instead, at about 1 ms per MiB,
  and an answer that is too large to hold piece by piece, as it passes.
- JSON that the standard does not allow (NaN, -Infinity) is read like the rest: engines write it.
"""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import Raw

from gateway.policy.response.dialects import engine_usage, usage_of
from gateway.records.attempt import Usage

DECODED_BYTES: Final = 1024 * 1024
"""Larger JSON is not decoded."""
_MAX_MEMBER_BYTES: Final = 4096
_MAX_TRIES: Final = 32
"""Members named like the wanted one, without its value, that a search passes over."""
_ENDS: Final = frozenset({"completed", "incomplete", "failed"})
"""Statuses of a response that has ended."""
_NOTHING: Final = Raw(b"")
_RESPONSE_ID: Final = re.compile(rb'"id":\s*"(resp_[A-Za-z0-9_-]{1,128})"')
_OBJECT: Final = re.compile(rb"\s*:\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})")
_WORD: Final = re.compile(rb'\s*:\s*("[A-Za-z_-]{1,64}")')
_FIRST_TYPE: Final = re.compile(rb'(?:data:)?\s*\{\s*"type"\s*:\s*"([a-z_.]{1,64})"')
_LAST_TYPE: Final = re.compile(rb'"type"\s*:\s*"([a-z_.]{1,64})"\s*\}\s*$')
_NOT_JSON: Final = re.compile(rb"(?<=[\[:,\s])-?(?:Infinity|NaN)(?=[\],}\s])")


class _Choice(msgspec.Struct, gc=False):
    index: Raw = _NOTHING
    finish_reason: Raw = _NOTHING
    message: Raw = _NOTHING
    text: Raw = _NOTHING


class _Inner(msgspec.Struct):
    """A response or message within an event; the delta of a message."""

    usage: Raw = _NOTHING
    stop_reason: Raw = _NOTHING


class _Said(msgspec.Struct):
    """The members read of any JSON; their values are not checked."""

    type: Raw = _NOTHING
    object: Raw = _NOTHING
    id: Raw = _NOTHING
    usage: Raw = _NOTHING
    choices: list[_Choice] | None = None
    content: Raw = _NOTHING
    output: Raw = _NOTHING
    stop_reason: Raw = _NOTHING
    status: Raw = _NOTHING
    response: _Inner | None = None
    message: Raw = _NOTHING
    delta: Raw = _NOTHING
    meta: Raw = _NOTHING
    error: Raw = _NOTHING


_Count = Annotated[int, msgspec.Meta(ge=0)]


class _PlainDetails(msgspec.Struct):
    cached_tokens: _Count | None = None


class _PlainUsage(msgspec.Struct):
    prompt_tokens: Annotated[int, msgspec.Meta(ge=1)]
    completion_tokens: _Count
    prompt_tokens_details: _PlainDetails | None = None


class _PlainChoice(msgspec.Struct, gc=False):
    finish_reason: str | None = None


class _PlainAnswer(msgspec.Struct):
    """The usual shape of an answer, checked while decoding; a faster path than `_Said`."""

    usage: _PlainUsage
    choices: Annotated[list[_PlainChoice], msgspec.Meta(min_length=1)]
    id: str | None = None


_decode: Final = msgspec.json.Decoder(_Said).decode
_decode_inner: Final = msgspec.json.Decoder(_Inner).decode
_decode_plain: Final = msgspec.json.Decoder(_PlainAnswer).decode


class Answer(NamedTuple):
    """What a whole answer says; None if it does not."""

    usage: Usage | None = None
    finish_reason: str | None = None
    id: str | None = None
    generated_bytes: int = 0
    """Size of what was generated, for an answer without usage."""
    is_error: bool = False
    """Whether it is an error and no answer, whatever its status."""


class EventData(NamedTuple):
    """What the data of a stream's event says."""

    type: str = ""
    usage: Usage | None = None
    ends: tuple[tuple[int, str], ...] = ()
    """(choice, finish reason) of choices that ended."""


def response_id(head: bytes) -> str | None:
    """The response id in an answer's first bytes; None if there is none."""
    found = _RESPONSE_ID.search(head)
    return None if found is None else found[1].decode("ascii")


def read_answer(body: bytes) -> Answer:
    """Read a whole answer of at most DECODED_BYTES."""
    try:
        plain = _decode_plain(body)
    except (msgspec.DecodeError, RecursionError):  # another shape, or none
        return _read_odd(body)
    found = plain.usage
    details = found.prompt_tokens_details
    cached = None if details is None else details.cached_tokens
    usage = engine_usage(found.prompt_tokens, found.completion_tokens, cached)
    return Answer(usage, plain.choices[0].finish_reason, plain.id)


def _read_odd(body: bytes) -> Answer:
    said = _decoded(body)
    if said is None:
        return search_answer(body)
    finish = _text(said.stop_reason)
    if said.choices:
        finish = _text(said.choices[0].finish_reason)
    elif finish is None and (status := _text(said.status)) in _ENDS:
        finish = status
    usage = _usage(said)
    generated = [part for choice in said.choices or () for part in (choice.message, choice.text)]
    size = sum(map(len, (*generated, said.content, said.output)))
    is_error = not size and usage is None and _is_error(said)
    return Answer(usage, finish, _text(said.id), size or len(body), is_error)


def search_answer(part: bytes) -> Answer:
    """What is found of an answer that is too large or odd to decode, or of a part of it.

    Quotes inside a JSON string are escaped, so names never match generated text.
    """
    return Answer(
        _search_usage(part),
        _search_finish(part),
        response_id(part[:_MAX_MEMBER_BYTES]),
        len(part),
    )


def search_event(event: bytes, name: str) -> EventData:
    """What is found of an event that is too large to decode; `name` is its own."""
    if not name:
        found = _FIRST_TYPE.match(event) or _LAST_TYPE.search(event, len(event) - 128)
        name = "" if found is None else found[1].decode("ascii")
    finish = _search_finish(event)
    ends = ((0, finish),) if finish else _ends_of(name)
    return EventData(name, _search_usage(event), ends)


def read_event(data: bytes) -> EventData:
    """Read the data of an event of at most DECODED_BYTES."""
    said = _decoded(data)
    if said is None:
        return search_event(data, "")
    kind = _text(said.type) or ""
    ends = tuple(
        (_index(choice.index), reason)
        for choice in said.choices or ()
        if (reason := _text(choice.finish_reason))
    )
    if not ends and kind == "message_delta":
        reason = _text(_inner(said.delta).stop_reason) or ""
        ends = ((0, reason),) if reason else ()
    return EventData(kind, _usage(said), ends or _ends_of(kind))


def _ends_of(kind: str) -> tuple[tuple[int, str], ...]:
    """The end that an event's type alone says."""
    prefix, _, status = kind.rpartition(".")
    if prefix == "response" and status in _ENDS:
        return ((0, status),)
    return ((0, "stop"),) if kind in {"transcript.text.done", "speech.audio.done"} else ()


def _decoded(data: bytes) -> _Said | None:
    try:
        return _decode(data)
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        return _decode(_NOT_JSON.sub(b"null", data))
    except (msgspec.DecodeError, RecursionError):
        return None


def _is_error(said: _Said) -> bool:
    """A response that failed says why in `error`, too, and is an answer."""
    kind = _text(said.object)
    return kind == "error" or (not _is_null(said.error) and kind != "response")


def _usage(said: _Said) -> Usage | None:
    """Usage from wherever an endpoint puts it."""
    raw = said.usage
    if _is_null(raw) and said.response is not None:
        raw = said.response.usage
    if _is_null(raw):
        raw = _inner(said.message).usage
    usage = _value(raw)
    if isinstance(usage, dict):
        return usage_of(usage)
    meta = _value(said.meta)  # rerank as Cohere has it
    for name in ("tokens", "billed_units") if isinstance(meta, dict) else ():
        usage = meta.get(name)
        if isinstance(usage, dict) and (found := usage_of(usage)) is not None:
            return found
    return None


def _inner(raw: Raw) -> _Inner:
    try:
        return _decode_inner(raw) if raw else _Inner()
    except (msgspec.DecodeError, RecursionError):
        return _Inner()


def _search_usage(body: bytes) -> Usage | None:
    for value in _search(body, b'"usage"', _OBJECT):
        if isinstance(value, dict) and (usage := usage_of(value)) is not None:
            return usage
    return None


def _search_finish(body: bytes) -> str | None:
    return next((str(v) for v in _search(body, b'"finish_reason"', _WORD)), None)


def _search(body: bytes, name: bytes, value: re.Pattern[bytes]) -> Iterator[Any]:
    """The values of members of this name, the last first."""
    at = len(body)
    for _ in range(_MAX_TRIES):
        at = body.rfind(name, 0, at + len(name) - 1)
        if at < 0:
            break
        behind = at + len(name)
        if found := value.match(body, behind, behind + _MAX_MEMBER_BYTES):
            yield _value(Raw(found[1]))


def _is_null(raw: Raw) -> bool:
    return len(raw) == 0 or (len(raw) == 4 and bytes(raw) == b"null")


def _value(raw: Raw) -> Any:
    try:
        return msgspec.json.decode(raw) if 0 < len(raw) <= _MAX_MEMBER_BYTES else None
    except (msgspec.DecodeError, RecursionError):
        return None


def _text(raw: Raw) -> str | None:
    value = _value(raw)
    return value if isinstance(value, str) else None


def _index(raw: Raw) -> int:
    value = _value(raw)
    return value if type(value) is int else 0
