"""Read usage, finish reason and id from an engine's whole (not streamed) answer.

Decoding takes 2 to 5 ms per MiB on the event loop, even though all other members are skipped. So
answers over DECODED_BYTES are not decoded: the last `usage` is searched from the end instead,
which takes a millisecond per MiB at most.
"""

import re
from typing import Annotated, Any, Final

import msgspec
from msgspec import Raw

from gateway.policy.response.sse import usage_from
from gateway.records.attempt import Usage

DECODED_BYTES: Final = 2 * 1024 * 1024
"""A larger answer is not decoded."""
SEARCHED_BYTES: Final = 16 * 1024 * 1024
"""Of a larger answer, this many bytes at its end are searched."""
_LARGEST_USAGE_BYTES: Final = 4096
_ID_WITHIN_BYTES: Final = 4096
_ENDS: Final = frozenset({"completed", "incomplete", "failed"})
"""Statuses of a response that has ended."""
_NOTHING: Final = Raw(b"")
_RESPONSE_ID: Final = re.compile(rb'"id":\s*"(resp_[A-Za-z0-9_-]{1,128})"')
_OBJECT: Final = re.compile(rb"\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})")
_WORD: Final = re.compile(rb'\s*"([a-z_]{1,64})"')


class _Choice(msgspec.Struct, gc=False):
    finish_reason: Raw = _NOTHING


class _Answer(msgspec.Struct):
    """The members read of any whole answer; their values are not checked."""

    usage: Raw = _NOTHING
    choices: list[_Choice] | None = None
    id: Raw = _NOTHING
    stop_reason: Raw = _NOTHING
    status: Raw = _NOTHING


_Count = Annotated[int, msgspec.Meta(ge=0)]


class _PlainDetails(msgspec.Struct):
    cached_tokens: _Count | None = None


class _PlainUsage(msgspec.Struct):
    prompt_tokens: _Count
    completion_tokens: _Count = 0
    prompt_tokens_details: _PlainDetails | None = None
    input_tokens_details: _PlainDetails | None = None
    cache_read_input_tokens: _Count | None = None


class _PlainChoice(msgspec.Struct, gc=False):
    finish_reason: str | None = None


class _PlainAnswer(msgspec.Struct):
    """The usual shape of an answer, checked while decoding; a faster path than `_Answer`."""

    usage: _PlainUsage
    choices: Annotated[list[_PlainChoice], msgspec.Meta(min_length=1)]
    id: str | None = None


_decode: Final = msgspec.json.Decoder(_Answer).decode
_decode_plain: Final = msgspec.json.Decoder(_PlainAnswer).decode

Read = tuple[Usage | None, str | None, str | None]
"""Usage, finish reason and id of an answer; each is None if the answer lacks it."""


def response_id(head: bytes) -> str | None:
    """The response id in an answer's first bytes; None if there is none."""
    found = _RESPONSE_ID.search(head)
    return None if found is None else found[1].decode("ascii")


def read_answer(body: bytes) -> Read:
    """Usage, finish reason and id of a whole answer."""
    if len(body) > DECODED_BYTES:
        return _read_large(body)
    try:
        plain = _decode_plain(body)
    except (msgspec.DecodeError, RecursionError):  # another shape, or none
        return _read_odd(body)
    found = plain.usage
    details = found.prompt_tokens_details or found.input_tokens_details
    cached = found.cache_read_input_tokens
    if details is not None and details.cached_tokens is not None:
        cached = details.cached_tokens
    usage = Usage(
        prompt_tokens=found.prompt_tokens,
        completion_tokens=found.completion_tokens,
        cached_tokens=cached or 0,
        cached_reported=cached is not None,
    )
    return usage, plain.choices[0].finish_reason, plain.id


def _read_odd(body: bytes) -> Read:
    try:
        answer = _decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None, None, None
    finish = _text(answer.stop_reason)
    if answer.choices:
        finish = _text(answer.choices[0].finish_reason)
    elif finish is None and (status := _text(answer.status)) in _ENDS:
        finish = status
    return usage_from({"usage": _value(answer.usage)}), finish, _text(answer.id)


def _read_large(body: bytes) -> Read:
    # Quotes inside a JSON string are escaped, so these patterns never match generated text.
    usage = _behind(body, b'"usage":', _OBJECT)
    finish = _behind(body, b'"finish_reason":', _WORD)
    return (
        usage_from({"usage": _value(Raw(usage))}),
        finish.decode("ascii") or None,
        response_id(body[:_ID_WITHIN_BYTES]),
    )


def _behind(body: bytes, name: bytes, value: re.Pattern[bytes]) -> bytes:
    """The value behind the last occurrence of `name`; b"" if there is none."""
    at = body.rfind(name, -SEARCHED_BYTES)
    start = at + len(name)
    found = value.match(body, start, start + _LARGEST_USAGE_BYTES) if at >= 0 else None
    return b"" if found is None else found[1]


def _value(raw: Raw) -> Any:
    try:
        return msgspec.json.decode(raw) if 0 < len(raw) <= _LARGEST_USAGE_BYTES else None
    except (msgspec.DecodeError, RecursionError):
        return None


def _text(raw: Raw) -> str | None:
    value = _value(raw)
    return value if isinstance(value, str) else None
