r"""Find the top-level members of a JSON object in one C pass, and edit them by splicing.

Finding:
- msgspec decodes the object as a mapping of `Key` to `Raw`. Keys compare by identity, so a
  repeated key appears twice instead of silently replacing the first. Keys are decoded:
  `"mod\u0065l"` is `model`.
- At most MAX_MEMBERS names are decoded, because each costs a Python call.
- A Raw value has its exact length. The lengths and the order of the keys locate every member
  in the original bytes, whatever the white space, without a JSON scanner in Python.

Editing, as splices into the client's original bytes:
- Unedited bytes stay as they are: white space, order, escapes, number spellings.
- Only top-level members are edited, including every occurrence of a repeated name.
- An edit that changes nothing returns the very same object.
- Inserting needs no scan: new members go right after the opening brace.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec
from msgspec import Raw

from gateway.errors import BadRequest
from gateway.policy.request.refusals import undecodable

MAX_MEMBERS: Final = 10_000
_names_left = 0
"""How many more names the decoder may decode in this call."""


class Key:
    """One member's decoded name; compares by identity."""

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
"""Name -> value as sent, as a view into the body."""

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
    """The members of a body that `read_body` has accepted, or of an edited copy of one."""
    return {key.name: value for key, value in pairs(raw).items()}


def locate(raw: bytes) -> list[Member]:
    """All top-level members with their offsets; raises as `pairs` does."""
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


Pieces = list[bytes | memoryview]
"""Consecutive pieces of a body."""

_NONE: Mapping[str, bytes] = MappingProxyType({})
_USAGE = {"include_usage": b"true"}


def splice(
    raw: bytes,
    *,
    replace: Mapping[str, bytes] = _NONE,
    insert: Mapping[str, bytes] = _NONE,
    remove: Collection[str] = (),
    places: Sequence[tuple[str, int, int, int]] = (),
) -> bytes:
    """Edit top-level members of the JSON object `raw`; values are JSON bytes. See `edits`."""
    found = edits(raw, replace=replace, insert=insert, remove=remove, places=places)
    return raw if found is None else b"".join(found)


def edits(
    raw: bytes,
    *,
    replace: Mapping[str, bytes] = _NONE,
    insert: Mapping[str, bytes] = _NONE,
    remove: Collection[str] = (),
    places: Sequence[tuple[str, int, int, int]] = (),
) -> Pieces | None:
    """The pieces of the edited body; None if nothing changes.

    `replace` sets a member's value and adds the member if it is absent. `insert` adds a member
    that the caller knows to be absent (or removes in the same call). `read_body` must have
    accepted `raw`: anything but a JSON object raises ValueError. `places` are its members as
    `locate` returns them, if the caller has them.
    """
    if not (replace or remove):
        if not insert:
            return None
        at = body_start(raw)
        return _pieces(raw, (), insert, empty=raw[at : at + 1] == b"}")
    members = [Member(*place) for place in places] if places else locate(raw)
    cuts = _cuts(members, replace, frozenset(remove))
    present = {member.name for member in members}
    added = {name: value for name, value in replace.items() if name not in present}
    added.update(insert)
    if not cuts and not added:
        return None
    return _pieces(raw, cuts, added, empty=present <= set(remove))


def with_usage(options: msgspec.Raw | None) -> bytes:
    """`options` with include_usage true and all else kept; None: there is no stream_options."""
    given = b"null" if options is None else bytes(options)
    return splice(b"{}" if given == b"null" else given, replace=_USAGE)


def _pieces(
    raw: bytes,
    cuts: Sequence[tuple[int, int, bytes]],
    added: Mapping[str, bytes],
    *,
    empty: bool,
) -> Pieces:
    """The edited body as views, without a copy; `empty`: without `added` it has no members."""
    view = memoryview(raw)
    pieces: Pieces = []
    at = 0
    if added:
        at = raw.index(b"{") + 1
        new = (msgspec.json.encode(name) + b":" + value for name, value in added.items())
        pieces += (view[:at], b",".join(new), b"" if empty else b",")
    for start, end, value in cuts:
        pieces += (view[at:start], value)
        at = end
    pieces.append(view[at:])
    return pieces


def _cuts(
    members: list[Member], replace: Mapping[str, bytes], remove: frozenset[str]
) -> list[tuple[int, int, bytes]]:
    """(start, end, new bytes) in order. One cut removes neighbours together with their commas."""
    cuts: list[tuple[int, int, bytes]] = []
    kept_end = removed_from = -1
    for member in members:
        if member.name in remove:
            if removed_from < 0:
                removed_from = member.key_start
            continue
        if removed_from >= 0:
            cuts.append((removed_from, member.key_start, b""))
            removed_from = -1
        if member.name in replace:
            cuts.append((member.value_start, member.value_end, replace[member.name]))
        kept_end = member.value_end
    if removed_from >= 0:
        # The removed members are the last ones: the comma before them goes, too.
        start = removed_from if kept_end < 0 else kept_end
        cuts.append((start, members[-1].value_end, b""))
    return cuts


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
