"""What was delivered of a stream is counted by its text, however it is cut and packed."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.payload.sse import StreamMeter
from gateway.records.endpoint import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Endpoint

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
spacing = st.sampled_from(((",", ":"), (", ", ": ")))


def event(said: dict[str, Any], separators: tuple[str, str], *, ascii_only: bool) -> bytes:
    text = json.dumps(said, separators=separators, ensure_ascii=ascii_only)
    return f"data: {text}\n\n".encode()


def said_by(endpoint: Endpoint, text: str, field: str) -> dict[str, Any]:
    """An event with generated text."""
    if endpoint is CHAT:
        return {"id": "c", "choices": [{"index": 0, "delta": {field: text}, "finish_reason": None}]}
    if endpoint is COMPLETIONS:
        return {"id": "c", "choices": [{"index": 0, "text": text, "finish_reason": None}]}
    if endpoint is MESSAGES:
        return {"type": "content_block_delta", "delta": {"type": "text_delta", "text": text}}
    return {"type": "response.output_text.delta", "delta": text}


@given(
    endpoint=st.sampled_from((CHAT, COMPLETIONS, MESSAGES, RESPONSES)),
    field=st.sampled_from(("content", "reasoning_content")),
    pieces=st.lists(texts, min_size=1, max_size=8),
    separators=spacing,
    ascii_only=st.booleans(),
    cuts=st.lists(st.integers(1, 600), max_size=6),
)
def test_the_bytes_of_the_text_are_found_wherever_it_is_cut(
    endpoint: Endpoint,
    field: str,
    pieces: list[str],
    separators: tuple[str, str],
    ascii_only: bool,
    cuts: list[int],
) -> None:
    meter = StreamMeter(endpoint, strip_usage=True, bytes_per_token=1.0)
    events = [event(said_by(endpoint, p, field), separators, ascii_only=ascii_only) for p in pieces]
    stream, sent, at = b"".join(events), b"", 0
    for cut in [*cuts, len(stream)]:
        sent += meter.feed(stream[at : at + cut])
        at += cut
    assert sent == stream
    size = len("".join(pieces).encode())
    assert meter.counted_tokens == (size or len(pieces))


@given(
    tokens=st.lists(st.integers(1, 50), min_size=1, max_size=20),
    left=st.integers(0, 20),
    separators=spacing,
    more=st.sampled_from(({}, {"prompt_tokens_details": None}, {"details": {"cached_tokens": 1}})),
)
def test_running_usage_counts_to_the_token_and_is_kept_from_the_client(
    tokens: list[int], left: int, separators: tuple[str, str], more: dict[str, Any]
) -> None:
    meter = StreamMeter(CHAT, strip_usage=True, strip_running=True, bytes_per_token=100.0)
    sent, expected, total = b"", b"", 0
    for count in tokens[: max(1, left)]:
        total += count
        said = said_by(CHAT, " token" * count, "content")
        usage = {"prompt_tokens": 9, "completion_tokens": total, **more}
        sent += meter.feed(event({**said, "usage": usage}, separators, ascii_only=False))
        expected += event(said, separators, ascii_only=False)
    assert sent == expected
    found = meter.usage()
    assert found is not None
    assert (found.prompt_tokens, found.completion_tokens) == (9, total)


@given(before=st.integers(1, 40), after=st.integers(1, 40))
def test_what_comes_after_the_last_report_is_added(before: int, after: int) -> None:
    meter = StreamMeter(CHAT, strip_usage=True, bytes_per_token=6.0)
    first = said_by(CHAT, " token" * before, "content")
    usage = {"prompt_tokens": 9, "completion_tokens": before}
    meter.feed(event({**first, "usage": usage}, (",", ":"), ascii_only=False))
    meter.feed(event(said_by(CHAT, " token" * after, "content"), (",", ":"), ascii_only=False))
    found = meter.usage()
    assert found is not None
    assert found.completion_tokens == before + after
