"""What all records share: their base, a trace's ids, and text that is safe to show.

Records are msgspec structs, which take 0.05 us to create. `gc=False` is safe because no record can
be part of a reference cycle. Records that live as long as the gateway and that every request reads
are dataclasses instead: compiled code reads their fields directly, not by name.
"""

import re
from typing import Final

import msgspec


class Record(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Base of all records: immutable, not tracked by the garbage collector."""


class Document(Record, frozen=True, kw_only=True):
    """A record that stores hold by its id, and change by compare-and-set."""

    id: str
    tenant: str = ""

    @property
    def is_open(self) -> bool:
        """Whether stores list it among what has to be looked after."""
        return True


_HIDDEN: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\ud800-\udfff\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
"""C0 and C1 controls, bidirectional overrides, what has no width, lone surrogates, tags."""


def plain(text: str) -> str:
    r"""The text with control, bidirectional and invisible characters as \x1b, \u202e and so on."""
    return _HIDDEN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def without_credentials(url: str) -> str:
    """The text of a URL with its credentials masked, as read or as written."""
    return re.sub(r"//.*@", "//***@", url)


class Trace(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Ids of W3C Trace Context, in hexadecimal digits; all empty while telemetry is off."""

    trace_id: str = ""
    span_id: str = ""
    """The span of the request in the gateway. Its last two digits are 0: other spans of the request
    count there (`gateway.payload.trace_context`)."""
    parent_span_id: str = ""
    """The client's own span, from its `traceparent`; empty without one."""
    sampled: bool = False
    """Whether spans of the request are exported."""


NO_TRACE = Trace()
