"""Read an engine's refusals: context overflow (rescue it), busy (try elsewhere), error message.

The wordings are those of vLLM's versions and of SGLang, as listed in docs/concepts/pipeline.md.
An overflow is a 400 about the context length; busy is a 503 from a live engine with a full queue.

Engines echo what clients send, so a wording counts only at the beginning of the engine's own
message, and only if its numbers can be true of the request.
"""

import contextlib
import re
from typing import Final

import orjson

from gateway.records.request import BodyFacts

_OVERFLOWS: Final = (
    # vLLM; SGLang's begins with "Requested"
    re.compile(
        r"(?:Requested token count exceeds the|This) model's maximum context length "
        r"(?:is|of) (?P<window>\d{1,9}) tokens"
    ),
    re.compile(
        r"You passed \d+ input tokens and requested \d+ output tokens\. However, the model's "
        r"context length is only (?P<window>\d{1,9}) tokens"
    ),
    re.compile(r"The \w+ prompt \(length \d+\) is longer than the maximum model length of "
        r"(?P<window>\d{1,9})"),
    # SGLang
    re.compile(
        r"The input \(\d+ tokens\) is longer than the model's context length "
        r"\((?P<window>\d{1,9}) tokens\)"
    ),
    # both
    re.compile(
        r"[`']?max_(?:completion_)?tokens.{0,40}(?:too large|cannot be greater than max_model_len)"
        r".{0,60}?(?:maximum context length is |at most |max_model_len\D{0,3})"
        r"(?P<window>\d{1,9})"
    ),
)  # fmt: skip
_PROMPT: Final = re.compile(
    r"(\d{1,9}) (?:in the messages|in the prompt|input tokens|tokens from the input)"
    r"|input \((\d{1,9}) tokens\)|prompt \(length (\d{1,9})\)"
)
DROPPED: Final = b"x-llm-d-request-dropped-reason"
"""Header of an llm-d router's 429 or 503: its flow control refused or evicted the request, or no
engine was ready. The router itself is well."""
_NO_MODEL: Final = re.compile(
    r"The model [`'\"].{1,300}[`'\"] (?:does not exist|was not found)", re.DOTALL
)
_BUSY: Final = re.compile(rb"busy|backlog|try again|overloaded|queue is full", re.IGNORECASE)
_NO_PRIORITY: Final = re.compile(
    r"Got priority -?\d+ but Priority scheduling is not enabled"  # vLLM
    r"|Using priority is disabled for this server"  # SGLang, with --abort-on-priority-when-disabled
)
_LOOK_BYTES: Final = 4096
_MAX_ERROR_BYTES: Final = 64 * 1024
"""Engines' refusals are shorter; a longer body is not read as one."""
_MAX_MESSAGE: Final = 500
_ROOM_TOKENS: Final = 4096
"""Allowance for the chat template's tokens, which are not in the request's bytes."""
_MAX_TOKENS_A_BYTE: Final = 2
_UNKNOWN: Final = 1 << 40


def max_prompt_tokens(facts: BodyFacts, body_bytes: int) -> int:
    """Upper bound of the prompt tokens of a request of `body_bytes`, for any tokenizer."""
    if facts.measure.media_parts or facts.previous_response_id is not None:
        return _UNKNOWN  # media and earlier turns are not in the body and may be long
    return body_bytes * _MAX_TOKENS_A_BYTE + _ROOM_TOKENS


def overflow_window(status: int, body: bytes, most_prompt: int, cap_tokens: int | None) -> int:
    """The window of an engine that refused because prompt + output exceed it; 0 for no overflow.

    `most_prompt` is the upper bound of the prompt's tokens, `cap_tokens` the client's output limit.
    """
    if status not in (400, 413, 422) or len(body) > _MAX_ERROR_BYTES:
        return 0
    return _window_in(engine_message(body), most_prompt, cap_tokens)


def overflow_window_of_event(first_bytes: bytes, most_prompt: int, cap_tokens: int | None) -> int:
    """`overflow_window` for a 200 stream that begins with an in-band error."""
    if len(first_bytes) > _MAX_ERROR_BYTES:
        return 0
    for line in first_bytes.splitlines():
        if line.startswith(b"data:") and b'"error"' in line:
            return _window_in(engine_message(line), most_prompt, cap_tokens)
    return 0


def _window_in(message: str, most_prompt: int, cap_tokens: int | None) -> int:
    for wording in _OVERFLOWS:
        if found := wording.match(message):
            window = int(found["window"])
            reported = _PROMPT.search(message)
            prompt = int(reported[1] or reported[2] or reported[3]) if reported else most_prompt
            fits = cap_tokens is not None and prompt + cap_tokens < window
            possible = prompt <= most_prompt and window <= most_prompt + (cap_tokens or 0)
            return window if possible and not fits else 0
    return 0


def in_band_status(said: bytes) -> int:
    """The HTTP status in the `code` of an error that came with status 200; 500 if there is none.

    `said` is a body or events.
    """
    for line in said.splitlines():
        if len(line) > _MAX_ERROR_BYTES:
            continue
        with contextlib.suppress(orjson.JSONDecodeError, AttributeError):
            decoded = orjson.loads(line.removeprefix(b"data:"))
            code = decoded.get("error", decoded).get("code")
            if isinstance(code, int) and 400 <= code < 600:
                return code
    return 500


def is_busy(status: int, body: bytes, dropped: bytes = b"") -> bool:
    """Whether a 503 (or 429) means a full queue rather than a dead engine.

    `dropped`: why a router before the engines dropped the request, by its header DROPPED.
    """
    if status == 503:
        return bool(dropped) or _BUSY.search(body[:_LOOK_BYTES]) is not None
    return status == 429


def is_not_served(status: int, body: bytes) -> bool:
    """Whether a 404 means that the engine does not serve the model or adapter of the request."""
    if status != 404 or len(body) > _MAX_ERROR_BYTES:
        return False
    return _NO_MODEL.match(engine_message(body)) is not None


def refuses_priority(status: int, body: bytes) -> bool:
    """Whether an engine refuses a request's priority because it does not schedule by it."""
    if status not in (400, 503) or len(body) > _MAX_ERROR_BYTES:
        return False
    return _NO_PRIORITY.match(engine_message(body)) is not None


def engine_message(body: bytes) -> str:
    """The message in an engine's error body of any shape, cut to a limit; "" if there is none."""
    if len(body) > _MAX_ERROR_BYTES:
        return ""
    body = body.removeprefix(b"data:").strip()
    try:
        decoded = orjson.loads(body) if body else None
    except orjson.JSONDecodeError:
        return body[:_MAX_MESSAGE].decode("utf-8", "replace")
    if isinstance(decoded, dict):
        error = decoded.get("error", decoded)
        if isinstance(error, dict):
            error = error.get("message") or error.get("detail") or ""
        return str(error)[:_MAX_MESSAGE]
    return ""


def has_error_shape(body: bytes, *, anthropic: bool) -> bool:
    """Whether an engine's error body already has the shape that clients of the dialect expect."""
    if len(body) > _MAX_ERROR_BYTES:
        return False
    try:
        decoded = orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    if not isinstance(decoded, dict) or not isinstance(decoded.get("error"), dict):
        return False
    return not anthropic or decoded.get("type") == "error"
