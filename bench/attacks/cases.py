"""The cases of each family, drawn from a seed.

json: faults in bodies. heads: faults in request lines and headers. framing: lengths and chunks
that disagree. forms: multipart. trailers: what follows a last chunk. slow: requests in small
pieces. half-closed: clients that stop sending, or reading, or leave. behind: bytes sent while an
answer runs.
"""

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import Any, Final, Literal

import msgspec

from bench.common.tools import KEY, MODEL

# -- jSON bodies: valid ones of each endpoint, and ones with a few faults in critical places


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


Step = bytes | float | Literal["half-close"]
"""Bytes to send, seconds to wait, or the end of what the client sends."""


class AttackCase(msgspec.Struct, frozen=True, kw_only=True):
    """One connection's life."""

    family: str
    steps: tuple[Step, ...]
    whole: bool = False
    """Whether a server must answer: one complete request, or a fault visible in what was sent."""
    read_bytes: int | None = None
    """How much of the answer is read before the client resets; None for all."""


_CHAT: Final = "/v1/chat/completions"
_JSON: Final = b"application/json"
_CONTROL: Final = (
    *("/", "/health", "/ready", "/metrics", "/v1/models", "/v1/models/x", "/docs", "/openapi.json"),
    *("/admin/pools", "/admin/entitlements", "/admin/decisions/x", "/v1/sluice/me"),
    *("/admission/authorize", "/admission/settle", "/v1", "//", "/v1/chat/completions/", "/%2e%2e"),
    *("/v1/chat/completions?x=" + "a" * 3000, "/v1/chat%2fcompletions", "*", "http://h/v1/models"),
)
_KEYS: Final = (*(*(KEY,) * 6, "wrong", "", "a" * 5000, "\u00e9\u00e9", f"{KEY} ", f"{KEY}\x01"),)
_STEERING: Final = (
    *("X-data-parallel-rank: 3", "x-gateway-inference-objective: a", "x-request-id: " + "r" * 2000),
    *("x-sluice-category: prose", "x-sluice-category: none", "x-sluice-compress: off"),
    *("x-stainless-read-timeout: 0.001", "x-stainless-read-timeout: 1e400"),
    "forwarded: for=1.1.1.1",
)
_HEAD_FAULTS: Final = (
    *("host:", "host: a\r\nhost: b", "content-length: 5", "content-length: -1"),
    "content-length: +5",
    *("content-length: 99999999999999999999", "content-length: 0x10", "content-length: 5, 5"),
    *("transfer-encoding: chunked", "transfer-encoding: gzip, chunked", "transfer-encoding: x"),
    *("transfer-encoding:\x0bchunked", "content-encoding: gzip", "expect: 100-continue"),
    *("expect: 200-ok", "connection: upgrade\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk"),
    *("connection: upgrade\r\nupgrade: websocket", "connection: close"),
    "connection: keep-alive, x",
    *(" folded: 1", "bad name: 1", "no-colon", ": empty", "x\x00: 1", "x: \x00", "x: \xff\xfe"),
    *("x: " + "a" * 60_000, "x: " + "a" * 70_000, "\r\n".join(f"h{n}: {n}" for n in range(900))),
    *("te: trailers", "trailer: x-a", "accept-encoding: gzip;q=0", "cookie: " + "a=b; " * 2000),
    *("authorization: Basic eA==", "x-api-key: wrong", "authorization: Bearer"),
)
_METHODS: Final = (
    *(b"POST", b"GET", b"PUT", b"DELETE", b"OPTIONS", b"HEAD", b"PATCH", b"TRACE", b"CONNECT"),
    *(b"post", b"PRI", b"P\x00ST", b"", b"A" * 300),
)
_VERSIONS: Final = (b"HTTP/1.1",) * 6 + (b"HTTP/1.0", b"HTTP/2.0", b"HTTP/1.2", b"", b"HTTP/1.1 x")


def stream_of_cases(seed: int) -> Iterator[AttackCase]:
    """Cases without end, families in turn by their weight; the same for the same seed."""
    rng = Random(seed)
    names, weights = list(FAMILIES), [weight for weight, _ in FAMILIES.values()]
    while True:
        (name,) = rng.choices(names, weights)
        yield FAMILIES[name][1](rng)


def _json(rng: Random) -> AttackCase:
    path = rng.choice(list(HONEST))
    body = honest(rng, path) if rng.random() < 0.15 else hostile(rng, path)
    return AttackCase(family="json", steps=(_request(path, body),), whole=True)


def _heads(rng: Random) -> AttackCase:
    path = rng.choice(_CONTROL) if rng.random() < 0.4 else rng.choice(list(HONEST))
    body = honest(rng, path) if path in HONEST else b""
    lines = [rng.choice(_HEAD_FAULTS) for _ in range(rng.choice((0, 1, 1, 2)))]
    lines += [rng.choice(_STEERING) for _ in range(rng.choice((0, 0, 1)))]
    method = rng.choice(_METHODS) if rng.random() < 0.4 else b"POST"
    head = b"%b %b %b\r\n" % (method, path.encode(), rng.choice(_VERSIONS))
    head += b"host: h\r\nauthorization: Bearer %b\r\n" % rng.choice(_KEYS).encode("latin-1")
    head += b"content-type: %b\r\n" % rng.choice(
        (_JSON, _JSON, b"text/plain", b"application/json;")
    )
    if rng.random() < 0.8:
        head += b"content-length: %d\r\n" % len(body)
    for line in lines:
        head += line.encode("latin-1") + b"\r\n"
    return AttackCase(family="heads", steps=(head + b"\r\n" + body,))


def _framing(rng: Random) -> AttackCase:
    body = honest(rng, _CHAT)
    kind = rng.randrange(6)
    if kind == 0:  # a length that is not the body's
        length = len(body) + rng.choice((-len(body), -5, -1, 1, 5, 10_000))
        return AttackCase(
            family="framing", steps=(_head(_CHAT, f"content-length: {length}") + body,)
        )
    if kind == 1:  # requests one behind the other
        more = b"".join(_request(_CHAT, honest(rng, _CHAT)) for _ in range(rng.randint(1, 8)))
        return AttackCase(family="framing", steps=(_request(_CHAT, body) + more,))
    if kind == 2:  # both ways at once
        both = f"content-length: {len(body)}\r\ntransfer-encoding: chunked"
        return AttackCase(
            family="framing", steps=(_head(_CHAT, both) + _chunked(rng, body, odd=False),)
        )
    odd = kind >= 4
    sent = _head(_CHAT, "transfer-encoding: chunked") + _chunked(rng, body, odd=odd)
    return AttackCase(family="framing", steps=(sent,), whole=not odd)


def _forms(rng: Random) -> AttackCase:
    faulty = rng.random() < 0.85
    media, body = form(rng, faulty=faulty)
    sent = _request(rng.choice(PATHS), body, media=media)
    return AttackCase(family="forms", steps=(sent,), whole=True)


def _trailers(rng: Random) -> AttackCase:
    body = honest(rng, _CHAT)
    trailer = rng.choice(
        (
            b"x-a: 1\r\n" * rng.choice((1, 100, 20_000)),
            b"x-a: " + b"v" * rng.choice((10, 60_000, 500_000)) + b"\r\n",
            b"authorization: Bearer other\r\ncontent-length: 5\r\n",
            b"content-length: 0\r\ntransfer-encoding: chunked\r\n",
            b"no colon\r\n",
            b"\x00\xff: 1\r\n",
            b"n" * 70_000,
        )
    )
    chunks = _chunked(rng, body, odd=False).removesuffix(b"\r\n")
    sent = _head(_CHAT, "transfer-encoding: chunked") + chunks + trailer + b"\r\n"
    steps: tuple[Step, ...] = (sent,)
    if rng.random() < 0.2:  # without an end
        steps = (sent.removesuffix(b"\r\n"), 0.01, b"x-b: 2\r\n" * 50)
    return AttackCase(family="trailers", steps=steps)


def _slow(rng: Random) -> AttackCase:
    body = honest(rng, _CHAT)
    if rng.random() < 0.5:
        sent = _request(_CHAT, body)
    else:
        sent = _head(_CHAT, "transfer-encoding: chunked") + _chunked(rng, body, odd=False)
    cuts = sorted(rng.sample(range(1, len(sent)), rng.randint(1, 6)))
    pieces = [sent[a:b] for a, b in zip([0, *cuts], [*cuts, len(sent)], strict=True)]
    steps: list[Step] = []
    for piece in pieces:
        steps += [piece, rng.choice((0.0, 0.001, 0.02))]
    return AttackCase(family="slow", steps=tuple(steps), whole=True)


def _half_closed(rng: Random) -> AttackCase:
    body = honest(rng, _CHAT)
    sent = _request(_CHAT, body)
    kind = rng.randrange(4)
    if kind == 0:  # whole, and then no more
        return AttackCase(family="half-closed", steps=(sent, "half-close"), whole=True)
    if kind == 1:  # not whole, and then no more
        cut = rng.randrange(len(sent))
        return AttackCase(family="half-closed", steps=(sent[:cut], "half-close"))
    if kind == 2:  # leaves at once
        return AttackCase(family="half-closed", steps=(sent,), read_bytes=0)
    return AttackCase(family="half-closed", steps=(sent,), read_bytes=rng.choice((1, 20, 300, 900)))


def _behind(rng: Random) -> AttackCase:
    stream = rng.random() < 0.7
    body = honest(rng, _CHAT)
    if stream:
        body = body[:-1] + b', "max_completion_tokens": %d}' % rng.choice((4, 40))
        body = body.replace(b'"stream": true, ', b"").replace(b', "stream": true', b"")
        body = body[:-1] + b', "stream": true}'
    garbage = rng.choice(
        (b"x", b"\r\n", b"\x00" * 50, b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0")
    )
    steps: list[Step] = [_request(_CHAT, body), rng.choice((0.0, 0.002, 0.01)), garbage]
    if rng.random() < 0.3:
        steps += [0.001, rng.choice((b"y" * 70_000, "half-close"))]
    return AttackCase(family="behind", steps=tuple(steps), read_bytes=rng.choice((None, 10, 700)))


FAMILIES: Final[Mapping[str, tuple[float, Callable[[Random], AttackCase]]]] = {
    "json": (6.0, _json),
    "heads": (3.0, _heads),
    "framing": (2.0, _framing),
    "forms": (1.5, _forms),
    "trailers": (0.7, _trailers),
    "slow": (1.0, _slow),
    "half-closed": (1.5, _half_closed),
    "behind": (1.0, _behind),
}
"""By name: how often it is drawn, and how."""


def _head(path: str, *lines: str, media: bytes = _JSON) -> bytes:
    head = b"POST %b HTTP/1.1\r\nhost: h\r\nauthorization: Bearer %b\r\ncontent-type: %b\r\n"
    rest = "".join(f"{line}\r\n" for line in lines).encode()
    return head % (path.encode(), KEY.encode(), media) + rest + b"\r\n"


def _request(path: str, body: bytes, *, media: bytes = _JSON) -> bytes:
    return _head(path, f"content-length: {len(body)}", media=media) + body


def _chunked(rng: Random, body: bytes, *, odd: bool) -> bytes:
    sent = b""
    at = 0
    while at < len(body):
        size = rng.choice((1, 2, 7, 100, 4096))
        piece = body[at : at + size]
        at += size
        length = b"%x" % len(piece)
        if odd and rng.random() < 0.1:
            odd_ones = (b"0" * 20 + length, length + b";a=b", length + b" ", b"-1", b"f" * 16, b"g")
            length = rng.choice(odd_ones)
        end = b"\r\n" if not odd or rng.random() < 0.95 else rng.choice((b"", b"\n", b"xx"))
        sent += length + b"\r\n" + piece + end
    return sent + b"0\r\n\r\n"


# -- forms with a file: heads of parts, boundaries and ends that parsers read differently

PATHS: Final = ("/v1/audio/transcriptions", "/v1/audio/translations")
_DISPOSITIONS: Final = (
    'form-data; name="model"',
    "form-data; name=model",
    'form-data; x-name="model"',
    'form-data; name="model"; name="file"',
    'form-data; name="mod\\"el"',
    "form-data; name*=utf-8''model",
    'form-data; filename="model"; name=prompt',
    'form-data; name="priority"',
    'form-data; name="vllm_xargs"',
    'attachment; name="model"',
    'form-data;name="model";',
    'form-data; name="',
    "form-data",
    "",
    'form-data; name="model"' * 200,
    "form-data; " + 'name="a"; ' * 3000,
)
_FILES: Final = (
    b"RIFF....WAVE",
    b'\r\ncontent-disposition: form-data; name="model"\r\n\r\nother\r\n',
    b"--",
    b"\x00" * 3000,
    b"-" * 5000,
)


def form(rng: Random, *, faulty: bool) -> tuple[bytes, bytes]:
    """(content type, body)."""
    boundary = rng.choice((b"x", b"----form1", b"-" * 70, b"a'()+_,-./:=?"))
    parts = [
        ('form-data; name="model"', MODEL.encode()),
        ('form-data; name="file"; filename="a.wav"', rng.choice(_FILES) if faulty else _FILES[0]),
    ]
    if faulty:
        for _ in range(rng.randint(1, 3)):
            value = rng.choice((MODEL.encode(), b"other", b"", b"1", b"\xff" * 50))
            parts.insert(rng.randint(0, len(parts)), (rng.choice(_DISPOSITIONS), value))
        if rng.random() < 0.2:
            del parts[rng.randrange(len(parts))]
        if rng.random() < 0.05:
            parts *= rng.choice((20, 400))
    line = b"\r\n" if not faulty or rng.random() < 0.8 else rng.choice((b"\n", b"\r", b"\r\n\r\n"))
    body = b"".join(
        b"--%b%bcontent-disposition: %b%b%b%b%b"
        % (boundary, line, disposition.encode(), line, line, value, line)
        for disposition, value in parts
    )
    body += b"--%b--%b" % (boundary, line)
    media = b"multipart/form-data; boundary=" + boundary
    if faulty and rng.random() < 0.3:
        body = body[: rng.randrange(len(body))]
    if faulty and rng.random() < 0.2:
        media = rng.choice((b"multipart/form-data", media + b"; boundary=y", media.upper(), b"x/y"))
    return media, body
