"""How much text an answer delivered: bytes, and pieces that had any.

Charged are tokens that the client was sent, also where the stream ends before its engine reports
them. An engine sends as many tokens an event as it likes, so events are no measure: it is the
text's bytes by the tenant's ratio, and at least one token for each piece.
"""

import re
from collections.abc import Sequence

import msgspec

_BACKSLASH = b"\\"


class TextFields:
    """The members of events that hold generated text."""

    __slots__ = ("_any", "_usual")

    def __init__(self, names: Sequence[str]) -> None:
        """`names`: of the members, the usual one first."""
        self._usual = b'"%b":"' % names[0].encode()
        self._any = re.compile(rb'"(?:%b)"\s*:\s*"((?:[^"\\]++|\\.)*+)"' % "|".join(names).encode())

    def measure(self, said: bytes, events: int) -> tuple[int, int]:
        """Bytes of text in so many events, and its pieces."""
        at = said.find(self._usual)
        if at >= 0 and events == 1:  # as nearly always
            begin = at + len(self._usual)
            end = said.find(b'"', begin)
            if end > begin and said.find(_BACKSLASH, begin, end) < 0:
                return end - begin, 1
        pieces = [piece for piece in self._any.findall(said) if piece]
        return sum(map(_size, pieces)), len(pieces)


def _size(piece: bytes) -> int:
    """Bytes of a JSON string's text, without its escapes."""
    if _BACKSLASH not in piece:
        return len(piece)
    try:
        return len(msgspec.json.decode(b'"%b"' % piece, type=str).encode())
    except (msgspec.DecodeError, UnicodeEncodeError):
        return len(piece)
