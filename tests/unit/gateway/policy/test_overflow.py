"""Engines' refusals in all their wordings: overflow is rescued, busy is tried elsewhere."""

import pytest

from gateway.policy.overflow import is_busy, is_overflow, is_overflow_event
from tests.builders import OVERFLOWS, chunk, error_answer, event


@pytest.mark.parametrize("wording", OVERFLOWS)
def test_each_wording_of_a_400_is_an_overflow(wording: str) -> None:
    assert is_overflow(400, error_answer(wording))


@pytest.mark.parametrize("wording", OVERFLOWS)
def test_each_wording_as_the_first_event_of_a_stream_is_an_overflow(wording: str) -> None:
    assert is_overflow_event(event({"error": {"message": wording, "code": 400}}))


@pytest.mark.parametrize("wording", OVERFLOWS)
def test_the_old_error_shape_without_a_wrapper_is_understood_too(wording: str) -> None:
    assert is_overflow(400, event({"object": "error", "message": wording}))


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


def test_a_429_is_busy_whatever_it_says() -> None:
    assert is_busy(429, b"")


def test_a_500_is_not_busy_whatever_it_says() -> None:
    assert not is_busy(500, b"busy, try again")
