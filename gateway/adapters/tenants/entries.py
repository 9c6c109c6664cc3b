"""Tenants as the directory stores them, and the keys that they and the file give together.

Plain records and functions without I/O. The directory holds what administrators made: tenants,
keys, and what they took away from keys of the file. Rules:

- A tenant and a key of the file are as the file says. Administrators add keys to the tenant, and
  only take away from a key of the file: suspend it, let it end earlier, revoke it.
- A revoked key stays revoked, whatever a file or an older copy lists.
- Of two states after the directory lost writes, each key's later change counts.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Final

import msgspec

from gateway.policy.budgets.stated import key_limits
from gateway.ports import StoredEntry
from gateway.records.limit import UNLIMITED, KeyLimits, Limit
from gateway.records.record import Record
from gateway.records.request import TenantKey

MAX_KEYS: Final = 1_000
"""Keys that administrators may give one tenant."""
RETAINED_REVOKED: Final = 1_000
"""Digests of revoked keys kept for a tenant, beside those that the file lists."""


class KeyEntry(Record, frozen=True, kw_only=True):
    """A key that an administrator made."""

    name: str
    sha256: str
    """Hex digest."""
    models: tuple[str, ...] | None = None
    entitlements: tuple[str, ...] | None = None
    expires_unix_s: float = 0.0
    suspended: bool = False
    limits: KeyLimits = UNLIMITED
    """Its own, unless the file has a key of its name: then that one's count."""
    former_sha256: str = ""
    """Digest before the last rotation, which also opens until `former_until_unix_s`."""
    former_until_unix_s: float = 0.0
    changed: int = 0
    """Time of its last change in Unix ms, at least one above its value before."""


class FileKeyState(Record, frozen=True, kw_only=True):
    """Rights that an administrator took away from a key of the file."""

    suspended: bool = False
    expires_unix_s: float = 0.0
    changed: int = 0


class TenantEntry(StoredEntry, frozen=True, kw_only=True):
    """A tenant as administrators made or changed it."""

    tenant: str
    made: bool = True
    """Whether an administrator made it; else it only adds to a tenant of the file."""
    display_name: str | None = None
    labels: Mapping[str, str] = {}
    entitlements: tuple[str, ...] | None = None
    suspended: bool = False
    standing: int = 0
    """Time of its last suspension or resumption in Unix ms, at least one above its value before."""
    keys: tuple[KeyEntry, ...] = ()
    in_file: Mapping[str, FileKeyState] = {}
    """By digest of a key in the file."""
    revoked_sha256: tuple[str, ...] = ()
    """Digests of revoked keys, newest last."""

    @property
    def name(self) -> str:
        """The tenant's name."""
        return self.tenant


class FileTenant(Record, frozen=True, kw_only=True):
    """A tenant of the configuration file."""

    display_name: str | None = None
    labels: Mapping[str, str] = {}
    entitlements: tuple[str, ...] | None = None
    keys: tuple[TenantKey, ...] = ()


class TenantFile(Record, frozen=True, kw_only=True):
    """The configuration file's part in tenants."""

    tenants: Mapping[str, FileTenant] = {}
    order: Mapping[str, tuple[str, ...]] = {}
    """Entitlements of the file by tenant, in the file's order."""
    currency: str = ""
    """Label of money."""

    def key_named(self, tenant: str, name: str) -> TenantKey | None:
        """The key that the file lists by this name."""
        listed = self.tenants.get(tenant)
        keys = () if listed is None else listed.keys
        return next((key for key in keys if key.name == name), None)


def keys_of(name: str, file: TenantFile, entry: TenantEntry | None) -> tuple[TenantKey, ...]:
    """Every key of a tenant that is not revoked; none of a tenant that no longer exists."""
    listed = file.tenants.get(name)
    if entry is None:
        return () if listed is None else listed.keys
    if listed is None and not entry.made:
        return ()
    of_file = () if listed is None else listed.keys
    given, order = _listed(name, file, entry), file.order.get(name, ())
    own = {key.sha256.hex() for key in of_file}
    former = {key.former_sha256 for key in entry.keys}
    revoked = set(entry.revoked_sha256)
    gone = former | revoked
    kept = [
        _limited(key, state_in_file(entry, digest))
        for key in of_file
        if (digest := key.sha256.hex()) not in gone
    ]
    named = {key.name: key for key in (*of_file, *kept)}
    made = (
        _opened(name, key, given, order, own, _limits(name, key, namesake, file), namesake)
        for key in entry.keys
        for namesake in (named.get(key.name),)
    )
    # The key before a rotation can be revoked by itself, on another gateway too.
    return tuple(key for key in chain(kept, *made) if key.sha256.hex() not in revoked)


def default_of(name: str, file: TenantFile, entry: TenantEntry | None) -> TenantKey | None:
    """What a tenant's token opens that lists no entitlements; None for all of them, by name."""
    given, order = _listed(name, file, entry), file.order.get(name, ())
    if given is None and not order:
        return None
    return TenantKey(
        tenant=name,
        name="",
        sha256=b"",
        entitlements=order if given is None else given,
        only_listed=given is not None,
    )


def _listed(name: str, file: TenantFile, entry: TenantEntry | None) -> tuple[str, ...] | None:
    """The tenant's own list of entitlements; the file's before an administrator's."""
    listed = file.tenants.get(name)
    if listed is not None:
        return listed.entitlements
    return None if entry is None else entry.entitlements


def state_in_file(entry: TenantEntry, digest: str) -> FileKeyState | None:
    """What administrators took away from a key of the file.

    A key that was theirs until the file listed it is as suspended as it was.
    """
    known = entry.in_file.get(digest)
    if known is None and any(key.suspended and key.sha256 == digest for key in entry.keys):
        return FileKeyState(suspended=True)
    return known


def _limited(key: TenantKey, state: FileKeyState | None) -> TenantKey:
    """A key of the file, with what an administrator took away."""
    if state is None:
        return key
    return msgspec.structs.replace(
        key,
        suspended=key.suspended or state.suspended,
        expires_unix_s=_earlier(key.expires_unix_s, state.expires_unix_s),
    )


def _limits(
    tenant: str, key: KeyEntry, namesake: TenantKey | None, file: TenantFile
) -> tuple[KeyLimits, tuple[Limit, ...]]:
    """(as stated, as counted): the file's for a key of this name, or else the key's own."""
    if namesake is not None:  # a rotation does not lift them
        return namesake.stated, namesake.limits
    return key.limits, key_limits(tenant, key.name, key.limits, file.currency)


def _opened(
    tenant: str,
    key: KeyEntry,
    given: tuple[str, ...] | None,
    order: tuple[str, ...],
    own: set[str],
    limits: tuple[KeyLimits, tuple[Limit, ...]],
    namesake: TenantKey | None,
) -> Iterable[TenantKey]:
    """The key and, after a rotation, the one before it; a key that the file lists is the file's.

    `namesake` is the file's key of this name: a rotation lifts nothing of what the file says of it.
    """
    listed = given if key.entitlements is None else key.entitlements
    stated, counted = limits
    found = TenantKey(
        tenant=tenant,
        name=key.name,
        sha256=bytes.fromhex(key.sha256),
        models=None if key.models is None else frozenset(key.models),
        entitlements=order if listed is None else listed,
        only_listed=listed is not None,
        expires_unix_s=key.expires_unix_s or None,
        suspended=key.suspended,
        stated=stated,
        limits=counted,
    )
    if namesake is not None:
        found = _narrowed(found, namesake)
    if key.sha256 not in own:
        yield found
    if key.former_sha256:
        yield msgspec.structs.replace(
            found,
            sha256=bytes.fromhex(key.former_sha256),
            expires_unix_s=_earlier(found.expires_unix_s, key.former_until_unix_s),
        )


def _narrowed(key: TenantKey, by: TenantKey) -> TenantKey:
    """A key that opens no more than another does."""
    listed = key.entitlements
    if by.only_listed:
        listed = by.entitlements
        if key.only_listed:
            listed = tuple(name for name in key.entitlements if name in by.entitlements)
    models = [m for m in (key.models, by.models) if m is not None]
    return msgspec.structs.replace(
        key,
        models=frozenset.intersection(*models) if models else None,
        entitlements=listed,
        only_listed=key.only_listed or by.only_listed,
        expires_unix_s=_earlier(key.expires_unix_s, by.expires_unix_s),
        suspended=key.suspended or by.suspended,
    )


def _earlier(*ends_unix_s: float | None) -> float | None:
    """The first of some ends in Unix seconds; None and 0 are none."""
    return min(filter(None, ends_unix_s), default=None)


def _without_former(key: KeyEntry) -> KeyEntry:
    return msgspec.structs.replace(key, former_sha256="", former_until_unix_s=0.0)


def changed(before: TenantEntry, unix_s: float, **fields: object) -> TenantEntry:
    """A newer entry with other content."""
    number = max(before.version, before.changed, int(unix_s * 1000) - 1) + 1
    return msgspec.structs.replace(before, **fields, changed=number)


def with_key(before: TenantEntry, key: KeyEntry, unix_s: float) -> TenantEntry:
    """The entry with a key added, or changed in its place."""
    known = next((k for k in before.keys if k.name == key.name), None)
    number = max(0 if known is None else known.changed, int(unix_s * 1000) - 1) + 1
    key = msgspec.structs.replace(key, changed=number)
    keys = [key if k.name == key.name else k for k in before.keys]
    return changed(before, unix_s, keys=tuple(keys if known else [*keys, key]))


def with_revoked(
    before: TenantEntry, digests: Iterable[str], unix_s: float, in_file: Sequence[TenantKey]
) -> TenantEntry:
    """The entry with these digests revoked for good, and without the keys of them."""
    revoked = tuple(dict.fromkeys((*before.revoked_sha256, *filter(None, digests))))
    if len(revoked) > RETAINED_REVOKED:  # what the file lists would open again
        listed = {key.sha256.hex() for key in in_file}
        rest = [digest for digest in revoked if digest not in listed]
        dropped = set(rest[:-RETAINED_REVOKED])
        revoked = tuple(digest for digest in revoked if digest not in dropped)
    keys = tuple(k for k in before.keys if k.sha256 not in revoked)
    states = {d: state for d, state in before.in_file.items() if d not in revoked}
    return changed(before, unix_s, keys=keys, in_file=states, revoked_sha256=revoked)


def reconciled(mine: TenantEntry, theirs: TenantEntry) -> TenantEntry:
    """Merge two states of one tenant into a state based on the version of `theirs`."""
    newer = mine if mine.changed > theirs.changed else theirs
    revoked = tuple(dict.fromkeys((*theirs.revoked_sha256, *mine.revoked_sha256)))
    keys: dict[str, KeyEntry] = {}
    for key in (*theirs.keys, *mine.keys):
        known = keys.get(key.name)
        if key.sha256 not in revoked and (known is None or key.changed > known.changed):
            ended = key.former_sha256 in revoked
            keys[key.name] = _without_former(key) if ended else key
    states: dict[str, FileKeyState] = {}
    for digest, state in (*theirs.in_file.items(), *mine.in_file.items()):
        there = states.get(digest)
        if digest not in revoked and (there is None or state.changed > there.changed):
            states[digest] = state
    standing = max(mine.standing, theirs.standing)
    return msgspec.structs.replace(
        newer,
        made=mine.made or theirs.made,
        suspended=any(e.suspended for e in (mine, theirs) if e.standing == standing),
        standing=standing,
        keys=tuple(keys.values()),
        in_file=states,
        revoked_sha256=revoked[-2 * RETAINED_REVOKED :],
        version=theirs.version,
    )
