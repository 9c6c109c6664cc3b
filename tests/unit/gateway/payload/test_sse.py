"""Relaying event streams: bytes pass unchanged, usage and the end are found, errors are seen."""

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.payload.sse import DONE, StreamMeter
from gateway.records.attempt import Usage
from gateway.records.endpoint import CHAT, MESSAGES, RESPONSES, Endpoint
from tests.builders import chunk, event, usage_chunk, usage_object
from tests.growth import assert_linear

LF, CRLF, BOM = b"\n\n", b"\r\n\r\n", b"\xef\xbb\xbf"


def cut(data: bytes, points: list[int]) -> list[bytes]:
    """`data` in pieces, cut at the points (taken modulo its length)."""
    at = sorted({p % (len(data) + 1) for p in points} | {0, len(data)})
    return [data[a:b] for a, b in pairwise(at)]


def relay(
    pieces: list[bytes], endpoint: Endpoint = CHAT, *, strip: bool = False, choices: int = 1
) -> tuple[bytes, StreamMeter]:
    meter = StreamMeter(endpoint, strip_usage=strip, choices=choices)
    return b"".join(meter.feed(piece) for piece in pieces), meter


NASTY = st.sampled_from(
    [
        '"finish_reason":"stop"',
        '"finish_reason": "length"',
        '","finish_reason":"stop"}]}',
        '"usage":{"prompt_tokens":1000000000,"completion_tokens":9}',
        '"choices":[],"usage":{"prompt_tokens":1}',
        "data: [DONE]\n\n",
        "[DONE]",
        'data: {"error":{"message":"x"}}\n\n',
        "event: error\n",
        "finish_reason",
        "\\",
        '\\"',
        "\r\n\r\n",
        "\n\n",
        "\u2028é漢🎉",
    ]
)
CONTENTS = st.lists(st.text(max_size=12) | NASTY, min_size=1, max_size=6)
POINTS = st.lists(st.integers(0, 100_000), max_size=12)
SEPARATORS = st.sampled_from([LF, CRLF])


@given(CONTENTS, POINTS, SEPARATORS, st.booleans(), st.booleans(), st.booleans())
def test_however_the_bytes_are_cut_the_client_gets_the_input_minus_the_stripped_usage_chunk(
    contents: list[str], points: list[int], end: bytes, sends: bool, strip: bool, done: bool
) -> None:
    text = b"".join(chunk(c, end=end) for c in contents) + chunk(finish="stop", end=end)
    usage = usage_chunk(17, 5, 2, end=end) if sends else b""
    closing = b"data: [DONE]" + end if done else b""
    out, meter = relay(cut(text + usage + closing, points), strip=strip)
    assert out == text + (b"" if strip else usage) + closing
    assert meter.finish_reason == "stop"
    assert not meter.failed_in_band
    assert meter.done is done
    assert meter.closing() == (b"" if done else DONE)
    expected = (
        Usage(prompt_tokens=17, completion_tokens=5, cached_tokens=2, cached_reported=True)
        if sends
        else None
    )
    assert meter.usage() == expected
    stripped = sends and strip
    assert meter.events == len(contents) + 1 + sends + done - stripped


@given(CONTENTS, POINTS, SEPARATORS, st.booleans())
def test_no_content_can_fake_an_end_or_a_usage(
    contents: list[str], points: list[int], end: bytes, strip: bool
) -> None:
    text = b"".join(chunk(c, end=end) for c in contents)
    out, meter = relay(cut(text, points), strip=strip)
    assert out == text
    assert not meter.complete
    assert not meter.failed_in_band
    assert not meter.done
    assert meter.usage() is None
    assert meter.closing() == b""


@given(st.binary(max_size=200) | st.text("\r\n: {}\"dat'", max_size=60).map(str.encode), POINTS)
def test_of_any_bytes_at_all_a_prefix_that_ends_with_an_event_is_relayed(
    data: bytes, points: list[int]
) -> None:
    out, _ = relay(cut(data, points))
    assert data.removeprefix(BOM).startswith(out) or data.startswith(out)
    assert not out or out.endswith((LF, b"\n\r\n", b"\r\r"))


def test_usage_on_the_last_content_chunk_is_metered_and_never_stripped() -> None:
    last = chunk("x", finish="stop", usage=usage_object(9, 4))
    out, meter = relay([last, DONE], strip=True)
    assert out == last + DONE
    assert meter.usage() == Usage(prompt_tokens=9, completion_tokens=4, cached_reported=True)


def test_done_ends_a_stream_without_finish_reason_and_nothing_follows() -> None:
    out, meter = relay([chunk("x"), DONE, chunk("y"), event({"error": {"message": "late"}})])
    assert out == chunk("x") + DONE
    assert meter.complete
    assert not meter.failed_in_band
    assert meter.closing() == b""


def test_an_empty_finish_reason_on_every_chunk_is_no_end() -> None:
    _, meter = relay([chunk("x", finish="")])
    assert not meter.complete


def test_of_several_choices_the_last_finish_counts_however_it_is_cut() -> None:
    chunks = [chunk(finish="stop"), chunk(finish="length")]
    assert relay(chunks)[1].finish_reason == "length"
    assert relay([b"".join(chunks)])[1].finish_reason == "length"


# -- lines that end in both ways, and lines without data

PARTS = st.lists(
    st.tuples(st.sampled_from(["data", "comment", "usage"]), SEPARATORS), min_size=1, max_size=8
)
MADE: dict[str, Callable[[bytes], bytes]] = {
    "data": lambda end: chunk("x", end=end),
    "comment": lambda end: b": ping" + end,
    "usage": lambda end: usage_chunk(17, 5, end=end),
}


@given(PARTS, POINTS, st.booleans())
def test_however_lines_end_nothing_is_lost_and_only_the_usage_chunk_is_stripped(
    parts: list[tuple[str, bytes]], points: list[int], strip: bool
) -> None:
    made = [(kind, MADE[kind](end)) for kind, end in parts]
    out, meter = relay(cut(b"".join(event for _, event in made), points), strip=strip)
    assert out == b"".join(event for kind, event in made if kind != "usage" or not strip)
    kinds = [kind for kind, _ in parts]
    assert meter.events == kinds.count("data") + (0 if strip else kinds.count("usage"))
    assert (meter.usage() is not None) == ("usage" in kinds)


def test_a_comment_with_lf_among_crlf_events_holds_nothing_back() -> None:
    meter = StreamMeter(CHAT, strip_usage=False)
    said = b": ping\n\n" + chunk("x", end=CRLF)
    assert meter.feed(said) == said


# -- several choices


def finish(index: int, reason: str = "stop") -> bytes:
    return event({"choices": [{"index": index, "delta": {}, "finish_reason": reason}]})


@given(st.integers(1, 5), st.data(), POINTS)
def test_a_stream_is_complete_when_every_choice_has_ended(
    choices: int, data: st.DataObject, points: list[int]
) -> None:
    order = data.draw(st.permutations(range(choices)))
    repeated = [finish(order[0])] * 3
    _, meter = relay(cut(b"".join([*repeated, *map(finish, order[1:-1])]), points), choices=choices)
    assert meter.complete == (choices == 1)
    _, meter = relay(cut(b"".join(map(finish, order)), points), choices=choices)
    assert meter.complete


def test_an_engine_that_says_done_with_fewer_choices_has_ended() -> None:
    assert not relay([finish(0)], choices=2)[1].complete
    assert relay([finish(0), DONE], choices=2)[1].complete
    assert relay([DONE], choices=2)[1].empty


def test_a_last_done_that_lost_its_blank_line_is_completed() -> None:
    out, meter = relay([chunk("x", finish="stop"), b"data: [DONE]\n"])
    assert (out + meter.closing()).endswith(DONE)


# -- Anthropic's stream

START = event(
    {
        "type": "message_start",
        "message": {
            "id": "msg_1",
            "stop_reason": None,
            "usage": {"input_tokens": 25, "output_tokens": 1, "cache_read_input_tokens": 8},
        },
    },
    name="message_start",
)
DELTA = event(
    {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "hi"}},
    name="content_block_delta",
)
END = event(
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 7}},
    name="message_delta",
) + event({"type": "message_stop"}, name="message_stop")


@given(POINTS)
def test_messages_usage_comes_from_message_start_and_message_delta(points: list[int]) -> None:
    out, meter = relay(cut(START + DELTA + END, points), MESSAGES, strip=True)
    assert out == START + DELTA + END
    assert meter.finish_reason == "end_turn"
    assert meter.usage() == Usage(
        prompt_tokens=33, completion_tokens=7, cached_tokens=8, cached_reported=True
    )
    assert meter.closing() == b""


def test_an_error_event_of_messages_is_seen_and_a_text_that_spells_one_is_none() -> None:
    body = {"type": "error", "error": {"type": "overloaded_error", "message": "x"}}
    assert relay([START, event(body, name="error")], MESSAGES)[1].failed_in_band
    spelled = {"type": "content_block_delta", "delta": {"text": "event: error\ndata: {}"}}
    assert not relay([event(spelled, name="content_block_delta")], MESSAGES)[1].failed_in_band


# -- the responses stream

CREATED = event(
    {"type": "response.created", "response": {"id": "resp_1", "error": None, "usage": None}},
    name="response.created",
)


def completed(kind: str = "completed") -> bytes:
    usage = {
        "input_tokens": 30,
        "output_tokens": 6,
        "input_tokens_details": {"cached_tokens": 16},
    }
    return event(
        {"type": f"response.{kind}", "response": {"id": "resp_1", "usage": usage}},
        name=f"response.{kind}",
    )


def text_delta(text: str) -> bytes:
    body = {"type": "response.output_text.delta", "delta": text}
    return event(body, name="response.output_text.delta")


@given(POINTS, st.sampled_from(["completed", "incomplete"]))
def test_responses_usage_comes_from_the_closing_event(points: list[int], kind: str) -> None:
    stream = CREATED + text_delta("hi") + completed(kind)
    out, meter = relay(cut(stream, points), RESPONSES, strip=True)
    assert out == stream
    assert meter.finish_reason == kind
    assert meter.usage() == Usage(
        prompt_tokens=30, completion_tokens=6, cached_tokens=16, cached_reported=True
    )
    assert meter.closing() == b""


@given(POINTS)
def test_responses_text_that_spells_another_end_does_not_hide_the_true_one(
    points: list[int],
) -> None:
    stream = CREATED + text_delta("response.failed") + text_delta("response.completed")
    assert not relay([stream], RESPONSES)[1].complete
    stream += completed()
    assert relay(cut(stream, points), RESPONSES)[1].finish_reason == "completed"


def test_what_a_client_sent_and_the_engine_echoes_is_no_end() -> None:
    echoed = {"type": "response.completed", "response.failed": {"type": "response.failed"}}
    said = {"id": "resp_1", "metadata": echoed, "tools": [echoed], "usage": None}
    created = event({"type": "response.created", "response": said}, name="response.created")
    assert not relay([created, text_delta("hi")], RESPONSES)[1].complete
    assert relay([created, completed("incomplete")], RESPONSES)[1].finish_reason == "incomplete"


def test_the_input_of_a_tool_is_no_end_of_messages() -> None:
    block = {"type": "tool_use", "input": {"stop_reason": "end_turn", "usage": {"input_tokens": 9}}}
    said = event({"type": "content_block_start", "content_block": block})
    _, meter = relay([START, said], MESSAGES)
    assert not meter.complete
    assert meter.usage() == Usage(
        prompt_tokens=33, completion_tokens=1, cached_tokens=8, cached_reported=True
    )


# -- how long it takes


WORST: dict[str, Callable[[int], list[bytes]]] = {
    "one event in small pieces": lambda n: [b"data: "] + [b"x" * 64] * n + [b"\n\n"],
    "one event of half ends": lambda n: [b"data: "] + [b"\n\r" * 32] * n + [b"\n\n"],
    "lines of one event": lambda n: [b"data: x\n" * n + b"\n"],
    "ends only": lambda n: [b"\n" * 40 * n],
    "marks without an end": lambda n: [b'data: "finish_reason":"' * n + b"\n\n"],
    "small events with marks": lambda n: [b'data: "finish_reason":"\n\n' * n],
    "small events with usage": lambda n: [b'data: "usage":{\n\n' * n],
    "events of both ends": lambda n: [b'data: "usage":{\r\n\r\n:\n\n' * n],
    "errors": lambda n: [b'\ndata: {"error":null' * n + b"\n\n"],
    "bare ends": lambda n: [b"\r\n\r\n" * 10 * n],
    "lines that never begin": lambda n: [b"data" * n],
    "usage that never ends": lambda n: [b'data: {"usage":{"error"\n' * n],
    "small events of usage alone": lambda n: [b'data: {"usage":{"a":1},"choices":[]}\n\n' * n],
    "answers": lambda n: [b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n' * n],
    "dones": lambda n: [b"\ndata: [DONE]" * n + b"\n\n"],
}


@pytest.mark.parametrize("worst", WORST)
@pytest.mark.parametrize("endpoint", [CHAT, MESSAGES, RESPONSES], ids=lambda e: e.name)
def test_twice_the_bytes_take_at_most_twice_the_time(endpoint: Endpoint, worst: str) -> None:
    def feed(pieces: list[bytes]) -> None:
        relay(pieces, endpoint, strip=True)[1].usage()

    assert_linear(WORST[worst], feed)
