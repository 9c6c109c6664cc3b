"""What two states of an entitlement come to, when the directory lost the writes between them.

Plain functions without I/O. The directory may have come back older than it was, and others may
have written to it since, so that neither state need descend from the other.

- A deletion holds: an id that was deleted never comes back. Of two namesakes the newer stays.
- A key that an admin revoked stays revoked.
- Suspension is the one that was set last, and so is expiry, each for itself; the stricter, where
  neither is the later.
- Everything else is the newer one's, by the clock of whoever made the change.
"""

from collections.abc import Container, Iterable, Mapping
from typing import Final

import msgspec

from gateway.ports import EntitlementEntry, Kept

REVOKED_KEPT: Final = 32
"""Digests of revoked keys remembered with an entitlement."""

Grave = tuple[str, str]
"""Name and id of a deleted entitlement."""


class Repair(msgspec.Struct):
    """How to have a directory hold what is known."""

    puts: list[EntitlementEntry] = []
    """Each based on the version that the directory holds."""
    deletes: list[EntitlementEntry] = []
    gone: list[str] = []
    """Names that are to be forgotten here."""


def grave(entry: EntitlementEntry) -> Grave:
    """What its deletion would be known by."""
    return entry.terms.name, entry.id


def changed(before: EntitlementEntry, unix_s: float = 0.0, **fields: object) -> EntitlementEntry:
    """An entry with other content, which is newer than before; `unix_s`: now, if known."""
    number = max(_next(before), int(unix_s * 1000))
    after = msgspec.structs.replace(before, **fields, changed=number)
    if before.terms.expires_unix_s != after.terms.expires_unix_s:
        return msgspec.structs.replace(after, expiring=_later(before.expiring, unix_s))
    return after


def stood(before: EntitlementEntry, unix_s: float, *, suspended: bool) -> EntitlementEntry:
    """An entry that was suspended or resumed, even if it was so already as far as is known here."""
    terms = msgspec.structs.replace(before.terms, suspended=suspended)
    after = changed(before, unix_s, terms=terms)
    return msgspec.structs.replace(after, standing=_later(before.standing, unix_s))


def revoked(before: EntitlementEntry, unix_s: float, digests: Container[str]) -> EntitlementEntry:
    """An entry without these keys, for good."""
    ended = tuple(d for d in before.key_sha256 if d in digests)
    return changed(
        before,
        unix_s,
        key_sha256=_without(before.key_sha256, ended),
        revoked_sha256=(*before.revoked_sha256, *ended)[-REVOKED_KEPT:],
    )


def reconciled(mine: EntitlementEntry, theirs: EntitlementEntry) -> EntitlementEntry:
    """What two states of one name come to, as a state based on `theirs`."""
    newer = mine if mine.changed > theirs.changed else theirs
    ended = dict.fromkeys((*theirs.revoked_sha256, *mine.revoked_sha256))
    newer = msgspec.structs.replace(
        newer,
        key_sha256=_without(newer.key_sha256, ended),
        revoked_sha256=tuple(ended)[-REVOKED_KEPT:],
        version=theirs.version,
    )
    # What the file says has one id in a directory, and another in one that came back empty.
    if mine.id != theirs.id and not mine.origin == theirs.origin == "file":
        return newer
    return msgspec.structs.replace(
        newer,
        terms=msgspec.structs.replace(
            newer.terms, suspended=_suspended(mine, theirs), expires_unix_s=_expiry(mine, theirs)
        ),
        standing=max(mine.standing, theirs.standing),
        expiring=max(mine.expiring, theirs.expiring),
    )


def repair(
    known: Mapping[str, EntitlementEntry], buried: Container[Grave], kept: Kept
) -> Iterable[Repair]:
    """One step for each entry that is known here or kept there, so that one can pause between."""
    graves = {(removal.name, removal.id) for removal in kept.removals}
    listed = set()
    for theirs in kept.entries:
        listed.add(theirs.terms.name)
        mine = known.get(theirs.terms.name)
        if mine is not None and grave(mine) in graves:
            mine = None
        if mine is not None and mine.version and (grave(theirs) in buried or mine != theirs):
            wanted = mine if grave(theirs) in buried else reconciled(mine, theirs)
            wanted = msgspec.structs.replace(wanted, version=theirs.version)
            yield Repair(puts=[wanted] if wanted != theirs else [])
        else:
            yield Repair(deletes=[theirs] if grave(theirs) in buried else [])
    for name, mine in known.items():
        if name in listed:
            continue
        # Where it is older than all removals that are remembered, one of it may be forgotten.
        back = grave(mine) not in graves and mine.version >= kept.complete_since
        if back and mine.version:
            yield Repair(puts=[msgspec.structs.replace(mine, version=0)])
        else:
            yield Repair(gone=[name])


def _suspended(mine: EntitlementEntry, theirs: EntitlementEntry) -> bool:
    if mine.standing != theirs.standing:
        return (mine if mine.standing > theirs.standing else theirs).terms.suspended
    return mine.terms.suspended or theirs.terms.suspended


def _expiry(mine: EntitlementEntry, theirs: EntitlementEntry) -> float:
    if mine.expiring != theirs.expiring:
        return (mine if mine.expiring > theirs.expiring else theirs).terms.expires_unix_s
    ends = [e.terms.expires_unix_s for e in (mine, theirs) if e.terms.expires_unix_s > 0]
    return min(ends, default=0.0)


def _later(before: int, unix_s: float) -> int:
    """By the clock: how many writes each history had says nothing of which came later."""
    return max(before + 1, int(unix_s * 1000))


def _without(keys: tuple[str, ...], ended: Container[str]) -> tuple[str, ...]:
    return tuple(key for key in keys if key not in ended)


def _next(before: EntitlementEntry) -> int:
    """Above whatever was known when the change was made, in any history of the directory."""
    return max(before.version, before.changed) + 1
