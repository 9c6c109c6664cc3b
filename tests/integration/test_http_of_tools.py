"""HTTP as people's tools speak it: browsers, load balancers, curl, clients with odd base URLs.

docs/develop/field-cases.md says who met which.
"""

import hashlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any, Final

import httpx
import pytest

from bench.common.fleet import ADMIN_KEY, MODEL, Fleet

KEY: Final = "sk-page"
PAGE: Final = "https://chat.example"
CHAT: Final = "/v1/chat/completions"
READ: Final = {"x-request-id", "x-sluice-reason", "retry-after", "x-ratelimit-remaining-tokens"}
STAINLESS: Final = "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-os"


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    entitlement = {"name": "e", "tenant": "t", "model": MODEL, "api_keys": [f"sha256:{digest}"]}
    server = {"allowed_origins": [PAGE, "app://notes"], "keep_alive_s": 0.5}
    with Fleet(short=1, long=0, server=server, config={"entitlements": [entitlement]}) as fleet:
        yield fleet


def body(**more: Any) -> dict[str, Any]:
    sizes = {"max_tokens": 2, "mock_output_tokens": 2}
    return {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], **sizes, **more}


def ask(fleet: Fleet, method: str, path: str, *, key: str = KEY, **more: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}", **more.pop("headers", {})}
    return httpx.request(method, fleet.url + path, headers=headers, trust_env=False, **more)


def raw(fleet: Fleet, *pieces: bytes, until: bytes = b"") -> bytes:
    """What comes until the gateway closes, or until these bytes; the last piece is sent then."""
    with socket.create_connection(("127.0.0.1", fleet.port), 10) as client:
        got = b""
        client.sendall(pieces[0])
        while data := client.recv(65_536):
            got += data
            if until and until in got:
                client.sendall(b"".join(pieces[1:]))
                until = b""
        return got


@pytest.mark.parametrize("origin", [PAGE, "app://notes"])
@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/v1/messages", "/v1//chat/completions"])
def test_a_browser_is_told_that_a_page_may_call(fleet: Fleet, path: str, origin: str) -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": STAINLESS}
    answer = httpx.options(fleet.url + path, headers={"origin": origin, **asked}, trust_env=False)
    assert answer.status_code == 204
    assert answer.headers["access-control-allow-origin"] == origin
    assert answer.headers["access-control-allow-headers"] == STAINLESS
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert "origin" in answer.headers["vary"].lower()


@pytest.mark.parametrize(
    ("method", "path", "key", "sent", "status"),
    [
        ("POST", CHAT, KEY, body(), 200),
        ("POST", CHAT, KEY, body(stream=True), 200),
        ("POST", CHAT, "wrong", body(), 401),
        ("POST", CHAT, KEY, {}, 400),
        ("GET", CHAT, KEY, None, 405),
        ("GET", "/v1/models", KEY, None, 200),
        ("GET", "/v1/models", "wrong", None, 401),
        ("POST", "/v1//chat/completions", KEY, body(), 200),
    ],
)
def test_a_page_may_read_answers_and_errors(
    fleet: Fleet, method: str, path: str, key: str, sent: Any, status: int
) -> None:
    answer = ask(fleet, method, path, key=key, json=sent, headers={"origin": PAGE})
    assert answer.status_code == status
    assert answer.headers["access-control-allow-origin"] == PAGE
    exposed = answer.headers["access-control-expose-headers"].split(", ")
    assert set(exposed) >= READ
    own = {name for name in answer.headers if name.startswith(("x-sluice-", "x-ratelimit-"))}
    assert own <= set(exposed)


@pytest.mark.parametrize(
    ("path", "origin", "key"),
    [
        (CHAT, "https://other.example", KEY),
        (CHAT, PAGE + ".other.example", KEY),
        ("/admin/pools", PAGE, ADMIN_KEY),
        ("/metrics", PAGE, KEY),
    ],
)
def test_other_pages_and_admin_routes_are_not_opened(
    fleet: Fleet, path: str, origin: str, key: str
) -> None:
    for method in ("OPTIONS", "GET", "POST"):
        answer = ask(fleet, method, path, key=key, json=body(), headers={"origin": origin})
        assert not [name for name in answer.headers if name.startswith("access-control-")]


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/metrics", "/", "/health/"])
def test_head_is_answered_as_get_without_a_body(fleet: Fleet, path: str) -> None:
    headers = {"accept": "application/json"}
    assert ask(fleet, "GET", path, headers=headers).status_code == 200
    answer = ask(fleet, "HEAD", path, headers=headers)
    assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize(
    ("target", "allowed"),
    [
        (b"/", b"GET, HEAD, OPTIONS"),
        (b"*", b"GET, HEAD, OPTIONS"),
        (b"/health", b"GET, HEAD, OPTIONS"),
        (b"/v1/embeddings", b"POST, OPTIONS"),
        (b"/admin/entitlements", b"GET, HEAD, OPTIONS, POST"),
    ],
)
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_options_probes_of_load_balancers_are_answered(
    fleet: Fleet, target: bytes, allowed: bytes, version: bytes
) -> None:
    answer = raw(
        fleet, b"OPTIONS %s HTTP/%s\r\nhost: x\r\nconnection: close\r\n\r\n" % (target, version)
    )
    assert answer.startswith(b"HTTP/1.1 204 ")
    assert b"\r\nallow: %s\r\n" % allowed in answer


def test_a_wrong_method_is_told_the_right_ones(fleet: Fleet) -> None:
    for method, path, allowed in (
        ("GET", CHAT, "POST, OPTIONS"),
        ("HEAD", CHAT, "POST, OPTIONS"),
        ("PUT", "/admin/entitlements", "GET, HEAD, OPTIONS, POST"),
        ("DELETE", "/health", "GET, HEAD, OPTIONS"),
    ):
        answer = ask(fleet, method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)


@pytest.mark.parametrize(
    "path", ["/v1//chat/completions", "//v1/chat/completions", CHAT + "/", "/chat/completions/?x=1"]
)
def test_base_urls_that_end_in_a_slash_work(fleet: Fleet, path: str) -> None:
    whole = ask(fleet, "POST", path, json=body())
    assert whole.status_code == 200
    streamed = ask(fleet, "POST", path, json=body(stream=True))
    assert streamed.text.rstrip().endswith("data: [DONE]")
    assert ask(fleet, "GET", "/v1/models/").json() == ask(fleet, "GET", "/v1/models").json()


@pytest.mark.parametrize(
    "kind",
    ["application/json; charset=utf-8", "application/json;charset=UTF8", "Application/JSON"],
)
def test_spellings_of_the_content_type_are_read(fleet: Fleet, kind: str) -> None:
    headers = {"content-type": kind}
    answer = ask(fleet, "POST", CHAT, content=json.dumps(body()).encode(), headers=headers)
    assert answer.status_code == 200


def head(*lines: bytes, target: bytes = CHAT.encode(), version: bytes = b"1.1") -> bytes:
    return b"\r\n".join(
        (
            b"POST %s HTTP/%s" % (target, version),
            b"host: x",
            b"authorization: Bearer %s" % KEY.encode(),
            b"content-type: application/json",
            *lines,
            b"",
            b"",
        )
    )


def test_a_body_is_asked_for_where_the_client_waits_and_not_where_it_is_refused(
    fleet: Fleet,
) -> None:
    sent = json.dumps(body()).encode()
    lines = (b"expect: 100-continue", b"connection: close", b"content-length: %d")
    asked = head(*lines) % len(sent)
    answer = raw(fleet, asked, sent, until=b"100 Continue\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 100 ")
    assert b"HTTP/1.1 200 OK" in answer
    for refused, status in (
        (asked.replace(KEY.encode(), b"wrong").replace(b"%d" % len(sent), b"300000"), b"401"),
        (asked.replace(b"%d" % len(sent), b"99999999"), b"413"),
    ):
        assert raw(fleet, refused).startswith(b"HTTP/1.1 %s " % status)


@pytest.mark.parametrize(
    ("target", "version"), [(b"http://gateway.example%s", b"1.1"), (b"%s", b"1.0")]
)
def test_proxies_and_old_clients_are_answered(fleet: Fleet, target: bytes, version: bytes) -> None:
    sent = json.dumps(body()).encode()
    lines = (b"connection: close", b"content-length: %d" % len(sent))
    asked = head(*lines, target=target % CHAT.encode(), version=version)
    assert b" 200 OK\r\n" in raw(fleet, asked + sent)


@pytest.mark.parametrize("path", [CHAT, "/health"])
def test_an_idle_connection_lives_as_long_as_the_setting_says(fleet: Fleet, path: str) -> None:
    began_s = time.monotonic()
    sent = json.dumps(body()).encode()
    asked = head(b"content-length: %d" % len(sent)) + sent if path == CHAT else b""
    assert b" 200 OK\r\n" in raw(fleet, asked or b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    assert 0.5 < time.monotonic() - began_s < 20.0  # it is 75 s without the setting


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank", "/v1/v2/rerank"])
def test_rerank_is_served_at_every_path_that_clients_use(fleet: Fleet, path: str) -> None:
    said = {"model": MODEL, "query": "a", "documents": ["b", "a"], "top_n": 1}
    answer = ask(fleet, "POST", path, json=said)
    assert answer.status_code == 200, answer.text
    assert [result["index"] for result in answer.json()["results"]] in ([0], [1])


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v1/score", {"text_1": "a", "text_2": ["b", "c"], "score_threshold": 0.7}),
        ("/score", {"queries": "a", "documents": ["b"]}),
        ("/classify", {"input": ["a", "b"]}),
        ("/v1/classify", {"input": "a"}),
        ("/pooling", {"input": "a", "task": "token_classify"}),
        ("/v2/embed", {"texts": ["a"], "input_type": "search_query"}),
        ("/tokenize", {"prompt": "a"}),
        ("/v1/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1, 2]}),
    ],
)
def test_endpoints_of_pooling_models_and_tokenizers_reach_an_engine(
    fleet: Fleet, path: str, said: dict[str, Any]
) -> None:
    answer = ask(fleet, "POST", path, json={"model": MODEL, **said})
    # The mock has no pooling model and says so.
    assert answer.status_code == 200 or "x-sluice-worker" in answer.headers, answer.text
