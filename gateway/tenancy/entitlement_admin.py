"""Admin operations on entitlements, and entitlements as an admin reads them."""

import asyncio
from collections.abc import Awaitable, Callable, Container, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from gateway.admission.entitlement_terms import (
    GIB,
    BadTerms,
    ModelShape,
    check_fit,
    fields_from,
    instant,
    terms_from,
)
from gateway.errors import BadRequest, Conflict, NotFound, StateFailure
from gateway.ports import AccountView, PoolView, TokenPools
from gateway.records.entitlement import Entitlement
from gateway.records.tenancy import Denial, DirectoryChange, Row, fingerprint
from gateway.tenancy.changes import AdminChanges, Audit, Planned, new_uid
from gateway.tenancy.rights import CLUSTER, EntitlementInForce, entitlement_fields
from gateway.tenancy.tenancy import Tenancy

LIVE_KEYS: Final = 2
SLICE: Final = 500
"""Entitlements that a list reads between two pauses."""


class EntitlementAdmin(AdminChanges[EntitlementInForce]):
    """The admin operations. They raise Refusal, like any request."""

    kind = "entitlement"

    def __init__(
        self,
        tenancy: Tenancy,
        trail: Audit,
        store: TokenPools,
        shapes: Mapping[str, ModelShape],
        *,
        managed: Container[str],
        pools: Callable[[str], Awaitable[list[PoolView]]] | None = None,
        **common: Any,
    ) -> None:
        """`shapes` of models by name, including the `managed` ones, which the store counts.

        `pools` gives a model's pools instead of the store (the upkeep adds desired replicas).
        """
        super().__init__(tenancy, trail, **common)
        self._index = tenancy.index
        self._store = store
        self._shapes = shapes
        self._managed = managed
        self._pools = pools or store.pools

    # -- what is there

    def terms(self, model: str) -> Iterator[Entitlement]:
        """A model's entitlements, oldest first; safe to iterate during changes."""
        return self._index.terms(model)

    def find(self, name: str) -> Entitlement | None:
        """An entitlement's terms; None if there is none of this name."""
        entry = self._index.entries.get(name)
        return None if entry is None else entry.terms

    def audit(self, count: int) -> list[dict[str, object]]:
        """The newest changes that this process made, newest first."""
        return self._trail.latest(count)

    def note_proof(self, who: str, proof: str, verdict: str) -> None:
        """A proof was attached to the configuration in force."""
        self._trail.note(who, "attach_proof", "", {}, {"proof": proof, "verdict": verdict})

    async def pools(self, model: str) -> list[PoolView]:
        """Counters of a model's pools; empty if the model is not managed or the store is away."""
        if model not in self._managed:
            return []
        try:
            return await self._pools(model)
        except StateFailure:
            return []

    async def page(
        self, *, model: str | None, tenant: str | None, after: str | None, limit: int
    ) -> dict[str, object]:
        """A page of entitlements, oldest first: {"data", "next"}; `after`: an earlier "next"."""
        number, colon, name = ("0:" if after is None else after).partition(":")
        if not colon or not number.isascii() or not number.isdecimal() or len(number) > 20:
            raise BadRequest(
                "after: not a cursor; give the `next` of an earlier page, or leave it out.",
                reason="invalid_cursor",
                param="after",
            )
        place = (int(number), name)
        shown: list[EntitlementInForce] = []
        while True:
            entries = self._index.after(place, SLICE)
            for entry in entries:
                terms = entry.terms
                if model in (None, terms.model) and tenant in (None, terms.tenant):
                    if len(shown) == limit:  # one more than the limit: there is a next page
                        cursor = f"{place[0]}:{place[1]}"
                        return {"data": await self._shown(shown), "next": cursor}
                    shown.append(entry)
                place = (terms.created, terms.name)
            if len(entries) < SLICE:
                return {"data": await self._shown(shown), "next": None}
            await asyncio.sleep(0)

    async def get(self, name: str) -> dict[str, object]:
        """One entitlement: terms, counters, fingerprints of its keys."""
        (row,) = await self._shown([self._current(name)])
        return row

    async def _shown(self, entries: Sequence[EntitlementInForce]) -> list[dict[str, object]]:
        """Entitlements for GET; without a view of the store, state and use are unknown."""
        names: dict[str, list[str]] = {}
        for entry in entries:
            if entry.terms.model in self._managed:
                names.setdefault(entry.terms.model, []).append(entry.terms.name)
        views: dict[str, AccountView] = {}
        for model, wanted in names.items():
            try:
                views |= {view.name: view for view in await self._store.view(model, wanted)}
            except StateFailure:
                continue
        rows = []
        for entry in entries:
            terms, shape = entry.terms, self._shapes.get(entry.terms.model)
            if shape is None:  # it is leaving
                continue
            state, usage, view = None, None, views.get(terms.name)
            if view is not None:
                state, usage = (
                    view.state,
                    {
                        "inflight": dict(zip(shape.pools, view.inflight, strict=False)),
                        "kv_cache_gib": view.kv_bytes / GIB,
                        "bucket_tokens": round(view.level_tokens),
                        "bucket_depth_tokens": round(view.depth_tokens),
                        "debt": view.debt,
                        "burst": view.burst,
                        "weight": view.weight,
                        "debited_tokens": view.debited,
                        "refunded_tokens": view.refunded,
                        "used_tokens": view.used,
                    },
                )
            counters = {
                "origin": entry.origin,
                "source": entry.granted.source or None,
                "message": entry.granted.message or None,
                "created": terms.created,
                "revision": entry.revision,
                "state": entry.granted.verdict or state,
                "usage": usage,
            }
            rows.append({**self._fields(entry), **counters})
        return rows

    def _in_force(self, name: str) -> EntitlementInForce | None:
        entry = self._index.entries.get(name)
        return None if entry is None or entry.terms.model not in self._shapes else entry

    def _fields(self, entry: EntitlementInForce) -> dict[str, object]:
        return {
            **fields_from(entry.terms, self._shapes[entry.terms.model]),
            "suspended": entry.suspended,
            "keys": [fingerprint(digest) for digest in entry.digests],
        }

    # -- changes

    async def create(self, fields: Mapping[str, object], who: str) -> dict[str, object]:
        """Create an entitlement. The returned "key" is shown only this once."""
        checked = self._checked("entitlement", fields)
        name, (key, digest) = str(checked["name"]), self._make_key()

        async def work() -> Planned:
            if name in self._index.entries or name in self._tenancy.foreign:
                raise self._taken(name)
            self._check_fit(self._terms(checked))
            made = Row(kind="entitlement", name=name, uid=new_uid(), fields=checked)
            row = self._row(made, created=int(self._wall_clock() * 1000))
            return DirectoryChange(puts=(row, self._key_row(name, made.uid, digest))), "create"

        warning = await self._change(name, who, work)
        return {**await self.get(name), "key": key, **warning}

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

        async def work() -> Planned:
            only_ends, file = fields.keys() <= {"expires_at"}, self._tenancy.file
            entry = self._current(name, version) if only_ends else self._own(name, version)
            stated = entitlement_fields(name, file, self._known)
            before, origin = ({}, "admin") if stated is None else stated[:2]
            for field in ("name", "model"):
                if fields.get(field, before[field]) != before[field]:
                    fix = "leave it out, or create another entitlement"
                    raise _refused(BadTerms(field, "cannot be changed", fix))
            checked = self._checked("entitlement", {**before, **fields})
            terms, now_s = self._terms(checked), self._wall_clock()
            reserved = _reserved(terms, now_s)
            if reserved and reserved != _reserved(entry.terms, now_s):
                self._check_fit(terms)
            row = self._known.row("entitlement", name)
            if row is None:
                row = Row(kind="entitlement", name=name, uid=new_uid())
            of = file.entitlements[name].section if origin == "file" else ""
            denials: tuple[Denial, ...] = ()
            if "expires_at" in fields:  # also where its section changes, or leaves and returns
                denials = (self._denial("ends", name, instant(checked.get("expires_at"))),)
            puts = () if origin == CLUSTER else (self._row(row, fields=checked, of=of),)
            return DirectoryChange(puts=puts, denials=denials), what

        warning = await self._change(name, who, work)
        return {**await self.get(name), **warning}

    async def suspend(
        self, name: str, who: str, *, undo: bool = False, version: int | None = None
    ) -> dict[str, object]:
        """Refuse new requests, or with `undo` allow them again. Running requests continue."""

        async def work() -> Planned:
            self._current(name, version)
            denial = self._denial("suspended", name, float(not undo))
            return DirectoryChange(denials=(denial,)), "resume" if undo else "suspend"

        warning = await self._change(name, who, work)
        return {**await self.get(name), **warning}

    async def expire(
        self, name: str, at: str | None, who: str, *, version: int | None = None
    ) -> dict[str, object]:
        """Expire the entitlement at a time (ISO 8601), or now."""
        if at is None:
            at = datetime.fromtimestamp(self._wall_clock(), UTC).isoformat()
        return await self.change(name, {"expires_at": at}, who, what="expire", version=version)

    async def delete(self, name: str, who: str, *, version: int | None = None) -> dict[str, object]:
        """Delete it. Refused while it has requests in flight, and if it is in the file."""

        async def work() -> Planned:
            entry, inflight = self._own(name, version), 0
            if entry.origin == "file":
                raise Conflict(
                    f"'{name}' is in the configuration file and would come back with it. Remove "
                    "it there, or suspend it.",
                    reason="entitlement_in_file",
                )
            if entry.terms.model in self._managed:
                views = await self._store.view(entry.terms.model, [name])
                inflight = sum(sum(view.inflight) for view in views)
            if inflight:
                raise Conflict(
                    f"'{name}' has {inflight} sequences in flight. Suspend it, and "
                    "delete it when they have ended.",
                    reason="entitlement_in_use",
                )
            return self.removal(name), "delete"

        return await self._change(name, who, work)

    def removal(self, name: str) -> DirectoryChange:
        """The change that ends an entitlement made here, with its own keys, for good."""
        own = self._known.own_keys_of(name).values()
        rows = (self._known.rows["entitlement", name], *own)
        lifted = [  # What restricted this one does not restrict a later one of its name.
            self._denial(denial.what, name, 0.0)
            for what in ("suspended", "ends")
            if (denial := self._known.denials.get(f"{what} entitlement {name}")) and denial.value
        ]
        return DirectoryChange(removes=rows, denials=(*self._gone(name, (), rows), *lifted))

    async def add_key(
        self, name: str, who: str, *, version: int | None = None
    ) -> dict[str, object]:
        """Add a live key, for rotation. The returned "key" is shown only this once."""
        key, digest = self._make_key()

        async def work() -> Planned:
            entry = self._own(name, version)
            if len(entry.digests) >= LIVE_KEYS:
                raise Conflict(
                    f"'{name}' has {LIVE_KEYS} live keys. Revoke one first.", reason="too_many_keys"
                )
            return DirectoryChange(puts=(self._key_row(name, entry.uid, digest),)), "add_key"

        warning = await self._change(name, who, work)
        return {**await self.get(name), "key": key, **warning}

    async def revoke_key(
        self, name: str, fingerprint_: str, who: str, *, version: int | None = None
    ) -> dict[str, object]:
        """Revoke one key at once. Requests admitted with it continue."""

        async def work() -> Planned:
            digests = self._current(name, version).digests
            ended = [d for d in digests if fingerprint(d) == fingerprint_]
            if not ended:
                raise NotFound(
                    f"'{name}' has no key with the fingerprint '{fingerprint_[:64]}'.",
                    reason="key_not_found",
                )
            own = self._known.own_keys_of(name).values()
            rows = tuple(row for row in own if not set(ended).isdisjoint(row.digests))
            denials = self._gone(name, [*ended, *(row.uid for row in rows)])
            return DirectoryChange(removes=rows, denials=tuple(denials)), "revoke_key"

        warning = await self._change(name, who, work)
        return {**await self.get(name), **warning}

    def _key_row(self, name: str, of: str, digest: str) -> Row:
        """A key of an entitlement's own."""
        full, fields = f"{name}:{fingerprint(digest)}", {"sha256": digest}
        return self._row(Row(kind="key", name=full, uid=new_uid(), of=of, fields=fields))

    def _own(self, name: str, version: int | None) -> EntitlementInForce:
        """One that administrators may change and delete. Raises Conflict, and as `_current`."""
        entry = self._current(name, version)
        if entry.origin == CLUSTER:
            raise Conflict(
                f"'{name}' is stated by {entry.granted.source} in the cluster. Change that object "
                "(kubectl), or delete it. Here you can suspend or expire it, or revoke a key.",
                reason="entitlement_in_cluster",
            )
        return entry

    def _terms(self, fields: Mapping[str, Any]) -> Entitlement:
        """The terms that checked fields describe. Raises BadRequest."""
        shape = self._shapes.get(fields["model"])
        try:
            if shape is None:
                models = ", ".join(f"`{name}`" for name in self._shapes)
                raise BadTerms("model", "no such model", f"give one of {models}")
            terms = terms_from(fields, shape, 0)
            if shape.name not in self._managed:  # limits that the gateway could not enforce
                plain = Entitlement(name=terms.name, model=terms.model)
                stated, default = fields_from(terms, shape), fields_from(plain, shape)
                free = {"name", "tenant", "model", "trusted_usage", "expires_at"}
                for field in sorted(set(stated) - free):
                    if stated[field] != default[field]:
                        raise BadTerms(
                            field,
                            f"model `{shape.name}` has no managed capacity, so this could not be "
                            "kept",
                            "leave it out, or give an entitlement of the model a class in the "
                            "configuration",
                        )
        except BadTerms as error:
            raise _refused(error) from error
        return terms

    def _check_fit(self, terms: Entitlement) -> None:
        now_s = self._wall_clock()
        reserving = self._index.reserving(terms.model)
        others = (t for t in reserving if not 0 < t.expires_unix_s <= now_s)
        try:
            check_fit(terms, self._shapes[terms.model], others)
        except BadTerms as error:
            raise _refused(error) from error


def _reserved(terms: Entitlement, now_unix_s: float) -> tuple[object, ...]:
    """The fields that decide whether it fits into capacity; empty once it has expired."""
    if not terms.reserves or 0 < terms.expires_unix_s <= now_unix_s:
        return ()
    return (terms.baseline, terms.kv_bytes, terms.tokens_per_s)


def _refused(error: BadTerms) -> BadRequest:
    """The 400 response for invalid terms."""
    return BadRequest(
        f"{error}.",
        reason="invalid_entitlement",
        param=f"{error.field}.{error.part}" if error.part else error.field,
    )
