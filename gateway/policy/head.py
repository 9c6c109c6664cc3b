"""What the gateway reads of a request's headers, in one pass.

Names come in lower case. Only the headers listed as forwarded travel to an engine: client
keys, cookies, and whatever would steer an engine do not.
"""

from collections.abc import Sequence

from gateway.domain import RequestHead

MAX_REQUEST_ID = 128
FORWARDED = frozenset(
    {
        b"accept",
        b"anthropic-beta",
        b"anthropic-version",
        b"baggage",
        b"content-type",
        b"traceparent",
        b"tracestate",
        b"user-agent",
    }
)
_READ = frozenset(
    {
        b"api-key",
        b"authorization",
        b"content-encoding",
        b"content-length",
        b"content-type",
        b"x-api-key",
        b"x-request-id",
        b"x-sluice-category",
        b"x-sluice-compress",
    }
)


def read_head(headers: Sequence[tuple[bytes, bytes]]) -> RequestHead:
    """The facts of a request's headers."""
    forwarded: list[tuple[bytes, bytes]] = []
    bearer = other_key = request_id = category = length = None
    json_body, form_body, plain_body, compress = True, False, True, True
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
        elif name == b"content-length":
            length = int(value) if value.isdigit() else None
        elif name == b"authorization":
            if bearer is None and value[:7].lower() == b"bearer ":
                bearer = value[7:].strip()
        elif name == b"x-request-id":
            request_id = _printable(value)
        elif name == b"content-encoding":
            plain_body = value.strip().lower() in (b"", b"identity")
        elif name == b"x-sluice-category":
            category = value.decode("latin-1")
        elif name == b"x-sluice-compress":
            compress = value.strip().lower() not in (b"off", b"false", b"0", b"no")
        else:
            other_key = value.strip()
    return RequestHead(
        api_key=other_key if bearer is None else bearer,
        request_id=request_id,
        category=category,
        compress=compress,
        content_length=length,
        json_body=json_body,
        form_body=form_body,
        plain_body=plain_body,
        forwarded=tuple(forwarded),
    )


def _printable(value: bytes) -> str | None:
    """A client's request id when it is short, printable ASCII without spaces."""
    if not 0 < len(value) <= MAX_REQUEST_ID:
        return None
    text = value.decode("latin-1")
    return text if text.isascii() and text.isprintable() and " " not in text else None
