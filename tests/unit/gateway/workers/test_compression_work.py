"""One task in the worker: what is put back, what is refused, what can never happen."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from compressor import load_counter
from gateway.ports import CompressResult, CompressTask
from gateway.workers import compression_work as compress_work
from gateway.workers.compression_work import Counter, rewritten, work
from tests.unit.compressor.texts import WORDS, prose

QUESTION = "\n\nQuestion: Where is the lantern?"
LONG = prose(80) + QUESTION
ANY: dict[str, Any] = {"when": "any", "mark": False}
BUDGET_TOKENS = 1_300  # of some 1,900


def run(body: bytes, endpoint: str = "chat", **more: Any) -> CompressResult:
    task = CompressTask(
        endpoint=endpoint,
        body=body,
        bytes_per_token=4.0,
        **({**ANY, "budget_tokens": BUDGET_TOKENS} | more),
    )
    return work(task)


def cut(body: bytes, endpoint: str = "chat", **more: Any) -> bytes:
    """The body's extract; it is one."""
    result = run(body, endpoint, **more)
    assert result.body is not None, result.reason
    assert 0 < result.text_bytes_after < result.text_bytes_before
    assert len(result.body) < len(body)
    return result.body


def encoded(text: str) -> bytes:
    return msgspec.json.encode(text)


def test_all_but_the_cut_string_stays_byte_for_byte() -> None:
    before = (
        b' {"model" : "m",\r\n "seed":1.0E+2, "x_unknown":[1e0, 123456789012345678901234567890],\n'
        b'\t"mess\\u0061ges" : [ {"role":"system","content":"Be br\\u0069ef."} ,\n'
        b'  {"content" :\t[ {"type":"text" , "text":'
    )
    after = (
        b' ,"uuid":{"ttl":1.50}} ,{"type":"image_url","image_url":{"url":"data:,\\/x"}}]'
        b', "role":"user","weight":0.10 }\n] ,"temperature":1.0e-1,"stop":null}\n'
    )
    found = cut(before + encoded(LONG) + after)
    assert found.startswith(before)
    assert found.endswith(after)
    text = json.loads(found[len(before) : -len(after)])
    assert text.endswith(QUESTION)
    assert set(re.split(r"\s{1,2}", text)) <= set(re.split(r"\s{1,2}", LONG))


def test_several_cut_strings_are_each_put_back_in_their_place() -> None:
    first, second = prose(40, seed=1), prose(40, seed=2) + QUESTION
    body = (
        b'{"messages":[{"role":"assistant","content":"So  it is."},{"role":"user","content":[ '
        b'{"type":"text","text":%s},\n{"type" :"text","text": %s } ]}],"n":1}'
    )
    found = cut(body % (encoded(first), encoded(second)))
    texts = [part["text"] for part in json.loads(found)["messages"][1]["content"]]
    assert found == body % (encoded(texts[0]), encoded(texts[1]))
    assert 0 < len(texts[0]) < len(first)
    assert 0 < len(texts[1]) < len(second)


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("chat", b'{"a":1.0,"messages":[{"role":"user","content":%s}], "z":2.50}'),
        ("completions", b'{"a":1.0,"prompt": %s, "z":2.50}'),
        ("completions", b'{"a":1.0,"prompt": [ %s ], "z":2.50}'),
        ("responses", b'{"a":1.0,"instructions":"Be brief.","input": %s, "z":2.50}'),
        ("responses", b'{"a":1.0,"input": [ {"role":"user","content":%s}], "z":2.50}'),
        ("messages", b'{"system":"Be brief.","messages":[{"role":"user","content":%s}],"z":2.50}'),
        (
            "messages",
            b'{"messages":[{"content":[{"type":"tool_use","id":1e0},{"text":%s}]}],"system":null}',
        ),
    ],
)
def test_each_endpoint_is_cut_where_its_text_is(endpoint: str, body: bytes) -> None:
    before, after = body.split(b"%s")
    found = cut(body.replace(b"%s", encoded(LONG)), endpoint)
    assert found.startswith(before)
    assert found.endswith(after)
    assert json.loads(found[len(before) : -len(after)]).endswith(QUESTION)


@pytest.mark.parametrize(
    ("endpoint", "name"), [("responses", "instructions"), ("messages", "system")]
)
def test_a_long_system_prompt_stays_whole_in_its_own_member(endpoint: str, name: str) -> None:
    members = {"input": LONG, "messages": [{"role": "user", "content": LONG}]}
    other = "input" if endpoint == "responses" else "messages"
    body = json.dumps({name: prose(80, seed=3), other: members[other], "top_p": 1.0}).encode()
    found = json.loads(cut(body, endpoint, budget_tokens=4_000))
    assert found[name] == prose(80, seed=3)
    assert len(json.dumps(found[other])) < len(json.dumps(members[other]))
    assert list(found) == [name, other, "top_p"]


@pytest.mark.parametrize(
    ("endpoint", "body", "reason"),
    [
        ("completions", {"prompt": [LONG, LONG]}, "several_prompts"),
        ("completions", {"prompt": [1, 2, 3]}, "token_ids"),
        ("completions", {"prompt": [[1, 2], [3]]}, "token_ids"),
        ("completions", {"prompt": []}, "no_text"),
        ("completions", {"prompt": 7}, "malformed"),
        ("completions", {}, "malformed"),
        ("chat", {}, "malformed"),
        ("chat", {"messages": None}, "malformed"),
        ("chat", {"messages": "text"}, "malformed"),
        ("chat", {"messages": [LONG]}, "malformed"),
        ("chat", {"messages": [{"role": "user", "content": None}]}, "no_text"),
        ("chat", {"messages": [{"role": "user", "content": LONG * 3}]}, "cut_too_deep"),
        ("responses", {"input": 7}, "malformed"),
        ("messages", {"messages": {"role": "user"}}, "malformed"),
        ("embeddings", {"input": LONG}, "failed"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_a_reason(
    endpoint: str, body: dict[str, Any], reason: str
) -> None:
    result = run(json.dumps(body).encode(), endpoint)
    assert (result.body, result.reason) == (None, reason)


def test_the_task_s_category_room_and_largest_cut_are_heeded() -> None:
    body = b'{"messages":[{"role":"user","content":%s}]}' % encoded(LONG)
    assert run(body, category="code").reason == "code"
    assert run(body, max_cut=0.1).reason == "cut_too_deep"
    assert run(body, budget_tokens=100, fixed_tokens=100).reason == "no_budget"
    assert len(cut(body, fixed_tokens=200)) < len(cut(body))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"messages":',
        b'{"messages":[{"role":"user","content":"\\ud83d %s"}]}' % LONG[:-1].encode().strip(),
        b'{"messages":%s%s}' % (b"[" * 100_000, b"]" * 100_000),
        b'{"messages":[{"role":"user","content":"a","x":%s1%s}]}' % (b"[" * 50_000, b"]" * 50_000),
        b'{"messages":[{"role":"user","content":"a","x":1e99999}]}',
        b'{"messages":[{"role":"user","content":%s,"content":%s}]}'
        % (encoded(LONG), encoded(LONG)),
        b'{"messages":[{"role":"user","content":%s}],"messages":[{"role":"user","content":%s}]}'
        % (encoded(LONG), encoded(LONG)),
    ],
)
def test_a_hostile_body_is_malformed_and_nothing_worse(body: bytes) -> None:
    assert run(body) == CompressResult(reason="malformed")


def test_a_defect_fails_its_task_and_says_where_without_quoting_the_prompt(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(given: object, *_args: object, **_more: object) -> object:
        raise KeyError(given)

    monkeypatch.setattr(compress_work, "compress", broken)
    body = b'{"messages":[{"role":"user","content":"secret"}]}'
    assert run(body) == CompressResult(reason="failed")
    assert "KeyError at " in caplog.text
    assert __file__ in caplog.text
    assert "secret" not in caplog.text


def test_a_tokenizer_counts_the_whole_prompt_and_is_loaded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["?", *WORDS])}, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    loads = []

    def loaded(file: Path) -> Counter:
        loads.append(file)
        return load_counter(file)

    monkeypatch.setattr(compress_work, "load_counter", loaded)
    counted: dict[str, Any] = {"tokenizer": str(path), "budget_tokens": 900, "fixed_tokens": 50}
    for _ in range(2):
        result = run(json.dumps({"prompt": LONG}).encode(), "completions", **counted)
        assert result.body is not None
        words = len(tokenizer.encode(json.loads(result.body)["prompt"]).ids)
        assert result.tokens_after == words + 50 <= 900
    assert loads == [path]


def test_a_tokenizer_that_cannot_be_loaded_leaves_the_estimate(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    missing = str(tmp_path / "none.json")
    for _ in range(2):
        result = run(json.dumps({"prompt": LONG}).encode(), "completions", tokenizer=missing)
        assert result.body is not None
        assert result.tokens_after is None
    assert caplog.text.count("none.json is not a tokenizer.json") == 1


LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=9)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=20,
)


def halved(value: Any) -> Any:
    """Each text cut to its half; what has none to cut is the same object."""
    if isinstance(value, str):
        return value[: len(value) // 2] if value else value
    if isinstance(value, list):
        cuts = [halved(item) for item in value]
        same = all(a is b for a, b in zip(cuts, value, strict=True))
        return value if same else cuts
    if isinstance(value, dict):
        members = {name: halved(item) for name, item in value.items()}
        return value if all(members[name] is value[name] for name in value) else members
    return value


@given(
    st.dictionaries(st.text(max_size=4), VALUES, max_size=4),
    st.booleans(),
    st.sampled_from([None, 1, "\t"]),
    st.sampled_from([",", " ,\n"]),
)
def test_any_json_however_it_is_written_is_rewritten_to_what_it_should_say(
    value: dict[str, Any],
    ascii_only: bool,
    indent: int | str | None,
    comma: str,
) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only, indent=indent, separators=(comma, ": "))
    encoded = raw.encode()
    assert json.loads(rewritten(encoded, value, halved(value))) == halved(value)
    assert rewritten(encoded, value, value) is encoded
