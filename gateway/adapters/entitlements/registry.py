"""Admin operations on entitlements: each is validated, stored, applied and audited.

An operation is either written to the directory and then applied here, or refused without any
change. If another replica's change came first, it is repeated on the new version. Other replicas
read it with their next poll. Keys are generated here, shown once and stored as SHA-256; admins
refer to them by fingerprint, the digest's first 8 hex digits.
"""

import hashlib
import secrets
from collections.abc import Awaitable, Callable, Container, Iterator, Mapping
from datetime import UTC, datetime
from typing import Final, TypeVar

import msgspec

from gateway.adapters.entitlements import views
from gateway.adapters.entitlements.changing import changing, check_version
from gateway.adapters.entitlements.conflicts import changed, revoked, stood
from gateway.adapters.entitlements.index import File
from gateway.adapters.entitlements.reconciler import EntitlementSync
from gateway.adapters.records.audit import Audit
from gateway.errors import BadRequest, Conflict, NotFound
from gateway.policy.entitlements.entitlement import Entitlement
from gateway.policy.entitlements.terms import (
    BadTerms,
    ModelShape,
    check_fit,
    fields_from,
    terms_from,
)
from gateway.ports import EntitlementEntry, PoolView, TokenPools

_T = TypeVar("_T")
LIVE_KEYS: Final = 2


def fresh_key() -> str:
    """A new random key."""
    return f"sk-sluice-{secrets.token_urlsafe(32)}"


class Registry:
    """The admin operations. They raise Refusal, like any request."""

    def __init__(
        self,
        sync: EntitlementSync,
        store: TokenPools,
        models: Mapping[str, ModelShape],
        *,
        managed: Container[str],
        wall_clock: Callable[[], float],
        pools: Callable[[str], Awaitable[list[PoolView]]] | None = None,
        new_key: Callable[[], str] = fresh_key,
        trail: Audit | None = None,
    ) -> None:
        """`models` by name, including the `managed` ones; `wall_clock` in Unix seconds.

        `pools` gives a model's pools instead of the store (the upkeep adds desired replicas);
        `trail` is the audit, shared with other registries.
        """
        self._sync = sync
        self._reader = views.EntitlementReader(
            sync.index, store, models, managed, pools or store.pools
        )
        self._models = models
        self._managed = managed
        self._wall_clock = wall_clock
        self._new_key = new_key
        self._audit = trail or Audit(wall_clock)

    async def start(self, file: File, *, guarded: bool) -> None:
        """Begin as `EntitlementSync.begin`, then poll."""
        await self._sync.start(file, guarded=guarded)

    async def adopt(self, file: File) -> None:
        """Apply another version of the file, as `EntitlementSync.adopt`."""
        await self._sync.adopt(file)

    async def close(self) -> None:
        """Stop polling and close the directory."""
        await self._sync.close()

    @property
    def up(self) -> bool:
        """Whether the directory answers."""
        return self._sync.up

    def terms(self, model: str) -> Iterator[Entitlement]:
        """A model's entitlements, oldest first; safe to iterate during changes."""
        return self._sync.index.terms(model)

    def find(self, name: str) -> Entitlement | None:
        """An entitlement's terms; None if there is none of this name."""
        entry = self._sync.index.entries.get(name)
        return None if entry is None else entry.terms

    def audit(self, count: int) -> list[dict[str, object]]:
        """The newest changes that this process made, newest first."""
        return self._audit.latest(count)

    def note(
        self,
        who: str,
        what: str,
        name: str,
        before: Mapping[str, object],
        after: Mapping[str, object],
    ) -> None:
        """Audit an event of a budget."""
        self._audit.note(who, what, name, before, after)

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
            taken = (self._sync.index.entries, self._sync.foreign)
            if isinstance(name, str) and any(name in names for names in taken):
                raise _taken(name)
            terms = self._terms(fields, self._sync.index.next_created)
            self._check_fit(terms)
            first = EntitlementEntry(terms=terms, origin="admin", id=secrets.token_hex(8))
            entry = changed(first, self._wall_clock(), key_sha256=(digest,))
            await self._sync.put(entry)
            self._audit.note(who, "create", terms.name, {}, self._audited(entry))
            return terms.name

        return {**await self.get(await self._changing(work)), "key": key}

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

        `version`, here and below: refuse unless the entitlement is at this version.
        """

        async def work() -> None:
            entry = self._entry(name, version)
            before = fields_from(entry.terms, self._models[entry.terms.model])
            for field in ("name", "model"):
                if fields.get(field, before[field]) != before[field]:
                    fix = "leave it out, or create another entitlement"
                    raise refused(BadTerms(field, "cannot be changed", fix))
            created = entry.terms.created
            terms = self._terms({**before, **fields}, created)
            terms = msgspec.structs.replace(terms, suspended=entry.terms.suspended)
            now_s = self._wall_clock()
            reserved = views.reserved(terms, now_s)
            if reserved and reserved != views.reserved(entry.terms, now_s):
                self._check_fit(terms)
            await self._store_entry(entry, changed(entry, now_s, terms=terms), who, what)

        await self._changing(work)
        return await self.get(name)

    async def suspend(
        self, name: str, who: str, *, undo: bool = False, version: int | None = None
    ) -> dict[str, object]:
        """Refuse new requests, or with `undo` allow them again. Running requests continue."""

        async def work() -> None:
            entry = self._entry(name, version)
            after = stood(entry, self._wall_clock(), suspended=not undo)
            await self._store_entry(entry, after, who, "resume" if undo else "suspend")

        await self._changing(work)
        return await self.get(name)

    async def expire(
        self, name: str, at: str | None, who: str, *, version: int | None = None
    ) -> dict[str, object]:
        """Expire the entitlement at a time (ISO 8601), or now."""
        if at is None:
            at = datetime.fromtimestamp(self._wall_clock(), UTC).isoformat()
        return await self.change(name, {"expires_at": at}, who, what="expire", version=version)

    async def delete(self, name: str, who: str, *, version: int | None = None) -> None:
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
            await self._sync.delete(entry)
            self._audit.note(who, "delete", name, self._audited(entry), {})

        await self._changing(work)

    async def add_key(
        self, name: str, who: str, *, version: int | None = None
    ) -> dict[str, object]:
        """Add a live key, for rotation. The returned "key" is shown only this once."""
        key, digest = self._make_key()

        async def work() -> None:
            entry = self._entry(name, version)
            if len(entry.key_sha256) >= LIVE_KEYS:
                raise Conflict(
                    f"'{name}' has {LIVE_KEYS} live keys. Revoke one first.",
                    reason="too_many_keys",
                    code="too_many_keys",
                )
            after = changed(entry, self._wall_clock(), key_sha256=(*entry.key_sha256, digest))
            await self._store_entry(entry, after, who, "add_key")

        await self._changing(work)
        return {**await self.get(name), "key": key}

    async def revoke_key(
        self, name: str, fingerprint: str, who: str, *, version: int | None = None
    ) -> dict[str, object]:
        """Revoke one key at once. Requests admitted with it continue."""

        async def work() -> None:
            entry = self._entry(name, version)
            ended = [d for d in entry.key_sha256 if views.fingerprint(d) == fingerprint]
            if not ended:
                raise NotFound(
                    f"'{name}' has no key with the fingerprint '{fingerprint[:64]}'.",
                    reason="key_not_found",
                    code="key_not_found",
                )
            await self._store_entry(
                entry, revoked(entry, self._wall_clock(), ended), who, "revoke_key"
            )

        await self._changing(work)
        return await self.get(name)

    async def _changing(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """Run one change at a time, on the newest versions. Raises Unavailable, Conflict."""
        return await changing(self._sync, work, of="entitlements", reason="entitlement_changed")

    def _entry(self, name: str, version: int | None) -> EntitlementEntry:
        """An entry, checked against `version` if given. Raises NotFound, PreconditionFailed."""
        entry = self._reader.entry(name)
        check_version(entry, version, reason="entitlement_changed")
        return entry

    async def _store_entry(
        self, before: EntitlementEntry, after: EntitlementEntry, who: str, what: str
    ) -> None:
        await self._sync.put(after)
        name = after.terms.name
        self._audit.note(who, what, name, self._audited(before), self._audited(after))

    def _terms(self, fields: Mapping[str, object], created: int) -> Entitlement:
        model = fields.get("model")
        shape = self._models.get(model) if isinstance(model, str) else None
        try:
            if shape is None:
                known = ", ".join(f"`{name}`" for name in self._models)
                raise BadTerms("model", "no such model", f"give one of {known}")
            terms = terms_from(fields, shape, created)
            if shape.name not in self._managed:
                _check_unmanaged(terms, shape)
        except BadTerms as error:
            raise refused(error) from error
        return terms

    def _check_fit(self, terms: Entitlement) -> None:
        now_s = self._wall_clock()
        others = (
            t for t in self._sync.index.reserving(terms.model) if not 0 < t.expires_unix_s <= now_s
        )
        try:
            check_fit(terms, self._models[terms.model], others)
        except BadTerms as error:
            raise refused(error) from error

    def _make_key(self) -> tuple[str, str]:
        key = self._new_key()
        return key, hashlib.sha256(key.encode()).hexdigest()

    def _audited(self, entry: EntitlementEntry) -> dict[str, object]:
        return views.audited(entry, self._models[entry.terms.model])


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
