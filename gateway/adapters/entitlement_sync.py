"""Keeps directory, keyring and the store's token pools saying the same.

Rules:
- Every change goes to the directory first; what it kept is then taken into the roster, the
  keyring and the store. A store that fails is told again with the next poll.
- A poll every POLL_S hears of other replicas' changes. While the directory is away this process
  goes on with what it knows, and changes are refused; the breaker says when to ask again.
- A directory that lost its memory is given back what this process knows.
- All that changes runs under `lock`, in slices, so that requests go between.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import (
    AsyncIterator,
    Callable,
    Container,
    Iterable,
    Mapping,
    Sequence,
)
from typing import Final, Protocol, TypeVar

from gateway.adapters.guarded_directory import GuardedDirectory
from gateway.adapters.roster import Roster, merge
from gateway.adapters.store_dues import StoreDues
from gateway.domain import Principal
from gateway.errors import StateFailure
from gateway.policy.entitlement_terms import ModelShape
from gateway.policy.entitlements import Entitlement
from gateway.policy.rates import MeanRate
from gateway.ports import Directory, EntitlementEntry, TokenPools

POLL_S: Final = 1.0
SLICE: Final = 50
"""Entries taken between two pauses: some 1 ms."""
PUT_AT_ONCE: Final = 500
FORGETS_S: Final = 3_600.0
"""Longer out of touch than this, all is loaded anew: removals may have been missed."""

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
        self._directory = GuardedDirectory(directory, clock, chance)
        self._keyring = keyring
        self._dues = StoreDues(store, managed, changed)
        self._models = models
        self._chance = chance
        self._rates = rates or {}
        self.foreign: set[str] = set()
        """Names in the directory whose model is not configured here: another fleet's, or gone."""
        self._file: Sequence[EntitlementEntry] = ()
        self._merged = False
        self._revision = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def up(self) -> bool:
        """Whether the directory answers."""
        return self._directory.up

    async def start(self, file: Sequence[EntitlementEntry], *, guarded: bool) -> None:
        """`begin`, and keep in step from now on."""
        await self.begin(file, guarded=guarded)
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def begin(self, file: Sequence[EntitlementEntry], *, guarded: bool) -> None:
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
                steps = merge(file, {}, 0)
                await self._take((step for step in steps if isinstance(step, EntitlementEntry)), ())

    async def close(self) -> None:
        """Stop polling and let go of the directory."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
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
        if not self._merged:
            await self._merge()
            return
        if self._directory.silence_s > FORGETS_S:
            await self._load()
            return
        newest, entries, removed = await self._directory.changes(self._revision)
        if newest < self._revision:
            await self._restore()
            return
        self._revision = newest
        await self._take(entries, removed)

    async def put(self, entry: EntitlementEntry) -> None:
        """Keep an entry and act on it (under `lock`). Raises StateFailure: nothing changed."""
        await self._directory.put(entry)
        await self._take([entry], ())

    async def delete(self, name: str) -> None:
        """Forget an entry (under `lock`); what it has in flight ends by itself.

        Raises StateFailure: nothing changed.
        """
        await self._directory.delete(name)
        await self._take((), [name])

    async def _merge(self) -> None:
        revision, kept = await self._directory.load()
        # Once keyed it stays closed, whether or not any entitlement is left.
        self._keyring.open = revision == 0 and not self._file
        by_name, newest = await self._index(kept)
        for name in await self._join(by_name, newest):
            await self._directory.delete(name)
        await self._replace(by_name, revision)
        self._merged = True

    async def _join(self, by_name: dict[str, EntitlementEntry], newest: int) -> list[str]:
        """Change what is kept by the file, the directory's too but for removals: their names."""
        entries, gone = [], []
        async for step in _paused(merge(self._file, dict(by_name), newest)):
            if isinstance(step, str):
                gone.append(step)
                del by_name[step]
            elif step is not None:
                entries.append(step)
                by_name[step.terms.name] = step
        await self._put_all(entries)
        return gone

    async def _load(self) -> None:
        revision, kept = await self._directory.load()
        by_name, _ = await self._index(kept)
        await self._replace(by_name, revision)

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
        revision, kept = await self._directory.load()
        _log.warning("the directory of entitlements lost its memory: giving back what is known")
        by_name, _ = await self._index(kept)
        lost = [e for name, e in self.roster.entries.items() if name not in by_name]
        await self._put_all(lost)
        self._revision = revision
        await self._take(kept, ())

    async def _put_all(self, entries: Sequence[EntitlementEntry]) -> None:
        for start in range(0, len(entries), PUT_AT_ONCE):
            await self._directory.put(*entries[start : start + PUT_AT_ONCE])
            await asyncio.sleep(0)

    async def _replace(self, by_name: Mapping[str, EntitlementEntry], revision: int) -> None:
        """Make these the entries there are."""
        gone = [name for name in self.roster.entries if name not in by_name]
        await self._take(by_name.values(), gone)
        self._revision = revision

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
        if known is not None:
            self._count(known.terms, on=False)
        self._count(terms, on=True)
        self.roster.put(entry)
        self._keyring.put(_principal(terms), [bytes.fromhex(d) for d in entry.key_sha256])
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
