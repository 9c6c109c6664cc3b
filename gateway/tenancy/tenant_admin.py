"""Admin operations on tenants and their keys, and both as administrators see them.

A key is named by its name or by its fingerprint; nobody sees more of it.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import UTC, datetime
from difflib import get_close_matches
from math import inf
from typing import Any, Final

import msgspec

from gateway.admission.entitlement_terms import instant
from gateway.errors import BadRequest, Conflict, NotFound
from gateway.records.tenancy import Denial, DirectoryChange, Row, fingerprint
from gateway.tenancy.changes import AdminChanges, Audit, Planned, new_uid
from gateway.tenancy.rights import LIMIT_FIELDS, KeyInForce, TenantInForce
from gateway.tenancy.tenancy import Tenancy

MAX_TENANTS: Final = 200_000
MAX_KEYS: Final = 1_000
"""Keys that administrators may give one tenant."""
GRACE_S: Final = 86_400.0
"""How long the old key opens after a rotation that says nothing."""
MAX_GRACE_S: Final = 90 * 86_400.0
_OF_FILE: Final = frozenset({"models", "entitlements", "queue_status", *LIMIT_FIELDS})


class TenantAdmin(AdminChanges[TenantInForce]):
    """Tenants and their keys. All methods raise Refusal."""

    kind = "tenant"

    def __init__(
        self,
        tenancy: Tenancy,
        trail: Audit,
        *,
        removal: Callable[[str], DirectoryChange],
        adapters: Callable[[str], Collection[str]] = lambda _model: (),
        **common: Any,
    ) -> None:
        """`removal`: the change that ends an entitlement. `adapters`: a model's LoRA adapters."""
        super().__init__(tenancy, trail, **common)
        self._removal = removal
        self._adapters = adapters

    # -- what is there

    async def page(self, *, after: str | None, limit: int) -> dict[str, object]:
        """Tenants by name, without their keys: {"data", "next"}; `after`: an earlier "next"."""
        names = self._tenancy.names
        start = names.bisect_right(after or "")
        shown = list(names[start : start + limit + 1])
        data = [self._shown(name) for name in shown[:limit]]
        return {"data": data, "next": shown[limit - 1] if len(shown) > limit else None}

    def get(self, name: str) -> dict[str, object]:
        """One tenant with its keys by name and fingerprint."""
        now_s = self._wall_clock()
        keys = [_key_row(key, now_s) for key in self._current(name).keys]
        return {**self._shown(name), "keys": keys}

    def search(self, begins: str, page: int, size: int, most_keys: int) -> dict[str, Any]:
        """A page of tenants whose names begin so, each with some of its keys."""
        names = self._tenancy.names
        first = names.bisect_left(begins)
        count = names.bisect_left(begins + "\uffff") - first
        pages = max(1, -(-count // size))
        page = min(page, pages - 1)
        at, now_s = first + page * size, self._wall_clock()
        rows = []
        for name in names[at : min(at + size, first + count)]:
            keys = [_key_row(key, now_s) for key in self._tenancy.tenant(name).keys[:most_keys]]
            states = [{"name": row["name"], "state": row["state"]} for row in keys]
            rows.append({**self._shown(name), "keys": states})
        return {"rows": rows, "found": count, "total": len(names), "page": page, "pages": pages}

    def _shown(self, name: str) -> dict[str, object]:
        """A tenant for GET and in lists, without its keys."""
        tenant = self._tenancy.tenant(name)
        return {
            **_tenant_fields(tenant),
            "origin": tenant.origin,
            "revision": tenant.revision,
            "uses": sorted(self._tenancy.keyring.entitlements_of(name)),
            "key_count": len(tenant.keys),
        }

    def _in_force(self, name: str) -> TenantInForce | None:
        tenant = self._tenancy.tenant(name)
        return tenant if tenant.exists else None

    def _fields(self, tenant: TenantInForce) -> dict[str, object]:
        fields = _tenant_fields(tenant)
        for key in tenant.keys:
            row = _key_row(key, 0.0)
            former = " before its rotation" if key.former else ""
            fields[f"key {row.pop('name')}{former}"] = row
        return fields

    # -- tenants

    async def create(self, fields: Mapping[str, object], who: str) -> dict[str, object]:
        """Create a tenant; it has no key yet."""
        checked = self._checked_tenant(fields)
        name = str(checked["name"])

        async def work() -> Planned:
            if self._tenancy.tenant(name).exists:
                raise self._taken(name)
            if len(self._tenancy.names) >= MAX_TENANTS:
                raise Conflict(
                    f"There are {MAX_TENANTS} tenants, which is the most.",
                    reason="too_many_tenants",
                )
            own = {field: value for field, value in checked.items() if field != "suspended"}
            row = self._row(Row(kind="tenant", name=name, uid=new_uid(), fields=own))
            denials = self._suspension(name, {**checked})
            return DirectoryChange(puts=(row,), denials=denials), "create"

        warning = await self._change(name, who, work)
        return {**self.get(name), **warning}

    async def change(
        self, name: str, fields: Mapping[str, object], who: str, *, version: int | None = None
    ) -> dict[str, object]:
        """Change some fields; None removes one. Of a tenant of the file only `suspended`.

        `version`, here and below: refuse unless the tenant is at this revision.
        """
        if fields.get("name", name) != name:
            raise _invalid("name", "name: cannot be changed; leave it out, or create a tenant.")

        async def work() -> Planned:
            self._current(name, version)
            row = self._known.row("tenant", name)
            before = {"name": name} if row is None else row.fields
            checked = self._checked_tenant({**before, **fields})
            denials = self._suspension(name, checked)
            own = fields.keys() - {"suspended", "name"}
            section = self._tenancy.file.tenants.get(name)
            if own and section is not None:
                raise _in_file(name, "Change it there and reload, or change `suspended` alone.")
            if section is not None and section.suspended and denials and not denials[0].value:
                raise _in_file(name, "It is suspended there: resume it there and reload.")
            puts = () if row is None or not own else (self._row(row, fields=checked),)
            what = "change"
            if denials and not own:
                what = "suspend" if denials[0].value else "resume"
            return DirectoryChange(puts=puts, denials=denials), what

        warning = await self._change(name, who, work)
        return {**self.get(name), **warning}

    async def delete(
        self, name: str, who: str, *, version: int | None = None, force: bool = False
    ) -> dict[str, object]:
        """Delete a tenant and its keys; requests run on.

        Refused if it is in the file, and while entitlements name it, whose keys and tokens would
        still open. `force` deletes these, too, unless the file or a cluster states one.
        """

        async def work() -> Planned:
            self._current(name, version)
            if name in self._tenancy.file.tenants:
                raise _in_file(name, "Remove it there and reload, or suspend it.")
            own = self._tenancy.entitlements_of(name)
            file, cluster = self._tenancy.file.entitlements, self._known.cluster.entitlements
            stated = [
                f"'{e}' is in the configuration file: remove it there and reload"
                if e in file
                else f"'{e}' is stated by {cluster[e].source}: delete that object"
                for e in own
                if e in file or e in cluster
            ]
            if own and (stated or not force):
                fix = (
                    f"{stated[0]}, or suspend the tenant."
                    if stated
                    else "Delete these first, or all at once: DELETE with ?force=true, "
                    "`sluice tenant delete --force`."
                )
                raise Conflict(
                    f"{len(own)} entitlements name '{name}' ({', '.join(own[:5])}), and would "
                    f"still open. {fix}",
                    reason="tenant_in_use",
                )
            rows = (self._known.rows["tenant", name], *self._known.keys_of(name).values())
            denials = self._gone(name, (), rows)
            for entitlement in own:
                removal = self._removal(entitlement)
                rows += removal.removes
                denials += removal.denials
            return DirectoryChange(removes=rows, denials=tuple(denials)), "delete"

        return await self._change(name, who, work)

    def _checked_tenant(self, fields: Mapping[str, object]) -> dict[str, Any]:
        """The fields as JSON. Raises BadRequest."""
        checked = self._checked("tenant", fields)
        own = self._tenancy.keyring.entitlements_of(str(checked["name"]))
        _check_list(checked["name"], "entitlements", checked, own)
        return checked

    def _suspension(self, name: str, checked: dict[str, Any]) -> tuple[Denial, ...]:
        """Takes `suspended` out of the fields: a denial, or its end; none if it is not said."""
        if "suspended" not in checked:
            return ()
        return (self._denial("suspended", name, float(checked.pop("suspended"))),)

    # -- keys

    async def add_key(
        self, name: str, fields: Mapping[str, object], who: str, *, version: int | None = None
    ) -> dict[str, object]:
        """Add a key. The returned "key" is shown only this once; none with a `sha256` given."""
        secret, made_digest = (None, "") if "sha256" in fields else self._make_key()
        checked, suspended = self._checked_key({"sha256": made_digest, **fields})
        digest, key_name = checked["sha256"], checked["name"]

        async def work() -> Planned:
            tenant = self._current(name, version)
            self._check_lists(name, checked)
            if any(k.key.name == key_name for k in tenant.keys):
                raise Conflict(f"'{name}' has a key '{key_name}'. Rotate it.", reason="key_exists")
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
            denials = (
                *self._gone(name, (), () if stale is None else (stale,)),
                *self._restrictions(name, [digest], suspended=suspended),
            )
            return DirectoryChange(puts=(self._row(row),), denials=denials), "add_key"

        warning = await self._change(name, who, work)
        return self._answer(name, digest, secret, warning)

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
            raise _invalid("sha256", "sha256: cannot be changed; rotate the key.")
        if fields.get("name", key) != key:
            raise _invalid("name", "name: cannot be changed; add another key.")
        digest = ""

        async def work() -> Planned:
            nonlocal digest
            # A row also of one that the file lists since.
            current, row = self._key(name, key, version)
            digest = current.sha256
            before = {"name": current.key.name, "sha256": digest} if row is None else row.fields
            checked, suspended = self._checked_key({**before, **fields})
            section, changed = self._tenancy.file.tenants.get(name), fields.keys()
            namesakes = [k for k in (section.keys if section else ()) if k.name == current.key.name]
            where = f"key '{current.key.name}'"
            if fields.get("suspended") is False and any(k.suspended for k in namesakes):
                problem = (
                    f"The configuration file suspends the {where}. Resume it there and reload."
                )
            elif current.origin == "file" and changed & _OF_FILE:
                problem = (
                    f"The {where} is in the configuration file. Change it there and reload; "
                    "`suspended` and `expires_at` can be changed here."
                )
            elif namesakes and changed & set(LIMIT_FIELDS):
                problem = (
                    f"The limits of the {where} are in the configuration file. Change them there "
                    "and reload."
                )
            else:
                problem = ""
            if problem:
                raise Conflict(problem, reason="key_in_file")
            self._check_lists(name, checked)
            ends = instant(checked.get("expires_at")) if "expires_at" in fields else None
            # What an administrator made ends by its row; what the file lists, by a denial.
            listed = current.origin == "file" or f"ends key {digest}" in self._known.denials
            digests = {digest, *(() if row is None else row.digests)}
            denials = (
                *self._restrictions(name, sorted(digests), suspended=suspended),
                *self._restrictions(name, [digest], ends=ends if listed else None),
            )
            puts = () if row is None else (self._row(row, fields=checked),)
            return DirectoryChange(puts=puts, denials=denials), "change_key"

        warning = await self._change(name, who, work)
        return self._answer(name, digest, None, warning)

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
        for field in fields:
            if field not in ("grace_s", "sha256"):
                message = f"{field[:64]}: unknown here; give `grace_s` and `sha256` alone."
                raise _invalid(field, message)
        grace_s: Any = fields.get("grace_s", GRACE_S)
        if isinstance(grace_s, bool) or not isinstance(grace_s, int | float):
            raise _invalid("grace_s", "grace_s: not a number; give seconds, 0 for not at all.")
        if not 0 <= grace_s <= MAX_GRACE_S:
            raise _invalid("grace_s", f"grace_s: give 0 to {MAX_GRACE_S:.0f} seconds.")
        secret, made_digest = (None, "") if "sha256" in fields else self._make_key()
        checked, _ = self._checked_key({"name": "x", "sha256": fields.get("sha256", made_digest)})
        digest = checked["sha256"]

        async def work() -> Planned:
            (current, row), now_s = self._key(name, key, version), self._wall_clock()
            self._check_new(name, digest, more=0 if row is not None else 1)
            if row is None or current.origin == "file":
                # An administrators' key from now on, with the rights in force: the row that the
                # last rotation left may be out of date.
                shown = {**_key_row(current, 0.0), "sha256": current.sha256}
                shared = ("name", "sha256", "models", "entitlements", "queue_status", "expires_at")
                stated = {field: shown[field] for field in shared if shown[field] is not None}
                stated |= msgspec.to_builtins(current.key.stated)
                full, of = f"{name}/{current.key.name}", self._uid(name)
                made = Row(kind="key", name=full, uid=new_uid(), of=of)
                row = msgspec.structs.replace(row or made, fields=stated)
            if grace_s and row.former_sha256 and row.former_until_unix_s > now_s:
                raise Conflict(
                    f"The key '{current.key.name}' was rotated, and the one before still opens. "
                    "Revoke that one first, or rotate with a grace_s of 0, which ends both.",
                    reason="key_rotating",
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
                *self._gone(name, ended),
                *self._restrictions(name, [digest], suspended=current.key.suspended or None),
            ]
            if grace_s:  # also where the file lists it elsewhere later
                ends = min(now_s + grace_s, current.key.expires_unix_s or inf)
                denials += self._restrictions(name, [old], ends=ends)
            return DirectoryChange(puts=(after,), denials=tuple(denials)), "rotate_key"

        warning = await self._change(name, who, work)
        return self._answer(name, digest, secret, warning)

    async def revoke_key(
        self, name: str, key: str, who: str, *, version: int | None = None
    ) -> dict[str, object]:
        """End a key for good, at once. Requests admitted with it run on."""

        async def work() -> Planned:
            current, row = self._key(name, key, version)
            digest = current.sha256
            ended, change = [digest], DirectoryChange()
            if row is not None and row.former_sha256 == digest:
                rest = self._row(row, former_sha256="", former_until_unix_s=0.0)
                change = DirectoryChange(puts=(rest,))
            elif row is not None:
                ended += [row.uid, row.former_sha256]
                change = DirectoryChange(removes=(row,))
            denials = tuple(self._gone(name, ended))
            return msgspec.structs.replace(change, denials=denials), "revoke_key"

        return await self._change(name, who, work)

    def _checked_key(self, fields: Mapping[str, object]) -> tuple[dict[str, Any], bool | None]:
        """(fields as JSON with the bare digest, suspended if that is said). Raises BadRequest."""
        checked = self._checked("key", fields)
        checked["sha256"] = str(checked["sha256"]).removeprefix("sha256:")
        return checked, checked.pop("suspended", None)

    def _check_lists(self, name: str, checked: Mapping[str, Any]) -> None:
        own = self._tenancy.keyring.entitlements_of(name)
        _check_list(name, "entitlements", checked, own)
        bases = {principal.model for principal in own.values() if principal.model}
        _check_list(name, "models", checked, bases.union(*map(self._adapters, bases)))

    def _check_new(self, name: str, digest: str, more: int = 1) -> None:
        """Refuse a digest that is known or was revoked, and too many keys."""
        if more and len(self._known.keys_of(name)) >= MAX_KEYS:
            raise Conflict(
                f"'{name}' has {MAX_KEYS} keys. Revoke some first.", reason="too_many_keys"
            )
        if self._tenancy.keyring.owners(bytes.fromhex(digest)) or self._known.gone(digest):
            raise Conflict(
                "This key is known here, or was revoked: make another.", reason="key_exists"
            )

    def _restrictions(
        self,
        name: str,
        digests: Iterable[str],
        *,
        suspended: bool | None = None,
        ends: float | None = None,
    ) -> list[Denial]:
        """Denials of what is said of a key; `ends` in Unix seconds, 0 for never."""
        return [
            self._denial(what, name, float(value), key=digest)
            for digest in digests
            for what, value in (("suspended", suspended), ("ends", ends))
            if value is not None
        ]

    def _key(self, name: str, key: str, version: int | None) -> tuple[KeyInForce, Row | None]:
        """A key by name or fingerprint, and administrators' row of it. Raises Refusal."""
        keys = [
            k
            for k in self._current(name, version).keys
            if fingerprint(k.sha256) == key or (k.key.name == key and not k.former)
        ]
        if not keys:
            raise NotFound(
                f"'{name}' has no key '{key[:64]}'. GET /admin/tenants/{name} lists its keys.",
                reason="key_not_found",
            )
        if len(keys) > 1:
            raise Conflict(f"'{key}' names two keys. Give the fingerprint.", reason="key_ambiguous")
        rows = self._known.keys_of(name).values()
        return keys[0], next((row for row in rows if keys[0].sha256 in row.digests), None)

    def _uid(self, tenant: str) -> str:
        """Of the tenant that administrators made; "" for one that only the file has."""
        row = self._known.row("tenant", tenant)
        return "" if row is None else row.uid

    def _answer(
        self, name: str, digest: str, secret: str | None, warning: Mapping[str, object]
    ) -> dict[str, object]:
        """The tenant's revision and the key's row; "key" where one was made."""
        tenant, now_s = self._tenancy.tenant(name), self._wall_clock()
        shown = next(_key_row(k, now_s) for k in tenant.keys if k.sha256 == digest)
        answer = {**shown, "tenant": name, "revision": tenant.revision, **warning}
        return answer if secret is None else {**answer, "key": secret}


def _tenant_fields(tenant: TenantInForce) -> dict[str, object]:
    """A tenant's own fields."""
    given = tenant.entitlements
    return {
        "name": tenant.name,
        "display_name": tenant.display_name,
        "labels": dict(tenant.labels),
        "entitlements": None if given is None else list(given),
        "suspended": tenant.suspended,
    }


def _key_row(in_force: KeyInForce, now_s: float) -> dict[str, object]:
    """A key for people, with its limits as in the file, every field of a budget included."""
    key, ends = in_force.key, in_force.key.expires_unix_s
    expired = ends is not None and ends <= now_s
    budgets = [msgspec.structs.asdict(budget) for budget in key.stated.budgets]
    return {
        "name": key.name,
        "fingerprint": fingerprint(in_force.sha256),
        "models": None if key.models is None else sorted(key.models),
        "entitlements": list(key.entitlements) if key.only_listed else None,
        "expires_at": None if ends is None else datetime.fromtimestamp(ends, UTC).isoformat(),
        "suspended": key.suspended,
        "queue_status": key.queue_status,
        "requests_per_minute": key.stated.requests_per_minute,
        "max_concurrency": key.stated.max_concurrency,
        "budgets": [{k: v for k, v in budget.items() if v is not None} for budget in budgets],
        "state": "expired" if expired else "suspended" if key.suspended else "live",
        "origin": in_force.origin,
        "former": in_force.former,
    }


def _check_list(
    tenant: str, field: str, checked: Mapping[str, Any], names: Collection[str]
) -> None:
    """Refuse entitlements or models that the tenant does not have. Raises BadRequest."""
    for name in checked.get(field) or ():
        if name not in names:
            near = get_close_matches(name, names, 1)
            listed = ", ".join(f"'{n}'" for n in sorted(names)[:20]) or "none"
            has = f"Did you mean '{near[0]}'?" if near else f"It has: {listed}."
            raise _invalid(
                field, f"{field}: the tenant '{tenant}' has no '{name[:64]}' here. {has}"
            )


def _invalid(field: str | None, message: str) -> BadRequest:
    """The 400 answer for a bad field."""
    return BadRequest(message, reason="invalid_tenant", param=field)


def _in_file(name: str, fix: str) -> Conflict:
    return Conflict(f"'{name}' is in the configuration file. {fix}", reason="tenant_in_file")
