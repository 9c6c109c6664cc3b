"""Keeps directory, keyring and the store's token pools saying the same.

Rules:
- Every change goes to the directory first; what it kept is then taken into the roster, the
  keyring and the store. A store that fails is told again with the next poll.
- A poll every POLL_S hears of other replicas' changes. While the directory is away this process
  goes on with what it knows, and changes are refused; the breaker says when to ask again.
- Every write names the version it is based on; one that lost to another's is refused (`Raced`)
  and made again by whoever asked for it, on what the other left.
- The directory tells whether it knows the last write that this process knows. Where it does not
  (Redis failed over to a replica, or came back empty) it lost writes: all is read, what this
  process knows is brought together with it (`reconcile`) and given back.
- All that changes runs under `lock`, in slices, so that requests go between.
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
from gateway.adapters.entitlements.conflicts import Repair, grave, repair
from gateway.adapters.entitlements.guarded_directory import GuardedDirectory
from gateway.adapters.entitlements.index import File, Roster, merge
from gateway.adapters.entitlements.known_directory import KnownDirectory, Raced
from gateway.adapters.entitlements.outbox import StoreDues
from gateway.errors import StateFailure
from gateway.policy.entitlements.entitlement import Entitlement, MeanRate
from gateway.policy.entitlements.terms import ModelShape
from gateway.ports import Directory, EntitlementEntry, Removal, TokenPools
from gateway.records.request import Principal

POLL_S: Final = 1.0
ATTEMPTS: Final = 5
"""How often a change is made again after another gateway's came first."""
SLICE: Final = 50
"""Entries taken between two pauses: some 1 ms."""
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
    """Who may come in, by key."""

    open: bool
    """Whether anybody may, without a key."""

    def put(self, principal: Principal, digests: Sequence[bytes]) -> None:
        """Replace an entitlement's principal and its keys."""

    def remove(self, entitlement: str) -> None:
        """Forget an entitlement and its keys."""


class EntitlementSync:
    """The roster of this process, kept in step."""

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
        """`models` by name; `changed` hears each model whose entitlements changed.

        `rates`, by model, are told of every entitlement's token rate.

        Of models that are not `managed` the store is told nothing: they have keys only.
        """
        self.roster = Roster()
        self.lock = asyncio.Lock()
        self._directory = KnownDirectory(GuardedDirectory(directory, clock, chance))
        self._keyring = keyring
        self._dues = StoreDues(store, managed, changed)
        self._models = models
        self._chance = chance
        self._rates = rates or {}
        self.foreign: set[str] = set()
        """Names in the directory whose model is not configured here: another fleet's, or gone."""
        self._file = File()
        self._merged = False
        self._background = BackgroundTasks()

    @property
    def up(self) -> bool:
        """Whether the directory answers."""
        return self._directory.up

    async def start(self, file: File, *, guarded: bool) -> None:
        """`begin`, and keep in step from now on."""
        await self.begin(file, guarded=guarded)
        self._background.start(self._run())

    async def begin(self, file: File, *, guarded: bool) -> None:
        """Join the file's entries with what is kept.

        With the directory away the file's entries serve alone until it is back. `guarded`: the
        directory may hold entitlements that the file does not, so that nobody comes in without
        a key before that is known.
        """
        self._file = file
        if guarded:
            self._keyring.open = False
        await self.poll()
        if not self._merged:
            async with self.lock:
                steps = merge(file, {}, 0, {}, str)
                await self._take((step.put for step in steps if step.put is not None), ())

    async def close(self) -> None:
        """Stop polling and let go of the directory."""
        await self._background.close()
        await self._directory.close()

    async def poll(self) -> None:
        """Hear of others' changes and tell the store what it missed. Never raises."""
        async with self.lock:
            try:
                with contextlib.suppress(StateFailure):  # it was logged
                    await self.refresh()
                await self._dues.settle(self.roster.entries)
            except Exception:  # noqa: BLE001 - a defect must not end the task
                _log.exception("keeping entitlements in step failed")

    async def refresh(self) -> None:
        """Hear of others' changes (under `lock`). Raises StateFailure, at once while it is away."""
        self._directory.check()
        for _ in range(ATTEMPTS):
            with contextlib.suppress(Raced):
                await (self._follow() if self._merged else self._merge())
                return
        raise StateFailure("other gateways change entitlements all the time")

    async def put(self, entry: EntitlementEntry) -> None:
        """Keep an entry of the version it was based on, and act on it (under `lock`).

        Raises Raced, StateFailure: nothing changed.
        """
        (kept,) = await self._directory.put([entry])
        await self._take([kept], ())

    async def delete(self, entry: EntitlementEntry) -> None:
        """Forget an entry (under `lock`); what it has in flight ends by itself.

        Raises Raced, StateFailure: nothing changed.
        """
        await self._directory.delete(entry)
        await self._take((), [entry.terms.name])

    async def _follow(self) -> None:
        kept = await self._directory.changes()
        if kept is None:
            await self._restore()
            return
        here = self.roster.entries
        removed = [r.name for r in kept.removals if _is_of(here.get(r.name), r)]
        dead = [entry for entry in kept.entries if grave(entry) in self._directory.graves]
        await self._take(
            (e for e in kept.entries if grave(e) not in self._directory.graves), removed
        )
        for entry in dead:  # a gateway that had not heard of its deletion gave it back
            await self._directory.delete(entry)
        self._directory.know(kept)

    async def _merge(self) -> None:
        kept = await self._directory.load()
        # Once keyed it stays closed, whether or not any entitlement is left.
        self._keyring.open = kept.revision == 0 and not self._file.entries
        by_name, newest = await self._index(kept.entries)
        puts, removes = await self._joined(by_name, newest)
        # A namesake of a model that is not served here gives way, too.
        versions = {entry.terms.name: entry.version for entry in kept.entries}
        puts = [
            msgspec.structs.replace(entry, version=versions.get(entry.terms.name, 0))
            for entry in puts
        ]
        for entry in await self._directory.put(puts):
            by_name[entry.terms.name] = entry
        for entry in removes:
            await self._directory.delete(entry)
            del by_name[entry.terms.name]
        gone = [name for name in self.roster.entries if name not in by_name]
        await self._take(by_name.values(), gone)
        self._directory.know(kept)
        self._merged = True

    async def _joined(
        self, by_name: Mapping[str, EntitlementEntry], newest: int
    ) -> tuple[list[EntitlementEntry], list[EntitlementEntry]]:
        """What the file changes of what is kept: entries to put, and to remove."""
        puts, removes, older = [], [], []
        removed_unix_s: dict[str, float] = {}
        for removal in self._directory.graves.values():
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
        """Entries of models that are served here by name, and the highest number of all."""
        by_name, newest = {}, 0
        async for entry in _paused(kept):
            newest = max(newest, entry.terms.created)
            if self._ours(entry.terms):
                by_name[entry.terms.name] = entry
        return by_name, newest

    async def _restore(self) -> None:
        """Give back what the directory lost, and take what it has instead."""
        kept = await self._directory.load()
        _log.warning("the directory of entitlements lost its memory: giving back what is known")
        all_steps = Repair()
        async for step in _paused(repair(self.roster.entries, self._directory.graves, kept)):
            all_steps.puts += step.puts
            all_steps.deletes += step.deletes
            all_steps.gone += step.gone
        by_name = {entry.terms.name: entry for entry in kept.entries}
        for entry in await self._directory.put(all_steps.puts):
            by_name[entry.terms.name] = entry
        for entry in all_steps.deletes:
            await self._directory.delete(entry)
            del by_name[entry.terms.name]
        await self._take(by_name.values(), all_steps.gone)
        self._directory.know(kept)

    async def _take(self, entries: Iterable[EntitlementEntry], removed: Iterable[str]) -> None:
        """Act on what the directory keeps; what is known already costs next to nothing."""
        for name in removed:
            self.foreign.discard(name)
            self._forget(name)
        async for entry in _paused(entries):
            self._enter(entry)
        await self._dues.settle(self.roster.entries)

    def _ours(self, terms: Entitlement) -> bool:
        """Whether its model is served here."""
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
        known = self.roster.entries.get(name)
        if known is not None:
            self.roster.remove(name)
            self._keyring.remove(name)
            self._count(known.terms, on=False)
            self._dues.add(known.terms)

    def _count(self, terms: Entitlement, *, on: bool) -> None:
        rates = self._rates.get(terms.model)
        if rates is not None:
            (rates.add if on else rates.remove)(terms.tokens_per_s)

    def _enter(self, entry: EntitlementEntry) -> None:
        terms = entry.terms
        known = self.roster.entries.get(terms.name)
        if known == entry:
            return
        if not self._ours(terms):
            self._forget(terms.name)
            return
        if known is not None and known.terms.model != terms.model:
            self._dues.add(known.terms)
        self.roster.put(entry)
        self._keyring.put(_principal(terms), [bytes.fromhex(d) for d in entry.key_sha256])
        if known is not None and known.terms == terms:
            return
        if known is not None:
            self._count(known.terms, on=False)
        self._count(terms, on=True)
        self._dues.add(terms)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(POLL_S * (0.9 + 0.2 * self._chance()))
            await self.poll()


async def _paused(items: Iterable[_T]) -> AsyncIterator[_T]:
    """The items, with others' turns after every slice."""
    for number, item in enumerate(items):
        if number % SLICE == SLICE - 1:
            await asyncio.sleep(0)
        yield item


def _is_of(known: EntitlementEntry | None, removal: Removal) -> bool:
    """Whether what is known, if anything, went with what was removed: no later namesake did.

    An earlier one of another id had been replaced by what was removed.
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
        tokens_per_s=terms.tokens_per_s,
    )
