"""What is counted: decoded UTF-8 bytes of all that an engine may tokenize, known or not."""

import base64
import json
import struct
from typing import Any

import orjson
import pytest

from gateway.errors import BadRequest
from gateway.payload.body import read_body
from gateway.payload.counting import dimensions
from gateway.records.endpoint import (
    CHAT,
    CLASSIFY,
    COHERE_EMBED,
    COMPLETIONS,
    COUNT_TOKENS,
    DETOKENIZE,
    EMBEDDINGS,
    MESSAGES,
    POOLING,
    RERANK,
    RESPONSES,
    SCORE,
    TOKENIZE,
    Endpoint,
)
from gateway.records.request import Measure
from tests.growth import quickest_s

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
TOOLS_BYTES = len(json.dumps(TOOLS, separators=(",", ":")))


def measure(endpoint: Endpoint, **fields: Any) -> Measure:
    return read_body(endpoint, json.dumps({"model": "m", **fields}).encode()).measure


def messages(*contents: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content} for content in contents]


def png(width: int, height: int, size: int = 64) -> str:
    header = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", width, height)
    return base64.b64encode(header.ljust(size, b"\x00")).decode()


def test_message_contents_are_counted_decoded() -> None:
    found = measure(CHAT, messages=messages("abc", 'd\n"e'))
    assert found.text_bytes == found.longest_text_bytes == 3 + 4
    assert found.messages == 2
    assert found.prompts == 1


def test_escaped_cjk_counts_like_plain_cjk() -> None:
    body = {"model": "m", "messages": messages("\u4f60\u597d\uff0c\u4e16\u754c \U0001f600" * 50)}
    escaped = read_body(CHAT, json.dumps(body).encode()).measure
    plain = read_body(CHAT, json.dumps(body, ensure_ascii=False).encode()).measure
    assert escaped == plain
    assert plain.text_bytes == 50 * (5 * 3 + 1 + 4)


def test_white_space_and_fields_without_text_do_not_count() -> None:
    body = {"model": "m", "messages": messages("abc"), "metadata": {"x": "y" * 1000}}
    found = read_body(CHAT, json.dumps(body, indent=8).encode()).measure
    assert found.text_bytes == 3


def test_names_calls_and_tools_count() -> None:
    called = {
        "role": "assistant",
        "content": None,
        "name": "bob",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get", "arguments": '{"a":1}'},
            }
        ],
    }
    found = measure(CHAT, messages=[called], tools=TOOLS)
    assert found.text_bytes == 3 + 3 + 7 + TOOLS_BYTES
    assert found.tools


TEXT = "word " * 12_000
"""60 KB: as much as is hidden somewhere."""
CALL = {"function": {"name": "f", "arguments": "{}"}}


IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}
RESULT = {"type": "tool_result", "content": "x"}
IN_MESSAGE: list[dict[str, Any]] = [
    {"reasoning": TEXT},
    {"reasoning_content": TEXT},
    {"refusal": TEXT},
    {"name": TEXT},
    {"role": TEXT},
    {"tool_call_id": TEXT},
    {"annotations": [{"text": TEXT}]},
    {"audio": {"transcript": TEXT}},
    {"nobody_knows": {"a": [TEXT]}},
    {TEXT: None},
    {"tool_calls": [{"function": {"name": "f", "arguments": TEXT}}]},
    {"tool_calls": [CALL | {"id": TEXT}]},
    {"tool_calls": [CALL | {"nobody_knows": TEXT}]},
    {"tool_calls": [{"function": {"name": "f", "nobody_knows": TEXT}}]},
    {"function_call": {"name": "f", "arguments": TEXT}},
    {"function_call": {"name": "f", "nobody_knows": TEXT}},
]
IN_ITEM = [
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": TEXT}]},
    {"type": "code_interpreter_call", "code": TEXT},
    {"type": "file_search_call", "results": [{"text": TEXT}]},
    {"type": "mcp_list_tools", "tools": [{"description": TEXT}]},
    {"type": "custom_tool_call_output", "call_id": "c", "output": TEXT},
    {"type": "function_call", "name": "f", "arguments": "{}", "call_id": TEXT},
    {"role": "user", "content": "x", "nobody_knows": TEXT},
    {"role": TEXT, "content": "x"},
]
IN_DOCUMENT = [
    {"type": "document", "source": {"type": "text", "data": TEXT}},
    {"type": "document", "source": {"type": "content", "content": [{"text": TEXT}]}},
    {"type": "document", "source": {"type": "url", "url": "x"}, "context": TEXT},
    {"type": "search_result", "title": TEXT, "content": [{"type": "text", "text": "x"}]},
]
IN_PART = [
    {"type": "text", "text": "x", "nobody_knows": TEXT},
    {"type": "text", "text": "x", TEXT: True},
    {"type": "text", "text": "x", "nobody_knows": [{"a": TEXT}]},
    {"type": "text", "text": "x", "thinking": TEXT},
    {"type": "text", "text": "x", "annotations": [{"title": TEXT}]},
    {"type": "text", "text": "x", "cache_control": {"type": TEXT}},
    {"type": "text", "text": "x", "file": {"file_data": TEXT}},
    {"type": "text", "text": "x", "content": TEXT},
    {"type": "text", "text": "x", "content": [{"type": "text", "text": TEXT}]},
    {"text": "x", "input": {"a": TEXT}},
    IMAGE | {"nobody_knows": TEXT},
    IMAGE | {"text": TEXT},
    {"type": "thinking", "thinking": "x", "nobody_knows": TEXT},
    {"type": "tool_use", "name": "f", "input": {}, "caller": {"a": TEXT}},
    {"type": TEXT + "tool_result", "content": "x"},
    RESULT | {"tool_use_id": TEXT},
    RESULT | {"nobody_knows": TEXT},
    RESULT | {"content": [{"type": "text", "text": "x", "nobody_knows": TEXT}]},
    RESULT | {"content": [RESULT | {"content": [IMAGE | {"nobody_knows": TEXT}]}]},
    {"type": "redacted_thinking", "data": TEXT},
    {"type": "tool_reference", "tool_name": TEXT},
]
IN_TEXT = [{"type": "text", "text": "x", "nobody_knows": TEXT}]
SAID = {"role": "user", "content": "x"}
HIDDEN: list[tuple[Endpoint, dict[str, Any]]] = [
    *(
        (CHAT, {"messages": [{"role": role, "content": "x", **hidden}]})
        for hidden in IN_MESSAGE
        for role in ("user", "assistant", "system", "tool")
    ),
    *((RESPONSES, {"input": [item, SAID]}) for item in IN_ITEM),
    *((MESSAGES, {"messages": messages([part])}) for part in (*IN_DOCUMENT, *IN_PART)),
    *((e, {"messages": messages([part])}) for part in IN_PART for e in (CHAT, COUNT_TOKENS)),
    (MESSAGES, {"messages": [SAID], "system": IN_TEXT}),
    (RESPONSES, {"input": messages(IN_TEXT)}),
    (RESPONSES, {"input": [{"type": "function_call_output", "output": IN_TEXT}]}),
    (RESPONSES, {"input": [{"type": "reasoning", "summary": IN_TEXT}]}),
    (RESPONSES, {"input": [{"type": "reasoning", "encrypted_content": TEXT}, SAID]}),
    (RERANK, {"query": "q", "documents": [{"content": IN_TEXT}]}),
    (RERANK, {"query": {"text": "q", "nobody_knows": TEXT}, "documents": ["x"]}),
    (RERANK, {"query": "q", "documents": [{"text": "x", "nobody_knows": TEXT}]}),
    (SCORE, {"text_1": {"text": "q", "nobody_knows": TEXT}, "text_2": ["x"]}),
    (SCORE, {"queries": "q", "documents": [{"content": IN_TEXT}]}),
]


@pytest.mark.parametrize(("endpoint", "fields"), HIDDEN, ids=range(len(HIDDEN)))
def test_text_counts_wherever_a_body_has_it(endpoint: Endpoint, fields: dict[str, Any]) -> None:
    found = measure(endpoint, **fields)
    assert len(TEXT) <= found.text_bytes < len(TEXT) + 120, fields
    assert found.longest_text_bytes == found.text_bytes


@pytest.mark.parametrize(
    "name", ["documents", "chat_template", "chat_template_kwargs", "nobody_knows"]
)
@pytest.mark.parametrize("value", [TEXT, {"a": TEXT}, [{"text": TEXT}]], ids=["", "{}", "[]"])
def test_members_that_nobody_knows_count_as_text(name: str, value: Any) -> None:
    found = measure(CHAT, messages=messages("x"), **{name: value})
    assert len(TEXT) < found.text_bytes < len(TEXT) + 50
    found = measure(COMPLETIONS, prompt=[1, 2], **{name: value})
    assert (found.exact_tokens, found.text_bytes > len(TEXT)) == (2, True)


@pytest.mark.parametrize(
    "part",
    [
        IMAGE | {"image_url": {"url": TEXT}, "uuid": "u", "cache_control": {"type": "ephemeral"}},
        {"type": "input_image", "file_id": TEXT, "detail": "high"},
        {"type": "image", "image": TEXT},
        {"type": "image", "source": {"type": "base64", "data": TEXT}},
        {"type": "image_embeds", "image_embeds": {"a": TEXT}},
        {"type": "input_audio", "input_audio": {"data": TEXT}},
        {"type": "audio_url", "audio_url": {"url": TEXT}},
        {"type": "video_url", "video_url": {"url": TEXT}},
        {"type": "video", "video": [TEXT]},
        {"type": "file", "file": {"file_data": TEXT, "filename": "a.pdf"}},
        {"type": "input_file", "file_data": TEXT, "filename": "a.pdf"},
        {"type": "input_file", "file_url": TEXT},
    ],
    ids=lambda part: str(part)[:60],
)
def test_what_a_media_part_is_made_of_is_no_text(part: dict[str, Any]) -> None:
    found = measure(CHAT, messages=messages([part, "abc"]))
    assert (found.text_bytes, found.media_parts) == (3, 1)


def test_settings_and_ids_beside_a_text_are_no_text() -> None:
    beside = {"cache_control": {"type": "ephemeral"}, "citations": [], "annotations": []}
    parts = [
        {"type": "text", "text": "abc", "id": "a", "logprobs": [], **beside},
        {"type": "tool_result", "tool_use_id": "t", "is_error": False, "content": "de", **beside},
        {"type": "thinking", "thinking": "f", "signature": "s" * 1000},
    ]
    assert measure(MESSAGES, messages=messages(parts)).text_bytes == 6


def test_parts_in_parts_without_end_are_read_quickly() -> None:
    """Each level of them is decoded once, not once for each level above."""
    part = {"type": "tool_result", "nobody_knows": 1, "content": "[]," * 15_000}
    for _ in range(300):
        part = {"type": "tool_result", "content": [part]}

    def refused() -> None:
        with pytest.raises(BadRequest):
            measure(CHAT, messages=[{"role": "user", "content": [part]}])

    assert quickest_s(refused) < 0.05


DATA = "QUJD" * 50_000
UNKNOWN = [
    {"type": "hologram", "text": {"value": TEXT}, "content": [1, {"type": 2}]},
    {"type": "web_search_tool_result", "content": {"error_code": TEXT}},
    {"type": "web_search_tool_result", "content": [{"type": "web_search_result", "url": TEXT}]},
    {"type": "tool_addition", "tool": {"name": TEXT}},
    {"type": "tool_reference", "name": [TEXT]},
    {"source": TEXT, "name": "x"},
    {"type": "future", "picture": DATA, "name": {"said": TEXT}},
    {"type": "image", "mimeType": "image/png", "data": DATA, "alt": TEXT},
    {"type": "future", "picture": f"data:image/png;base64,{DATA}", "said": TEXT},
    {"inlineData": {"mimeType": "image/png", "data": DATA}, "said": TEXT},
    {"type": "document", "source": {"type": "future", "data": DATA, "said": TEXT}},
]


@pytest.mark.parametrize("part", UNKNOWN, ids=lambda part: str(part)[:60])
def test_parts_of_unknown_shapes_count_as_text_but_for_their_data(part: dict[str, Any]) -> None:
    within = {"type": "tool_result", "tool_use_id": "t", "content": [part]}
    for found in (
        measure(CHAT, messages=messages([part])),
        measure(MESSAGES, messages=messages([within])),
        measure(MESSAGES, messages=messages("x"), system=[part]),
        measure(RESPONSES, input=messages([part])),
    ):
        data = 3_072 if DATA in str(part) else 0
        assert len(TEXT) + data < found.text_bytes < len(TEXT) + data + 150
        assert found.messages


@pytest.mark.parametrize(
    "item",
    [
        {"type": "tool_search_call", "arguments": {"query": TEXT}},
        {"type": "shell_call_output", "output": [{"stdout": TEXT, "outcome": {"code": 0}}]},
        {"type": "computer_call_output", "output": {"image_url": DATA, "said": TEXT}},
        {"type": "image_generation_call", "result": DATA, "status": {"said": TEXT}},
    ],
    ids=lambda item: str(item)[:60],
)
def test_items_of_unknown_shapes_count_as_text_but_for_their_data(item: dict[str, Any]) -> None:
    found = measure(RESPONSES, input=[item])
    data = 3_072 if DATA in str(item) else 0
    assert len(TEXT) + data < found.text_bytes < len(TEXT) + data + 150


def test_embeddings_count_by_tokens_and_not_as_text() -> None:
    """At most one token for 4,096 characters of base64."""
    megabytes = "QUJD" * 1_000_000
    for embeddings in (megabytes, [megabytes]):
        found = measure(COMPLETIONS, prompt_embeds=embeddings)
        assert 4_000_000 // 1_024 <= found.text_bytes < 4_000_000 // 1_024 + 10
    assert measure(COMPLETIONS, prompt="abc", prompt_embeds=None).text_bytes == 3
    with pytest.raises(BadRequest) as caught:
        measure(COMPLETIONS, prompt_embeds=None)
    assert caught.value.param == "prompt"


def test_bodies_of_pooling_models_count_by_prompt() -> None:
    pictured = {"content": [{"type": "text", "text": "cde"}, IMAGE]}
    for endpoint, fields, sizes in (
        (CLASSIFY, {"input": ["a", "bcd"], "softmax": True}, (4, 3, 2)),
        (CLASSIFY, {"messages": messages("abc")}, (3, 3, 1)),
        (POOLING, {"input": "abc", "task": "token_classify"}, (3, 3, 1)),
        (POOLING, {"data": {"tile": DATA}, "softmax": False}, (3_072 + 11, 3_072 + 11, 1)),
        (COHERE_EMBED, {"texts": ["ab", "c"], "truncate": "END"}, (3, 2, 2)),
        (COHERE_EMBED, {"inputs": [pictured, pictured]}, (6, 3, 2)),
        (COHERE_EMBED, {"images": [f"data:image/png;base64,{png(75, 750)}"]}, (0, 0, 1)),
    ):
        found = measure(endpoint, **fields)
        assert (found.text_bytes, found.longest_text_bytes, found.prompts) == sizes, fields
    assert measure(COHERE_EMBED, images=[png(750, 750)]).media_tokens == 768
    assert measure(DETOKENIZE, tokens=[1, 2, 3]).exact_tokens == 3
    with pytest.raises(BadRequest, match="texts"):
        measure(COHERE_EMBED, texts=None)


def test_long_words_in_known_texts_are_text() -> None:
    assert measure(CHAT, messages=messages(DATA)).text_bytes == len(DATA)
    assert measure(CHAT, messages=messages([{"type": "text", "text": DATA}])).text_bytes == len(
        DATA
    )


def test_an_encoded_document_is_no_text() -> None:
    source = {"type": "base64", "media_type": "application/pdf", "data": "QUJD" * 10_000}
    found = measure(MESSAGES, messages=messages([{"type": "document", "source": source}]))
    assert (found.text_bytes, found.media_parts) == (0, 1)


def test_an_image_beside_unknown_members_is_no_text() -> None:
    url = f"data:image/png;base64,{png(1000, 750, size=100_000)}"
    said = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "abc"}]
    message = {"role": "user", "content": said, "sent_at": "2026-01-01"}
    found = measure(CHAT, messages=[message])
    assert (found.text_bytes, found.media_tokens) == (3 + len('"2026-01-01"'), 1000)


@pytest.mark.parametrize(
    ("endpoint", "fields", "param"),
    [
        (EMBEDDINGS, {"input": "a", "messages": messages(TEXT)}, "input"),
        (TOKENIZE, {"prompt": "a", "messages": messages(TEXT)}, "prompt"),
        (SCORE, {"text_1": "a", "queries": TEXT, "text_2": "b"}, "queries"),
    ],
)
def test_of_two_prompts_it_is_not_guessed_which_counts(
    endpoint: Endpoint, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        measure(endpoint, **fields)
    assert caught.value.param == param


def test_tool_definitions_count_as_compact_utf8() -> None:
    tools = [{"description": '\u00e9t\u00e9 "x"'}]
    compact = json.dumps(tools, separators=(",", ":"), ensure_ascii=False)
    for ascii_only in (True, False):
        raw = json.dumps(
            {"model": "m", "messages": messages("a"), "tools": tools},
            indent=2,
            ensure_ascii=ascii_only,
        )
        assert read_body(CHAT, raw.encode()).measure.text_bytes == 1 + len(compact.encode())


@pytest.mark.parametrize("tools", [None, []])
def test_no_tools_is_no_tools(tools: Any) -> None:
    found = measure(CHAT, messages=messages("abc"), tools=tools)
    assert found.text_bytes == 3
    assert not found.tools


@pytest.mark.parametrize(
    ("width", "height", "tokens"),
    [(1000, 750, 1000), (10, 10, 64), (9000, 9000, 4096), (768, 1024, 1049)],
)
def test_inline_images_cost_by_dimensions(width: int, height: int, tokens: int) -> None:
    url = f"data:image/png;base64,{png(width, height)}"
    for image in ({"url": url}, url):
        found = measure(CHAT, messages=messages([{"type": "image_url", "image_url": image}]))
        assert found.media_tokens == tokens
    source = {"type": "base64", "media_type": "image/png", "data": png(width, height)}
    found = measure(MESSAGES, messages=messages([{"type": "image", "source": source}]))
    assert found.media_tokens == tokens
    part = {"type": "input_image", "image_url": url}
    found = measure(RESPONSES, input=messages([part]))
    assert found.media_tokens == tokens


def test_a_large_inline_image_is_cheap_and_not_text() -> None:
    url = f"data:image/png;base64,{png(1000, 750, size=2_250_000)}"
    parts = [{"type": "text", "text": "x" * 200}, {"type": "image_url", "image_url": {"url": url}}]
    raw = json.dumps({"model": "m", "messages": messages(parts)}).encode()
    assert len(raw) > 3_000_000
    read = read_body(CHAT, raw).measure
    assert read.text_bytes == 200
    assert read.media_tokens == 1000
    assert quickest_s(lambda: read_body(CHAT, raw)) < 4 * quickest_s(lambda: orjson.loads(raw))


def test_dimensions_of_the_common_formats() -> None:
    jpeg = (
        b"\xff\xd8\xff\xe0" + struct.pack(">H", 16) + b"\x00" * 14
        + b"\xff\xc0" + struct.pack(">HBHH", 17, 8, 480, 640) + b"\x00" * 10
    )  # fmt: skip
    assert dimensions(jpeg) == (640, 480)
    assert dimensions(jpeg[:10]) is None
    assert dimensions(b"GIF89a" + struct.pack("<HH", 320, 200)) == (320, 200)
    lossy = b"RIFF\x00\x00\x00\x00WEBPVP8 " + b"\x00" * 10 + struct.pack("<HH", 640, 480)
    assert dimensions(lossy) == (640, 480)
    lossless = b"RIFF\x00\x00\x00\x00WEBPVP8L\x00\x00\x00\x00\x2f"
    lossless += ((639) | (479 << 14)).to_bytes(4, "little") + b"\x00" * 8
    assert dimensions(lossless) == (640, 480)
    extended = b"RIFF\x00\x00\x00\x00WEBPVP8X" + b"\x00" * 8
    extended += (639).to_bytes(3, "little") + (479).to_bytes(3, "little")
    assert dimensions(extended) == (640, 480)
    assert dimensions(b"BM" + b"\x00" * 40) is None
    assert dimensions(b"") is None


@pytest.mark.parametrize("url", ["data:image/png;base64,@@@@", "data:image/png;base64,", "data:,x"])
def test_broken_data_urls_cost_the_configured_figure(url: str) -> None:
    parts = [{"type": "image_url", "image_url": {"url": url}}]
    assert measure(CHAT, messages=messages(parts)).media_tokens == 768


def test_token_ids_are_exact() -> None:
    found = measure(COMPLETIONS, prompt=[1, 2, 3])
    assert (found.exact_tokens, found.longest_exact_tokens, found.prompts) == (3, 3, 1)
    found = measure(EMBEDDINGS, input=[[1, 2], [3, 4, 5, 6]])
    assert (found.exact_tokens, found.longest_exact_tokens, found.prompts) == (6, 4, 2)
    assert found.text_bytes == 0


def test_responses_items() -> None:
    items = [
        {"role": "user", "content": "abc"},
        {"role": "user", "content": [{"type": "input_text", "text": "de"}]},
        {"type": "function_call", "name": "f", "arguments": '{"a":1}', "call_id": "c"},
        {"type": "function_call_output", "output": "1234", "call_id": "c"},
        {"type": "function_call_output", "output": [{"type": "output_text", "text": "56"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "why"}]},
        {"type": "item_reference", "id": "x"},
    ]
    found = measure(RESPONSES, input=items, instructions="be kind", tools=TOOLS)
    assert found.text_bytes == 3 + 2 + 1 + 7 + 4 + 2 + 3 + 7 + TOOLS_BYTES
    assert found.messages == 8
    assert measure(RESPONSES, input="abcd").text_bytes == 4


def test_anthropic_blocks() -> None:
    conversation = [
        {"role": "user", "content": "abc"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s" * 100},
                {"type": "tool_use", "id": "t", "name": "f", "input": {"a": [1, 2]}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t", "content": "four"},
                {"type": "tool_result", "content": [{"type": "text", "text": "five!"}]},
            ],
        },
    ]
    found = measure(
        MESSAGES, messages=conversation, system=[{"type": "text", "text": "sys"}], tools=TOOLS
    )
    assert found.text_bytes == 3 + 2 + 1 + len('{"a":[1,2]}') + 4 + 5 + 3 + TOOLS_BYTES
    assert found.messages == 4


def test_rerank_repeats_the_query() -> None:
    found = measure(RERANK, query="q" * 5, documents=["d" * 10, {"text": "e" * 20}])
    assert found.prompts == 2
    assert found.text_bytes == 2 * 5 + 30
    assert found.longest_text_bytes == 25


@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("queries", "documents"), ("queries", "items")]
)
def test_score_pairs(names: tuple[str, str]) -> None:
    left, right = names
    found = measure(SCORE, **{left: "q" * 5, right: ["d" * 10, "e" * 20]})
    assert (found.prompts, found.text_bytes, found.longest_text_bytes) == (2, 40, 25)
    found = measure(SCORE, **{left: ["a", "bbb"], right: ["cc", "d"]})
    assert (found.prompts, found.text_bytes, found.longest_text_bytes) == (2, 7, 4)


def test_values_that_cannot_be_measured_are_refused_by_path() -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"x"}],"tools":["\\u00e9",1e400]}'
    with pytest.raises(BadRequest) as caught:
        read_body(CHAT, body)
    assert caught.value.param == "tools[1]"
