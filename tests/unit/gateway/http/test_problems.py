"""Refusals in the shape of each dialect, with the headers that say when to come back."""

import orjson
import pytest

from gateway.errors import (
    BadRequest,
    ContextLengthExceeded,
    Forbidden,
    MethodNotAllowed,
    NotFound,
    RateLimited,
    Refusal,
    TooLarge,
    Unauthorized,
    Unavailable,
    UnsupportedMedia,
    UpstreamBroken,
    UpstreamTimeout,
)
from gateway.http.problems import error_body, error_event, error_headers
from gateway.records.endpoint import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Dialect


def test_openai_clients_get_the_four_members() -> None:
    refusal = NotFound("No such model.", reason="r", code="model_not_found", param="model")
    assert orjson.loads(error_body(refusal)) == {
        "error": {
            "message": "No such model.",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
    }


def test_what_is_not_known_is_null_not_absent() -> None:
    error = orjson.loads(error_body(BadRequest("x", reason="r")))["error"]
    assert (error["param"], error["code"]) == (None, None)


@pytest.mark.parametrize(
    ("refusal", "status", "openai", "anthropic"),
    [
        (BadRequest("x", reason="r"), 400, "invalid_request_error", "invalid_request_error"),
        (
            ContextLengthExceeded("x", prompt_tokens=9, window_tokens=8),
            400,
            "invalid_request_error",
            "invalid_request_error",
        ),
        (Unauthorized("x", reason="r"), 401, "invalid_request_error", "authentication_error"),
        (Forbidden("x", reason="r"), 403, "permission_denied", "permission_error"),
        (NotFound("x", reason="r"), 404, "invalid_request_error", "not_found_error"),
        (MethodNotAllowed("x", reason="r"), 405, "invalid_request_error", "invalid_request_error"),
        (TooLarge("x"), 413, "invalid_request_error", "request_too_large"),
        (UnsupportedMedia("x", reason="r"), 415, "invalid_request_error", "invalid_request_error"),
        (RateLimited("x", reason="r"), 429, "requests", "rate_limit_error"),
        (UpstreamBroken("x", reason="r"), 502, "server_error", "api_error"),
        (Unavailable("x", reason="r"), 503, "server_error", "overloaded_error"),
        (UpstreamTimeout("x", reason="r"), 504, "server_error", "timeout_error"),
    ],
)
def test_each_status_has_its_type_in_both_dialects(
    refusal: Refusal, status: int, openai: str, anthropic: str
) -> None:
    assert refusal.status == status
    words = "prompt is too long: 9 tokens > 8 maximum" if "context" in refusal.reason else ""
    assert orjson.loads(error_body(refusal))["error"]["type"] == openai
    assert orjson.loads(error_body(refusal, Dialect.ANTHROPIC)) == {
        "type": "error",
        "error": {"type": anthropic, "message": words or "x"},
    }


def test_a_context_overflow_has_the_code_clients_look_for() -> None:
    error = orjson.loads(error_body(ContextLengthExceeded("x", prompt_tokens=9, window_tokens=8)))[
        "error"
    ]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS])
def test_an_in_band_error_is_a_data_event(endpoint: object) -> None:
    refusal = UpstreamBroken("x", reason="r", code="c")
    event = error_event(refusal, getattr(endpoint, "name"), Dialect.OPENAI)  # noqa: B009
    assert event == b"data: " + error_body(refusal) + b"\n\n"


def test_an_in_band_error_for_messages_is_an_error_event() -> None:
    event = error_event(UpstreamBroken("x", reason="r"), MESSAGES.name, MESSAGES.dialect)
    head, data = event.removesuffix(b"\n\n").split(b"\n")
    assert head == b"event: error"
    assert orjson.loads(data.removeprefix(b"data: "))["error"]["type"] == "api_error"


def test_an_in_band_error_for_responses_is_an_error_event_of_its_own_shape() -> None:
    refusal = UpstreamBroken("x", reason="r", code="c")
    event = error_event(refusal, RESPONSES.name, RESPONSES.dialect)
    head, data = event.removesuffix(b"\n\n").split(b"\n")
    assert head == b"event: error"
    decoded = orjson.loads(data.removeprefix(b"data: "))
    assert (decoded["type"], decoded["code"], decoded["message"]) == ("error", "c", "x")


def test_the_reason_is_a_header() -> None:
    headers = dict(error_headers(BadRequest("x", reason="too_deep")))
    assert headers == {b"content-type": b"application/json", b"x-sluice-reason": b"too_deep"}


@pytest.mark.parametrize(
    ("wait_s", "seconds", "millis"),
    [(0.2, b"1", b"200"), (1.0, b"1", b"1000"), (1.001, b"2", b"1001"), (60.0, b"60", b"60000")],
)
def test_when_to_come_back_is_told_in_whole_seconds_and_in_milliseconds(
    wait_s: float, seconds: bytes, millis: bytes
) -> None:
    headers = dict(error_headers(Unavailable("x", reason="r", retry_after_s=wait_s)))
    assert (headers[b"retry-after"], headers[b"retry-after-ms"]) == (seconds, millis)


@pytest.mark.parametrize(("should", "said"), [(True, b"true"), (False, b"false"), (None, None)])
def test_whether_to_come_back_is_said_only_when_it_is_known(
    should: bool | None, said: bytes | None
) -> None:
    headers = dict(error_headers(RateLimited("x", reason="r", should_retry=should)))
    assert headers.get(b"x-should-retry") == said


def test_a_401_names_the_scheme() -> None:
    assert (b"www-authenticate", b"Bearer") in error_headers(Unauthorized("x", reason="r"))
