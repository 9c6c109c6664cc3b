"""JSON values as the text that a template would render them as, and texts' bytes."""

import msgspec
from msgspec import Raw

from gateway.policy.request.refusals import undecodable


def utf8_length(text: str) -> int:
    """Bytes of `text` in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def compact(raw: Raw, param: str) -> str:
    r"""JSON without white space and with its strings' `\u` escapes decoded."""
    try:
        data = bytes(raw)
        if b"\\u" in data:
            return msgspec.json.encode(msgspec.json.decode(data)).decode()
        return msgspec.json.format(data, indent=-1).decode()
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise undecodable(error, param) from None
