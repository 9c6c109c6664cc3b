"""Admin operations on entitlements: each is checked, stored, applied and audited.

An operation is either written to the directory and then applied here, or refused without any
change. If another gateway's change came first, it is made again on the new state. Other gateways
read it with their next poll. Keys are generated here, shown once and stored as SHA-256; admins
refer to them by fingerprint, the digest's first 8 hex digits.
"""

from collections.abc import Awaitable, Callable, Container, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from gateway.admission.entitlement_terms import (
    BadTerms,
    ModelShape,
    check_fit,
    fields_from,
    instant,
    terms_from,
)
from gateway.errors import BadRequest, Conflict, NotFound
from gateway.ports import PoolView, TokenPools
from gateway.records.entitlement import Entitlement
from gateway.records.tenancy import Denial, DirectoryChange, Row, fingerprint
from gateway.tenancy import entitlement_views as views
from gateway.tenancy.admin_changes import (
    AdminChanges,
    ReadFields,
    check_revision,
    new_uid,
)
from gateway.tenancy.rights import EntitlementInForce, entitlement_fields
from gateway.tenancy.tenancy import Tenancy
from gateway.usage.audit import Audit

LIVE_KEYS: Final = 2


class EntitlementAdmin(AdminChanges):
    """The admin operations. They raise Refusal, like any request."""

    def __init__(
        self,
        tenancy: Tenancy,
        trail: Audit,
        store: TokenPools,
        shapes: Mapping[str, ModelShape],
        *,
        managed: Container[str],
        wall_clock: Callable[[], float],
        read_fields: ReadFields,
        pools: Callable[[str], Awaitable[list[PoolView]]] | None = None,
        new_key: Callable[[], str] | None = None,
    ) -> None:
        """`shapes` of models by name, including the `managed` ones.

        `pools` gives a model's pools instead of the store (the upkeep adds desired replicas).
        """
        super().__init__(
            tenancy, trail, wall_clock=wall_clock, read_fields=read_fields, new_key=new_key
        )
        self._reader = views.EntitlementReader(
            tenancy.index, store, shapes, managed, pools or store.pools
        )
        self._shapes = shapes
        self._managed = managed

    def terms(self, model: str) -> Iterator[Entitlement]:
        """A model's entitlements, oldest first; safe to iterate during changes."""
        return self._tenancy.index.terms(model)

    def find(self, name: str) -> Entitlement | None:
        """An entitlement's terms; None if there is none of this name."""
        entry = self._tenancy.index.entries.get(name)
        return None if entry is None else entry.terms

    def audit(self, count: int) -> list[dict[str, object]]:
        """The newest changes that this process made, newest first."""
        return self._trail.latest(count)

    async def pools(self, model: str) -> list[PoolView]:
        """Counters of a model's pools; empty if the model is not managed or the store is away."""
        return await self._reader.pools(model)

    async def page(
        self, *, model: str | None, tenant: str | None, after: str | None, limit: int
    ) -> dict[str, object]:
        """A page of entitlements, oldest first: {"data", "next"}; `after`: an earlier "next"."""
        return await self._reader.page(model, tenant, after, limit)

    async def get(self, name: str) -> dict[str, object]:
        """One entitlement: terms, counters, fingerprints of its keys."""
        return await self._reader.get(name)

    async def create(self, fields: Mapping[str, object], who: str) -> dict[str, object]:
        """Create an entitlement. The returned "key" is shown only this once."""
        key, digest = self._make_key()

        async def work() -> str:
            name = fields.get("name")
            taken = (self._tenancy.index.entries, self._tenancy.foreign)
            if isinstance(name, str) and any(name in names for names in taken):
                raise _taken(name)
            checked = self._checked(fields)
            name = checked["name"]
            self._check_fit(self._terms(checked))
            uid = new_uid()
            made = Row(kind="entitlement", name=name, uid=uid, fields=checked)
            change = DirectoryChange(
                puts=(
                    self._row(made, created=int(self._wall_clock() * 1000)),
                    self._key_row(name, uid, digest),
                )
            )
            await self._store(name, change, who, "create")
            return str(name)

        name, said = await self._changing(work, reason="entitlement_changed")
        return {**await self.get(name), "key": key, **said}

    async def change(
        self,
        name: str,
        fields: Mapping[str, object],
        who: str,
        *,
        what: str = "change",
        version: int | None = None,
    ) -> dict[str, object]:
        """Change some fields; None removes a field. Name and model cannot change.

        `version`, here and below: refuse unless the entitlement is at this revision.
        """

        async def work() -> None:
            entry = self._entry(name, version)
            before, origin = self._stated(name)
            for field in ("name", "model"):
                if fields.get(field, before[field]) != before[field]:
                    fix = "leave it out, or create another entitlement"
                    raise refused(BadTerms(field, "cannot be changed", fix))
            checked = self._checked({**before, **fields})
            terms, now_s = self._terms(checked), self._wall_clock()
            reserved = views.reserved(terms, now_s)
            if reserved and reserved != views.reserved(entry.terms, now_s):
                self._check_fit(terms)
            row = self._known.row("entitlement", name)
            if row is None:
                row = Row(kind="entitlement", name=name, uid=new_uid())
            of = self._tenancy.file.entitlements[name].section if origin == "file" else ""
            subject = f"entitlement {name}"
            denials: tuple[Denial, ...] = ()
            if "expires_at" in fields:  # also where its section changes, or leaves and returns
                ends = instant(checked.get("expires_at"))
                denials = (self._denial("ends", subject, ends, of=subject),)
            change = DirectoryChange(puts=(self._row(row, fields=checked, of=of),), denials=denials)
            await self._store(name, change, who, what)

        _, said = await self._changing(work, reason="entitlement_changed")
        return {**await self.get(name), **said}

    async def suspend(
        self, name: str, who: str, *, undo: bool = False, version: int | None = None
    ) -> dict[str, object]:
        """Refuse new requests, or with `undo` allow them again. Running requests continue."""

        async def work() -> None:
            self._entry(name, version)
            subject = f"entitlement {name}"
            denial = self._denial("suspended", subject, float(not undo), of=subject)
            change = DirectoryChange(denials=(denial,))
            await self._store(name, change, who, "resume" if undo else "suspend")

        _, said = await self._changing(work, reason="entitlement_changed")
        return {**await self.get(name), **said}

    async def expire(
        self, name: str, at: str | None, who: str, *, version: int | None = None
    ) -> dict[str, object]:
        """Expire the entitlement at a time (ISO 8601), or now."""
        if at is None:
            at = datetime.fromtimestamp(self._wall_clock(), UTC).isoformat()
        return await self.change(name, {"expires_at": at}, who, what="expire", version=version)

    async def delete(self, name: str, who: str, *, version: int | None = None) -> dict[str, object]:
        """Delete it. Refused while it has requests in flight, and if it is in the file."""

        async def work() -> None:
            entry = self._entry(name, version)
            if entry.origin == "file":
                raise Conflict(
                    f"'{name}' is in the configuration file and would come back with it. Remove "
                    "it there, or suspend it.",
                    reason="entitlement_in_file",
                    code="entitlement_in_file",
                )
            inflight = await self._reader.inflight(entry.terms)
            if inflight:
                raise Conflict(
                    f"'{name}' has {inflight} sequences in flight. Suspend it, and "
                    "delete it when they have ended.",
                    reason="entitlement_in_use",
                    code="entitlement_in_use",
                )
            await self._store(name, self.removal(name), who, "delete")

        return (await self._changing(work, reason="entitlement_changed"))[1]

    def removal(self, name: str) -> DirectoryChange:
        """The change that ends an entitlement made here, with its own keys, for good."""
        row = self._known.rows["entitlement", name]
        rows = (row, *self._known.own_keys_of(name).values())
        ended = [part for each in rows for part in (each.uid, *each.digests)]
        subject = f"entitlement {name}"
        lifted = [  # What restricted this one does not restrict a later one of its name.
            self._denial(denial.what, subject, 0.0, of=subject)
            for what in ("suspended", "ends")
            if (denial := self._known.denials.get(f"{what} {subject}")) and denial.value
        ]
        return DirectoryChange(removes=rows, denials=(*self._gone(ended, of=subject), *lifted))

    async def add_key(
        self, name: str, who: str, *, version: int | None = None
    ) -> dict[str, object]:
        """Add a live key, for rotation. The returned "key" is shown only this once."""
        key, digest = self._make_key()

        async def work() -> None:
            entry = self._entry(name, version)
            if len(entry.digests) >= LIVE_KEYS:
                raise Conflict(
                    f"'{name}' has {LIVE_KEYS} live keys. Revoke one first.",
                    reason="too_many_keys",
                    code="too_many_keys",
                )
            change = DirectoryChange(puts=(self._key_row(name, entry.uid, digest),))
            await self._store(name, change, who, "add_key")

        _, said = await self._changing(work, reason="entitlement_changed")
        return {**await self.get(name), "key": key, **said}

    async def revoke_key(
        self, name: str, fingerprint_: str, who: str, *, version: int | None = None
    ) -> dict[str, object]:
        """Revoke one key at once. Requests admitted with it continue."""

        async def work() -> None:
            entry = self._entry(name, version)
            ended = [d for d in entry.digests if fingerprint(d) == fingerprint_]
            if not ended:
                raise NotFound(
                    f"'{name}' has no key with the fingerprint '{fingerprint_[:64]}'.",
                    reason="key_not_found",
                    code="key_not_found",
                )
            own = self._known.own_keys_of(name).values()
            rows = tuple(row for row in own if not set(ended).isdisjoint(row.digests))
            ended += [row.uid for row in rows]
            denials = self._gone(ended, of=f"entitlement {name}")
            change = DirectoryChange(removes=rows, denials=denials)
            await self._store(name, change, who, "revoke_key")

        _, said = await self._changing(work, reason="entitlement_changed")
        return {**await self.get(name), **said}

    def _key_row(self, name: str, of: str, digest: str) -> Row:
        """A key of an entitlement's own."""
        row = Row(
            kind="key",
            name=f"{name}:{fingerprint(digest)}",
            uid=new_uid(),
            of=of,
            fields={"sha256": digest},
        )
        return self._row(row)

    def _entry(self, name: str, version: int | None) -> EntitlementInForce:
        """An entitlement, checked against `version` if given. Raises NotFound."""
        entry = self._reader.entry(name)
        check_revision(name, entry.revision, version, reason="entitlement_changed")
        return entry

    async def _store(self, name: str, change: DirectoryChange, who: str, what: str) -> None:
        before = self._audited(name)
        await self._tenancy.sync.write(change)
        self._trail.note(who, what, name, before, self._audited(name))

    def _stated(self, name: str) -> tuple[Mapping[str, Any], str]:
        """(fields as the file or administrators state them, `file` or `admin`)."""
        found = entitlement_fields(name, self._tenancy.file, self._known)
        return ({}, "admin") if found is None else (found[0], found[1])

    def _audited(self, name: str) -> dict[str, object]:
        entry = self._tenancy.index.entries.get(name)
        return {} if entry is None else views.audited(entry, self._shapes[entry.terms.model])

    def _checked(self, fields: Mapping[str, object]) -> dict[str, Any]:
        """The fields as JSON, checked as a section of the file. Raises BadRequest."""
        return self._read("entitlement", {k: v for k, v in fields.items() if v is not None})

    def _terms(self, fields: Mapping[str, Any]) -> Entitlement:
        shape = self._shapes.get(fields["model"])
        try:
            if shape is None:
                known = ", ".join(f"`{name}`" for name in self._shapes)
                raise BadTerms("model", "no such model", f"give one of {known}")
            terms = terms_from(fields, shape, 0)
            if shape.name not in self._managed:
                _check_unmanaged(terms, shape)
        except BadTerms as error:
            raise refused(error) from error
        return terms

    def _check_fit(self, terms: Entitlement) -> None:
        now_s = self._wall_clock()
        reserving = self._tenancy.index.reserving(terms.model)
        others = (t for t in reserving if not 0 < t.expires_unix_s <= now_s)
        try:
            check_fit(terms, self._shapes[terms.model], others)
        except BadTerms as error:
            raise refused(error) from error


def refused(error: BadTerms) -> BadRequest:
    """The 400 response for invalid terms."""
    return BadRequest(
        f"{error}.",
        reason="invalid_entitlement",
        code="invalid_entitlement",
        param=f"{error.field}.{error.part}" if error.part else error.field,
    )


def _check_unmanaged(terms: Entitlement, model: ModelShape) -> None:
    """Refuse limits that the gateway could not enforce."""
    plain = Entitlement(name=terms.name, model=terms.model)
    stated, default = fields_from(terms, model), fields_from(plain, model)
    for field in set(stated) - {"name", "tenant", "model", "trusted_usage", "expires_at"}:
        if stated[field] != default[field]:
            raise BadTerms(
                field,
                f"model `{model.name}` has no managed capacity, so this could not be kept",
                "leave it out, or give an entitlement of the model a class in the configuration",
            )


def _taken(name: str) -> Conflict:
    return Conflict(
        f"There is an entitlement '{name}'. Change it with PATCH, or take another name.",
        reason="entitlement_exists",
        code="entitlement_exists",
        param="name",
    )
