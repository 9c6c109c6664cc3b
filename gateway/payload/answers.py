"""Read what an engine says in JSON: a whole answer, or the data of a stream's event.

- Only the members that count are decoded; all others are skipped, which takes 2 to 5 ms per MiB on
  the event loop. So JSON over DECODED_BYTES is searched for them instead, at about 1 ms per MiB,
  and an answer that is too large to hold piece by piece, as it passes.
- JSON that the standard does not allow (NaN, -Infinity) is read like the rest: engines write it.
"""

import contextlib
import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Raw

from gateway.payload.dialects import begins_error, usage_of
from gateway.records.attempt import Usage

DECODED_BYTES: Final = 1024 * 1024
"""Larger JSON is not decoded."""
_MAX_MEMBER_BYTES: Final = 4096
_MAX_TRIES: Final = 32
"""Members named like the wanted one, without its value, that a search passes over."""
_ENDS: Final = frozenset({"completed", "incomplete", "failed"})
"""Statuses of a response that has ended."""
_NOTHING: Final = Raw(b"")
_ODD: Final = (msgspec.DecodeError, RecursionError)
_RESPONSE_ID: Final = re.compile(rb'"id":\s*"(resp_[A-Za-z0-9_-]{1,128})"')
_OBJECT: Final = re.compile(rb"\s*:\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})")
_WORD: Final = re.compile(rb'\s*:\s*("[A-Za-z_-]{1,64}")')
_FIRST_TYPE: Final = re.compile(rb'(?:data:)?\s*\{\s*"type"\s*:\s*"([a-z_.]{1,64})"')
_LAST_TYPE: Final = re.compile(rb'"type"\s*:\s*"([a-z_.]{1,64})"\s*\}\s*$')
_NOT_JSON: Final = re.compile(rb"(?<=[\[:,\s])-?(?:Infinity|NaN)(?=[\],}\s])")


class _Choice(msgspec.Struct, gc=False):
    index: int = 0
    finish_reason: str | None = None
    message: Raw = _NOTHING
    text: Raw = _NOTHING


class _Inner(msgspec.Struct):
    """A response or message within an event; the delta of a message."""

    usage: dict[str, Any] | None = None
    stop_reason: str | None = None


class _Said(msgspec.Struct):
    """The members read of any JSON; where one has another type, all of it is searched instead."""

    type: str | None = None
    object: str | None = None
    id: str | None = None
    usage: dict[str, Any] | None = None
    choices: list[_Choice] | None = None
    content: Raw = _NOTHING
    output: Raw = _NOTHING
    stop_reason: str | None = None
    status: str | int | None = None
    response: _Inner | None = None
    message: _Inner | str | None = None
    delta: _Inner | str | None = None
    meta: dict[str, Any] | None = None
    error: Raw = _NOTHING


_decode: Final = msgspec.json.Decoder(_Said).decode


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
    found = _RESPONSE_ID.search(head)
    return None if found is None else found[1].decode("ascii")


def read_answer(body: bytes) -> Answer:
    """Read an answer, or the data of an event, of at most DECODED_BYTES."""
    said = _decoded(body)
    if said is None:
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
        found = _FIRST_TYPE.match(part) or _LAST_TYPE.search(part, len(part) - 128)
        name = "" if found is None else found[1].decode("ascii")
    finish = next((str(word) for word in _search(part, b'"finish_reason"', _WORD)), None)
    return Answer(
        next(filter(None, map(usage_of, _search(part, b'"usage"', _OBJECT))), None),
        ((0, finish),) if finish else _end_of(name),
        response_id(part[:_MAX_MEMBER_BYTES]),
        name,
        len(part),
    )


def _decoded(data: bytes) -> _Said | None:
    try:
        return _decode(data)
    except _ODD:
        pass
    with contextlib.suppress(*_ODD):
        return _decode(_NOT_JSON.sub(b"null", data))
    return None


def _ends(said: _Said) -> tuple[tuple[int, str], ...]:
    """Where an endpoint says that a choice ended."""
    if said.choices:
        return tuple((c.index, c.finish_reason) for c in said.choices if c.finish_reason)
    reason = said.delta.stop_reason if isinstance(said.delta, _Inner) else said.stop_reason
    if said.object == "response" and said.status in _ENDS:
        reason = str(said.status)
    return ((0, reason),) if reason else _end_of(said.type or "")


def _end_of(kind: str) -> tuple[tuple[int, str], ...]:
    """The end that an event's type alone says."""
    prefix, _, status = kind.rpartition(".")
    if prefix == "response" and status in _ENDS:
        return ((0, status),)
    return ((0, "stop"),) if kind in {"transcript.text.done", "speech.audio.done"} else ()


def _usage(said: _Said) -> Usage | None:
    """Usage from wherever an endpoint puts it."""
    if said.usage is not None:
        return usage_of(said.usage)
    inner = said.response or said.message
    if isinstance(inner, _Inner) and inner.usage is not None:
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
        if found := value.match(body, behind, behind + _MAX_MEMBER_BYTES):
            with contextlib.suppress(*_ODD):
                yield msgspec.json.decode(found[1])
