"""Keeps the directory, the keyring and the store's token pools consistent.

Rules:
- Every change is written to the directory first and then applied to the roster, the keyring and
  the store. After a failure of the store, the next poll sends the change again.
- A poll every POLL_S reads other replicas' changes. While the directory is away, this process
  uses what it knows and refuses changes; the breaker decides when to ask again.
- Every write names the version that it is based on. If another gateway wrote first, the write is
  refused (`Raced`), and the caller repeats it on the new version.
- The directory tells whether it knows the last write that this process knows. If not, it lost
  writes (Redis failed over to a replica, or came back empty): this process loads everything,
  merges it with its own state (`conflicts`) and writes the result back.
- All changes run under `lock`, in slices, so that requests run in between.
"""

import asyncio
import contextlib
import logging
import random
import secrets
from collections.abc import (
    AsyncIterator,
    Callable,
    Container,
    Iterable,
    Mapping,
    Sequence,
)
from typing import Final, Protocol, TypeVar

import msgspec

from gateway.adapters.background_task import BackgroundTasks
from gateway.adapters.entitlements.conflicts import Repair, deleted_id, repair
from gateway.adapters.entitlements.guarded_directory import GuardedDirectory
from gateway.adapters.entitlements.index import EntitlementIndex, File, merge
from gateway.adapters.entitlements.known_directory import KnownDirectory, Raced
from gateway.adapters.entitlements.outbox import EntitlementOutbox
from gateway.errors import StateFailure
from gateway.policy.entitlements.entitlement import Entitlement, MeanRate
from gateway.policy.entitlements.terms import ModelShape
from gateway.ports import Directory, EntitlementEntry, Removal, TokenPools
from gateway.records.request import Principal

POLL_S: Final = 1.0
ATTEMPTS: Final = 5
"""Attempts at a change when other gateways' changes come first."""
SLICE: Final = 50
"""Entries applied between two pauses; about 1 ms."""
OLDER: Final = (
    "the configuration file is older than %d entitlements (%s): they are left as the directory "
    "has them. If the file is the right one, touch it and start again"
)
REVOKED: Final = (
    "the configuration file lists a key of entitlement %s that an admin revoked: it stays "
    "revoked. Give it another key"
)

_log = logging.getLogger("sluice.entitlements")
_T = TypeVar("_T")


class Keys(Protocol):
    """The keyring: API keys by entitlement."""

    open: bool
    """Whether requests without a key are allowed."""

    def put(self, principal: Principal, digests: Sequence[bytes]) -> None:
        """Replace an entitlement's principal and its keys."""

    def remove(self, entitlement: str) -> None:
        """Forget an entitlement and its keys."""


class EntitlementSync:
    """Synchronizes this process's roster with the directory."""

    def __init__(
        self,
        *,
        directory: Directory,
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
        self.index = EntitlementIndex()
        self.lock = asyncio.Lock()
        self._directory = KnownDirectory(GuardedDirectory(directory, clock, chance))
        self._keyring = keyring
        self._outbox = EntitlementOutbox(store, managed, changed)
        self._models = models
        self._chance = chance
        self._rates = rates or {}
        self.foreign: set[str] = set()
        """Names in the directory whose model is not configured in this process."""
        self._file = File()
        self._merged = False
        self._background = BackgroundTasks()

    @property
    def up(self) -> bool:
        """Whether the directory answers."""
        return self._directory.up

    async def start(self, file: File, *, guarded: bool) -> None:
        """Call `begin`, then poll from now on."""
        await self.begin(file, guarded=guarded)
        self._background.start(self._run())

    async def begin(self, file: File, *, guarded: bool) -> None:
        """Merge the file's entries with the directory's.

        While the directory is away, only the file's entries apply. `guarded`: the directory may
        hold further entitlements, so requests need a key until it has been read.
        """
        self._file = file
        if guarded:
            self._keyring.open = False
        await self.poll()
        if not self._merged:
            async with self.lock:
                steps = merge(file, {}, 0, {}, str)
                await self._take((step.put for step in steps if step.put is not None), ())

    async def adopt(self, file: File) -> None:
        """Merge another version of the file, now or once the directory answers."""
        async with self.lock:
            self._file = file
            self._merged = False
        await self.poll()

    async def close(self) -> None:
        """Stop polling and close the directory."""
        await self._background.close()
        await self._directory.close()

    async def poll(self) -> None:
        """Read other replicas' changes and send the store what it missed. Never raises."""
        async with self.lock:
            try:
                with contextlib.suppress(StateFailure):  # it was logged
                    await self.refresh()
                await self._outbox.settle(self.index.entries)
            except Exception:  # noqa: BLE001 - a defect must not end the task
                _log.exception("keeping entitlements in step failed")

    async def refresh(self) -> None:
        """Read other replicas' changes (under `lock`).

        Raises StateFailure, immediately while the directory is away.
        """
        self._directory.check()
        for _ in range(ATTEMPTS):
            with contextlib.suppress(Raced):
                await (self._follow() if self._merged else self._merge())
                return
        raise StateFailure("other gateways change entitlements all the time")

    async def put(self, entry: EntitlementEntry) -> None:
        """Write an entry over the version that it names, and apply it (under `lock`).

        Raises Raced, StateFailure; then nothing changed.
        """
        (state,) = await self._directory.put([entry])
        await self._take([state], ())

    async def delete(self, entry: EntitlementEntry) -> None:
        """Delete an entry (under `lock`); its requests in flight run to their end.

        Raises Raced, StateFailure; then nothing changed.
        """
        await self._directory.delete(entry)
        await self._take((), [entry.terms.name])

    async def _follow(self) -> None:
        state = await self._directory.changes()
        if state is None:
            await self._restore()
            return
        here = self.index.entries
        removed = [r.name for r in state.removals if _is_of(here.get(r.name), r)]
        dead = [entry for entry in state.entries if deleted_id(entry) in self._directory.tombstones]
        await self._take(
            (e for e in state.entries if deleted_id(e) not in self._directory.tombstones), removed
        )
        for entry in dead:  # a gateway that did not know of the deletion wrote it back
            await self._directory.delete(entry)
        self._directory.know(state)

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

    async def _joined(
        self, by_name: Mapping[str, EntitlementEntry], newest: int
    ) -> tuple[list[EntitlementEntry], list[EntitlementEntry]]:
        """The file's changes to the directory: entries to put and entries to remove."""
        puts, removes, older = [], [], []
        removed_unix_s: dict[str, float] = {}
        for removal in self._directory.tombstones.values():
            removed_unix_s[removal.name] = max(
                removal.file_unix_s, removed_unix_s.get(removal.name, 0.0)
            )
        steps = merge(self._file, by_name, newest, removed_unix_s, lambda: secrets.token_hex(8))
        async for step in _paused(steps):
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

    async def _index(
        self, kept: Sequence[EntitlementEntry]
    ) -> tuple[dict[str, EntitlementEntry], int]:
        """Entries of this process's models by name, and the highest `created` of all entries."""
        by_name, newest = {}, 0
        async for entry in _paused(kept):
            newest = max(newest, entry.terms.created)
            if self._ours(entry.terms):
                by_name[entry.terms.name] = entry
        return by_name, newest

    async def _restore(self) -> None:
        """Write back what the directory lost, and apply what it holds now."""
        state = await self._directory.load()
        _log.warning("the directory of entitlements lost its memory: giving back what is known")
        all_steps = Repair()
        async for step in _paused(repair(self.index.entries, self._directory.tombstones, state)):
            all_steps.puts += step.puts
            all_steps.deletes += step.deletes
            all_steps.gone += step.gone
        by_name = {entry.terms.name: entry for entry in state.entries}
        for entry in await self._directory.put(all_steps.puts):
            by_name[entry.terms.name] = entry
        for entry in all_steps.deletes:
            await self._directory.delete(entry)
            del by_name[entry.terms.name]
        await self._take(by_name.values(), all_steps.gone)
        self._directory.know(state)

    async def _take(self, entries: Iterable[EntitlementEntry], removed: Iterable[str]) -> None:
        """Apply the directory's entries and removals; known ones cost almost nothing."""
        for name in removed:
            self.foreign.discard(name)
            self._forget(name)
        async for entry in _paused(entries):
            self._enter(entry)
        await self._outbox.settle(self.index.entries)

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
        known = self.index.entries.get(name)
        if known is not None:
            self.index.remove(name)
            self._keyring.remove(name)
            self._count(known.terms, on=False)
            self._outbox.add(known.terms)

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
            self._forget(terms.name)
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

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(POLL_S * (0.9 + 0.2 * self._chance()))
            await self.poll()


async def _paused(items: Iterable[_T]) -> AsyncIterator[_T]:
    """The items, with a pause for requests after every slice."""
    for number, item in enumerate(items):
        if number % SLICE == SLICE - 1:
            await asyncio.sleep(0)
        yield item


def _is_of(known: EntitlementEntry | None, removal: Removal) -> bool:
    """Whether a removal applies to the known entry; it does not if the entry is a later one.

    A known entry with another id that is older was replaced by the removed one, so it goes too.
    """
    return known is None or known.id == removal.id or known.version < removal.revision


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
