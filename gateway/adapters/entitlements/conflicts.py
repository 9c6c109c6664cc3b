"""Merges two states of an entry after the directory lost writes.

Plain functions without I/O. The directory may have come back in an older state and taken other
gateways' writes since, so neither state has to descend from the other.

- Deletions are final: a deleted id never comes back. Of two entitlements with one name, the newer
  stays.
- Revoked keys stay revoked.
- Suspension and expiry each take the value that was set last; if set at the same time, the
  stricter one.
- All other fields come from the newer state, by the clock of the gateway that changed it.
"""

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Final, Generic

import msgspec

from gateway.ports import DirectoryState, EntitlementEntry, Entry, StoredEntry

RETAINED_REVOKED: Final = 32
"""Digests of revoked keys kept per entitlement."""

DeletedId = tuple[str, str]
"""Name and id of a deleted entry."""


class Repair(msgspec.Struct, Generic[Entry]):
    """Steps that bring the directory and this process to the same state."""

    puts: list[Entry] = []
    """Each based on the version that the directory holds."""
    deletes: list[Entry] = []
    gone: list[str] = []
    """Names that this process must forget."""


def deleted_id(entry: StoredEntry) -> DeletedId:
    """The name and id under which the entry's deletion is remembered."""
    return entry.name, entry.id


def changed(before: EntitlementEntry, unix_s: float = 0.0, **fields: object) -> EntitlementEntry:
    """A newer entry with other content; `unix_s` is the current time, if known."""
    number = max(_next(before), int(unix_s * 1000))
    after = msgspec.structs.replace(before, **fields, changed=number)
    if before.terms.expires_unix_s != after.terms.expires_unix_s:
        return msgspec.structs.replace(after, expiring=_later(before.expiring, unix_s))
    return after


def stood(before: EntitlementEntry, unix_s: float, *, suspended: bool) -> EntitlementEntry:
    """The entry suspended or resumed now, even if `before` is in that state already."""
    terms = msgspec.structs.replace(before.terms, suspended=suspended)
    after = changed(before, unix_s, terms=terms)
    return msgspec.structs.replace(after, standing=_later(before.standing, unix_s))


def revoked(before: EntitlementEntry, unix_s: float, digests: Container[str]) -> EntitlementEntry:
    """The entry with these keys revoked for good."""
    ended = tuple(d for d in before.key_sha256 if d in digests)
    return changed(
        before,
        unix_s,
        key_sha256=_without(before.key_sha256, ended),
        revoked_sha256=(*before.revoked_sha256, *ended)[-RETAINED_REVOKED:],
    )


def reconciled(mine: EntitlementEntry, theirs: EntitlementEntry) -> EntitlementEntry:
    """Merge two states of one name into a state based on the version of `theirs`."""
    newer = mine if mine.changed > theirs.changed else theirs
    ended = dict.fromkeys((*theirs.revoked_sha256, *mine.revoked_sha256))
    newer = msgspec.structs.replace(
        newer,
        key_sha256=_without(newer.key_sha256, ended),
        revoked_sha256=tuple(ended)[-RETAINED_REVOKED:],
        version=theirs.version,
    )
    # An entry from the file gets another id in a directory that came back empty.
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
    known: Mapping[str, Entry],
    buried: Container[DeletedId],
    state: DirectoryState[Entry],
    reconcile: Callable[[Entry, Entry], Entry],
) -> Iterable[Repair[Entry]]:
    """Yield one step per entry of this process or of the directory, so that callers can pause.

    `reconcile` merges mine and theirs into an entry that is based on the version of theirs.
    """
    tombstones = {(removal.name, removal.id) for removal in state.removals}
    listed = set()
    for theirs in state.entries:
        listed.add(theirs.name)
        mine = known.get(theirs.name)
        if mine is not None and deleted_id(mine) in tombstones:
            mine = None
        if mine is not None and mine.version and (deleted_id(theirs) in buried or mine != theirs):
            wanted = mine if deleted_id(theirs) in buried else reconcile(mine, theirs)
            wanted = msgspec.structs.replace(wanted, version=theirs.version)
            yield Repair(puts=[wanted] if wanted != theirs else [])
        else:
            yield Repair(deletes=[theirs] if deleted_id(theirs) in buried else [])
    for name, mine in known.items():
        if name in listed:
            continue
        # An entry older than all remembered removals may have been removed by a forgotten one.
        back = deleted_id(mine) not in tombstones and mine.version >= state.complete_since
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
    """A change time by the clock; numbers of writes cannot order two diverged histories."""
    return max(before + 1, int(unix_s * 1000))


def _without(keys: tuple[str, ...], ended: Container[str]) -> tuple[str, ...]:
    return tuple(key for key in keys if key not in ended)


def _next(before: EntitlementEntry) -> int:
    """A number above every version and change time that the entry had, in any history."""
    return max(before.version, before.changed) + 1
