"""LoRA adapters of one model: their names, and which workers have them.

- An adapter is a further name of its base model. It uses the base's workers, slots and leases,
  and engines are sent its own name: the base's name would have the base answer.
- A worker whose model list lacks an adapter is no candidate for it. A worker whose list nobody
  could read may have it.
- Among its workers, those that run it already are preferred while they are not crowded, then
  those with a free place for another adapter: an engine with none lets the request wait.
- An adapter that the configuration does not name exists while a worker lists it.
"""

from collections.abc import Collection, Sequence
from typing import Final

from gateway.fleet import fleet
from gateway.fleet.fleet import PoolState
from gateway.scheduling.baselines import CROWDED, SLACK

MAX_ADAPTERS: Final = 4096
"""Most adapters known of one worker; further ones are ignored."""

_Worker = tuple[PoolState, int]


class Adapters:
    """State of one model's adapters."""

    def __init__(self, named: Collection[str] = (), *, discovers: bool = False) -> None:
        """`named` by the configuration; `discovers`: those that engines list exist, too."""
        self.named = frozenset(named)
        self.discovers = discovers
        self.any = bool(self.named)
        """Whether there is one, named or listed; without, requests pay for one look at this."""
        self.doubted: set[_Worker] = set()
        """Workers that answered that they lack an adapter of their list: it is to be read."""
        self._lists: dict[_Worker, frozenset[str]] = {}
        self._listing: dict[str, set[_Worker]] = {}
        """Adapter -> the workers that list it."""
        self._running: dict[_Worker, frozenset[str]] = {}
        self._full: set[_Worker] = set()
        """Workers that run as many adapters as they can."""
        self._barred: dict[tuple[str, PoolState], frozenset[int]] = {}
        """Answers of `barred`, until a list changes."""

    def __contains__(self, name: str) -> bool:
        return name in self.named or name in self._listing

    @property
    def names(self) -> list[str]:
        """All adapters, sorted."""
        return sorted({*self.named, *self._listing})

    def workers(self, name: str, pool: PoolState) -> list[int]:
        """Workers of a pool that list an adapter."""
        return sorted(worker for at, worker in self._listing.get(name, ()) if at is pool)

    def ready(self, name: str, pools: Sequence[PoolState], now_s: float) -> int:
        """Number of workers in the rotation that list an adapter."""
        having = self._listing.get(name, set[_Worker]())
        return sum(
            (pool, worker) in having for pool in pools for worker in fleet.available(pool, now_s)
        )

    def use(self, named: Collection[str], *, discovers: bool) -> None:
        """Use another configuration. Lists are to be read again: other names may count now."""
        self.named, self.discovers = frozenset(named), discovers
        self.any = bool(self.named) or bool(self._listing)
        self.doubted.update(self._lists)

    def listed(self, pool: PoolState, worker: int, names: Collection[str]) -> list[str]:
        """Note the adapters that a worker lists; returns those that it did not list before."""
        place = (pool, worker)
        listed = frozenset(sorted(names)[:MAX_ADAPTERS])
        before = self._lists.get(place, frozenset[str]())
        self.doubted.discard(place)
        if place not in self._lists or listed != before:
            self._note(place, listed)
        return sorted(listed - before)

    def lost(self, pool: PoolState, worker: int, name: str) -> None:
        """Note that a worker answered that it lacks an adapter."""
        place = (pool, worker)
        self._note(place, self._lists.get(place, frozenset[str]()) - {name})
        self.doubted.add(place)

    def forget(self, pool: PoolState, worker: int) -> None:
        """Forget a worker: it is gone."""
        place = (pool, worker)
        self._note(place, frozenset())
        for table in (self._lists, self._running):
            table.pop(place, None)
        self.doubted.discard(place)
        self._full.discard(place)
        self._barred.clear()

    def running(self, pool: PoolState, worker: int, names: Collection[str], most: int) -> None:
        """Note the adapters that a worker runs now, and how many it can run at once."""
        place = (pool, worker)
        self._running[place] = frozenset(names)
        full = len(self._running[place]) >= most > 0
        if full != (place in self._full):
            (self._full.add if full else self._full.discard)(place)
            self._barred.clear()

    def barred(self, name: str, pool: PoolState) -> frozenset[int]:
        """Workers of a pool that a request for an adapter must not go to."""
        barred = self._barred.get((name, pool))
        if barred is None:
            having = {w for at, w in self._listing.get(name, ()) if at is pool}
            lacking = {w for at, w in self._lists if at is pool} - having
            full = {w for at, w in self._full if at is pool}
            barred = frozenset(lacking | full if having - full else lacking)
            self._barred[name, pool] = barred
        return barred

    def warm(self, name: str, state: PoolState, now_s: float) -> int:
        """The least loaded worker that runs an adapter now and is not crowded; -1 for none."""
        most = CROWDED * state.total_active / max(1, len(state.alive)) + SLACK
        best = -1
        for at, worker in self._listing.get(name, ()):
            if at is not state or name not in self._running.get((at, worker), ()):
                continue
            engine, load = state.engine_of[worker], state.active[worker]
            if not engine.up or state.draining[worker] or engine.leaving:
                continue
            if engine.ejected_until_s > now_s or load > most:
                continue
            if best < 0 or load < state.active[best]:
                best = worker
        return best

    def _note(self, place: _Worker, names: frozenset[str]) -> None:
        for gone in self._lists.get(place, frozenset[str]()) - names:
            holders = self._listing[gone]
            holders.discard(place)
            if not holders:
                del self._listing[gone]
        self._lists[place] = names
        for name in names:
            self._listing.setdefault(name, set()).add(place)
        self.any = bool(self.named) or bool(self._listing)
        self._barred.clear()
