"""Entitlements as an admin reads them: the file's fields, counters, and keys by fingerprint."""

import asyncio
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from typing import Final

from gateway.admission.entitlement_terms import GIB, ModelShape, fields_from
from gateway.errors import BadRequest, NotFound, StateFailure
from gateway.ports import AccountView, PoolView, TokenPools
from gateway.records.entitlement import Entitlement
from gateway.records.tenancy import fingerprint
from gateway.tenancy.entitlement_index import EntitlementIndex, PagePosition
from gateway.tenancy.rights import EntitlementInForce

SLICE: Final = 500
"""Entitlements that a list reads between two pauses."""


class EntitlementReader:
    """Reads entitlements for an admin, from the index and the store's counters."""

    def __init__(
        self,
        index: EntitlementIndex,
        store: TokenPools,
        models: Mapping[str, ModelShape],
        managed: Container[str],
        pools: Callable[[str], Awaitable[list[PoolView]]],
    ) -> None:
        """`models` by name; the store has counters of the `managed` ones only."""
        self._entries = index
        self._pools = pools
        self._store = store
        self._models = models
        self._managed = managed

    def entry(self, name: str) -> EntitlementInForce:
        """An entitlement by name. Raises NotFound."""
        entry = self._entries.entries.get(name)
        if entry is None or entry.terms.model not in self._models:
            raise NotFound(
                f"There is no entitlement '{name[:64]}'. GET /admin/entitlements lists them.",
                reason="entitlement_not_found",
                code="entitlement_not_found",
            )
        return entry

    async def get(self, name: str) -> dict[str, object]:
        """One entitlement."""
        (found,) = await self._shown([self.entry(name)])
        return found

    async def page(
        self, model: str | None, tenant: str | None, after: str | None, limit: int
    ) -> dict[str, object]:
        """Up to `limit` entitlements after a cursor, oldest first, and the next cursor."""
        place = place_of(after)
        found: list[EntitlementInForce] = []
        while True:
            entries = self._entries.after(place, SLICE)
            for entry in entries:
                if matches(entry.terms, model, tenant):
                    if len(found) == limit:  # one more than the limit: there is a next page
                        return {"data": await self._shown(found), "next": cursor_of(place)}
                    found.append(entry)
                place = (entry.terms.created, entry.terms.name)
            if len(entries) < SLICE:
                return {"data": await self._shown(found), "next": None}
            await asyncio.sleep(0)

    async def pools(self, model: str) -> list[PoolView]:
        """Counters of a model's pools; empty if the model is not managed or the store is away."""
        if model not in self._managed:
            return []
        try:
            return await self._pools(model)
        except StateFailure:
            return []

    async def inflight(self, terms: Entitlement) -> int:
        """Sequences in flight; 0 if they are not counted. Raises StateFailure."""
        if terms.model not in self._managed:
            return 0
        found = await self._store.view(terms.model, [terms.name])
        return sum(sum(view.inflight) for view in found)

    async def _shown(self, entries: Sequence[EntitlementInForce]) -> list[dict[str, object]]:
        names: dict[str, list[str]] = {}
        for entry in entries:
            if entry.terms.model in self._managed:
                names.setdefault(entry.terms.model, []).append(entry.terms.name)
        counters: dict[str, AccountView] = {}
        for model, wanted in names.items():
            try:
                counters |= {view.name: view for view in await self._store.view(model, wanted)}
            except StateFailure:
                continue
        return [
            shown(e, shape, counters.get(e.terms.name))
            for e in entries
            if (shape := self._models.get(e.terms.model)) is not None  # else it is leaving
        ]


def audited(entry: EntitlementInForce, model: ModelShape) -> dict[str, object]:
    """All fields of an entitlement that an admin can change."""
    return {
        **fields_from(entry.terms, model),
        "suspended": entry.terms.suspended,
        "keys": [fingerprint(digest) for digest in entry.digests],
    }


def shown(
    entry: EntitlementInForce, model: ModelShape, view: AccountView | None
) -> dict[str, object]:
    """An entitlement for GET; without a view, its state and use are unknown."""
    return {
        **audited(entry, model),
        "origin": entry.origin,
        "created": entry.terms.created,
        "revision": entry.revision,
        "state": None if view is None else view.state,
        "usage": None if view is None else _usage(view, model),
    }


def _usage(view: AccountView, model: ModelShape) -> dict[str, object]:
    return {
        "inflight": dict(zip(model.pools, view.inflight, strict=False)),
        "kv_cache_gib": view.kv_bytes / GIB,
        "bucket_tokens": round(view.level_tokens),
        "bucket_depth_tokens": round(view.depth_tokens),
        "debt": view.debt,
        "burst": view.burst,
        "weight": view.weight,
        "debited_tokens": view.debited,
        "refunded_tokens": view.refunded,
        "used_tokens": view.used,
    }


def reserved(terms: Entitlement, now_unix_s: float) -> tuple[object, ...]:
    """The fields that decide whether it fits into capacity; empty once it has expired."""
    if not terms.reserves or 0 < terms.expires_unix_s <= now_unix_s:
        return ()
    return (terms.baseline, terms.kv_bytes, terms.tokens_per_s)


def matches(terms: Entitlement, model: str | None, tenant: str | None) -> bool:
    """Whether it passes a list's filters."""
    return model in (None, terms.model) and tenant in (None, terms.tenant)


def cursor_of(place: PagePosition) -> str:
    """The cursor at the end of a page."""
    return f"{place[0]}:{place[1]}"


def place_of(cursor: str | None) -> PagePosition:
    """The position after which a page begins. Raises BadRequest for an invalid cursor."""
    if cursor is None:
        return (0, "")
    number, colon, name = cursor.partition(":")
    if not colon or not number.isascii() or not number.isdecimal() or len(number) > 20:
        raise BadRequest(
            "after: not a cursor; give the `next` of an earlier page, or leave it out.",
            reason="invalid_cursor",
            code="invalid_cursor",
            param="after",
        )
    return int(number), name
