"""Admin operations on tenants and their keys: each is checked, stored, applied and audited.

An operation is either written to the directory and then applied here, or refused without any
change. Keys are made here, shown once and stored as SHA-256. A key is named by its name or by its
fingerprint, the digest's first 8 hex digits.
"""

import hashlib
import secrets
from collections.abc import Awaitable, Callable, Collection, Mapping
from itertools import islice
from typing import Any, Final, TypeVar

import msgspec
from msgspec import UNSET

from gateway.adapters.entitlements.changing import changing, check_version
from gateway.adapters.entitlements.registry import fresh_key
from gateway.adapters.records.audit import Audit
from gateway.adapters.tenants import views
from gateway.adapters.tenants.entries import TenantEntry, changed
from gateway.adapters.tenants.fields import TenantFields, check_lists, invalid, read
from gateway.adapters.tenants.sync import TenantSync
from gateway.errors import Conflict, NotFound
from gateway.records.limit import KeyLimits

MAX_TENANTS: Final = 200_000
_T = TypeVar("_T")


class TenantRegistry:
    """Tenants; `gateway.adapters.tenants.keys` adds the operations on their keys."""

    def __init__(
        self,
        sync: TenantSync,
        trail: Audit,
        *,
        wall_clock: Callable[[], float],
        read_limits: Callable[[Mapping[str, object]], KeyLimits],
        new_key: Callable[[], str] = fresh_key,
        adapters: Callable[[str], Collection[str]] = lambda _model: (),
    ) -> None:
        """`trail` is the audit, `wall_clock` in Unix seconds.

        `read_limits` checks limits of a key as the file's are, and raises BadRequest.
        `adapters`: the LoRA adapters of a model, which the keys for it may list.
        """
        self._sync = sync
        self._trail = trail
        self._wall_clock = wall_clock
        self._read_limits = read_limits
        self._new_key = new_key
        self._adapters = adapters

    @property
    def up(self) -> bool:
        """Whether the directory answers."""
        return self._sync.up

    async def page(self, *, after: str | None, limit: int) -> dict[str, object]:
        """Tenants by name, without their keys: {"data", "next"}; `after`: an earlier "next"."""
        names = self._sync.after(after or "", limit + 1)
        data = [views.shown(self._sync, name) for name in names[:limit]]
        return {"data": data, "next": names[limit - 1] if len(names) > limit else None}

    def get(self, name: str) -> dict[str, object]:
        """One tenant with its keys by name and fingerprint."""
        self._check_exists(name)
        now_s = self._wall_clock()
        keys = [views.key_row(found, now_s) for found in views.shown_keys(self._sync, name)]
        return {**views.shown(self._sync, name), "keys": keys}

    def search(self, begins: str, page: int, size: int, most_keys: int) -> dict[str, Any]:
        """A page of tenants whose names begin so, each with some of its keys."""
        first, found = self._sync.beginning(begins)
        pages = max(1, -(-found // size))
        page = min(page, pages - 1)
        at = first + page * size
        names = self._sync.slice(at, min(at + size, first + found))
        now_s = self._wall_clock()
        rows = [
            {
                **views.shown(self._sync, name),
                "keys": [
                    {"name": row["name"], "state": row["state"]}
                    for key in islice(views.shown_keys(self._sync, name), most_keys)
                    for row in [views.key_row(key, now_s)]
                ],
            }
            for name in names
        ]
        total = len(self._sync)
        return {"rows": rows, "found": found, "total": total, "page": page, "pages": pages}

    async def create(self, fields: Mapping[str, object], who: str) -> dict[str, object]:
        """Create a tenant; it has no key yet."""
        asked = read(fields, TenantFields)
        if asked.name is UNSET:
            raise invalid("name", "name: missing; give the tenant a name.")
        name = str(asked.name)
        self._check_lists(name, asked)

        async def work() -> None:
            if self._sync.exists(name):
                raise Conflict(
                    f"There is a tenant '{name}'. Change it with PATCH, or take another name.",
                    reason="tenant_exists",
                    code="tenant_exists",
                    param="name",
                )
            if len(self._sync) >= MAX_TENANTS:
                raise Conflict(
                    f"There are {MAX_TENANTS} tenants, which is the most.",
                    reason="too_many_tenants",
                    code="too_many_tenants",
                )
            # Of a tenant that left the file, what administrators added comes back with it.
            before = self._sync.entries.get(name) or new_entry(name, made=True)
            now_s = self._wall_clock()
            after = changed(before, now_s, made=True, **_own(asked), **self._stood(before, asked))
            await self._store(before, after, who, "create")

        await self._changing(work)
        return self.get(name)

    async def change(
        self, name: str, fields: Mapping[str, object], who: str, *, version: int | None = None
    ) -> dict[str, object]:
        """Change some fields; None removes one. Of a tenant of the file only `suspended`.

        `version`, here and below: refuse unless the tenant is at this version.
        """
        asked = read(fields, TenantFields)
        if asked.name not in (UNSET, name):
            raise invalid("name", "name: cannot be changed; leave it out, or create a tenant.")
        self._check_lists(name, asked)

        async def work() -> None:
            before = self._entry(name, version)
            own = _own(asked)
            if own and name in self._sync.file.tenants:
                raise _in_file(name, "Change it there and reload, or change `suspended` alone.")
            after = changed(before, self._wall_clock(), **own, **self._stood(before, asked))
            what = "change"
            if not own and after.suspended != before.suspended:
                what = "suspend" if after.suspended else "resume"
            await self._store(before, after, who, what)

        await self._changing(work)
        return self.get(name)

    async def delete(self, name: str, who: str, *, version: int | None = None) -> None:
        """Delete a tenant and its keys; requests run on.

        Refused if it is in the file, or suspended and named by entitlements.
        """

        async def work() -> None:
            before = self._entry(name, version)
            if name in self._sync.file.tenants:
                raise _in_file(name, "Remove it there and reload, or suspend it.")
            if before.suspended and (names := self._sync.keyring.entitlements_of(name)):
                raise Conflict(
                    f"'{name}' is suspended, and would not be any more: {len(names)} entitlements "
                    f"name it ('{min(names)}'). Delete these first, or resume the tenant.",
                    reason="tenant_in_use",
                    code="tenant_in_use",
                )
            await self._sync.delete(before)
            self._note(who, "delete", name, views.audited(before, self._sync), {})

        await self._changing(work)

    async def _changing(self, work: Callable[[], Awaitable[_T]]) -> _T:
        return await changing(self._sync, work, of="tenants", reason="tenant_changed")

    def _check_exists(self, name: str) -> None:
        if not self._sync.exists(name):
            raise NotFound(
                f"There is no tenant '{name[:64]}'. GET /admin/tenants lists them.",
                reason="tenant_not_found",
                code="tenant_not_found",
            )

    def _check_lists(self, name: str, asked: TenantFields) -> None:
        check_lists(name, asked.entitlements, None, self._sync.keyring.entitlements_of(name))

    def _entry(self, name: str, version: int | None) -> TenantEntry:
        """What is stored of a tenant, or a first entry of one of the file's."""
        self._check_exists(name)
        entry = self._sync.entries.get(name) or new_entry(name, made=False)
        check_version(entry, version, reason="tenant_changed")
        return entry

    def _stood(self, before: TenantEntry, asked: TenantFields) -> dict[str, object]:
        if asked.suspended is UNSET:
            return {}
        standing = max(before.standing + 1, int(self._wall_clock() * 1000))
        return {"suspended": asked.suspended, "standing": standing}

    async def _store(self, before: TenantEntry, after: TenantEntry, who: str, what: str) -> None:
        old = {} if what == "create" else views.audited(before, self._sync)
        await self._sync.put(after)
        self._note(who, what, after.name, old, views.audited(after, self._sync))

    def _note(
        self,
        who: str,
        what: str,
        name: str,
        before: Mapping[str, object],
        after: Mapping[str, object],
    ) -> None:
        self._trail.note(who, what, "", before, after, tenant=name)

    def _make_key(self) -> tuple[str, str]:
        key = self._new_key()
        return key, hashlib.sha256(key.encode()).hexdigest()


def new_entry(name: str, *, made: bool) -> TenantEntry:
    """A tenant that the directory does not hold yet."""
    return TenantEntry(tenant=name, made=made, id=secrets.token_hex(8))


def _own(asked: TenantFields) -> dict[str, object]:
    """The fields that a tenant of the file has from there."""
    found: dict[str, object] = {}
    if asked.display_name is not UNSET:
        found["display_name"] = asked.display_name
    if asked.labels is not UNSET:
        found["labels"] = asked.labels or {}
    if asked.entitlements is not UNSET:
        given = asked.entitlements
        found["entitlements"] = None if given is None else tuple(msgspec.convert(given, list[str]))
    return found


def _in_file(name: str, fix: str) -> Conflict:
    return Conflict(
        f"'{name}' is in the configuration file. {fix}",
        reason="tenant_in_file",
        code="tenant_in_file",
    )
