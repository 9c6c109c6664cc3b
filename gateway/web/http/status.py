"""HTTP/1.1 status lines, ready to be written."""

import http

_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in http.HTTPStatus}


def status_line(status: int) -> bytes:
    """The line with its end; unknown codes go without a phrase."""
    return _LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
