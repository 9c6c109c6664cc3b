"""Edits of a request body as splices into the client's original bytes.

Rules:
- What is not edited stays byte for byte: white space, order, escapes, number spellings.
- Only top-level members are touched; every occurrence of a repeated name is.
- An edit that changes nothing returns the very same object.
- Inserting needs no scan: new members go right after the opening brace.
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType

import msgspec

from gateway.domain import BodyFacts
from gateway.policy.members import Member, body_start, locate

_NONE: Mapping[str, bytes] = MappingProxyType({})
_USAGE = {"include_usage": b"true"}


def splice(
    raw: bytes,
    *,
    replace: Mapping[str, bytes] = _NONE,
    insert: Mapping[str, bytes] = _NONE,
    remove: Collection[str] = (),
) -> bytes:
    """Edit top-level members of the JSON object `raw`; values are JSON bytes.

    `replace` sets a member's value and adds the member when it is absent. `insert` adds
    one that the caller knows to be absent (or removes in the same call). `raw` must have
    passed `read_body`: anything but a JSON object raises ValueError.
    """
    if not (replace or remove):
        return _insert(raw, insert) if insert else raw
    members = locate(raw)
    cuts = _cuts(members, replace, remove)
    present = {member.name for member in members}
    added = {name: value for name, value in replace.items() if name not in present}
    added.update(insert)
    if not cuts and not added:
        return raw
    pieces: list[bytes] = []
    at = 0
    for start, end, value in cuts:
        pieces += (raw[at:start], value)
        at = end
    pieces.append(raw[at:])
    edited = b"".join(pieces)
    return _insert(edited, added) if added else edited


def with_usage(raw: bytes, facts: BodyFacts) -> bytes:
    """`raw` with stream_options.include_usage true, so that a stream's usage is metered.

    For chat and completions. Other members of an existing stream_options stay; bodies that
    do not stream, or ask already, are returned as they are.
    """
    if not facts.stream or facts.include_usage:
        return raw
    if not facts.has_stream_options:
        return _insert(raw, {"stream_options": b'{"include_usage":true}'})
    member = next(m for m in locate(raw) if m.name == "stream_options")
    options = raw[member.value_start : member.value_end]
    merged = splice(b"{}" if options == b"null" else options, replace=_USAGE)
    return splice(raw, replace={"stream_options": merged})


def _insert(raw: bytes, members: Mapping[str, bytes]) -> bytes:
    at = body_start(raw)
    added = b",".join(msgspec.json.encode(name) + b":" + value for name, value in members.items())
    comma = b"" if raw[at : at + 1] == b"}" else b","
    brace = raw.index(b"{") + 1
    return b"".join((raw[:brace], added, comma, raw[brace:]))


def _cuts(
    members: list[Member], replace: Mapping[str, bytes], remove: Collection[str]
) -> list[tuple[int, int, bytes]]:
    """(start, end, new bytes) in order. A removed member takes one comma with it."""
    cuts: list[tuple[int, int, bytes]] = []
    kept = max((i for i, m in enumerate(members) if m.name not in remove), default=-1)
    for index, member in enumerate(members[: kept + 1]):
        if member.name in remove:
            cuts.append((member.key_start, members[index + 1].key_start, b""))
        elif member.name in replace:
            cuts.append((member.value_start, member.value_end, replace[member.name]))
    if kept + 1 < len(members):
        # What follows the last kept member goes in one cut, its leading comma included.
        start = members[kept].value_end if kept >= 0 else members[0].key_start
        cuts.append((start, members[-1].value_end, b""))
    return cuts
