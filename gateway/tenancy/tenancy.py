"""The tenants, entitlements and keys of one process: rights in force, told to whoever needs them.

Rights are computed by `gateway.tenancy.rights` from the file, a cluster's grants, the directory and
its denials, by name, whenever one of these changes; a reload is nothing but another file. What
changed is told to the keyring (keys), to the store (terms), and to those who count limits. After a
failure of the store, the next poll sends the change again.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec
from sortedcontainers import SortedList, SortedSet

from gateway.admission.entitlement_terms import BadTerms, ModelShape
from gateway.errors import StateFailure
from gateway.ports import Directory, TokenPools
from gateway.records.entitlement import Entitlement, MeanRate
from gateway.records.limit import UNLIMITED, Limit
from gateway.records.request import Principal
from gateway.records.tenancy import (
    NO_FILE,
    ClusterState,
    Denial,
    DirectoryChange,
    RowId,
    TenancyFile,
)
from gateway.tenancy.directory_sync import DirectorySync, Raced, paused
from gateway.tenancy.keyring import CLUSTER_GRANTS, DIRECTORY, Keyring
from gateway.tenancy.known import joined, owner_of_key
from gateway.tenancy.rights import (
    CLUSTER,
    EntitlementInForce,
    NotServed,
    TenantInForce,
    entitlement_fields,
    entitlement_of,
    older,
    tenant_of,
)

SENT: Final = 50
"""Entitlements sent to the store between two pauses."""
KEYLESS: Final = Denial(what="gone", subject="keyless")
"""Nobody comes in without a key any more: there were entitlements or keys once."""

OLDER: Final = (
    "the configuration file is older than what administrators changed of %d entitlements (%s): "
    "these stay as changed. If the file is the right one, touch it"
)

REVOKED: Final = (
    "the configuration file lists keys of %d entitlements (%s) that an administrator revoked: they "
    "stay revoked. Give others"
)

TWICE: Final = "entitlement %s is stated by %s, and by the file or administrators, which %s"

_log = logging.getLogger("sluice.tenancy")


PagePosition = tuple[int, str]
"""`created` and name: an entitlement's position in the list."""


class EntitlementIndex:
    """The entitlements in force by name, in order of creation, and by model; cheap with 100,000.

    `created` orders the entitlements: older ones keep their reservation when capacity falls.
    """

    def __init__(self) -> None:
        self.entries: dict[str, EntitlementInForce] = {}
        self._order: SortedList[PagePosition] = SortedList()
        self._models: dict[str, SortedList[PagePosition]] = {}
        self._reserving: dict[str, dict[str, Entitlement]] = {}

    def put(self, entry: EntitlementInForce) -> None:
        """Add an entry or replace the one of the same name."""
        terms = entry.terms
        self.remove(terms.name)
        self.entries[terms.name] = entry
        place = (terms.created, terms.name)
        self._order.add(place)
        self._models.setdefault(terms.model, SortedList()).add(place)
        if terms.reserves:
            self._reserving.setdefault(terms.model, {})[terms.name] = terms

    def remove(self, name: str) -> None:
        """Forget an entry; unknown names are ignored."""
        entry = self.entries.pop(name, None)
        if entry is not None:
            place, model = (entry.terms.created, name), entry.terms.model
            self._order.remove(place)
            self._models[model].remove(place)
            self._reserving.get(model, {}).pop(name, None)

    def terms(self, model: str) -> Iterator[Entitlement]:
        """A model's entitlements, oldest first; safe to iterate during changes."""
        for _, name in tuple(self._models.get(model, ())):
            entry = self.entries.get(name)
            if entry is not None:
                yield entry.terms

    def reserving(self, model: str) -> list[Entitlement]:
        """A model's entitlements that reserve a baseline."""
        return list(self._reserving.get(model, {}).values())

    def after(self, place: PagePosition, count: int) -> list[EntitlementInForce]:
        """Up to `count` entries after a position, oldest first."""
        start = self._order.bisect_right(place)
        return [self.entries[name] for _, name in self._order[start : start + count]]


class Tenancy(DirectorySync):
    """What is in force in this process."""

    def __init__(
        self,
        *,
        directory: Directory,
        keyring: Keyring,
        store: TokenPools,
        shapes: Mapping[str, ModelShape],
        managed: Container[str],
        changed: Callable[[str], None],
        clock: Callable[[], float],
        chance: Callable[[], float] = random.random,
        rates: Mapping[str, MeanRate] | None = None,
        limits_changed: Callable[[str, Sequence[Limit]], None] = lambda _tenant, _limits: None,
        count_limits: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`shapes` of models by name; `changed` is called with each whose entitlements changed.

        `rates`, by model, receive every entitlement's token rate. Models that are not `managed`
        have keys only; the store gets none of their entitlements. `limits_changed` is called with
        a tenant and all limits of its keys; `count_limits` has requests for every model counted
        against them.
        """
        super().__init__(directory, clock, chance)
        self.file = NO_FILE
        self.index = EntitlementIndex()
        self.tenants: dict[str, TenantInForce] = {}
        """Those that are listed, and those that are only suspended."""
        self.foreign: set[str] = set()
        """Entitlements that this process cannot serve: of a model that is not configured here."""
        self.limited: set[str] = set()
        """Tenants whose keys have limits from an administrator."""
        self.on_entitlement_removed: Callable[[Entitlement], None] = lambda _: None
        self.on_tenant_removed: Callable[[str], None] = lambda _: None
        self.names: SortedSet[str] = SortedSet()
        """Of all tenants that are listed."""
        self.keyring = keyring
        self._store = store
        self._managed = managed
        self._changed = changed
        self._outbox: dict[tuple[str, str], Entitlement] = {}
        """(model, name) -> last terms of entitlements that the store has not taken yet."""
        self._untaken = False
        """Whether the store failed to take one, which was logged."""
        self._shapes = shapes
        self._rates = rates or {}
        self._limits_changed = limits_changed
        self._count_limits = count_limits
        self._limits: dict[str, tuple[Limit, ...]] = {}
        self._regranted: set[str] = set()
        """Entitlements of a cluster to compute anew."""
        self._twice = set[str]()
        """Those that something else states, too, which was logged."""

    async def begin(self, file: TenancyFile) -> None:
        """Read the directory, and apply the file; alone while the directory is away."""
        await self.poll()
        await self.adopt(file)
        await self.released()

    async def start(self, file: TenancyFile) -> None:
        """Call `begin`, then poll from now on."""
        await self.begin(file)
        self.follow()

    async def adopt(self, file: TenancyFile) -> None:
        """Apply another version of the file; a key that left it stops at once."""
        async with self.lock:
            before, self.file = self.file, file
            tenants = {*before.tenants, *file.tenants, *before.order, *file.order}
            if before.currency != file.currency:
                tenants |= set(self.names)
            rows = paused(list(self.known.rows))
            made = [name async for kind, name in rows if kind == "entitlement"]
            # All of them: their models may have other pools now.
            made += self.known.cluster.entitlements
            await self._compute({*self.index.entries, *file.entitlements, *made}, tenants)
            revoked, changed = [], []
            for name, section in file.entitlements.items():
                row = self.known.row("entitlement", name)
                if any(map(self.known.gone, section.digests)):
                    revoked.append(name)
                if row and row.of not in ("", section.section) and older(file, row):
                    changed.append(name)
            for message, names in ((REVOKED, revoked), (OLDER, changed)):
                if names:
                    _log.warning(message, len(names), ", ".join(names[:5]))
            await self.settle()

    async def apply(self, rows: Iterable[RowId], denials: Iterable[str]) -> None:
        entitlements: set[str] = set()
        tenants: set[str] = set()
        async for row_id in paused(rows):
            kind, name = owner_of_key(row_id[1]) if row_id[0] == "key" else row_id
            (entitlements if kind == "entitlement" else tenants).add(name)
        async for denial in paused(denials):
            what, _, name = denial.partition(" ")[2].partition(" ")
            if what == "entitlement":
                entitlements.add(name)
            elif what == "tenant":
                tenants.add(name)
            elif len(digest := name or what) == 64:
                for of, owner in self.keyring.owners(bytes.fromhex(digest)):
                    (entitlements if of == "entitlement" else tenants).add(owner)
        await self._compute(entitlements, tenants)
        if self.was_read:  # only now: until then revoked keys would open
            self.keyring.unread.discard(DIRECTORY)
        await self.settle()

    async def take_cluster(self, state: ClusterState | None, stale: frozenset[str]) -> None:
        """Apply what a cluster's controller published, and that these classes of it are stale."""
        self.keyring.open = False  # also while the cluster grants nothing
        async with self.lock:
            cluster, changed = await asyncio.to_thread(joined, self.known.cluster, state, stale)
            self.known.cluster = cluster
            self._regranted |= changed
            if self._regranted:
                await self._compute(set(self._regranted), set())
                self._regranted.clear()
                await self.settle()
            if state is not None:
                self.keyring.unread.discard(CLUSTER_GRANTS)

    async def settle(self) -> None:
        keyless = self.known.denials.get(KEYLESS.id)
        if keyless is not None and not keyless.revision and self.was_read:
            with contextlib.suppress(Raced, StateFailure):  # the next poll tries again
                await self.write(DirectoryChange(denials=(KEYLESS,)))
        # In slices; those that fail or have requests in flight stay queued.
        touched: dict[str, None] = {}
        todo = list(self._outbox)
        for start in range(0, len(todo), SENT):
            keys = todo[start : start + SENT]
            results = await asyncio.gather(*map(self._send, keys), return_exceptions=True)
            for (model, name), result in zip(keys, results, strict=True):
                if result is True:
                    del self._outbox[model, name]
                    touched[model] = None
            failures = [result for result in results if isinstance(result, BaseException)]
            for error in failures:
                if isinstance(error, asyncio.CancelledError):
                    raise error
                if not self._untaken:
                    self._untaken = True
                    _log.error(
                        "the store did not take an entitlement, trying again", exc_info=error
                    )
            if failures:
                break
            self._untaken = False
            await asyncio.sleep(0)
        for model in touched:
            self._changed(model)

    async def _send(self, key: tuple[str, str]) -> bool:
        """Send one entitlement; False if its removal must wait for requests in flight.

        It is suspended until they have ended.
        """
        model, name = key
        if model not in self._managed:  # any more: its token pool is gone
            return True
        entry = self.index.entries.get(name)
        if entry is not None and entry.terms.model == model:
            await self._store.define(entry.terms)
            return True
        if await self._store.remove(model, name):
            return True
        last = self._outbox[key]
        if not last.suspended:
            self._outbox[key] = msgspec.structs.replace(last, suspended=True)
            await self._store.define(self._outbox[key])
        return False

    def _enqueue(self, terms: Entitlement) -> None:
        """Have the store define an entitlement if it is in force, otherwise remove it."""
        if terms.model in self._managed:
            self._outbox[terms.model, terms.name] = terms

    async def released(self) -> None:
        """Count limits anew, which may take this file's rights again."""
        if self.limited and self._count_limits is not None:
            try:
                await self._count_limits()
            except Exception:  # noqa: BLE001 - the change is made, and the next poll tries again
                _log.exception("counting limits of keys failed")

    def manage(self, model: str) -> None:
        """Send a model's entitlements to its new token pool with the next poll."""
        for terms in self.index.terms(model):
            self._enqueue(terms)

    def tenant(self, name: str) -> TenantInForce:
        """A tenant in force, whether or not it is listed."""
        return self.tenants.get(name) or TenantInForce(name=name, exists=False)

    def entitlements_of(self, tenant: str) -> list[str]:
        """Names of a tenant's entitlements, also of those that only other gateways serve."""
        names = set(self.keyring.entitlements_of(tenant))
        for name in self.foreign:
            stated = entitlement_fields(name, self.file, self.known)
            if stated is not None and stated[0].get("tenant") == tenant:
                names.add(name)
        return sorted(names)

    async def _compute(self, entitlements: set[str], tenants: set[str]) -> None:
        """Compute these anew, and tell what changed."""
        async for name in paused(entitlements):
            self._enter(name)
        keys = False
        async for name in paused(tenants):
            try:
                tenant = tenant_of(name, self.file, self.known)
            except Exception:  # noqa: BLE001 - a row of another version: nothing of it opens
                _log.exception("what the directory says of tenant %s makes no sense", name)
                tenant = TenantInForce(name=name, exists=False, suspended=True)
            if tenant != self.tenant(name):
                self._enter_tenant(tenant)
                keys |= bool(tenant.keys)
        if self.index.entries or self.foreign or keys:
            self.known.take((), [KEYLESS])
        if self.known.rows or self.known.gone(KEYLESS.subject):
            self.keyring.open = False

    def _enter(self, name: str) -> None:
        """Compute an entitlement anew, and tell what changed."""
        entry, problem = None, ""
        try:
            entry = entitlement_of(name, self.file, self.known, self._shapes)
        except NotServed as error:
            problem = str(error)
        except BadTerms as error:
            problem = f"no longer fits its model ({error})"
        except Exception as error:  # noqa: BLE001 - a row of another version
            problem = f"makes no sense here ({error!r})"
        granted = self.known.cluster.entitlements.get(name)
        row = self.known.row("entitlement", name)
        in_file, made = name in self.file.entitlements, row is not None and not row.of
        if granted is None or not (in_file or made):
            self._twice.discard(name)
        elif name not in self._twice:
            self._twice.add(name)
            _log.warning(TWICE, name, granted.source, "count" if in_file else "do not count")
        if not problem:
            self.foreign.discard(name)
        elif name not in self.foreign:
            self.foreign.add(name)
            _log.warning("entitlement %s %s: it is left out", name, problem)
        before = self.index.entries.get(name)
        if entry != before:
            self._put(name, before, entry)

    def _put(
        self, name: str, before: EntitlementInForce | None, entry: EntitlementInForce | None
    ) -> None:
        if before is not None and (entry is None or entry.terms.model != before.terms.model):
            self._enqueue(before.terms)
        terms: Entitlement | None = None
        if entry is None:
            self.index.remove(name)
            self.keyring.remove(name)
        else:
            terms = entry.terms
            self.index.put(entry)
            principal = Principal(
                entitlement=name,
                tenant=terms.tenant,
                service_class=terms.service_class,
                model=terms.model,
                expires_unix_s=terms.expires_unix_s or None,
                suspended=entry.suspended,
                verdict=entry.granted.verdict,
                message=entry.granted.message,
                of_cluster=entry.origin == CLUSTER,
                compress=terms.compress,
                trusted_usage=terms.trusted_usage,
                tokens_per_s=terms.tokens_per_s,
                slo_ms=terms.slo_ms,
                slo_tpot_ms=terms.slo_tpot_ms,
            )
            self.keyring.put(principal, [bytes.fromhex(d) for d in entry.digests])
        if before is not None and before.terms != terms:
            self._count(before.terms, on=False)
        if terms is not None and (before is None or before.terms != terms):
            self._count(terms, on=True)
            self._enqueue(terms)
        if before is not None and terms is None:
            self.on_entitlement_removed(before.terms)

    def _count(self, terms: Entitlement, *, on: bool) -> None:
        rates = self._rates.get(terms.model)
        if rates is not None:
            (rates.add if on else rates.remove)(terms.tokens_per_s)

    def _enter_tenant(self, tenant: TenantInForce) -> None:
        name = tenant.name
        keys = [k.key for k in tenant.keys]
        self.keyring.put_tenant(name, keys)
        limits = tuple({limit.id: limit for key in keys for limit in key.limits}.values())
        if limits != self._limits.pop(name, ()):
            self._limits_changed(name, limits)
        if limits:
            self._limits[name] = limits
        made = (k.key for k in tenant.keys if k.origin == "admin")
        limited = any(key.stated != UNLIMITED for key in made)
        (self.limited.add if limited else self.limited.discard)(name)
        # Also of one that has no section here: its entitlements' own keys and tokens.
        (self.keyring.held.add if tenant.suspended else self.keyring.held.discard)(name)
        self.keyring.default_to(name, tenant.default)
        if tenant.exists or tenant.suspended or tenant.default is not None:
            self.tenants[name] = tenant
        else:
            self.tenants.pop(name, None)
        if tenant.exists:
            self.names.add(name)
        elif name in self.names:
            self.names.remove(name)
            self.on_tenant_removed(name)
