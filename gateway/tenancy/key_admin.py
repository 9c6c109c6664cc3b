"""Admin operations on the keys of tenants: add, change, rotate, revoke.

Keys are made here, shown once and stored as SHA-256. A key is named by its name or by its
fingerprint, the digest's first 8 hex digits.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from math import inf
from typing import Any, Final

import msgspec

from gateway.admission.entitlement_terms import instant
from gateway.errors import Conflict, NotFound
from gateway.records.tenancy import Denial, DirectoryChange, Row, fingerprint
from gateway.tenancy import tenant_views as views
from gateway.tenancy.admin_changes import new_uid
from gateway.tenancy.rights import LIMIT_FIELDS, KeyInForce
from gateway.tenancy.tenant_admin import TenantAdmin, check_lists, invalid

MAX_KEYS: Final = 1_000
"""Keys that administrators may give one tenant."""
GRACE_S: Final = 86_400.0
"""How long the old key opens after a rotation that says nothing."""
MAX_GRACE_S: Final = 90 * 86_400.0
_OF_FILE: Final = frozenset({"models", "entitlements", *LIMIT_FIELDS})


class TenantKeyAdmin(TenantAdmin):
    """Tenants and their keys. All methods raise Refusal."""

    async def add_key(
        self, name: str, fields: Mapping[str, object], who: str, *, version: int | None = None
    ) -> dict[str, object]:
        """Add a key. The returned "key" is shown only this once; none with a `sha256` given."""
        secret, made_digest = (None, "") if "sha256" in fields else self._make_key()
        checked, denied = self._checked_key({"sha256": made_digest, **fields})
        digest, key_name = checked["sha256"], checked["name"]

        async def work() -> None:
            tenant = self._tenant(name, version)
            self._check_lists(name, checked)
            if any(found.key.name == key_name for found in tenant.keys):
                raise _conflict(
                    reason="key_exists", message=f"'{name}' has a key '{key_name}'. Rotate it."
                )
            self._check_new(name, digest)
            row = Row(
                kind="key",
                name=f"{name}/{key_name}",
                uid=new_uid(),
                of=self._uid(name),
                fields=checked,
            )
            # A row of its name that opens nothing, of a tenant that left: it ends for good.
            stale = self._known.rows.get(row.id)
            ended = () if stale is None else (stale.uid, *stale.digests)
            denials = [
                *self._gone(ended, of=f"tenant {name}"),
                *self._restrictions(name, [digest], suspended=denied),
            ]
            change = DirectoryChange(puts=(self._row(row),), denials=tuple(denials))
            await self._store(name, change, who, "add_key")

        _, said = await self._changing(work, reason="tenant_changed")
        return self._answer(name, digest, secret, said)

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
        if "sha256" in fields:
            raise invalid("sha256", "sha256: cannot be changed; rotate the key.")
        if fields.get("name", key) != key:
            raise invalid("name", "name: cannot be changed; add another key.")
        digest = ""

        async def work() -> None:
            nonlocal digest
            self._tenant(name, version)
            found = self._find(name, key)
            digest = found.sha256
            row = self._row_of(name, digest)  # also of a key that the file lists since
            before = {"name": found.key.name, "sha256": digest} if row is None else row.fields
            checked, denied = self._checked_key({**before, **fields})
            self._check_of_file(name, found, fields)
            self._check_lists(name, checked)
            ends = instant(checked.get("expires_at")) if "expires_at" in fields else None
            # What an administrator made ends by its row; what the file lists, by a denial.
            listed = found.origin == "file" or f"ends key {digest}" in self._known.denials
            digests = {digest, *(() if row is None else row.digests)}
            denials = [
                *self._restrictions(name, sorted(digests), suspended=denied),
                *self._restrictions(name, [digest], ends=ends if listed else None),
            ]
            puts = () if row is None else (self._row(row, fields=checked),)
            change = DirectoryChange(puts=puts, denials=tuple(denials))
            await self._store(name, change, who, "change_key")

        _, said = await self._changing(work, reason="tenant_changed")
        return self._answer(name, digest, None, said)

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
        grace_s = _grace_s(fields)
        secret, made_digest = (None, "") if "sha256" in fields else self._make_key()
        checked, _ = self._checked_key({"name": "x", "sha256": fields.get("sha256", made_digest)})
        digest = checked["sha256"]

        async def work() -> None:
            self._tenant(name, version)
            found, now_s = self._find(name, key), self._wall_clock()
            row = self._row_of(name, found.sha256)
            self._check_new(name, digest, more=0 if row is not None else 1)
            if row is None or found.origin == "file":  # of which a row may be out of date
                row = self._row_from(name, found, row)
            if grace_s and row.former_sha256 and row.former_until_unix_s > now_s:
                raise _conflict(
                    reason="key_rotating",
                    message=f"The key '{found.key.name}' was rotated, and the one before still "
                    "opens. Revoke that one first, or rotate with a grace_s of 0, which ends both.",
                )
            old = str(row.fields["sha256"])
            ended = [row.former_sha256, "" if grace_s else old]
            after = self._row(
                row,
                fields={**row.fields, "sha256": digest},
                former_sha256=old if grace_s else "",
                former_until_unix_s=now_s + grace_s if grace_s else 0.0,
            )
            denials = [
                *self._gone(ended, of=f"tenant {name}"),
                *self._restrictions(name, [digest], suspended=found.key.suspended or None),
            ]
            if grace_s:  # also where the file lists it elsewhere later
                ends = min(now_s + grace_s, found.key.expires_unix_s or inf)
                denials += self._restrictions(name, [old], ends=ends)
            change = DirectoryChange(puts=(after,), denials=tuple(denials))
            await self._store(name, change, who, "rotate_key")

        _, said = await self._changing(work, reason="tenant_changed")
        return self._answer(name, digest, secret, said)

    async def revoke_key(
        self, name: str, key: str, who: str, *, version: int | None = None
    ) -> dict[str, object]:
        """End a key for good, at once. Requests admitted with it run on."""

        async def work() -> None:
            self._tenant(name, version)
            found = self._find(name, key)
            row = self._row_of(name, found.sha256)
            ended = [found.sha256]
            if row is not None and row.former_sha256 == found.sha256:
                kept = self._row(row, former_sha256="", former_until_unix_s=0.0)
                change = DirectoryChange(puts=(kept,))
            elif row is not None:
                ended += [row.uid, row.former_sha256]
                change = DirectoryChange(removes=(row,))
            else:
                change = DirectoryChange()
            denials = self._gone(ended, of=f"tenant {name}")
            change = msgspec.structs.replace(change, denials=denials)
            await self._store(name, change, who, "revoke_key")

        return (await self._changing(work, reason="tenant_changed"))[1]

    def _checked_key(self, fields: Mapping[str, object]) -> tuple[dict[str, Any], bool | None]:
        """(fields as JSON with the bare digest, suspended if that is said). Raises BadRequest."""
        checked = self._read("key", {k: v for k, v in fields.items() if v is not None})
        checked["sha256"] = str(checked["sha256"]).removeprefix("sha256:")
        return checked, checked.pop("suspended", None)

    def _check_lists(self, name: str, checked: Mapping[str, Any]) -> None:
        own = self._tenancy.keyring.entitlements_of(name)
        check_lists(name, "entitlements", checked.get("entitlements"), own)
        bases = {principal.model for principal in own.values() if principal.model}
        opened = bases.union(*map(self._adapters, bases))
        check_lists(name, "models", checked.get("models"), opened)

    def _check_new(self, name: str, digest: str, more: int = 1) -> None:
        """Refuse a digest that is known or was revoked, and too many keys."""
        if more and len(self._known.keys_of(name)) >= MAX_KEYS:
            raise _conflict(
                reason="too_many_keys", message=f"'{name}' has {MAX_KEYS} keys. Revoke some first."
            )
        if self._tenancy.keyring.owners(bytes.fromhex(digest)) or self._known.gone(digest):
            raise _conflict(
                reason="key_exists",
                message="This key is known here, or was revoked: make another.",
            )

    def _check_of_file(self, name: str, found: KeyInForce, fields: Mapping[str, object]) -> None:
        """Refuse to change what the file says of a key."""
        changed = _OF_FILE & fields.keys()
        section = self._tenancy.file.tenants.get(name)
        namesakes = [] if section is None else [k for k in section.keys if k.name == found.key.name]
        if fields.get("suspended") is False and any(key.suspended for key in namesakes):
            raise _conflict(
                reason="key_in_file",
                message=f"The configuration file suspends the key '{found.key.name}'. Resume it "
                "there and reload.",
            )
        if found.origin == "file" and changed:
            raise _conflict(
                reason="key_in_file",
                message=f"The key '{found.key.name}' is in the configuration file. Change it there "
                "and reload; `suspended` and `expires_at` can be changed here.",
            )
        if changed & set(LIMIT_FIELDS) and namesakes:
            raise _conflict(
                reason="key_in_file",
                message=f"The limits of the key '{found.key.name}' are in the configuration file. "
                "Change them there and reload.",
            )

    def _restrictions(
        self,
        name: str,
        digests: list[str],
        *,
        suspended: bool | None = None,
        ends: float | None = None,
    ) -> list[Denial]:
        """Denials of what is said of a key; `ends` in Unix seconds, 0 for never."""
        found = []
        for digest in digests:
            for what, value in (("suspended", suspended), ("ends", ends)):
                if value is not None:
                    found.append(
                        self._denial(what, f"key {digest}", float(value), of=f"tenant {name}")
                    )
        return found

    def _find(self, name: str, key: str) -> KeyInForce:
        """A key by name or fingerprint. Raises NotFound, Conflict."""
        found = [
            each
            for each in self._tenancy.tenant(name).keys
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

    def _uid(self, tenant: str) -> str:
        """Of the tenant that administrators made; "" for one that only the file has."""
        row = self._known.row("tenant", tenant)
        return "" if row is None else row.uid

    def _row_of(self, tenant: str, digest: str) -> Row | None:
        """The administrators' row that has a digest."""
        rows = self._known.keys_of(tenant).values()
        return next((row for row in rows if digest in row.digests), None)

    def _row_from(self, tenant: str, found: KeyInForce, row: Row | None) -> Row:
        """A key of the file as an administrators' from now on, with the rights in force.

        `row` is what the last rotation left.
        """
        key = found.key
        ends = key.expires_unix_s
        fields = {
            "name": key.name,
            "sha256": found.sha256,
            "models": None if key.models is None else sorted(key.models),
            "entitlements": list(key.entitlements) if key.only_listed else None,
            "expires_at": None if not ends else datetime.fromtimestamp(ends, UTC).isoformat(),
            **msgspec.to_builtins(key.stated),
        }
        given = {field: value for field, value in fields.items() if value is not None}
        if row is not None:
            return msgspec.structs.replace(row, fields=given)
        return Row(
            kind="key",
            name=f"{tenant}/{key.name}",
            uid=new_uid(),
            of=self._uid(tenant),
            fields=given,
        )

    def _answer(
        self, name: str, digest: str, secret: str | None, said: Mapping[str, object]
    ) -> dict[str, object]:
        """The tenant's revision and the key's row; "key" where one was made."""
        tenant, now_s = self._tenancy.tenant(name), self._wall_clock()
        shown = next(views.key_row(k, now_s) for k in tenant.keys if k.sha256 == digest)
        found = {**shown, "tenant": name, "revision": tenant.revision, **said}
        return found if secret is None else {**found, "key": secret}


def _grace_s(fields: Mapping[str, object]) -> float:
    """How long the old key opens. Raises BadRequest for anything but `grace_s` and `sha256`."""
    for field in fields:
        if field not in ("grace_s", "sha256"):
            raise invalid(field, f"{field[:64]}: unknown here; give `grace_s` and `sha256` alone.")
    given = fields.get("grace_s", GRACE_S)
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise invalid("grace_s", "grace_s: not a number; give seconds, 0 for not at all.")
    if not 0 <= given <= MAX_GRACE_S:
        raise invalid("grace_s", f"grace_s: give 0 to {MAX_GRACE_S:.0f} seconds.")
    return float(given)


def _conflict(*, reason: str, message: str) -> Conflict:
    return Conflict(message, reason=reason, code=reason)
