"""Engines' refusals in all their wordings: overflow is rescued, busy is tried elsewhere."""

import orjson
import pytest

from gateway.policy.response.overflow import (
    is_busy,
    max_prompt_tokens,
    overflow_window,
    overflow_window_of_event,
    refuses_priority,
)
from gateway.records.request import BodyFacts, Measure
from tests.builders import OVERFLOWS, chunk, error_answer, event

LONG_TOKENS = 60_000


def is_overflow(status: int, body: bytes) -> bool:
    return overflow_window(status, body, LONG_TOKENS, None) > 0


def is_overflow_event(first: bytes) -> bool:
    return overflow_window_of_event(first, LONG_TOKENS, None) > 0


@pytest.mark.parametrize("wording", OVERFLOWS)
def test_each_wording_of_a_400_is_an_overflow(wording: str) -> None:
    assert is_overflow(400, error_answer(wording))


@pytest.mark.parametrize("wording", OVERFLOWS)
def test_each_wording_as_the_first_event_of_a_stream_is_an_overflow(wording: str) -> None:
    assert is_overflow_event(event({"error": {"message": wording, "code": 400}}))


@pytest.mark.parametrize("wording", OVERFLOWS)
def test_the_old_error_shape_without_a_wrapper_is_understood_too(wording: str) -> None:
    assert is_overflow(400, event({"object": "error", "message": wording}))


MORE = (
    (
        "Requested token count exceeds the model's maximum context length of 8192 tokens. You "
        "requested a total of 9000 tokens: 8000 tokens from the input messages and 1000 tokens for "
        "the completion. Please reduce the number of tokens in the input messages or the "
        "completion to fit within the limit."
    ),
    "max_completion_tokens is too large: 9000.This model supports at most 8192 completion tokens.",
    (
        "'max_tokens' or 'max_completion_tokens' is too large: 4000. This model's maximum context "
        "length is 8192 tokens and your request has 5000 input tokens (4000 > 8192 - 5000)."
    ),
    "The decoder prompt (length 8825) is longer than the maximum model length of 8192. Make sure",
)


@pytest.mark.parametrize("wording", [*OVERFLOWS, *MORE])
def test_the_engines_window_is_read(wording: str) -> None:
    window = 2048 if "2048" in wording else 8192
    assert overflow_window(400, error_answer(wording), LONG_TOKENS, None) == window
    assert overflow_window(400, error_answer(wording), LONG_TOKENS, 9_000) == window


@pytest.mark.parametrize("wording", [*OVERFLOWS, *MORE])
def test_a_wording_within_a_message_is_an_echo(wording: str) -> None:
    assert not is_overflow(400, error_answer(f"Input should be 1, not '{wording}'"))
    assert not is_overflow(400, event({"detail": [{"msg": "bad", "input": wording}]}))
    assert not is_overflow_event(event({"error": {"message": f"bad: {wording}", "code": 400}}))


def test_numbers_that_cannot_be_true_are_no_overflow() -> None:
    said = error_answer(OVERFLOWS[1])  # 8,193 in the prompt, of 8,192
    assert not overflow_window(400, said, 8_000, 100)
    assert overflow_window(400, said, 8_200, 100)
    fits = error_answer(OVERFLOWS[1].replace("8193", "5000"))
    assert not overflow_window(400, fits, LONG_TOKENS, 100)
    assert not overflow_window(400, error_answer(OVERFLOWS[0].replace("8192", "9" * 30)), 9000, 1)


def test_a_body_of_the_size_of_no_refusal_is_not_looked_into() -> None:
    assert not is_overflow(400, error_answer(OVERFLOWS[0] + "x" * 100_000))


def test_what_is_not_in_the_body_may_be_long() -> None:
    measure = Measure(text_bytes=10, longest_text_bytes=10)
    assert max_prompt_tokens(BodyFacts(model="m", measure=measure), 100) < 10_000
    stored = BodyFacts(model="m", measure=measure, previous_response_id="resp_1")
    assert max_prompt_tokens(stored, 100) > 1_000_000


@pytest.mark.parametrize("status", [200, 404, 500, 503])
def test_another_status_is_no_overflow_whatever_it_says(status: int) -> None:
    assert not is_overflow(status, error_answer(OVERFLOWS[0]))


@pytest.mark.parametrize(
    "message",
    [
        "max_tokens must be at least 1, got 0.",
        "The model `m` does not exist.",
        "temperature must be non-negative, got -1.",
        "",
    ],
)
def test_other_400s_belong_to_the_client(message: str) -> None:
    assert not is_overflow(400, error_answer(message))


def test_a_body_that_is_not_json_is_looked_at_all_the_same() -> None:
    assert is_overflow(400, OVERFLOWS[0].encode())


def test_an_answer_that_talks_about_overflows_is_not_one() -> None:
    assert not is_overflow_event(chunk(OVERFLOWS[0]))


@pytest.mark.parametrize(
    "message",
    [
        "The server is busy, please try again later.",
        "Backlog limit reached (--max-num-queued-reqs).",
        "Please Try Again in a moment",
    ],
)
def test_a_503_that_says_busy_is_a_live_engine(message: str) -> None:
    assert is_busy(503, error_answer(message, code=503))


def test_a_503_that_says_nothing_is_not_busy() -> None:
    assert not is_busy(503, b"Service Unavailable")


def test_a_503_that_a_router_explains_is_busy() -> None:
    assert is_busy(503, b"inference error", b"rejected-no-endpoints")
    assert not is_busy(500, b"inference error", b"rejected-no-endpoints")


def test_a_429_is_busy_whatever_it_says() -> None:
    assert is_busy(429, b"")


def test_a_500_is_not_busy_whatever_it_says() -> None:
    assert not is_busy(500, b"busy, try again")


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (400, "Got priority 1 but Priority scheduling is not enabled."),
        (400, "Got priority -3 but Priority scheduling is not enabled."),
        (503, "Using priority is disabled for this server. Please send a new request"),
    ],
)
def test_a_refused_priority_is_known_by_the_engines_own_words(status: int, message: str) -> None:
    assert refuses_priority(status, error_answer(message, code=status))
    assert refuses_priority(status, orjson.dumps({"object": "error", "message": message}))
    assert not refuses_priority(200, error_answer(message))
    assert not refuses_priority(status, error_answer(f"The text {message} is too long"))
    assert not refuses_priority(status, error_answer(message + " " * 70_000))
