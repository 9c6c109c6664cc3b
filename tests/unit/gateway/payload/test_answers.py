"""What is read of whole answers: of small ones all that counts, of large ones at little cost."""

import pytest

from gateway.payload.answers import (
    DECODED_BYTES,
    Answer,
    read_answer,
    response_id,
    search_answer,
)
from gateway.payload.sse import BodyMeter
from gateway.pipeline.forward import HELD_BYTES
from gateway.records.attempt import Usage
from gateway.records.endpoint import CHAT
from gateway.routing.overflow import (
    engine_message,
    has_error_shape,
    in_band_error,
    in_band_status,
)
from tests.builders import event
from tests.growth import quickest_s

USAGE = b'"usage":{"prompt_tokens":9,"completion_tokens":4,"prompt_tokens_details":{"x":1}}'
TOLD = Usage(prompt_tokens=9, completion_tokens=4)
MIB = 1024 * 1024


def choice(content: bytes) -> bytes:
    return b'"choices":[{"message":{"content":"' + content + b'"},"finish_reason":"length"}]'


@pytest.mark.parametrize("size", [10, DECODED_BYTES, 3 * DECODED_BYTES])
@pytest.mark.parametrize("space", [b"", b" "])
def test_usage_is_read_of_small_and_of_large_answers(size: int, space: bytes) -> None:
    text = rb"\"usage\": {\"prompt_tokens\": 1}" + b"x" * size
    body = b'{"id":"resp_1",%b,%b,"prompt_logprobs":[%b1]}' % (
        choice(text),
        USAGE.replace(b":", b":" + space, 1),
        b"2," * (size // 2),
    )
    found = read(body)
    assert (found.usage, found.finish_reason, found.id) == (TOLD, "length", "resp_1")


@pytest.mark.parametrize(
    "usage",
    [b"null", b"[]", b"{", b'{"a":{"b":{}}}', b'{"prompt_tokens":-1}', b'{"a":"' + b"x" * 9000],
)
def test_of_a_large_answer_no_usage_is_read_that_is_none(usage: bytes) -> None:
    body = b'{"data":"' + b"x" * DECODED_BYTES + b'","usage":' + usage + b"}"
    assert read(body)[:3] == (None, (), None)


def test_usage_is_found_wherever_it_stands_in_a_large_answer() -> None:
    """vLLM puts prompt_logprobs, which may be many megabytes, behind the usage."""
    choices = choice(b"hi")
    body = b"{%b,%b," % (choices, USAGE) + b'"prompt_logprobs":[' + b"0.5," * (5 * MIB) + b"1]}"
    found = read(body)
    assert (found.usage, found.finish_reason) == (TOLD, "length")


def test_an_object_named_usage_that_counts_nothing_hides_none() -> None:
    body = b"{%b," % USAGE + b'"tools":{"usage":{"type":"string"}},"x":"' + b"x" * 2 * MIB + b'"}'
    assert read(body).usage == TOLD


@pytest.mark.parametrize(
    "body",
    [
        b'{"data":[' + b"0.0123," * (9 * MIB) + b"1]," + USAGE + b"}",
        b'{"usage":[' + b"[]," * (DECODED_BYTES // 3 - 9) + b"1]}",
        b'{"id":1,"x":[' + b"[]," * (32 * MIB) + b"1]}",
        b'{"id":1,"choices":[' + b"{}," * (9 * MIB) + b"{}]}",
        b'{"usage":' * (4 * MIB),
    ],
    ids=["embeddings", "usage", "lists", "choices", "nested"],
)
def test_no_answer_holds_the_event_loop_for_long(body: bytes) -> None:
    if len(body) <= DECODED_BYTES:
        assert quickest_s(lambda: read_answer(body)) < 0.05
    else:  # piece by piece
        assert quickest_s(lambda: search_answer(body[-DECODED_BYTES:])) < 0.05


def test_no_error_of_an_engine_holds_the_event_loop_for_long() -> None:
    body = b'{"error":[' + b"[]," * (4 * MIB) + b"1]}"
    data = b"data: " + body + b"\n\n"
    assert quickest_s(lambda: engine_message(body)) < 0.05
    assert quickest_s(lambda: has_error_shape(body, anthropic=False)) < 0.05
    assert quickest_s(lambda: in_band_error(data)) < 0.05
    assert (engine_message(body), has_error_shape(body, anthropic=False)) == ("", False)
    assert in_band_status(in_band_error(data + event({"error": {"code": 404}}))) == 404


def read(body: bytes) -> Answer:
    """As the relay reads it: what is too large to hold in pieces."""
    if len(body) <= HELD_BYTES:
        return read_answer(body)
    meter = BodyMeter(CHAT)
    for at in range(0, len(body), HELD_BYTES):
        meter.feed(body[at : at + HELD_BYTES])
    ends = ((0, meter.finish_reason),) if meter.finish_reason else ()
    return Answer(meter.usage(), ends, response_id(body[:HELD_BYTES]))
