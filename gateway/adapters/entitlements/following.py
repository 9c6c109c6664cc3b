"""Follows a directory: this process's copy of its entries, and the way that changes take.

Rules:
- Every change is written to the directory first and then applied here.
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
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Final, Generic, TypeVar

from gateway.adapters.background_task import BackgroundTasks
from gateway.adapters.entitlements.conflicts import Repair, deleted_id, repair
from gateway.adapters.entitlements.guarded_directory import GuardedDirectory
from gateway.adapters.entitlements.known_directory import KnownDirectory, Raced
from gateway.errors import StateFailure
from gateway.ports import Directory, Entry, Removal, StoredEntry

POLL_S: Final = 1.0
ATTEMPTS: Final = 5
"""Attempts at a change when other gateways' changes come first."""
SLICE: Final = 50
"""Entries applied between two pauses; about 1 ms."""

_log = logging.getLogger("sluice.entitlements")
_T = TypeVar("_T")


class Following(ABC, Generic[Entry]):
    """Keeps this process's entries the same as a directory's."""

    def __init__(
        self,
        directory: Directory[Entry],
        clock: Callable[[], float],
        chance: Callable[[], float],
        *,
        of: str,
    ) -> None:
        """`clock` monotonic, in seconds; `chance` gives [0, 1); `of` is for messages."""
        self.lock = asyncio.Lock()
        self._of = of
        self._directory = KnownDirectory(GuardedDirectory(directory, clock, chance, of))
        self._chance = chance
        self._merged = False
        """Whether the directory's content was read since the start or the last reload."""
        self._background = BackgroundTasks()

    @property
    @abstractmethod
    def _known(self) -> Mapping[str, Entry]:
        """The entries of this process, by name."""

    @abstractmethod
    def _enter(self, entry: Entry) -> None:
        """Apply a new or changed entry."""

    @abstractmethod
    def _forget(self, name: str) -> None:
        """Apply a removal; an unknown name is no failure."""

    @abstractmethod
    def _reconciled(self, mine: Entry, theirs: Entry) -> Entry:
        """Merge two states of one name into one based on the version of `theirs`."""

    @abstractmethod
    async def _merge(self) -> None:
        """Load the whole content and apply it; then `_merged` is true."""

    async def _settle(self) -> None:
        """Pass on what the last changes mean elsewhere."""

    @property
    def up(self) -> bool:
        """Whether the directory answers."""
        return self._directory.up

    def follow(self) -> None:
        """Poll from now on."""
        self._background.start(self._run())

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
                await self._settle()
            except Exception:  # noqa: BLE001 - a defect must not end the task
                _log.exception("keeping %s in step failed", self._of)

    async def refresh(self) -> None:
        """Read other replicas' changes (under `lock`).

        Raises StateFailure, immediately while the directory is away.
        """
        self._directory.check()
        for _ in range(ATTEMPTS):
            with contextlib.suppress(Raced):
                await (self._follow() if self._merged else self._merge())
                return
        raise StateFailure(f"other gateways change {self._of} all the time")

    async def put(self, entry: Entry) -> None:
        """Write an entry over the version that it names, and apply it (under `lock`).

        Raises Raced, StateFailure; then nothing changed.
        """
        (state,) = await self._directory.put([entry])
        await self._take([state], ())

    async def delete(self, entry: Entry) -> None:
        """Delete an entry (under `lock`); its requests in flight run to their end.

        Raises Raced, StateFailure; then nothing changed.
        """
        await self._directory.delete(entry)
        await self._take((), [entry.name])

    async def _follow(self) -> None:
        state = await self._directory.changes()
        if state is None:
            await self._restore()
            return
        here = self._known
        removed = [r.name for r in state.removals if _is_of(here.get(r.name), r)]
        dead = [entry for entry in state.entries if deleted_id(entry) in self._directory.tombstones]
        await self._take(
            (e for e in state.entries if deleted_id(e) not in self._directory.tombstones), removed
        )
        for entry in dead:  # a gateway that did not know of the deletion wrote it back
            await self._directory.delete(entry)
        self._directory.know(state)

    async def _restore(self) -> None:
        """Write back what the directory lost, and apply what it holds now."""
        state = await self._directory.load()
        _log.warning("the directory of %s lost its memory: giving back what is known", self._of)
        all_steps: Repair[Entry] = Repair()
        steps = repair(self._known, self._directory.tombstones, state, self._reconciled)
        async for step in paused(steps):
            all_steps.puts += step.puts
            all_steps.deletes += step.deletes
            all_steps.gone += step.gone
        by_name = {entry.name: entry for entry in state.entries}
        for entry in await self._directory.put(all_steps.puts):
            by_name[entry.name] = entry
        for entry in all_steps.deletes:
            await self._directory.delete(entry)
            del by_name[entry.name]
        await self._take(by_name.values(), all_steps.gone)
        self._directory.know(state)

    async def _take(self, entries: Iterable[Entry], removed: Iterable[str]) -> None:
        """Apply the directory's entries and removals; known ones cost almost nothing."""
        for name in removed:
            self._forget(name)
        async for entry in paused(entries):
            self._enter(entry)
        await self._settle()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(POLL_S * (0.9 + 0.2 * self._chance()))
            await self.poll()


async def paused(items: Iterable[_T]) -> AsyncIterator[_T]:
    """The items, with a pause for requests after every slice."""
    for number, item in enumerate(items):
        if number % SLICE == SLICE - 1:
            await asyncio.sleep(0)
        yield item


def _is_of(known: StoredEntry | None, removal: Removal) -> bool:
    """Whether a removal applies to the known entry; it does not if the entry is a later one.

    A known entry with another id that is older was replaced by the removed one, so it goes too.
    """
    return known is None or known.id == removal.id or known.version < removal.revision
