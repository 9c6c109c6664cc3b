"""W3C Trace Context: the client's `traceparent`, and the one that an engine gets instead.

The ids of a request's spans differ in their last two digits only, so that a record needs to name
one of them.
"""

import re
from typing import Final

from gateway.records.record import Trace

_LINE: Final = re.compile(rb"^traceparent: ([^\r\n]*)\r\n", re.MULTILINE)
_LINES: Final = re.compile(rb"^trace(?:parent|state): [^\r\n]*\r\n", re.MULTILINE)
_VALUE: Final = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MAX_BYTES: Final = 512
QUEUE: Final = 0
"""The span of the wait in the gateway; the spans of attempts are counted from 1."""


def parent_of(lines: bytes) -> tuple[str, str, bool] | None:
    """(trace id, span id, sampled) of a head's `traceparent`; None without exactly one valid."""
    found = _LINE.findall(lines)
    if len(found) != 1 or len(found[0]) > _MAX_BYTES:
        return None
    match = _VALUE.fullmatch(found[0].strip())
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
