"""Reading an engine's refusals: context overflow (rescue it), busy (try elsewhere), its words.

Wordings of vLLM's versions and of SGLang, as listed in docs/pipeline.md. An overflow is a
400 about the context length; busy is a 503 of a live engine whose queue is full.
"""

import contextlib
import re

import orjson

_OVERFLOW = re.compile(
    rb"maximum context length (?:is|of) \d+ tokens"
    rb"|context length is only \d+ tokens"
    rb"|longer than the model's context length \(\d+ tokens\)"
    rb"|max_(?:completion_)?tokens.{0,40}(?:too large|cannot be greater than max_model_len)"
)
_BUSY = re.compile(rb"busy|backlog|try again|overloaded|queue is full", re.IGNORECASE)
_LOOK_BYTES = 4096
_MAX_MESSAGE = 500


def is_overflow(status: int, body: bytes) -> bool:
    """Whether an engine refused because prompt + output exceed its window."""
    return status in (400, 413, 422) and _OVERFLOW.search(body[:_LOOK_BYTES]) is not None


def is_overflow_event(first_bytes: bytes) -> bool:
    """Whether a 200 stream begins with an in-band overflow error."""
    head = first_bytes[:_LOOK_BYTES]
    return b'"error"' in head and _OVERFLOW.search(head) is not None


def in_band_status(event: bytes) -> int:
    """The HTTP status that an in-band error event names in `code`; 500 when it names none."""
    for line in event.splitlines():
        if line.startswith(b"data:"):
            with contextlib.suppress(orjson.JSONDecodeError, AttributeError):
                code = orjson.loads(line[5:]).get("error", {}).get("code")
                if isinstance(code, int) and 400 <= code < 600:
                    return code
    return 500


def is_busy(status: int, body: bytes) -> bool:
    """Whether a 503 (or 429) means a full queue rather than a dead engine."""
    return status == 429 or (status == 503 and _BUSY.search(body[:_LOOK_BYTES]) is not None)


def engine_message(body: bytes) -> str:
    """The sentence in an engine's error body of any shape, bounded; "" when there is none."""
    body = body.removeprefix(b"data: ").strip()
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
    """Whether an engine's error body is in the shape clients of the dialect read."""
    try:
        decoded = orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    if not isinstance(decoded, dict) or not isinstance(decoded.get("error"), dict):
        return False
    return not anthropic or decoded.get("type") == "error"
