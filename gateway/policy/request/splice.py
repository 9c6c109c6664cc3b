"""Edits of a request body as splices into the client's original bytes.

Rules:
- What is not edited stays byte for byte: white space, order, escapes, number spellings.
- Only top-level members are touched; every occurrence of a repeated name is.
- An edit that changes nothing returns the very same object.
- Inserting needs no scan: new members go right after the opening brace.
"""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import msgspec

from gateway.policy.request.members import Member, body_start, locate

Pieces = list[bytes | memoryview]
"""Of a body, in order."""

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
    """What the edited body is joined of; None where nothing changes.

    `replace` sets a member's value and adds the member when it is absent. `insert` adds
    one that the caller knows to be absent (or removes in the same call). `raw` must have
    passed `read_body`: anything but a JSON object raises ValueError. `places` are its members',
    if they are known.
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
    """A stream_options member with include_usage true, its other members kept; None: absent."""
    given = b"null" if options is None else bytes(options)
    return splice(b"{}" if given == b"null" else given, replace=_USAGE)


def _pieces(
    raw: bytes,
    cuts: Sequence[tuple[int, int, bytes]],
    added: Mapping[str, bytes],
    *,
    empty: bool,
) -> Pieces:
    """What the edited body is joined of; `empty`: without `added` it has no members.

    Views: a body may be large, and is not to be copied.
    """
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
    """(start, end, new bytes) in order. Removed neighbours go in one cut, and a comma each."""
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
        # The comma before them goes, there is none behind.
        start = removed_from if kept_end < 0 else kept_end
        cuts.append((start, members[-1].value_end, b""))
    return cuts
