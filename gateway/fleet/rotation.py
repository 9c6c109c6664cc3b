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

from gateway.background_task import BackgroundTasks
from gateway.fleet import fleet, members, model_workers
from gateway.fleet.fleet import PoolState
from gateway.fleet.model_runtime import ModelRuntime
from gateway.fleet.probes import Prober
from gateway.metrics import Metrics
from gateway.records.attempt import WorkerAddress

CONFIGURED: Final = "the configuration"
ADMIN: Final = "an admin"
SWEEP_S: Final = 0.25
_SPREAD: Final = 0.001
"""Seconds between the first probes of engines that come together."""
VACATE_BATCH: Final = 32
"""Engines removed between two turns of the requests."""

_log = logging.getLogger("sluice.workers")

Engine = tuple[WorkerAddress, ...]
"""An engine: an address for each rank, or one."""


def engine_id(engine: Engine) -> str:
    """host:port and the path, if any: the workers' ids without the rank."""
    return engine[0].id.partition("#")[0]


class _Known:
    """An engine of a pool."""

    __slots__ = ("addresses", "leaving", "sources", "worker")

    def __init__(self, addresses: Engine, worker: int, source: str) -> None:
        self.addresses = addresses
        self.worker = worker
        """Its first place."""
        self.sources = {source}
        self.leaving = False


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
        self._models = {served.name: served for served in models}
        self._prober = prober
        self._metrics = metrics
        self._clock = clock
        self._disconnect = disconnect
        self._on_join = on_join
        self._lock = asyncio.Lock()
        self._known: dict[tuple[str, int], dict[str, _Known]] = {
            (served.name, pool): _configured(served, pool)
            for served in self._models.values()
            for pool in range(len(served.fleet.pools))
        }
        self._background = BackgroundTasks()

    async def start(self) -> None:
        """Remove engines that finished, from now on."""
        self._background.start(self._run())

    async def close(self) -> None:
        await self._background.close()

    def sources(self, model: str, pool: int) -> Mapping[str, frozenset[str]]:
        """Engine -> who names it; leaving engines have nobody."""
        return {name: frozenset(known.sources) for name, known in self._known[model, pool].items()}

    async def apply_to(self, model: str, pool: str, source: str, engines: Sequence[Engine]) -> None:
        """Make these the engines that a source names in a pool; requests run in between.

        Nothing if there is no pool of that name now.
        """
        async with self._lock:
            served = self._models.get(model)
            names = [] if served is None else [state.name for state in served.fleet.pools]
            if pool in names:
                await self._apply(model, names.index(pool), source, engines)

    def still(self) -> asyncio.Lock:
        """Held while models are replaced: no source's set is applied meanwhile."""
        return self._lock

    def replace(self, before: ModelRuntime | None, served: ModelRuntime | None) -> list[Engine]:
        """Serve a model in place of `before`; returns the engines of its pools that are gone.

        Pools that both have keep their engines. The others' stay as they are: whoever still waits
        for them may bind there.
        """
        known: dict[int, dict[str, _Known]] = {}
        if before is not None:
            del self._models[before.name]
            for pool, state in enumerate(before.fleet.pools):
                known[id(state)] = self._known.pop((before.name, pool))
                if served is None or state not in served.fleet.pools:
                    for ranks in state.engines:
                        self._prober.leave(state, ranks[0])
        if served is not None:
            self._models[served.name] = served
            self._prober.follow([served])
            for pool, state in enumerate(served.fleet.pools):
                kept = known.pop(id(state), None)
                self._known[served.name, pool] = kept or _configured(served, pool)
                if kept is None:
                    for number, ranks in enumerate(state.engines):
                        self._prober.watch(served, pool, ranks[0], number * _SPREAD)
        return [each.addresses for engines in known.values() for each in engines.values()]

    def close_connections(self, engines: Iterable[Engine]) -> None:
        """Close the connections to engines of pools that are gone, unless others have them."""
        used = {
            address
            for known in self._known.values()
            for each in known.values()
            for address in each.addresses
        }
        for engine in engines:
            for address in engine:
                if address not in used:
                    self._disconnect(address)

    async def _apply(self, model: str, pool: int, source: str, engines: Sequence[Engine]) -> None:
        wanted = {engine_id(engine): engine for engine in engines}
        before = [n for n, known in self._known[model, pool].items() if source in known.sources]
        # The new ones first: in between requests run, and must find an engine.
        for number, (name, engine) in enumerate(wanted.items()):
            self._name(model, pool, source, name, engine, number * _SPREAD)
            await asyncio.sleep(0)
        for name in before:
            if name not in wanted:
                self.remove(model, pool, source, name)
                await asyncio.sleep(0)

    def add(self, model: str, pool: int, source: str, engine: Engine) -> bool:
        """Name one more engine; False if others name it with another key, model or ranks."""
        return self._name(model, pool, source, engine_id(engine), engine, 0.0)

    def sweep(self) -> bool:
        """Remove leaving engines that serve nothing any more, at most VACATE_BATCH.

        Returns whether there may be more of them.
        """
        left = VACATE_BATCH
        for (model, pool), engines in self._known.items():
            served = self._models[model]
            leaving = {known.worker: name for name, known in engines.items() if known.leaving}
            gone = list(islice(model_workers.finished(served, pool, leaving), left))
            if gone:
                self._vacate(served, pool, [leaving[worker] for worker in gone])
            left -= len(gone)
        return not left

    def _name(
        self, model: str, pool: int, source: str, name: str, engine: Engine, delay_s: float
    ) -> bool:
        engines, served = self._known[model, pool], self._models[model]
        known = engines.get(name)
        if known is not None and known.addresses == engine:
            known.sources.add(source)
            if known.leaving:
                known.leaving = False
                members.stay(served.fleet.pools[pool], known.worker)
                _log.info("worker %s of %s stays: %s names it again", name, model, source)
            return True
        if known is not None:  # another key, served name or number of ranks: another engine
            if known.sources - {source, ADMIN}:
                return False  # who named it first decides, but an admin only until another does
            self._leave(served, pool, name, known)
            engines[f"{name} until {known.worker}"] = engines.pop(name)
        ranks = model_workers.join(served, pool, engine, self._clock())
        engines[name] = _Known(engine, ranks[0], source)
        for address in engine:
            self._on_join(address.id)
        self._prober.watch(served, pool, ranks[0], delay_s)
        _log.info("worker %s joins %s/%s: %s names it", name, model, _pool(served, pool), source)
        return True

    def remove(self, model: str, pool: int, source: str, name: str) -> None:
        """Name an engine no more."""
        known = self._known[model, pool].get(name)
        if known is None or source not in known.sources:
            return  # an admin was faster
        known.sources.remove(source)
        if not known.sources:
            self._leave(self._models[model], pool, name, known)

    def _leave(self, served: ModelRuntime, pool: int, name: str, known: _Known) -> None:
        state = served.fleet.pools[pool]
        known.sources.clear()
        known.leaving = True
        members.leave(state, known.worker)
        running = sum(state.active[rank] for rank in state.siblings[known.worker])
        _log.info(
            "worker %s leaves %s/%s: %d sequences finish there",
            name,
            served.name,
            state.name,
            running,
        )

    def _vacate(self, served: ModelRuntime, pool: int, names: Sequence[str]) -> None:
        engines = self._known[served.name, pool]
        gone = {name: engines.pop(name) for name in names}
        workers = [known.worker for known in gone.values()]
        model_workers.vacate(served, pool, workers, self._clock())
        for name, known in gone.items():
            self._prober.forget(served.fleet.pools[pool], known.worker)
            for address in known.addresses:
                self._disconnect(address)
                self._metrics.ejections.values.pop((_pool(served, pool), address.id), None)
            _log.info("worker %s of %s/%s is gone", name, served.name, _pool(served, pool))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                while self.sweep():  # noqa: ASYNC110 - requests run in between
                    await asyncio.sleep(0)
            except Exception:  # noqa: BLE001 - a defect must not end the task
                _log.exception("removing workers failed")


class RotationLog:
    """Logs every change of a worker's state once, with cause and undo, whoever saw it.

    Probes, traffic and the breaker change a worker's state; none of them logs it. Draining is
    logged by the audit.
    """

    def __init__(self) -> None:
        self._told: dict[PoolState, tuple[int, dict[str, str]]] = {}
        """The pool's revision, and its workers that were out -> why."""

    def look(self, models: Iterable[ModelRuntime], now_s: float) -> None:
        """Log what changed since the last look; about once a second."""
        told = self._told
        self._told = {}
        for served in models:
            for pool in served.fleet.pools:
                revision, before = told.get(pool, (-1, {}))
                if revision == pool.revision and not before:
                    now = before
                else:
                    now = fleet.out_of_rotation(pool, now_s)
                    _tell(f"{served.name}/{pool.name}", before, now)
                self._told[pool] = (pool.revision, now)


def _tell(place: str, before: dict[str, str], now: dict[str, str]) -> None:
    for worker in dict.fromkeys(chain(before, now)):
        if worker not in now:
            _log.info("worker %s of %s is back in the rotation", worker, place)
        elif now[worker] != before.get(worker):
            _log.warning("worker %s of %s is out of the rotation: %s", worker, place, now[worker])


def _pool(served: ModelRuntime, pool: int) -> str:
    return served.fleet.pools[pool].name


def _configured(served: ModelRuntime, pool: int) -> dict[str, _Known]:
    state, addresses = served.fleet.pools[pool], served.fleet.workers[pool]
    engines = [(ranks[0], tuple(addresses[rank] for rank in ranks)) for ranks in state.engines]
    return {engine_id(engine): _Known(engine, worker, CONFIGURED) for worker, engine in engines}
