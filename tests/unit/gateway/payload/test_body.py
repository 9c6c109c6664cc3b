"""Reading bodies: what is refused and how, and which facts come out."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import BadRequest
from gateway.payload.body import read_body
from gateway.payload.members import MAX_MEMBERS
from gateway.records.endpoint import CHAT, COMPLETIONS, ENDPOINTS, MESSAGES, RESPONSES, Endpoint
from tests.growth import quickest_s

USER = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": USER, **fields}).encode()


def refused(raw: bytes, endpoint: Endpoint = CHAT) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        read_body(endpoint, raw)
    assert caught.value.message
    assert caught.value.reason
    return caught.value


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "empty_body"),
        (b"   ", "invalid_json"),
        (b"hello", "invalid_json"),
        (b"[]", "invalid_type"),
        (b'"text"', "invalid_type"),
        (b"null", "invalid_type"),
        (b"\xef\xbb\xbf" + chat(), "invalid_json"),
        (chat() + b"x", "invalid_json"),
        (chat() + chat(), "invalid_json"),
        (chat()[:-1], "invalid_json"),
        (chat()[:-1] + b",}", "invalid_json"),
        (chat()[:-1] + b',"x":"\xff"}', "invalid_utf8"),
        (chat(model="\u00e9", user="\u00e9").decode().encode("utf-16"), "invalid_utf8"),
        (chat()[:-1] + b',"x":"\\ud83d"}', "invalid_json"),
        (chat()[:-1] + b',"x":["\\ude00 and more text"]}', "invalid_json"),
        (chat()[:-1] + b',"x":"\\ud83d\\ud83d and more"}', "invalid_json"),
        (b'{"model":"m","messages":[{"role":"user","content":"\\ud83dxxxxxx"}]}', "invalid_json"),
        (chat()[:-1] + b',"max_tokens":NaN}', "invalid_json"),
        (chat()[:-1] + b',"x":NaN}', "invalid_json"),
        (chat()[:-1] + b',"x":Infinity}', "invalid_json"),
        (chat()[:-1] + b',"x":01}', "invalid_json"),
        (chat()[:-1] + b',"x":"\x01"}', "invalid_json"),
    ],
)
def test_what_is_not_one_json_object_in_utf8_is_refused(raw: bytes, reason: str) -> None:
    error = refused(raw)
    assert error.reason == reason
    assert error.status == 400
    assert error.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"model": ""}, "model"),
        ({"model": "  "}, "model"),
        ({"model": 3}, "model"),
        ({"model": "m" * 257}, "model"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": 3, "content": "x"}]}, "messages[0].role"),
        ({"messages": [*USER, {"role": "user", "content": 3}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
        ),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "1.5"}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 0.0}, "max_tokens"),
        ({"max_tokens": "0"}, "max_tokens"),
        ({"max_tokens": "9" * 5000}, "max_tokens"),
        ({"max_tokens": 2**31 + 1}, "max_tokens"),
        ({"max_tokens": 10**400}, "max_tokens"),
        ({"max_tokens": -(10**400)}, "max_tokens"),
        ({"max_completion_tokens": 5, "max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 129.0}, "n"),
        ({"best_of": -1}, "best_of"),
        ({"stream": "maybe"}, "stream"),
        ({"stream": 2}, "stream"),
        ({"stream": 0.5}, "stream"),
        ({"stream_options": True}, "stream_options"),
        ({"stream_options": [1]}, "stream_options"),
        ({"stream_options": {"include_usage": 2}}, "stream_options.include_usage"),
        ({"tools": {"a": 1}}, "tools"),
        ({"tools": "x"}, "tools"),
    ],
)
def test_bad_fields_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    error = refused(chat(**fields))
    assert error.param == param
    assert param in error.message


@pytest.mark.parametrize("field", ["model", "messages"])
def test_required_fields_are_named(field: str) -> None:
    body = json.loads(chat())
    del body[field]
    error = refused(json.dumps(body).encode())
    assert error.param == field
    assert error.code == "missing_required_parameter"


@pytest.mark.parametrize(
    ("endpoint", "fields", "param"),
    [
        ("/v1/completions", {}, "prompt"),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": ["a", 1]}, "prompt"),
        ("/v1/completions", {"prompt": [[1], "a"]}, "prompt"),
        ("/v1/completions", {"prompt": [[1], []]}, "prompt"),
        ("/v1/completions", {"prompt": [1, True]}, "prompt[1]"),
        ("/v1/completions", {"prompt": [-1]}, "prompt[0]"),
        ("/v1/completions", {"prompt": {"a": 1}}, "prompt"),
        ("/v1/completions", {"prompt": ["a"] * 2049}, "prompt"),
        ("/v1/completions", {"prompt": [[1]] * 2049}, "prompt"),
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": 3}, "input"),
        ("/v1/embeddings", {"messages": []}, "messages"),
        ("/v1/responses", {}, "input"),
        ("/v1/responses", {"input": []}, "input"),
        ("/v1/responses", {"input": [3]}, "input[0]"),
        ("/v1/responses", {"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ("/v1/responses", {"input": "x", "instructions": 4}, "instructions"),
        ("/v1/responses", {"input": "x", "previous_response_id": 4}, "previous_response_id"),
        ("/v1/messages", {"messages": USER, "system": 3}, "system"),
        ("/v1/messages", {"messages": USER, "max_tokens": 0}, "max_tokens"),
        ("/tokenize", {}, "prompt"),
        ("/v1/rerank", {"query": "a"}, "documents"),
        ("/v1/rerank", {"documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b", {"title": 1}]}, "documents[1].text"),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * 2049}, "documents"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2"),
    ],
)
def test_each_endpoint_names_its_bad_fields(
    endpoint: str, fields: dict[str, Any], param: str
) -> None:
    raw = json.dumps({"model": "m", **fields}).encode()
    assert refused(raw, ENDPOINTS[endpoint]).param == param


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model":"m","messages":[],"model":"m"}',
        b'{"model":"m", "mod\\u0065l" : "m","messages":[]}',
        b'{ "a" : {"x":1} ,\n "b":1, "a":{"x":1}, "model":"m"}',
        b'{"\\u0061":1,"a":2}',
    ],
)
def test_duplicate_top_level_keys_are_refused_by_name(raw: bytes) -> None:
    error = refused(raw)
    assert error.reason == "duplicate_key"
    assert error.param in {"model", "a"}
    assert f"'{error.param}'" in error.message


def test_same_names_at_other_levels_are_no_duplicates() -> None:
    raw = (
        b'{"model":"m","x":{"model":1,"model":2},"messages":[{"content":"\\"model\\":","role":""}]}'
    )
    assert read_body(CHAT, raw).model == "m"


@pytest.mark.parametrize("opener", [b"[", b'{"a":', b'[{"a":'])
@pytest.mark.parametrize(
    "frame",
    [
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"x":%s}',
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"tools":%s}',
        b'{"model":"m","messages":%s}',
        b'{"model":"m","messages":[{"role":"user","content":%s}]}',
        b'{"model":"m","messages":[{"role":"user","content":[{"type":"tool_result","content":%s}]}]}',
        b"%s",
    ],
)
def test_deep_nesting_is_refused_and_cheap(opener: bytes, frame: bytes) -> None:
    raw = frame % (opener * 100_000)
    assert refused(raw).reason in {"too_deep", "invalid_type"}
    assert quickest_s(lambda: refused(raw)) < 0.05


def test_facts_of_a_chat_body() -> None:
    facts = read_body(
        CHAT,
        chat(
            stream=True,
            stream_options={"include_usage": True},
            max_tokens=7,
            max_completion_tokens=9,
            n=3,
            best_of=5,
            priority=1,
            cache_salt="s",
            bootstrap_host="h",
            **{"x-gateway-inference": 1, "unknown": [1]},
        ),
    )
    assert (facts.model, facts.stream, facts.include_usage) == ("m", True, True)
    assert facts.has_stream_options
    assert (facts.cap_tokens, facts.sequences_per_prompt, facts.choices_per_prompt) == (9, 5, 3)
    steering = ("priority", "cache_salt", "bootstrap_host", "x-gateway-inference")
    assert facts.steering_fields == steering


def test_numbers_and_flags_in_other_forms_are_read_as_engines_read_them() -> None:
    """By pydantic's rules: those that hold all numbers as doubles, forms and shells send them."""
    for sixteen in (16, 16.0, "16", "16.0", " 16 ", "1_6"):
        facts = read_body(CHAT, chat(max_tokens=sixteen, n=sixteen))
        read = (facts.cap_tokens, facts.sequences_per_prompt, facts.choices_per_prompt)
        assert read == (16, 16, 16), sixteen
    assert read_body(CHAT, chat(max_tokens=True)).cap_tokens == 1
    for value, flag in ((1, True), ("TRUE", True), ("yes", True), (0, False), ("off", False)):
        facts = read_body(CHAT, chat(stream=value, stream_options={"include_usage": value}))
        assert (facts.stream, facts.include_usage) == (flag, flag), value
    history = [{"role": "assistant", "tool_calls": [{"index": 0.0, "function": {"name": "f"}}]}]
    assert read_body(CHAT, chat(messages=history)).measure.text_bytes == 1
    ids = json.dumps({"model": "m", "prompt": [1.0, 2.0], "max_tokens": 5.0}).encode()
    assert read_body(COMPLETIONS, ids).measure.exact_tokens == 2


@pytest.mark.parametrize(
    ("endpoint", "fields", "cap"),
    [
        (CHAT, {"max_output_tokens": 1, "max_tokens": 7000}, 7000),
        (CHAT, {"max_completion_tokens": 1, "max_tokens": 7000}, 7000),
        (CHAT, {"max_completion_tokens": 7000, "max_tokens": 1}, 7000),
        (CHAT, {"max_output_tokens": 1}, None),
        (COMPLETIONS, {"max_completion_tokens": 1, "max_tokens": 7000}, 7000),
        (COMPLETIONS, {"max_completion_tokens": 1}, None),
        (RESPONSES, {"max_tokens": 1, "max_output_tokens": 7000}, 7000),
        (RESPONSES, {"max_tokens": 1}, None),
        (MESSAGES, {"max_completion_tokens": 1, "max_tokens": 7000}, 7000),
    ],
)
def test_only_limits_that_the_endpoints_engine_reads_count(
    endpoint: Endpoint, fields: dict[str, int], cap: int | None
) -> None:
    body = {"model": "m", "messages": USER, "prompt": "a", "input": "a", **fields}
    assert read_body(endpoint, json.dumps(body).encode()).cap_tokens == cap


def test_members_are_bounded_before_they_are_read() -> None:
    names = ",".join(f'"x{n}":1' for n in range(MAX_MEMBERS - 2))
    most = chat()[:-1] + b"," + names.encode() + b"}"
    assert len(read_body(CHAT, most).members) == MAX_MEMBERS
    assert refused(most[:-1] + b',"one_more":1}').reason == "too_many_members"
    many = b'{"a":1' + b',"a":1' * 3_000_000 + b"}"
    assert "1,000 members" in refused(many).message
    assert quickest_s(lambda: refused(many)) < 0.2


def test_responses_in_the_background_are_refused() -> None:
    raw = json.dumps({"model": "m", "input": "a", "background": True}).encode()
    error = refused(raw, RESPONSES)
    assert error.param == "background"
    assert "stream" in error.message
    for value in (False, None):
        raw = json.dumps({"model": "m", "input": "a", "background": value}).encode()
        assert read_body(RESPONSES, raw).model == "m"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=12,
)
field_names = st.sampled_from(
    [
        *("model", "messages", "prompt", "input", "tools", "max_tokens", "n", "stream"),
        *("stream_options", "system", "query", "documents", "text_1", "text_2", "instructions"),
        *("role", "content", "type", "text", "name", "tool_calls", "functions", "image_url"),
    ]
)
field_values = st.recursive(
    json_values | st.sampled_from(["text", "image_url", "tool_result", "input_text"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(field_names, inner, max_size=4),
    max_leaves=12,
)


@given(endpoint=st.sampled_from(sorted(ENDPOINTS)), raw=st.binary(max_size=200))
def test_arbitrary_bytes_raise_nothing_but_refusals(endpoint: str, raw: bytes) -> None:
    with contextlib.suppress(BadRequest):
        read_body(ENDPOINTS[endpoint], raw)


@settings(max_examples=500)
@given(
    endpoint=st.sampled_from(sorted(ENDPOINTS)),
    body=st.dictionaries(field_names, field_values, max_size=6),
    named=st.booleans(),
)
def test_arbitrary_objects_raise_nothing_but_refusals(
    endpoint: str, body: dict[str, Any], named: bool
) -> None:
    if named:
        body["model"] = "m"
    with contextlib.suppress(BadRequest):
        facts = read_body(ENDPOINTS[endpoint], json.dumps(body).encode())
        assert facts.measure.longest_text_bytes <= facts.measure.text_bytes
