"""Twenty kinds of bad input: each gets its 4xx in OpenAI's shape, and no engine sees it."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from bench.common.fleet import ADMIN_KEY, MODEL, Fleet

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet(short=1, long=1) as fleet:
        yield fleet


def chat(**changes: Any) -> bytes:
    body = {"model": MODEL, "messages": USER, "max_tokens": 4, **changes}
    return json.dumps(body).encode()


CASES: dict[str, tuple[bytes, int, str | None, str | None]] = {
    # name: body, status, code, param
    "empty body": (b"", 400, None, None),
    "not JSON": (b"hello", 400, None, None),
    "not an object": (b"[1, 2]", 400, None, None),
    "cut JSON": (chat()[:-3], 400, None, None),
    "trailing garbage": (chat() + b"{}", 400, None, None),
    "bad UTF-8": (chat().replace(b"hi", b"\xff\xfe"), 400, None, None),
    "lone surrogate": (chat().replace(b'"hi"', b'"\\ud83d"'), 400, None, None),
    "100,000 deep": (
        chat()[:-1] + b', "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        400,
        None,
        None,
    ),
    "duplicate key": (chat()[:-1] + b', "model": "other"}', 400, None, "model"),
    "duplicate key, escaped": (chat()[:-1] + b', "mod\\u0065l": "other"}', 400, None, "model"),
    "no model": (json.dumps({"messages": USER}).encode(), 400, None, "model"),
    "model is a number": (chat(model=7), 400, None, "model"),
    "unknown model": (chat(model="no-such-model"), 404, "model_not_found", "model"),
    "no messages": (json.dumps({"model": MODEL}).encode(), 400, None, "messages"),
    "empty messages": (chat(messages=[]), 400, None, "messages"),
    "messages is a string": (chat(messages="hi"), 400, None, "messages"),
    "content is a number": (
        chat(messages=[{"role": "user", "content": 5}]),
        400,
        None,
        "messages[0].content",
    ),
    "negative max_tokens": (chat(max_tokens=-1), 400, None, "max_tokens"),
    "max_tokens is a string": (chat(max_tokens="many"), 400, None, "max_tokens"),
    "max_tokens is a float": (chat(max_tokens=1.5), 400, None, "max_tokens"),
    "n is zero": (chat(n=0), 400, None, "n"),
    "stream is a string": (chat(stream="maybe"), 400, None, "stream"),
    "stream_options is a list": (chat(stream=True, stream_options=[]), 400, None, None),
    "too long for every window": (
        chat(messages=[{"role": "user", "content": "word " * 500_000}]),
        400,
        "context_length_exceeded",
        "messages",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_bodies_are_refused_with_what_to_change(fleet: Fleet, case: str) -> None:
    body, status, code, param = CASES[case]
    before = [len(e.last(500)) for e in fleet.engines]
    answer = httpx.post(
        fleet.url + CHAT, content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(error["message"]) > 10
    assert error["type"] == "invalid_request_error"
    if code is not None:
        assert error["code"] == code
    if param is not None:
        assert error["param"] == param
    assert answer.headers["x-sluice-reason"]
    assert answer.headers["x-request-id"]
    assert [len(e.last(500)) for e in fleet.engines] == before, "an engine saw it"


def test_an_oversized_body_is_413(fleet: Fleet) -> None:
    answer = httpx.post(
        fleet.url + CHAT,
        content=chat(padding="x" * 34_000_000),
        headers={"content-type": "application/json"},
    )
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"


def test_a_compressed_body_is_415(fleet: Fleet) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = httpx.post(fleet.url + CHAT, content=chat(), headers=headers)
    assert answer.status_code == 415
    assert answer.json()["error"]["code"] == "unsupported_content_encoding"


def test_the_root_says_what_this_is_and_where_to_go_on(fleet: Fleet) -> None:
    answer = httpx.get(fleet.url + "/", headers={"accept": "application/json"})
    assert answer.status_code == 200
    told = answer.json()
    assert told["name"] == "sluice"
    assert told["version"]
    for path in told["paths"].values():
        assert httpx.get(fleet.url + path).status_code in {200, 401}


def test_an_unknown_path_is_404_in_the_same_shape(fleet: Fleet) -> None:
    answer = httpx.post(fleet.url + "/v1/nothing", json={})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "unknown_path"


def test_thai_that_fits_is_not_refused_at_cold_start() -> None:
    sentence = "ปัญญาประดิษฐ์กำลังเปลี่ยนแปลงวิธีที่เราทำงานและใช้ชีวิตในทุกวัน "
    with Fleet(short=0, long=1, long_window=8192) as fleet:
        # 40 KB of Thai: over 8,192 tokens at 4 bytes a token, under it by the engine's count.
        text = sentence * (40_000 // len(sentence.encode()))
        answer = httpx.post(
            fleet.url + CHAT,
            json={"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 4},
        )
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] < 8188


HUGE = ("9" * 400, "9" * 5000, "1e400", "-" + "9" * 400)
"""Numbers that no type of a machine holds, and texts that Python reads as no number."""
READS = (
    *("/admin/decisions?limit={}", "/admin/audit?limit={}", "/admin/entitlements?limit={}"),
    *("/admin/tenants?limit={}", "/admin/budgets?limit={}", "/admin/usage?first={}"),
    *("/dashboard/history?minutes={}", "/dashboard/decisions?limit={}"),
)
BODIES = {
    "/admin/workers": '{{"model": "bench-model", "pool": "short", "url": "http://h", "ranks": {}}}',
    "/admin/budgets/none/raise": '{{"by": {}}}',
    "/admin/entitlements": '{{"name": "e", "tenant": "t", "model": "bench-model", '
    '"max_concurrency": {0}, "kv_cache_gib": {0}, "expires_at": {0}}}',
    "/admin/tenants": '{{"name": "t", "budgets": [{{"tokens": {0}, "window": "day"}}]}}',
    "/admin/reload?dry_run=true": "version: {0}\nserver: {{port: {0}, drain_timeout_s: {0}}}\n",
    "/admission/check": '{{"model": "bench-model", "prompt_tokens": {0}, "max_tokens": {0}}}',
    "/v1/chat/completions": '{{"model": "bench-model", "messages": [], "max_tokens": {0}, '
    '"n": {0}, "temperature": {0}}}',
}


@pytest.mark.parametrize("number", HUGE, ids=["400", "5000", "1e400", "-400"])
def test_no_number_is_too_large_to_be_refused(fleet: Fleet, number: str) -> None:
    key = {"authorization": f"Bearer {ADMIN_KEY}"}
    with httpx.Client(base_url=fleet.url, headers=key, trust_env=False, timeout=20) as client:
        answers = [client.get(path.format(number)) for path in READS]
        answers += [
            client.post(path, content=body.format(number), headers={"if-match": f'"{number}"'})
            for path, body in BODIES.items()
        ]
        answers.append(client.delete("/admin/tenants/none", headers={"if-match": number}))
        headers = {"x-stainless-read-timeout": number, "x-sluice-category": number}
        answers.append(client.post("/v1/chat/completions", content=chat(), headers=headers))
        answers.append(client.post("/admin/workers/w/drain", params={"timeout_s": number}))
    assert {a.url.path: a.text for a in answers if a.status_code >= 500} == {}
