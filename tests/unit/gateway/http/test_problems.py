"""Refusals in the shape of each dialect, with the headers that say when to come back."""

import orjson
import pytest

from gateway.errors import (
    BadRequest,
    ContextLengthExceeded,
    Forbidden,
    NotFound,
    RateLimited,
    Refusal,
    TooLarge,
    Unauthorized,
    Unavailable,
)
from gateway.http.problems import error_body, error_event, error_headers
from gateway.records.endpoint import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Dialect, Endpoint

INVALID = "invalid_request_error"


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


@pytest.mark.parametrize(
    ("refusal", "status", "openai", "anthropic"),
    [
        (BadRequest("x", reason="r"), 400, INVALID, INVALID),
        (ContextLengthExceeded("x", prompt_tokens=9, window_tokens=8), 400, INVALID, INVALID),
        (Unauthorized("x", reason="r"), 401, INVALID, "authentication_error"),
        (Forbidden("x", reason="r"), 403, "permission_denied", "permission_error"),
        (NotFound("x", reason="r"), 404, INVALID, "not_found_error"),
        (Refusal("x", reason="method_not_allowed"), 405, INVALID, INVALID),
        (TooLarge("x"), 413, INVALID, "request_too_large"),
        (Refusal("x", reason="unsupported_content_type"), 415, INVALID, INVALID),
        (RateLimited("x", reason="r"), 429, "requests", "rate_limit_error"),
        (Refusal("x", reason="engine_error"), 502, "server_error", "api_error"),
        (Unavailable("x", reason="r"), 503, "server_error", "overloaded_error"),
        (Refusal("x", reason="engine_timeout"), 504, "server_error", "timeout_error"),
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


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS, MESSAGES, RESPONSES])
def test_an_in_band_error_is_an_event_of_the_endpoint_s_own_shape(endpoint: Endpoint) -> None:
    refusal = Refusal("x", reason="engine_error", code="c")
    event = error_event(refusal, endpoint.name, endpoint.dialect)
    *first, data = event.removesuffix(b"\n\n").split(b"\n")
    assert first == ([] if endpoint in {CHAT, COMPLETIONS} else [b"event: error"])
    said = orjson.loads(data.removeprefix(b"data: "))
    if endpoint is RESPONSES:
        assert (said["type"], said["code"], said["message"]) == ("error", "c", "x")
    else:
        assert said == orjson.loads(error_body(refusal, endpoint.dialect))


@pytest.mark.parametrize(
    ("refusal", "headers"),
    [
        (BadRequest("x", reason="too_deep"), {"x-sluice-reason": "too_deep"}),
        (Unauthorized("x", reason="r"), {"www-authenticate": "Bearer"}),
        *(
            (
                Unavailable("x", reason="r", retry_after_s=seconds),
                {"retry-after": told, "retry-after-ms": told_ms},
            )
            for seconds, told, told_ms in (
                *((0.2, "1", "200"), (1.0, "1", "1000"), (1.001, "2", "1001")),
                (60.0, "60", "60000"),
            )
        ),
        *(
            (RateLimited("x", reason="r", should_retry=retry), headers)
            for retry, headers in (
                *((True, {"x-should-retry": "true"}), (False, {"x-should-retry": "false"})),
                (None, {}),
            )
        ),
    ],
)
def test_headers_say_why_and_whether_and_when_to_come_back(
    refusal: Refusal, headers: dict[str, str]
) -> None:
    common = {"content-type": "application/json", "x-sluice-reason": "r"}
    found = {name.decode(): value.decode() for name, value in error_headers(refusal)}
    assert found == common | headers
