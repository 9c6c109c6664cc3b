"""Tenants and their keys as administrators see them: keys by name and fingerprint, never more."""

from collections.abc import Iterator
from datetime import UTC, datetime

import msgspec

from gateway.adapters.entitlements.views import fingerprint
from gateway.adapters.tenants.entries import TenantEntry, keys_of
from gateway.adapters.tenants.sync import TenantSync
from gateway.records.limit import KeyLimits
from gateway.records.record import Record
from gateway.records.request import TenantKey


class ShownKey(Record, frozen=True, kw_only=True):
    """A key and where it comes from."""

    key: TenantKey
    origin: str
    """`file` or `admin`."""
    former: bool = False
    """Whether it is the one before a rotation."""

    @property
    def sha256(self) -> str:
        """Its digest in hex."""
        return self.key.sha256.hex()


def shown_keys(sync: TenantSync, name: str) -> Iterator[ShownKey]:
    """Every key of a tenant, the file's first."""
    entry = sync.entries.get(name)
    former = {} if entry is None else {key.former_sha256: key for key in entry.keys}
    made = set() if entry is None else {key.sha256 for key in entry.keys}
    listed = sync.file.tenants.get(name)
    of_file = set() if listed is None else {key.sha256 for key in listed.keys}
    for key in keys_of(name, sync.file, entry):
        digest = key.sha256.hex()
        ours = digest in former or (digest in made and key.sha256 not in of_file)
        yield ShownKey(key=key, origin="admin" if ours else "file", former=digest in former)


def tenant_fields(sync: TenantSync, name: str) -> dict[str, object]:
    """A tenant's own fields, those of the file before an administrator's."""
    listed, entry = sync.file.tenants.get(name), sync.entries.get(name)
    source = entry if listed is None else listed
    return {
        "name": name,
        "display_name": None if source is None else source.display_name,
        "labels": {} if source is None else dict(source.labels),
        "entitlements": None
        if source is None or source.entitlements is None
        else list(source.entitlements),
        "suspended": entry is not None and entry.suspended,
    }


def shown(sync: TenantSync, name: str) -> dict[str, object]:
    """A tenant for GET and in lists, without its keys."""
    entry = sync.entries.get(name)
    return {
        **tenant_fields(sync, name),
        "origin": "file" if name in sync.file.tenants else "admin",
        "revision": 0 if entry is None else entry.version,
        "uses": sorted(sync.keyring.entitlements_of(name)),
        "key_count": sum(1 for _ in shown_keys(sync, name)),
    }


def key_row(found: ShownKey, now_s: float) -> dict[str, object]:
    """A key for people."""
    key = found.key
    ends = key.expires_unix_s
    expired = ends is not None and ends <= now_s
    return {
        "name": key.name,
        "fingerprint": fingerprint(found.sha256),
        "models": None if key.models is None else sorted(key.models),
        "entitlements": list(key.entitlements) if key.only_listed else None,
        "expires_at": None if ends is None else datetime.fromtimestamp(ends, UTC).isoformat(),
        "suspended": key.suspended,
        **limit_fields(key.stated),
        "state": "expired" if expired else "suspended" if key.suspended else "live",
        "origin": found.origin,
        "former": found.former,
    }


def limit_fields(limits: KeyLimits) -> dict[str, object]:
    """A key's own limits as in the file, every field of a budget included."""
    budgets = [msgspec.structs.asdict(budget) for budget in limits.budgets]
    return {
        "requests_per_minute": limits.requests_per_minute,
        "max_concurrency": limits.max_concurrency,
        "budgets": [{k: v for k, v in each.items() if v is not None} for each in budgets],
    }


def audited(entry: TenantEntry, sync: TenantSync) -> dict[str, object]:
    """The fields of an entry that changes can differ in, each key by itself."""
    found = {**tenant_fields(sync, entry.name), "suspended": entry.suspended}
    if entry.name not in sync.file.tenants:
        found["display_name"] = entry.display_name
        found["labels"] = dict(entry.labels)
        given = entry.entitlements
        found["entitlements"] = None if given is None else list(given)
    for key in entry.keys:
        found[f"key {key.name}"] = {
            "fingerprint": fingerprint(key.sha256),
            "models": key.models,
            "entitlements": key.entitlements,
            "expires_unix_s": key.expires_unix_s,
            "suspended": key.suspended,
            **limit_fields(key.limits),
            "former": fingerprint(key.former_sha256),
        }
    for digest, state in entry.in_file.items():
        found[f"key {fingerprint(digest)} of the file"] = {
            "expires_unix_s": state.expires_unix_s,
            "suspended": state.suspended,
        }
    return found
