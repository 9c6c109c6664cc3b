"""Applies the engines that sources name (configuration, discovery, an admin) to the pools.

An engine is in a pool while any source names it. When the last one drops it, it gets no new
requests, what runs there finishes, and then all that is known of it goes: its place in the pool,
probes, metrics, prefixes, connections. An engine named again before that simply stays.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import Final

from gateway.fleet import fleet, members, model_runtime
from gateway.fleet.fleet import EngineState
from gateway.fleet.model_runtime import ModelRuntime, Pool
from gateway.fleet.probes import Prober
from gateway.metrics import Metrics
from gateway.records.attempt import WorkerAddress

CONFIGURED: Final = "the configuration"
ADMIN: Final = "an admin"
_SPREAD: Final = 0.001
"""Seconds between the first probes of engines that come together."""
VACATE_BATCH: Final = 32
"""Engines removed at once, so that requests need not wait."""

_log = logging.getLogger("sluice.workers")

Engine = tuple[WorkerAddress, ...]
"""An engine: an address for each rank, or one."""


def engine_id(engine: Engine) -> str:
    """host:port and the path, if any: the workers' ids without the rank."""
    return engine[0].id.partition("#")[0]


class Rotation:
    """The engines of all pools, and who named them."""

    def __init__(
        self,
        models: Iterable[ModelRuntime],
        prober: Prober,
        metrics: Metrics,
        clock: Callable[[], float],
        *,
        disconnect: Callable[[WorkerAddress], None],
        on_join: Callable[[str], None] = lambda _worker: None,
    ) -> None:
        """`disconnect` closes the connections to an address; `on_join` gets each new worker's id.

        `clock` is the requests' clock.
        """
        self._prober = prober
        self._metrics = metrics
        self._clock = clock
        self._disconnect = disconnect
        self._on_join = on_join
        self._lock = asyncio.Lock()
        self._models: dict[str, ModelRuntime] = {}
        self._engines: dict[Pool, dict[str, EngineState]] = {}
        """By pool, the engines by name; without those that leave because another took the name."""
        for served in models:
            self._follow(served)

    def _follow(self, served: ModelRuntime) -> list[Pool]:
        """Serve a model; returns its pools that are new here."""
        self._models[served.name] = served
        new = [pool for pool in served.fleet.pools if pool not in self._engines]
        for pool in new:
            self._engines[pool] = {engine_id(_addresses(pool, e)): e for e in pool.engines}
            for engine in pool.engines:
                engine.sources.add(CONFIGURED)
        return new

    def _pool(self, model: str, name: str) -> tuple[ModelRuntime, Pool] | None:
        """A model and its pool of this name, if there is one now."""
        served = self._models.get(model)
        for pool in () if served is None else served.fleet.pools:
            if served is not None and pool.name == name:
                return served, pool
        return None

    def sources(self, pool: Pool) -> Mapping[str, frozenset[str]]:
        """Engine -> who names it; leaving engines have nobody."""
        return {name: frozenset(engine.sources) for name, engine in self._engines[pool].items()}

    async def apply_to(self, model: str, pool: str, source: str, engines: Sequence[Engine]) -> None:
        """Make these the engines that a source names in a pool; requests run in between.

        Nothing if there is no pool of that name now.
        """
        async with self._lock:
            place = self._pool(model, pool)
            if place is None:
                return
            wanted = {engine_id(engine): engine for engine in engines}
            present = self._engines[place[1]]
            before = [name for name, engine in present.items() if source in engine.sources]
            # The new ones first: in between requests run, and must find an engine.
            for number, (name, engine) in enumerate(wanted.items()):
                self._name(*place, source, name, engine, number * _SPREAD)
                await asyncio.sleep(0)
            for name in before:
                if name not in wanted:
                    self.remove(*place, source, name)
                    await asyncio.sleep(0)

    def still(self) -> asyncio.Lock:
        """Held while models are replaced: no source's set is applied meanwhile."""
        return self._lock

    def replace(self, before: ModelRuntime | None, served: ModelRuntime | None) -> list[Engine]:
        """Serve a model in place of `before`; returns the engines of its pools that are gone.

        Pools that both have keep their engines. The others' stay as they are: whoever still waits
        for them may bind there.
        """
        gone: list[Engine] = []
        if before is not None:
            del self._models[before.name]
            for pool in before.fleet.pools:
                if served is None or pool not in served.fleet.pools:
                    gone += [_addresses(pool, engine) for engine in pool.engines]
                    del self._engines[pool]
                    for engine in pool.engines:
                        self._prober.leave(pool, engine.ranks[0])
        if served is not None:
            new = self._follow(served)
            self._prober.follow(served, served.fleet.pools)
            for pool in new:
                for number, engine in enumerate(pool.engines):
                    self._prober.watch(pool, engine.ranks[0], number * _SPREAD)
        return gone

    def close_connections(self, engines: Iterable[Engine]) -> None:
        """Close the connections to engines of pools that are gone, unless others have them."""
        used = {
            address
            for pool in self._engines
            for e in pool.engines
            for address in _addresses(pool, e)
        }
        for address in chain.from_iterable(engines):
            if address not in used:
                self._disconnect(address)

    def add(self, served: ModelRuntime, pool: Pool, source: str, engine: Engine) -> bool:
        """Name one more engine; False if others name it with another key, model or ranks."""
        return self._name(served, pool, source, engine_id(engine), engine, 0.0)

    def sweep(self) -> None:
        """Remove leaving engines that serve nothing any more, at most VACATE_BATCH."""
        left = VACATE_BATCH
        for served in self._models.values():
            for pool in served.fleet.pools:
                leaving = [engine.ranks[0] for engine in pool.engines if engine.leaving]
                gone = list(islice(pool.finished(leaving), left))
                left -= len(gone)
                if gone:
                    model_runtime.vacate(served, pool, gone, self._clock())
                for worker in gone:
                    engine = pool.engine_of[worker]
                    addresses = _addresses(pool, engine)
                    name = engine_id(addresses)
                    if self._engines[pool].get(name) is engine:
                        del self._engines[pool][name]
                    self._prober.leave(pool, worker)
                    for address in addresses:
                        self._disconnect(address)
                        self._metrics.ejections.values.pop((pool.name, address.id), None)
                    _log.info("worker %s of %s/%s is gone", name, served.name, pool.name)

    def _name(
        self,
        served: ModelRuntime,
        pool: Pool,
        source: str,
        name: str,
        addresses: Engine,
        delay_s: float,
    ) -> bool:
        engine = self._engines[pool].get(name)
        if engine is not None and _addresses(pool, engine) == addresses:
            engine.sources.add(source)
            if engine.leaving:
                members.stay(pool, engine.ranks[0])
                _log.info("worker %s of %s stays: %s names it again", name, served.name, source)
            return True
        if engine is not None:  # another key, served name or number of ranks: another engine
            if engine.sources - {source, ADMIN}:
                return False  # who named it first decides, but an admin only until another does
            self._leave(served, pool, name, engine)
        ranks = pool.join(addresses, self._clock())
        self._engines[pool][name] = pool.engine_of[ranks[0]]
        pool.engine_of[ranks[0]].sources.add(source)
        for address in addresses:
            self._on_join(address.id)
        self._prober.watch(pool, ranks[0], delay_s)
        _log.info("worker %s joins %s/%s: %s names it", name, served.name, pool.name, source)
        return True

    def remove(self, served: ModelRuntime, pool: Pool, source: str, name: str) -> None:
        """Name an engine no more."""
        engine = self._engines[pool].get(name)
        if engine is None or source not in engine.sources:
            return  # an admin was faster
        engine.sources.remove(source)
        if not engine.sources:
            self._leave(served, pool, name, engine)

    def _leave(self, served: ModelRuntime, pool: Pool, name: str, engine: EngineState) -> None:
        engine.sources.clear()
        members.leave(pool, engine.ranks[0])
        running = sum(pool.active[rank] for rank in engine.ranks)
        place = f"{served.name}/{pool.name}"
        _log.info("worker %s leaves %s: %d sequences finish there", name, place, running)


class RotationLog:
    """Logs every change of a worker's state once, with cause and undo, whoever saw it.

    Probes, traffic and the breaker change a worker's state; none of them logs it. Draining is
    logged by the audit.
    """

    def __init__(self) -> None:
        self._last: dict[Pool, tuple[int, dict[str, str]]] = {}
        """The pool's revision, and its workers that were out -> why."""

    def look(self, models: Iterable[ModelRuntime], now_s: float) -> None:
        """Log what changed since the last look; about once a second."""
        last = self._last
        self._last = {}
        for served in models:
            for pool in served.fleet.pools:
                revision, before = last.get(pool, (-1, {}))
                if revision == pool.revision and not before:
                    now = before
                else:
                    now = fleet.out_of_rotation(pool, now_s)
                    place = f"{served.name}/{pool.name}"
                    for name in dict.fromkeys(chain(before, now)):
                        if name not in now:
                            _log.info("worker %s of %s is back in the rotation", name, place)
                        elif now[name] != before.get(name):
                            out = "worker %s of %s is out of the rotation: %s"
                            _log.warning(out, name, place, now[name])
                self._last[pool] = (pool.revision, now)


def _addresses(pool: Pool, engine: EngineState) -> Engine:
    return tuple([pool.addresses[rank] for rank in engine.ranks])
