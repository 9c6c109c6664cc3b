"""Read a request's headers in one pass.

Names arrive in lower case. API keys are hashed on arrival. Engines get only the headers in
FORWARDED: no client keys, no cookies, nothing that could steer them.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Final

from gateway.records.record import Trace
from gateway.records.request import RequestHead


def lines_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The block of these (name, value) pairs."""
    return b"".join([b"%b: %b\r\n" % header for header in headers])


def pairs_of(lines: bytes) -> Sequence[tuple[bytes, bytes]]:
    """The (name, value) pairs of a block, in order."""
    headers = []
    for line in lines.split(b"\r\n")[:-1]:
        name, _, value = line.partition(b": ")
        headers.append((name, value))
    return headers


MAX_REQUEST_ID = 128
_TOKEN_BEGINS = b"eyJ"
"""How a JWT begins: `{"` in base64."""
FORWARDED = frozenset(
    b"accept anthropic-beta anthropic-version baggage content-type traceparent tracestate "
    b"user-agent".split()
)
_READ = frozenset(
    b"api-key authorization content-encoding content-type x-api-key x-request-id x-sluice-category "
    b"x-sluice-compress x-sluice-entitlement x-sluice-queue-status "
    b"x-stainless-read-timeout".split()
)
_KEYS = frozenset({b"api-key", b"x-api-key"})
_SAID = {
    **dict.fromkeys((b"off", b"false", b"0", b"no"), False),
    **dict.fromkeys((b"on", b"true", b"1", b"yes"), True),
}


def read_head(headers: Sequence[tuple[bytes, bytes]]) -> RequestHead:
    """The facts of a request's headers."""
    forwarded: list[tuple[bytes, bytes]] = []
    bearer = other_key = None
    json_body, form_body = True, False
    said: dict[bytes, bytes] = {}
    for pair in headers:
        name, value = pair
        if name in FORWARDED:
            forwarded.append(pair)
        if name not in _READ:
            continue
        if name == b"content-type":
            kind = value.lower()
            json_body = b"json" in kind
            form_body = kind.startswith(b"multipart/form-data")
        elif name == b"authorization":
            if bearer is None and value[:7].lower() == b"bearer ":
                bearer = value[7:].strip()
        elif name in _KEYS:
            other_key = value.strip()
        else:
            said[name] = value
    key = other_key if bearer is None else bearer
    key_digest = digest_of(key) if key else None
    token = key if key is not None and key[:3] == _TOKEN_BEGINS else None
    if not said:
        return RequestHead(
            key_digest=key_digest,
            token=token,
            json_body=json_body,
            form_body=form_body,
            forwarded=lines_of(forwarded),
        )
    category = said.get(b"x-sluice-category")
    entitlement = said.get(b"x-sluice-entitlement")
    try:  # as the official clients state it
        read_timeout_s = float(said.get(b"x-stainless-read-timeout", b"0")[:16])
    except ValueError:
        read_timeout_s = 0.0
    return RequestHead(
        key_digest=key_digest,
        token=token,
        request_id=_printable(said.get(b"x-request-id", b"")),
        category=None if category is None else category.decode("latin-1"),
        compress=_SAID.get(said.get(b"x-sluice-compress", b"").strip().lower()),
        entitlement=None if entitlement is None else entitlement.decode("latin-1").strip(),
        queue_status=_SAID.get(said.get(b"x-sluice-queue-status", b"").strip().lower()),
        read_timeout_s=read_timeout_s if 0.0 < read_timeout_s < 1e6 else None,
        json_body=json_body,
        form_body=form_body,
        plain_body=said.get(b"content-encoding", b"").strip().lower() in (b"", b"identity"),
        forwarded=lines_of(forwarded),
    )


def digest_of(key: bytes) -> bytes:
    """SHA-256 of an API key (32 bytes). The gateway keeps and compares only this digest."""
    return hashlib.sha256(key).digest()


def _printable(value: bytes) -> str | None:
    """A client's request id if it is short, printable ASCII without spaces; else None."""
    if not 0 < len(value) <= MAX_REQUEST_ID:
        return None
    text = value.decode("latin-1")
    return text if text.isascii() and text.isprintable() and " " not in text else None


_LINE: Final = re.compile(rb"^traceparent: ([^\r\n]*)\r\n", re.MULTILINE)
_LINES: Final = re.compile(rb"^trace(?:parent|state): [^\r\n]*\r\n", re.MULTILINE)
_VALUE: Final = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MAX_BYTES: Final = 512
QUEUE: Final = 0
"""The span of the wait in the gateway; the spans of attempts are counted from 1."""


def parent_of(lines: bytes) -> tuple[str, str, bool] | None:
    """(trace id, span id, sampled) of a head's `traceparent`; None without exactly one valid."""
    values = _LINE.findall(lines)
    if len(values) != 1 or len(values[0]) > _MAX_BYTES:
        return None
    match = _VALUE.fullmatch(values[0].strip())
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == b"ff" or (version == b"00" and more is not None):
        return None
    if not trace_id.strip(b"0") or not span_id.strip(b"0"):
        return None
    return trace_id.decode(), span_id.decode(), int(flags, 16) & 1 == 1


def child_id(trace: Trace, number: int) -> str:
    """The id of a request's span: of its wait (`QUEUE`), or of its attempt `number` from 1."""
    return f"{trace.span_id[:-2]}{(number + 1) & 0xFF:02x}"


def lines_to_engine(lines: bytes, trace: Trace, attempt: int) -> bytes:
    """The forwarded headers with the attempt's own `traceparent`.

    Without a valid one of the client's, its `tracestate` belongs to no trace and goes.
    """
    gone = _LINE if trace.parent_span_id else _LINES
    lines = gone.sub(b"", lines)
    flags = "01" if trace.sampled else "00"
    own = f"traceparent: 00-{trace.trace_id}-{child_id(trace, attempt)}-{flags}\r\n"
    return lines + own.encode()
