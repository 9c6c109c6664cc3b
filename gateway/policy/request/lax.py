"""A body's numbers and flags in the other forms that engines take, by the rules of pydantic.

Programs that hold every number as a double send 1024.0, and forms send "1024"; engines read both
as 1024. What engines refuse stays as it is, and the reader of the body refuses it, too.
"""

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import Raw
from pydantic import TypeAdapter

_integer: Final = TypeAdapter(int).validate_json
_flag: Final = TypeAdapter(bool).validate_json
_FORMS: Final = {
    **dict.fromkeys(("n", "best_of", "max_tokens", "max_completion_tokens"), _integer),
    **dict.fromkeys(("max_output_tokens",), _integer),
    **dict.fromkeys(("stream", "background", "include_usage"), _flag),
}
_members = msgspec.json.Decoder(dict[str, Raw]).decode


def relaxed(members: Mapping[str, Raw]) -> dict[str, Raw]:
    """The members with those numbers and flags as JSON's own."""
    kept = dict(members)
    for name in kept.keys() & _FORMS.keys():
        try:
            kept[name] = Raw(msgspec.json.encode(_FORMS[name](bytes(kept[name]))))
        except (ValueError, OverflowError):
            continue
    options = kept.get("stream_options")
    if options is not None and bytes(memoryview(options)[:1]) == b"{":
        kept["stream_options"] = Raw(msgspec.json.encode(relaxed(_members(options))))
    return kept
