"""Admin operations on tenants: each is checked, stored, applied and audited.

An operation is either written to the directory and then applied here, or refused without any
change. `gateway.tenancy.key_admin` adds the operations on keys.
"""

from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from typing import Any, Final

from gateway.errors import BadRequest, Conflict, NotFound
from gateway.records.tenancy import Denial, DirectoryChange, Row
from gateway.tenancy import tenant_views as views
from gateway.tenancy.admin_changes import (
    AdminChanges,
    ReadFields,
    check_revision,
    new_uid,
)
from gateway.tenancy.rights import TenantInForce
from gateway.tenancy.tenancy import Tenancy
from gateway.usage.audit import Audit

MAX_TENANTS: Final = 200_000


class TenantAdmin(AdminChanges):
    """Tenants. All methods raise Refusal."""

    def __init__(
        self,
        tenancy: Tenancy,
        trail: Audit,
        *,
        wall_clock: Callable[[], float],
        read_fields: ReadFields,
        removal: Callable[[str], DirectoryChange],
        adapters: Callable[[str], Collection[str]] = lambda _model: (),
        new_key: Callable[[], str] | None = None,
    ) -> None:
        """`removal`: the change that ends an entitlement. `adapters`: a model's LoRA adapters."""
        super().__init__(
            tenancy, trail, wall_clock=wall_clock, read_fields=read_fields, new_key=new_key
        )
        self._removal = removal
        self._adapters = adapters

    async def page(self, *, after: str | None, limit: int) -> dict[str, object]:
        """Tenants by name, without their keys: {"data", "next"}; `after`: an earlier "next"."""
        names = self._tenancy.names
        start = names.bisect_right(after or "")
        found = list(names[start : start + limit + 1])
        data = [self._shown(name) for name in found[:limit]]
        return {"data": data, "next": found[limit - 1] if len(found) > limit else None}

    def get(self, name: str) -> dict[str, object]:
        """One tenant with its keys by name and fingerprint."""
        now_s = self._wall_clock()
        keys = [views.key_row(found, now_s) for found in self._tenant(name).keys]
        return {**self._shown(name), "keys": keys}

    def search(self, begins: str, page: int, size: int, most_keys: int) -> dict[str, Any]:
        """A page of tenants whose names begin so, each with some of its keys."""
        names = self._tenancy.names
        first = names.bisect_left(begins)
        found = names.bisect_left(begins + "\uffff") - first
        pages = max(1, -(-found // size))
        page = min(page, pages - 1)
        at = first + page * size
        now_s = self._wall_clock()
        rows = [
            {
                **self._shown(name),
                "keys": [
                    {"name": row["name"], "state": row["state"]}
                    for key in self._tenancy.tenant(name).keys[:most_keys]
                    for row in [views.key_row(key, now_s)]
                ],
            }
            for name in names[at : min(at + size, first + found)]
        ]
        return {"rows": rows, "found": found, "total": len(names), "page": page, "pages": pages}

    async def create(self, fields: Mapping[str, object], who: str) -> dict[str, object]:
        """Create a tenant; it has no key yet."""
        checked = self._checked(fields)
        name = str(checked["name"])

        async def work() -> None:
            if self._tenancy.tenant(name).exists:
                raise Conflict(
                    f"There is a tenant '{name}'. Change it with PATCH, or take another name.",
                    reason="tenant_exists",
                    code="tenant_exists",
                    param="name",
                )
            if len(self._tenancy.names) >= MAX_TENANTS:
                raise Conflict(
                    f"There are {MAX_TENANTS} tenants, which is the most.",
                    reason="too_many_tenants",
                    code="too_many_tenants",
                )
            own = {field: value for field, value in checked.items() if field != "suspended"}
            row = self._row(Row(kind="tenant", name=name, uid=new_uid(), fields=own))
            denials = self._suspension(name, {**checked})
            await self._store(name, DirectoryChange(puts=(row,), denials=denials), who, "create")

        _, said = await self._changing(work, reason="tenant_changed")
        return {**self.get(name), **said}

    async def change(
        self, name: str, fields: Mapping[str, object], who: str, *, version: int | None = None
    ) -> dict[str, object]:
        """Change some fields; None removes one. Of a tenant of the file only `suspended`.

        `version`, here and below: refuse unless the tenant is at this revision.
        """
        if fields.get("name", name) != name:
            raise invalid("name", "name: cannot be changed; leave it out, or create a tenant.")

        async def work() -> None:
            self._tenant(name, version)
            row = self._known.row("tenant", name)
            before = {"name": name} if row is None else row.fields
            checked = self._checked({**before, **fields})
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
            change = DirectoryChange(puts=puts, denials=denials)
            await self._store(name, change, who, what)

        _, said = await self._changing(work, reason="tenant_changed")
        return {**self.get(name), **said}

    async def delete(
        self, name: str, who: str, *, version: int | None = None, force: bool = False
    ) -> dict[str, object]:
        """Delete a tenant and its keys; requests run on.

        Refused if it is in the file, and while entitlements name it, whose keys and tokens would
        still open. `force` deletes these, too, unless the file has one of them.
        """

        async def work() -> None:
            self._tenant(name, version)
            if name in self._tenancy.file.tenants:
                raise _in_file(name, "Remove it there and reload, or suspend it.")
            subject = f"tenant {name}"
            own = self._tenancy.entitlements_of(name)
            in_file = [each for each in own if each in self._tenancy.file.entitlements]
            if own and (in_file or not force):
                fix = (
                    f"'{in_file[0]}' is in the configuration file: remove it there and reload, or "
                    "suspend the tenant."
                    if in_file
                    else "Delete these first, or all at once: DELETE with ?force=true, "
                    "`sluice tenant delete --force`."
                )
                raise Conflict(
                    f"{len(own)} entitlements name '{name}' ({', '.join(own[:5])}), and would "
                    f"still open. {fix}",
                    reason="tenant_in_use",
                    code="tenant_in_use",
                )
            rows = [self._known.rows["tenant", name], *self._known.keys_of(name).values()]
            ended = [part for row in rows for part in (row.uid, *row.digests)]
            denials = self._gone(ended, of=subject)
            for each in own:
                removal = self._removal(each)
                rows += removal.removes
                denials += removal.denials
            change = DirectoryChange(removes=tuple(rows), denials=denials)
            await self._store(name, change, who, "delete")

        return (await self._changing(work, reason="tenant_changed"))[1]

    def _tenant(self, name: str, version: int | None = None) -> TenantInForce:
        """A tenant that is listed. Raises NotFound, PreconditionFailed."""
        tenant = self._tenancy.tenant(name)
        if not tenant.exists:
            raise NotFound(
                f"There is no tenant '{name[:64]}'. GET /admin/tenants lists them.",
                reason="tenant_not_found",
                code="tenant_not_found",
            )
        check_revision(name, tenant.revision, version, reason="tenant_changed")
        return tenant

    def _checked(self, fields: Mapping[str, object]) -> dict[str, Any]:
        """The fields as JSON. Raises BadRequest."""
        given = {name: value for name, value in fields.items() if value is not None}
        checked = self._read("tenant", given)
        own = self._tenancy.keyring.entitlements_of(str(checked["name"]))
        check_lists(checked["name"], "entitlements", checked.get("entitlements"), own)
        return checked

    def _suspension(self, name: str, checked: dict[str, Any]) -> tuple[Denial, ...]:
        """Takes `suspended` out of the fields: a denial, or its end; none if it is not said."""
        if "suspended" not in checked:
            return ()
        subject, suspended = f"tenant {name}", float(checked.pop("suspended"))
        return (self._denial("suspended", subject, suspended, of=subject),)

    def _shown(self, name: str) -> dict[str, object]:
        """A tenant for GET and in lists, without its keys."""
        tenant = self._tenancy.tenant(name)
        return {
            **views.tenant_fields(tenant),
            "origin": tenant.origin,
            "revision": tenant.revision,
            "uses": sorted(self._tenancy.keyring.entitlements_of(name)),
            "key_count": len(tenant.keys),
        }

    async def _store(self, name: str, change: DirectoryChange, who: str, what: str) -> None:
        before = self._tenancy.tenant(name)
        await self._tenancy.sync.write(change)
        after = self._tenancy.tenant(name)
        self._trail.note(
            who,
            what,
            "",
            views.audited(before) if before.exists else {},
            views.audited(after) if after.exists else {},
            tenant=name,
        )


def check_lists(
    tenant: str, field: str, given: Collection[str] | None, known: Collection[str]
) -> None:
    """Refuse entitlements or models that the tenant does not have. Raises BadRequest."""
    for name in given or ():
        if name not in known:
            near = get_close_matches(name, known, 1)
            listed = ", ".join(f"'{each}'" for each in sorted(known)[:20]) or "none"
            has = f"Did you mean '{near[0]}'?" if near else f"It has: {listed}."
            raise invalid(field, f"{field}: the tenant '{tenant}' has no '{name[:64]}' here. {has}")


def invalid(field: str | None, message: str) -> BadRequest:
    """The 400 answer for a bad field."""
    return BadRequest(message, reason="invalid_tenant", code="invalid_tenant", param=field)


def _in_file(name: str, fix: str) -> Conflict:
    return Conflict(
        f"'{name}' is in the configuration file. {fix}",
        reason="tenant_in_file",
        code="tenant_in_file",
    )
