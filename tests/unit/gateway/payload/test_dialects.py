"""What engines answer in each dialect, as people who run gateways met it (docs/develop)."""

import json

import pytest

from gateway.payload.answers import is_event_stream, read_answer, usage_of
from gateway.payload.sse import DONE, BodyMeter, StreamMeter
from gateway.records.attempt import Usage
from gateway.records.endpoint import (
    CHAT,
    EMBEDDINGS,
    MESSAGES,
    RERANK,
    RESPONSES,
    SPEECH,
    TRANSCRIPTIONS,
    Endpoint,
)
from tests.builders import chunk, event, usage_object


def relay(*pieces: bytes, endpoint: Endpoint = CHAT, strip: bool = False) -> StreamMeter:
    meter = StreamMeter(endpoint, strip_usage=strip)
    for piece in pieces:
        meter.feed(piece)
    return meter


def counts(usage: Usage | None) -> tuple[int, int, int] | None:
    if usage is None:
        return None
    return usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens


# -- usage


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}, (9, 0, 4)),
        ({"input_tokens": 9, "input_tokens_details": {"cached_tokens": 4}}, (9, 0, 4)),
        ({"input_tokens": 5, "cache_read_input_tokens": 4, "output_tokens": 2}, (9, 2, 4)),
        ({"input_tokens": 1, "cache_creation_input_tokens": 8, "output_tokens": 2}, (9, 2, 0)),
        # more cached than prompt tokens: counted apart
        ({"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 9}}, (14, 0, 9)),
        ({"input_tokens": 0, "cache_read_input_tokens": 9, "output_tokens": 1}, (9, 1, 9)),
        ({"total_tokens": 12}, (12, 0, 0)),
        ({"prompt_tokens": 12, "total_tokens": 15}, (12, 3, 0)),
        ({"prompt_tokens": 12.0, "completion_tokens": 3.0}, (12, 3, 0)),
        ({"type": "tokens", "input_tokens": 14, "output_tokens": 45}, (14, 45, 0)),
        ({"type": "duration", "seconds": 12}, None),
        ({"completion_tokens": 25}, (0, 25, 0)),
        ({"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}, None),
    ],
)
def test_usage_counts_what_its_dialect_means(
    said: dict[str, object], expected: tuple[int, int, int] | None
) -> None:
    assert counts(usage_of(said)) == expected


@pytest.mark.parametrize("bad", [-1, 1.5, "9", True, None, [], {}])
def test_counts_that_are_not_non_negative_integers_are_absent(bad: object) -> None:
    assert usage_of({"prompt_tokens": bad, "completion_tokens": bad}) is None


def test_what_the_cache_held_is_counted_once_over_start_and_delta() -> None:
    """The start knows the prompt, the delta what was cached of it."""
    start = {"type": "message_start", "message": {"usage": {"input_tokens": 100}}}
    late = {"input_tokens": 20, "cache_read_input_tokens": 80, "output_tokens": 7}
    delta = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": late}
    assert counts(relay(event(start), event(delta), endpoint=MESSAGES).usage()) == (100, 7, 80)
    both = {"input_tokens": 20, "cache_read_input_tokens": 80, "output_tokens": 1}
    start = {"type": "message_start", "message": {"usage": both}}
    assert counts(relay(event(start), event(delta), endpoint=MESSAGES).usage()) == (100, 7, 80)
    zeros = {"input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 7}
    delta = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": zeros}
    assert counts(relay(event(start), event(delta), endpoint=MESSAGES).usage()) == (100, 7, 80)


def test_running_usage_on_every_chunk_is_not_added_up() -> None:
    running = [chunk("x", usage=usage_object(9, n)) for n in (1, 4, 5)]
    assert counts(relay(*running).usage()) == (9, 5, 0)
    delta = {"type": "content_block_delta", "usage": {"input_tokens": 9, "output_tokens": 3}}
    assert counts(relay(event(delta), event(delta), endpoint=MESSAGES).usage()) == (9, 3, 0)


def test_usage_of_rerank_is_read_as_engines_and_as_cohere_have_it() -> None:
    vllm = {"results": [], "usage": {"total_tokens": 56}}
    cohere = {"results": [], "meta": {"billed_units": {"search_units": 1}}}
    tokens = {"results": [], "meta": {"tokens": {"input_tokens": 56}}}
    read = [counts(read_answer(json.dumps(b).encode()).usage) for b in (vllm, cohere, tokens)]
    assert read == [(56, 0, 0), None, (56, 0, 0)]
    assert not RERANK.generates


@pytest.mark.parametrize(
    "usage", [None, {}, {"input_tokens": 0, "output_tokens": 0}, usage_object(0, 0)]
)
def test_a_whole_answer_without_usage_is_no_free_output(usage: object) -> None:
    content = "x" * 400
    choice = {"message": {"content": content}, "finish_reason": "stop"}
    said = {"id": "c", "choices": [choice], "usage": usage}
    found = read_answer(json.dumps(said).encode())
    assert found.usage is None
    assert 400 <= found.generated_bytes < 450


# -- how streams end


ODD_ENDS = {
    "two spaces": b'data: {"choices":[{"index":0,"finish_reason" :  "stop"}]}\n\n',
    "no space, no field space": b'data:{"choices":[{"finish_reason":"stop"}]}\n\n',
    "lone CR": b'data: {"choices":[{"finish_reason":"stop"}]}\r\r',
    "byte order mark": b'\xef\xbb\xbfdata: {"choices":[{"finish_reason":"stop"}]}\n\n',
    "negative infinity": b'data: {"choices":[{"finish_reason":"stop"}],"x":[-Infinity, NaN]}\n\n',
    "only done": chunk("x") + DONE,
    "done without a space": chunk("x") + b"data:[DONE]\n\n",
    "CRLF": chunk("x", finish="stop", end=b"\r\n\r\n"),
}


@pytest.mark.parametrize("name", ODD_ENDS)
def test_an_end_is_an_end_however_it_is_written(name: str) -> None:
    meter = relay(ODD_ENDS[name])
    assert meter.complete
    assert not meter.failed_in_band
    assert relay(*[bytes([byte]) for byte in ODD_ENDS[name]]).complete


@pytest.mark.parametrize(
    ("endpoint", "last"),
    [
        (MESSAGES, "message_stop"),
        (RESPONSES, "response.completed"),
        (RESPONSES, "response.incomplete"),
        (TRANSCRIPTIONS, "transcript.text.done"),
        (SPEECH, "speech.audio.done"),
    ],
)
def test_each_endpoint_has_its_own_end_and_needs_no_done(endpoint: Endpoint, last: str) -> None:
    meter = relay(event({"type": last}), endpoint=endpoint)
    assert meter.done
    assert meter.complete
    assert meter.closing() == b""


def test_other_streams_end_with_their_body() -> None:
    meter = relay(event({"type": "row"}), endpoint=EMBEDDINGS)
    assert meter.whole
    assert not relay(chunk("x")).whole


def test_the_first_token_is_not_the_first_event() -> None:
    early = {
        RESPONSES: ("response.created", "response.queued", "response.in_progress"),
        MESSAGES: ("message_start", "ping"),
    }
    for endpoint, kinds in early.items():
        meter = relay(*[event({"type": kind}, name=kind) for kind in kinds], endpoint=endpoint)
        assert (meter.opened, meter.begun, meter.events) == (True, False, 0)
        meter.feed(event({"type": "content_block_delta"}))
        assert meter.begun


def test_a_media_type_has_no_case() -> None:
    assert is_event_stream(b"Text/Event-Stream; charset=utf-8")
    assert not is_event_stream(b"audio/pcm")


# -- large events


@pytest.mark.parametrize("name", ["response.completed", ""])
def test_a_large_closing_event_ends_and_is_metered(name: str) -> None:
    """A response repeats its tools and metadata in its last event."""
    echoed = {"usage": {"type": "string"}, "text": "x" * 2_000_000}
    usage = {"input_tokens": 62_000, "output_tokens": 13_000}
    said = {"response": {"tools": [echoed], "usage": usage}, "type": "response.completed"}
    meter = relay(event(said, name=name), endpoint=RESPONSES)
    assert (meter.done, meter.finish_reason) == (True, "completed")
    assert counts(meter.usage()) == (62_000, 13_000, 0)


# -- bodies that are no events


def test_lines_of_json_are_relayed_and_counted() -> None:
    meter = BodyMeter(CHAT)
    line = b'{"choices":[{"delta":{"content":"a"}}]}\n'
    assert meter.feed(line * 3) == line * 3
    assert (meter.whole, meter.counted_tokens, meter.usage()) == (True, 3, None)
    meter.feed(b'{"usage":{"prompt_tokens":9,"completion_tokens":3}}\n')
    assert counts(meter.usage()) == (9, 3, 0)


def test_audio_is_no_output_tokens() -> None:
    meter = BodyMeter(SPEECH)
    meter.feed(b"\n\0" * 4000)
    assert (meter.counted_tokens, meter.usage()) == (0, None)


# -- errors that come with status 200


@pytest.mark.parametrize(
    ("said", "is_error"),
    [
        ({"error": {"message": "ResourceExhausted", "code": 502}}, True),
        ({"object": "error", "message": "no", "code": 400}, True),
        ({"error": "overloaded"}, True),
        ({"object": "response", "status": "failed", "error": {"code": "x"}, "output": []}, False),
        ({"choices": [{"text": "a"}], "error": None}, False),
        ({"object": "list", "data": []}, False),
    ],
)
def test_an_error_is_an_error_whatever_its_status(said: dict[str, object], is_error: bool) -> None:
    assert read_answer(json.dumps(said).encode()).is_error is is_error
