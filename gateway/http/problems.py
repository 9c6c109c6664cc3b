"""Error bodies and events in the dialect of the endpoint: OpenAI's shape or Anthropic's.

OpenAI: {"error": {"message", "type", "param", "code"}}. Anthropic: {"type": "error",
"error": {"type", "message"}}. Never a bare string.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from fastapi import Response

from gateway.errors import ContextLengthExceeded, Refusal
from gateway.records.endpoint import MESSAGES, ROUTES, Dialect

JSON = (b"content-type", b"application/json")

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    502: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def dialect_of(path: str, headers: Mapping[str, str]) -> Dialect:
    """The dialect of a client by what it asks for: Anthropic's name their version everywhere."""
    endpoint = ROUTES.get(path)
    anthropic = "anthropic-version" in headers or path.startswith(MESSAGES.path)
    if anthropic or (endpoint is not None and endpoint.dialect is Dialect.ANTHROPIC):
        return Dialect.ANTHROPIC
    return Dialect.OPENAI


def error_object(refusal: Refusal, dialect: Dialect = Dialect.OPENAI) -> dict[str, object]:
    """The error as a JSON object."""
    if dialect is Dialect.ANTHROPIC:
        kind = _ANTHROPIC_TYPES.get(refusal.status, "invalid_request_error")
        message = refusal.message
        if isinstance(refusal, ContextLengthExceeded):  # clients branch on these words
            message = (
                f"prompt is too long: {refusal.prompt_tokens} tokens > "
                f"{refusal.window_tokens} maximum"
            )
        return {"type": "error", "error": {"type": kind, "message": message}}
    return {
        "error": {
            "message": refusal.message,
            "type": refusal.type,
            "param": refusal.param,
            "code": refusal.code,
        }
    }


def error_body(refusal: Refusal, dialect: Dialect = Dialect.OPENAI) -> bytes:
    """The error as a response body."""
    return orjson.dumps(error_object(refusal, dialect))


def error_event(refusal: Refusal, endpoint: str, dialect: Dialect) -> bytes:
    """The error as an event within a stream that has started."""
    if dialect is Dialect.ANTHROPIC:
        return b"event: error\ndata: " + error_body(refusal, dialect) + b"\n\n"
    if endpoint == "responses":
        event = {"type": "error", "code": refusal.code, "message": refusal.message, "param": None}
        return b"event: error\ndata: " + orjson.dumps(event) + b"\n\n"
    return b"data: " + error_body(refusal) + b"\n\n"


def error_headers(refusal: Refusal) -> Sequence[tuple[bytes, bytes]]:
    """x-sluice-reason and, if waiting helps, how long to wait."""
    headers = [JSON, (b"x-sluice-reason", refusal.reason.encode())]
    if refusal.retry_after_s is not None:
        seconds = max(1, math.ceil(refusal.retry_after_s))
        headers.append((b"retry-after", b"%d" % seconds))
        headers.append((b"retry-after-ms", b"%d" % math.ceil(refusal.retry_after_s * 1000)))
    if refusal.should_retry is not None:
        headers.append((b"x-should-retry", b"true" if refusal.should_retry else b"false"))
    if refusal.status == 405:
        headers.append((b"allow", b"POST, OPTIONS"))
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    headers += refusal.headers
    return headers


def json_response(content: Any, status: int = 200) -> Response:
    """A control-plane answer in JSON."""
    return Response(orjson.dumps(content), status_code=status, media_type="application/json")
