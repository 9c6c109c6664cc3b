"""JSON bodies: valid ones of each endpoint, and ones with a few faults in critical places."""

import copy
import json
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, Final

from bench.common.everything_on import MODEL

_TEXT: Final = "A gateway decides who may enter, what fits, and which worker serves it. "

_MESSAGES: Final = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": [
        {"type": "text", "text": _TEXT},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
    ]},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
    ]},
    {"role": "tool", "tool_call_id": "1", "content": "42"},
    {"role": "user", "content": _TEXT * 4},
]  # fmt: skip

HONEST: Final[Mapping[str, dict[str, Any]]] = {
    "/v1/chat/completions": {
        "model": MODEL,
        "messages": _MESSAGES,
        "max_tokens": 4,
        "temperature": 0.5,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    },
    "/v1/completions": {"model": MODEL, "prompt": [_TEXT, _TEXT], "max_tokens": 4, "n": 1},
    "/v1/embeddings": {"model": MODEL, "input": [_TEXT, _TEXT]},
    "/v1/responses": {"model": MODEL, "input": _TEXT, "max_output_tokens": 4, "store": False},
    "/v1/messages": {
        "model": MODEL,
        "max_tokens": 4,
        "system": "Answer briefly.",
        "messages": [{"role": "user", "content": [{"type": "text", "text": _TEXT}]}],
    },
    "/tokenize": {"model": MODEL, "prompt": _TEXT},
    "/v1/rerank": {"model": MODEL, "query": "gateway", "documents": [_TEXT, "other"]},
    "/v1/score": {"model": MODEL, "text_1": _TEXT, "text_2": [_TEXT]},
    "/v1/audio/speech": {"model": MODEL, "input": _TEXT, "voice": "alloy"},
}
_NAMES: Final = (
    *("priority", "cache_salt", "data_parallel_rank", "bootstrap_host", "kv_transfer_params"),
    *("request_id", "rid", "session_params", "vllm_xargs", "x-gateway-a", "stream", "n", "best_of"),
    *("max_tokens", "max_completion_tokens", "max_output_tokens", "stream_options", "background"),
    *("previous_response_id", "documents", "reasoning", "chat_template", "user", "metadata", ""),
    *("model", "messages", "prompt", "input", "suffix", "\u0000", "ключ", "a" * 300),
)
_VALUES: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**400, 1.5, -0.0, 1e308),
    *("", " ", "a", "\u0000", "\ud800", "\u202e", "💥" * 50, "x" * 5000, "é" * 2000, "null"),
    *([], {}, [[]], [None], [{}], {"": ""}, [1, 2, 3], ["a", 1, None], {"url": 5}),
    *([0] * 3000, ["a"] * 500, {str(n): n for n in range(300)}, [-1], [2**40], [1.5]),
)


def text_of(body: object) -> bytes:
    """JSON as sent; unpaired surrogates stay escapes."""
    return json.dumps(body).encode()


def honest(rng: Random, path: str) -> bytes:
    """A body that is served."""
    body = dict(HONEST[path])
    if rng.random() < 0.4 and path not in {"/tokenize", "/v1/embeddings"}:
        body["stream"] = True
    return text_of(body)


def hostile(rng: Random, path: str) -> bytes:
    """A body with one to three faults."""
    body = copy.deepcopy(HONEST[path])
    for _ in range(rng.randint(1, 3)):
        rng.choice(_TREE_FAULTS)(rng, body)
    raw = text_of(body)
    return rng.choice(_RAW_FAULTS)(rng, raw) if rng.random() < 0.35 else raw


def _places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Every container with each of its keys or indices."""
    if isinstance(value, dict):
        pairs = list(value.items())
    elif isinstance(value, list):
        pairs = list(enumerate(value[:20]))
    else:
        return found
    for key, inner in pairs:
        found.append((value, key))
        _places(inner, found)
    return found


def _replace(rng: Random, body: dict[str, Any]) -> None:
    places = _places(body, [])
    if places:
        container, key = rng.choice(places)
        container[key] = copy.deepcopy(rng.choice(_VALUES))


def _remove(rng: Random, body: dict[str, Any]) -> None:
    places = _places(body, [])
    if places:
        container, key = rng.choice(places)
        del container[key]


def _add(rng: Random, body: dict[str, Any]) -> None:
    found = [body, *(c[k] for c, k in _places(body, []) if isinstance(c[k], dict))]
    rng.choice(found)[rng.choice(_NAMES)] = copy.deepcopy(rng.choice(_VALUES))


def _nest(rng: Random, body: dict[str, Any]) -> None:
    deep: Any = copy.deepcopy(rng.choice(_VALUES))
    for _ in range(rng.choice((5, 50, 400))):
        deep = [deep] if rng.random() < 0.5 else {"content": deep}
    body[rng.choice(list(body) or ["model"])] = deep


def _repeat(rng: Random, body: dict[str, Any]) -> None:
    for value in body.values():
        if isinstance(value, list) and value:
            value.extend(copy.deepcopy(value) * rng.choice((1, 10, 100)))
            return


def _truncate(rng: Random, raw: bytes) -> bytes:
    return raw[: rng.randrange(len(raw) or 1)]


def _flip(rng: Random, raw: bytes) -> bytes:
    at = rng.randrange(len(raw) or 1)
    return raw[:at] + bytes([rng.randrange(256)]) + raw[at + rng.randint(0, 1) :]


def _twice(rng: Random, raw: bytes) -> bytes:
    """The first member again, with another value and perhaps another spelling."""
    name = rng.choice((b"model", b"mod\\u0065l", b"max_tokens", b"stream", b"messages"))
    value = rng.choice((b'"other"', b"null", b"1e3", b"true", b"[]"))
    return raw[:-1] + b", " + b'"' + name + b'": ' + value + b"}"


def _many(rng: Random, raw: bytes) -> bytes:
    count = rng.choice((100, 9_000, 11_000))
    members = b", ".join(b'"m%d": %d' % (n, n) for n in range(count))
    return raw[:-1] + b", " + members + b"}"


def _deep(rng: Random, raw: bytes) -> bytes:
    depth = rng.choice((900, 1_100, 20_000))
    return raw[:-1] + b', "x": ' + b"[" * depth + b"]" * depth + b"}"


def _wrap(rng: Random, raw: bytes) -> bytes:
    before = rng.choice((b"", b"\xef\xbb\xbf", b" \n\t", b"[", b"\x00", b"\xff\xfe"))
    return before + raw + rng.choice((b"", b"{}", b"]", b" " * 2000, b"\x00"))


def _odd_numbers(rng: Random, raw: bytes) -> bytes:
    odd = (b"1e999", b"-", b"01", b"1.", b".5", b"NaN", b"Infinity", b"9" * 5000, b"1e-999")
    return raw.replace(b": 4", b": " + rng.choice(odd), 1)


def _escapes(rng: Random, raw: bytes) -> bytes:
    odd = (b"\\ud800", b"\\udc00\\ud800", b"\\u12", b"\\x41", b"\\", b"\n", b"\xc3(")
    return raw.replace(b"gateway", rng.choice((*odd, b"\xed\xa0\x80")), 1)


_TREE_FAULTS: Final[tuple[Callable[[Random, dict[str, Any]], None], ...]] = (
    *(_replace, _replace, _replace, _remove, _add, _add, _nest, _repeat),
)
_RAW_FAULTS: Final[tuple[Callable[[Random, bytes], bytes], ...]] = (
    *(_truncate, _flip, _twice, _wrap, _odd_numbers, _escapes, _many, _deep),
)
