r"""The top-level members of a JSON object, found by one C pass over the body.

Rules:
- msgspec walks the object as a mapping of `Key` to `Raw`. Keys compare by identity, so a
  repeated key is seen twice instead of silently replacing the first; they are decoded, so
  `"mod\u0065l"` is `model`.
- No more than MAX_MEMBERS names are decoded: each costs a call.
- Raw values carry their exact length. With the keys in order that is enough to find every
  member's place in the original bytes, whatever the white space, without a scanner of ours.
"""

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec

from gateway.errors import BadRequest

MAX_MEMBERS: Final = 10_000
_names_left = 0
"""How many more the decoder may meet."""


class Key:
    """One member's decoded name, equal to nothing but itself."""

    __slots__ = ("name",)

    def __init__(self, _type: type, name: str) -> None:
        global _names_left  # noqa: PLW0603 - the decoder's hook knows nothing of its call
        if not _names_left:
            raise _too_many()
        _names_left -= 1
        self.name = name


class Member(NamedTuple):
    """Where one top-level member lies in the body: offsets of its key and of its value."""

    name: str
    key_start: int
    value_start: int
    value_end: int


Members = Mapping[str, msgspec.Raw]
"""Name -> value as sent, a view into the body."""

# The class itself is the hook: calling it is a C-level constructor call.
_decode = msgspec.json.Decoder(dict[Key, msgspec.Raw], dec_hook=Key).decode
_OPENING = re.compile(rb"[ \t\n\r]*\{[ \t\n\r]*")
# White space and comma before a member, then its key up to where its value starts.
_KEY = re.compile(rb'[ \t\n\r,]*("(?:[^"\\]++|\\.)*+"[ \t\n\r]*:[ \t\n\r]*)')


def pairs(raw: bytes) -> dict[Key, msgspec.Raw]:
    """All top-level members in order, repeated ones included.

    Raises msgspec.DecodeError (not JSON), ValidationError (not an object), RecursionError, and
    BadRequest for more than MAX_MEMBERS.
    """
    global _names_left  # noqa: PLW0603
    _names_left = MAX_MEMBERS
    return _decode(raw)


def by_name(raw: bytes) -> Members:
    """The members of a body that `read_body` has passed, or of one made from it."""
    return {key.name: value for key, value in pairs(raw).items()}


def locate(raw: bytes) -> list[Member]:
    """All top-level members with their places; raises as `pairs` does."""
    found: list[Member] = []
    match_key = _KEY.match
    at = body_start(raw)
    for key, value in pairs(raw).items():
        match = match_key(raw, at)
        if match is None:
            raise ValueError("msgspec and the key pattern disagree")
        key_start, value_start = match.span(1)
        at = value_start + len(value)
        found.append(Member(key.name, key_start, value_start, at))
    return found


def body_start(raw: bytes) -> int:
    """Offset of the first thing after the opening brace and its white space."""
    match = _OPENING.match(raw)
    if match is None:
        raise ValueError("not a JSON object")
    return match.end()


def _too_many() -> BadRequest:
    return BadRequest(
        f"The request body has more than {MAX_MEMBERS:,} members at its top level. Send fewer.",
        reason="too_many_members",
    )
