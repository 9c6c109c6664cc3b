"""Admin operations on the keys of tenants: add, change, rotate, revoke."""

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import UNSET, UnsetType

from gateway.adapters.entitlements.views import fingerprint
from gateway.adapters.tenants import views
from gateway.adapters.tenants.entries import (
    MAX_KEYS,
    FileKeyState,
    KeyEntry,
    TenantEntry,
    changed,
    state_in_file,
    with_key,
    with_revoked,
)
from gateway.adapters.tenants.fields import (
    LIMITS,
    KeyFields,
    RotateFields,
    check_lists,
    hex_digest,
    invalid,
    read,
    unix_s,
)
from gateway.adapters.tenants.registry import TenantRegistry
from gateway.adapters.tenants.views import ShownKey
from gateway.errors import Conflict, NotFound
from gateway.records.request import TenantKey

_OF_FILE: Final = frozenset({"models", "entitlements", *LIMITS})


class TenantKeyRegistry(TenantRegistry):
    """Tenants and their keys. All methods raise Refusal."""

    async def add_key(
        self, name: str, fields: Mapping[str, object], who: str, *, version: int | None = None
    ) -> dict[str, object]:
        """Add a key. The returned "key" is shown only this once; none with a `sha256` given."""
        asked = read(fields, KeyFields)
        if asked.name is UNSET:
            raise invalid("name", "name: missing; give the key a name.")
        key_name = str(asked.name)
        secret, digest = self._digest(asked.sha256)

        async def work() -> None:
            before = self._entry(name, version)
            self._check(name, asked)
            if any(found.key.name == key_name for found in views.shown_keys(self._sync, name)):
                raise _conflict(
                    reason="key_exists", message=f"'{name}' has a key '{key_name}'. Rotate it."
                )
            if len(before.keys) >= MAX_KEYS:
                raise _conflict(
                    reason="too_many_keys",
                    message=f"'{name}' has {MAX_KEYS} keys. Revoke some first.",
                )
            self._check_new(digest, before)
            made = self._changed(name, KeyEntry(name=key_name, sha256=digest), asked)
            after = with_key(before, made, self._wall_clock())
            await self._store(before, after, who, "add_key")

        await self._changing(work)
        return self._answer(name, digest, secret)

    async def change_key(
        self,
        name: str,
        key: str,
        fields: Mapping[str, object],
        who: str,
        *,
        version: int | None = None,
    ) -> dict[str, object]:
        """Change some fields; of a key of the file, only suspend it or let it end earlier."""
        asked = read(fields, KeyFields)
        if asked.sha256 is not UNSET:
            raise invalid("sha256", "sha256: cannot be changed; rotate the key.")
        if asked.name not in (UNSET, key):
            raise invalid("name", "name: cannot be changed; add another key.")
        digest = ""

        async def work() -> None:
            nonlocal digest
            before = self._entry(name, version)
            found = self._find(name, key)
            digest = found.sha256
            after, now_s = before, self._wall_clock()
            if found.origin == "file":
                after = self._limited(before, found, fields, asked)
            else:
                self._check(name, asked)
            for made in before.keys:  # also of a key that the file lists since: it may leave again
                if found.sha256 in _digests(made):
                    after = with_key(after, self._changed(name, made, asked), now_s)
            await self._store(before, after, who, "change_key")

        await self._changing(work)
        return self._answer(name, digest, None)

    async def rotate_key(
        self,
        name: str,
        key: str,
        fields: Mapping[str, object],
        who: str,
        *,
        version: int | None = None,
    ) -> dict[str, object]:
        """Give a key a new value; the old one opens for `grace_s` more, 0 for not at all."""
        asked = read(fields, RotateFields)
        secret, digest = self._digest(asked.sha256)

        async def work() -> None:
            before, now_s = self._entry(name, version), self._wall_clock()
            found = self._find(name, key)
            self._check_new(digest, before)
            made = next((k for k in before.keys if found.sha256 in _digests(k)), None)
            known = made
            if known is None or found.origin == "file":  # of which an entry may be out of date
                known = _entry_of(found, made)
            if asked.grace_s and known.former_sha256 and known.former_until_unix_s > now_s:
                raise _conflict(
                    reason="key_rotating",
                    message=f"The key '{known.name}' was rotated, and the one before still opens. "
                    "Revoke that one first, or rotate with a grace_s of 0, which ends both.",
                )
            if made is None and len(before.keys) >= MAX_KEYS:
                raise _conflict(
                    reason="too_many_keys", message=f"'{name}' has {MAX_KEYS} keys. Revoke some."
                )
            grace = {
                "former_sha256": known.sha256 if asked.grace_s else "",
                "former_until_unix_s": now_s + asked.grace_s if asked.grace_s else 0.0,
            }
            fresh = msgspec.structs.replace(known, sha256=digest, **grace)
            after = with_key(before, fresh, now_s)
            ended = [known.former_sha256, "" if asked.grace_s else known.sha256]
            after = with_revoked(after, ended, now_s, self._in_file(name))
            await self._store(before, after, who, "rotate_key")

        await self._changing(work)
        return self._answer(name, digest, secret)

    async def revoke_key(
        self, name: str, key: str, who: str, *, version: int | None = None
    ) -> None:
        """End a key for good, at once. Requests admitted with it run on."""

        async def work() -> None:
            before, now_s = self._entry(name, version), self._wall_clock()
            found = self._find(name, key)
            ended = [found.sha256]
            after = before
            made = next((k for k in before.keys if k.sha256 == found.sha256), None)
            if made is not None:
                ended.append(made.former_sha256)
            elif found.former:
                made = next(k for k in before.keys if k.former_sha256 == found.sha256)
                kept = msgspec.structs.replace(made, former_sha256="", former_until_unix_s=0.0)
                after = with_key(before, kept, now_s)
            after = with_revoked(after, ended, now_s, self._in_file(name))
            await self._store(before, after, who, "revoke_key")

        await self._changing(work)

    def _digest(self, given: str | UnsetType) -> tuple[str | None, str]:
        """(key to show, its digest): a new key, or none with the digest of a known one."""
        return self._make_key() if given is UNSET else (None, hex_digest(str(given)))

    def _check(self, name: str, asked: KeyFields) -> None:
        own = self._sync.keyring.entitlements_of(name)
        check_lists(name, asked.entitlements, asked.models, own, self._adapters)

    def _check_new(self, digest: str, entry: TenantEntry) -> None:
        known = self._sync.keyring.find(bytes.fromhex(digest)) is not None
        if known or digest in entry.revoked_sha256:
            raise _conflict(
                reason="key_exists",
                message="This key is known here, or was revoked: make another.",
            )

    def _in_file(self, name: str) -> tuple[TenantKey, ...]:
        listed = self._sync.file.tenants.get(name)
        return () if listed is None else listed.keys

    def _find(self, name: str, key: str) -> ShownKey:
        """A key by name or fingerprint. Raises NotFound, Conflict."""
        found = [
            each
            for each in views.shown_keys(self._sync, name)
            if fingerprint(each.sha256) == key or (each.key.name == key and not each.former)
        ]
        if not found:
            raise NotFound(
                f"'{name}' has no key '{key[:64]}'. GET /admin/tenants/{name} lists its keys.",
                reason="key_not_found",
                code="key_not_found",
            )
        if len(found) > 1:
            raise _conflict(
                reason="key_ambiguous", message=f"'{key}' names two keys. Give the fingerprint."
            )
        return found[0]

    def _changed(self, tenant: str, key: KeyEntry, asked: KeyFields) -> KeyEntry:
        fields: dict[str, object] = {}
        if limits := asked.limits:
            if self._sync.file.key_named(tenant, key.name) is not None:
                raise _conflict(
                    reason="key_in_file",
                    message=f"The limits of the key '{key.name}' are in the configuration file. "
                    "Change them there and reload.",
                )
            checked = self._read_limits({n: v for n, v in limits.items() if v is not None})
            wanted = {name: getattr(checked, name) for name in limits}
            fields["limits"] = msgspec.structs.replace(key.limits, **wanted)
        for field in ("models", "entitlements"):
            given = getattr(asked, field)
            if given is not UNSET:
                fields[field] = None if given is None else tuple(given)
        if asked.expires_at is not UNSET:
            fields["expires_unix_s"] = unix_s(asked.expires_at)
        if asked.suspended is not UNSET:
            fields["suspended"] = asked.suspended
        return msgspec.structs.replace(key, **fields)

    def _limited(
        self, before: TenantEntry, found: ShownKey, fields: Mapping[str, object], asked: KeyFields
    ) -> TenantEntry:
        """A key of the file that is suspended, resumed or ends earlier."""
        if not _OF_FILE.isdisjoint(fields):
            raise _conflict(
                reason="key_in_file",
                message=f"The key '{found.key.name}' is in the configuration file. Change it there "
                "and reload; `suspended` and `expires_at` can be changed here.",
            )
        state = state_in_file(before, found.sha256) or FileKeyState()
        now_s = self._wall_clock()
        more: dict[str, object] = {"changed": max(state.changed + 1, int(now_s * 1000))}
        if asked.suspended is not UNSET:
            more["suspended"] = asked.suspended
        if asked.expires_at is not UNSET:
            more["expires_unix_s"] = unix_s(asked.expires_at)
        listed = {key.sha256.hex() for key in self._in_file(before.name)}
        states = {d: s for d, s in before.in_file.items() if d in listed}
        states[found.sha256] = msgspec.structs.replace(state, **more)
        return changed(before, now_s, in_file=states)

    def _answer(self, name: str, digest: str, secret: str | None) -> dict[str, object]:
        """The tenant's revision and the key's row; "key" where one was made."""
        now_s = self._wall_clock()
        shown = next(k for k in views.shown_keys(self._sync, name) if k.sha256 == digest)
        revision = self._sync.entries[name].version
        found = {**views.key_row(shown, now_s), "tenant": name, "revision": revision}
        return found if secret is None else {**found, "key": secret}


def _digests(key: KeyEntry) -> tuple[str, str]:
    return key.sha256, key.former_sha256


def _entry_of(found: ShownKey, made: KeyEntry | None) -> KeyEntry:
    """A key of the file, as an administrator's from now on; `made` is what the last rotation left.

    It has the rights in force: the file's, less what administrators took away.
    """
    key = found.key
    return KeyEntry(
        former_sha256="" if made is None else made.former_sha256,
        former_until_unix_s=0.0 if made is None else made.former_until_unix_s,
        name=key.name,
        sha256=found.sha256,
        models=None if key.models is None else tuple(sorted(key.models)),
        entitlements=key.entitlements if key.only_listed else None,
        expires_unix_s=key.expires_unix_s or 0.0,
        suspended=key.suspended,
        limits=key.stated,
    )


def _conflict(*, reason: str, message: str) -> Conflict:
    return Conflict(message, reason=reason, code=reason)
