"""Keeps the directory, the keyring and the store's token pools consistent.

Rules:
- `gateway.adapters.entitlements.following` reads and writes the directory.
- A change is applied to the registry, the keyring and the store. After a failure of the store, the
  next poll sends the change again.
- The file's entries are merged with the directory's at the start and after a reload.
"""

import logging
import random
import secrets
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Final, Protocol

import msgspec

from gateway.adapters.entitlements.conflicts import reconciled
from gateway.adapters.entitlements.following import Following, paused
from gateway.adapters.entitlements.index import EntitlementIndex, File, merge
from gateway.adapters.entitlements.outbox import EntitlementOutbox
from gateway.policy.entitlements.entitlement import Entitlement, MeanRate
from gateway.policy.entitlements.terms import ModelShape
from gateway.ports import Directory, EntitlementEntry, TokenPools
from gateway.records.request import Principal

OLDER: Final = (
    "the configuration file is older than %d entitlements (%s): they are left as the directory "
    "has them. If the file is the right one, touch it and start again"
)
REVOKED: Final = (
    "the configuration file lists a key of entitlement %s that an admin revoked: it stays "
    "revoked. Give it another key"
)

_log = logging.getLogger("sluice.entitlements")


class Keys(Protocol):
    """The keyring: API keys by entitlement."""

    open: bool
    """Whether requests without a key are allowed."""
    unread: set[str]
    """Directories to read before any key opens."""

    def put(self, principal: Principal, digests: Sequence[bytes]) -> None:
        """Replace an entitlement's principal and its keys."""

    def remove(self, entitlement: str) -> None:
        """Forget an entitlement and its keys."""


class EntitlementSync(Following[EntitlementEntry]):
    """Synchronizes this process's registry with the directory."""

    def __init__(
        self,
        *,
        directory: Directory[EntitlementEntry],
        keyring: Keys,
        store: TokenPools,
        models: Mapping[str, ModelShape],
        managed: Container[str],
        changed: Callable[[str], None],
        clock: Callable[[], float],
        chance: Callable[[], float] = random.random,
        rates: Mapping[str, MeanRate] | None = None,
    ) -> None:
        """`models` by name; `changed` is called with each model whose entitlements changed.

        `rates`, by model, receive every entitlement's token rate. Models that are not `managed`
        have keys only; the store gets none of their entitlements.
        """
        super().__init__(directory, clock, chance, of="entitlements")
        self.index = EntitlementIndex()
        self._keyring = keyring
        self._outbox = EntitlementOutbox(store, managed, changed)
        self._models = models
        self._rates = rates or {}
        self.foreign: set[str] = set()
        """Names in the directory whose model is not configured in this process."""
        self._file = File()
        self.on_removal: Callable[[Entitlement], None] = lambda _: None

    async def begin(self, file: File, *, guarded: bool) -> None:
        """Merge the file's entries with the directory's.

        While the directory is away, only the file's entries apply. `guarded`: the directory may
        hold further entitlements, so requests need a key until it has been read.
        """
        self._file = file
        if guarded:
            self._keyring.open = False
        await self.poll()
        await self._apply_alone()

    async def start(self, file: File, *, guarded: bool) -> None:
        """Call `begin`, then poll from now on."""
        await self.begin(file, guarded=guarded)
        self.follow()

    async def adopt(self, file: File) -> None:
        """Merge another version of the file.

        While the directory is away, it applies to what this process knows: a key that left the
        file stops at once.
        """
        async with self.lock:
            self._file = file
            self._merged = False
        await self.poll()
        await self._apply_alone()

    async def _apply_alone(self) -> None:
        """Apply the file here, unless it was merged with the directory's content."""
        async with self.lock:
            if self._merged:
                return
            entries, newest = self.index.entries, self.index.next_created - 1
            merging = merge(self._file, entries, newest, self._removed_unix_s(), str)
            steps = [step async for step in paused(merging)]
            gone = [step.remove.terms.name for step in steps if step.remove is not None]
            gone += [name for name, entry in entries.items() if not self._ours(entry.terms)]
            await self._take([step.put for step in steps if step.put is not None], gone)

    def manage(self, model: str) -> None:
        """Send a model's entitlements to its new token pool with the next poll."""
        for terms in self.index.terms(model):
            self._outbox.add(terms)

    @property
    def _known(self) -> Mapping[str, EntitlementEntry]:
        return self.index.entries

    def _reconciled(self, mine: EntitlementEntry, theirs: EntitlementEntry) -> EntitlementEntry:
        return reconciled(mine, theirs)

    async def _settle(self) -> None:
        await self._outbox.settle(self.index.entries)

    async def _merge(self) -> None:
        state = await self._directory.load()
        # Once an entitlement existed, keys stay required, even if none is left.
        self._keyring.open = state.revision == 0 and not self._file.entries
        by_name, newest = await self._index(state.entries)
        puts, removes = await self._joined(by_name, newest)
        # Also replaces an entry of the same name whose model is not served here.
        versions = {entry.terms.name: entry.version for entry in state.entries}
        puts = [
            msgspec.structs.replace(entry, version=versions.get(entry.terms.name, 0))
            for entry in puts
        ]
        for entry in await self._directory.put(puts):
            by_name[entry.terms.name] = entry
        for entry in removes:
            await self._directory.delete(entry)
            del by_name[entry.terms.name]
        gone = [name for name in self.index.entries if name not in by_name]
        await self._take(by_name.values(), gone)
        self._directory.know(state)
        self._merged = True
        self._keyring.unread.discard(self._of)

    async def _joined(
        self, by_name: Mapping[str, EntitlementEntry], newest: int
    ) -> tuple[list[EntitlementEntry], list[EntitlementEntry]]:
        """The file's changes to the directory: entries to put and entries to remove."""
        puts, removes, older = [], [], []
        removed_unix_s = self._removed_unix_s()
        steps = merge(self._file, by_name, newest, removed_unix_s, lambda: secrets.token_hex(8))
        async for step in paused(steps):
            if step.put is not None:
                puts.append(step.put)
            elif step.remove is not None:
                removes.append(step.remove)
            elif step.older:
                older.append(step.older)
        if older:
            _log.warning(OLDER, len(older), ", ".join(older[:5]))
        listed = {entry.terms.name: entry.key_sha256 for entry in self._file.entries}
        for entry in puts:
            if len(entry.key_sha256) < len(listed[entry.terms.name]):
                _log.warning(REVOKED, entry.terms.name)
        return puts, removes

    def _removed_unix_s(self) -> dict[str, float]:
        """By name, the time of the newest file that removed it."""
        found: dict[str, float] = {}
        for removal in self._directory.tombstones.values():
            found[removal.name] = max(removal.file_unix_s, found.get(removal.name, 0.0))
        return found

    async def _index(
        self, kept: Sequence[EntitlementEntry]
    ) -> tuple[dict[str, EntitlementEntry], int]:
        """Entries of this process's models by name, and the highest `created` of all entries."""
        by_name, newest = {}, 0
        async for entry in paused(kept):
            newest = max(newest, entry.terms.created)
            if self._ours(entry.terms):
                by_name[entry.terms.name] = entry
        return by_name, newest

    def _ours(self, terms: Entitlement) -> bool:
        """Whether this process serves the entitlement's model."""
        if terms.model in self._models:
            self.foreign.discard(terms.name)
            return True
        if terms.name not in self.foreign:
            self.foreign.add(terms.name)
            _log.warning(
                "entitlement %s is for model %s, which is not configured: it is left out",
                terms.name,
                terms.model,
            )
        return False

    def _forget(self, name: str) -> None:
        self.foreign.discard(name)
        self._drop(name)

    def _drop(self, name: str) -> None:
        known = self.index.entries.get(name)
        if known is not None:
            self.index.remove(name)
            self._keyring.remove(name)
            self._count(known.terms, on=False)
            self._outbox.add(known.terms)
            self.on_removal(known.terms)

    def _count(self, terms: Entitlement, *, on: bool) -> None:
        rates = self._rates.get(terms.model)
        if rates is not None:
            (rates.add if on else rates.remove)(terms.tokens_per_s)

    def _enter(self, entry: EntitlementEntry) -> None:
        terms = entry.terms
        known = self.index.entries.get(terms.name)
        if known == entry:
            return
        if not self._ours(terms):
            self._drop(terms.name)
            return
        if known is not None and known.terms.model != terms.model:
            self._outbox.add(known.terms)
        self.index.put(entry)
        self._keyring.put(_principal(terms), [bytes.fromhex(d) for d in entry.key_sha256])
        if known is not None and known.terms == terms:
            return
        if known is not None:
            self._count(known.terms, on=False)
        self._count(terms, on=True)
        self._outbox.add(terms)


def _principal(terms: Entitlement) -> Principal:
    return Principal(
        entitlement=terms.name,
        tenant=terms.tenant,
        service_class=terms.service_class,
        model=terms.model,
        expires_unix_s=terms.expires_unix_s or None,
        suspended=terms.suspended,
        compress=terms.compress,
        trusted_usage=terms.trusted_usage,
        tokens_per_s=terms.tokens_per_s,
        slo_ms=terms.slo_ms,
    )
