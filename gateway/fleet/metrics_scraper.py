"""Reads each engine's /metrics page about once a second.

Each engine has one task; its ranks share one page. Requests never wait for a page. When a page
cannot be read, the last sample becomes stale and the task backs off. With many engines the
interval grows, because reading pages shares the event loop with requests, but it stays below
the age at which a sample becomes stale.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from typing import Final

from gateway.background_task import TasksByKey
from gateway.fleet.engine_metrics import ALIASES, missing, read_adapters, read_page
from gateway.fleet.engine_pages import MAX_PAGE_BYTES, NOT_HAD, EnginePages
from gateway.fleet.engine_telemetry import STALE_S, EngineSample, TelemetryView, join, record
from gateway.fleet.fleet import heard
from gateway.fleet.model_runtime import ModelRuntime
from gateway.ports import Upstream
from gateway.records.attempt import WorkerAddress

MAX_PAGES_PER_S: Final = 128.0
"""Limit over all engines, unless samples would become stale."""
JITTER: Final = 0.1
MAX_INTERVAL_S: Final = 0.8 * STALE_S
"""Together with jitter and response time, this stays below STALE_S."""
_MAX_PAUSE_S: Final = 60.0

_log = logging.getLogger("sluice.telemetry")

OnRestart = Callable[[ModelRuntime, int, int], None]
"""Called with (model, pool, worker) when the engine has restarted with an empty prefix cache."""


class EngineMetrics:
    """Updates the telemetry of every model's pools until closed."""

    def __init__(
        self,
        models: Iterable[ModelRuntime],
        clock: Callable[[], float],
        *,
        upstream: Upstream,
        interval_s: float = 1.0,
        timeout_s: float = 2.0,
        on_restart: OnRestart | None = None,
    ) -> None:
        """`clock` is the clock that decisions use; `upstream` provides connections."""
        self._models = {served.name: served for served in models}
        self._clock = clock
        self._on_restart = on_restart
        self._pages = EnginePages(upstream, timeout_s)
        self._background = TasksByKey()
        self._warned: set[tuple[str, ...]] = set()
        self.views = {name: _views_of(served) for name, served in self._models.items()}
        """Views of each model's pools, by model."""
        self._least_s = interval_s
        self.interval_s = interval_s
        """Seconds between two readings of an engine that responds."""
        self._space()

    async def start(self) -> None:
        for served in self._models.values():
            self._follow(served)

    def replace(self, name: str, served: ModelRuntime | None) -> None:
        """Read the pages of a model's engines as it is now; None: of none."""
        before = self._models.pop(name, None)
        if before is not None:
            for state in before.fleet.pools:
                for worker, *_ in state.engines:
                    self._background.end((state, worker))
        self.views.pop(name, None)
        if served is None:
            self._warned = {each for each in self._warned if each[0] != name}
        else:
            self._models[name] = served
            self.views[name] = _views_of(served)
            self._follow(served)
        self._space()

    def _follow(self, served: ModelRuntime) -> None:
        for pool, state in enumerate(served.fleet.pools):
            for worker, *_ in state.engines:
                self._background.start((state, worker), self._run(served, pool, worker))

    def watch(self, served: ModelRuntime, pool: int, worker: int) -> None:
        """Start reading the pages of a worker's engine, if its model's are read."""
        if served.name not in self.views:
            return
        state, view = served.fleet.pools[pool], self.views[served.name][pool]
        for rank in state.siblings[worker]:
            if rank >= len(view.samples):  # the view is this object's own
                join(view, rank)
        self._space()
        self._background.start((state, worker), self._run(served, pool, worker))

    def forget(self, served: ModelRuntime, pool: int, worker: int) -> None:
        """Stop reading the pages of a worker's engine: it is gone."""
        self._background.end((served.fleet.pools[pool], worker))
        self._space()

    def _space(self) -> None:
        """Set the interval by the number of engines."""
        pools = (pool for served in self._models.values() for pool in served.fleet.pools)
        pages = sum(len(pool.engines) for pool in pools)
        self.interval_s = max(self._least_s, min(pages / MAX_PAGES_PER_S, MAX_INTERVAL_S))

    async def close(self) -> None:
        await self._background.close()

    async def read(self, served: ModelRuntime, pool: int, worker: int) -> bool:
        """Read the page of a worker's engine into its view; False if the page could not be read.

        No response of an engine makes it raise.
        """
        address = served.fleet.workers[pool][worker]
        try:
            page = await self._pages.get(address, "/metrics", MAX_PAGE_BYTES)
        except NOT_HAD:
            return False
        if page is None or page.status != 200:
            return False
        known = False
        running = read_adapters(page.body)
        view = self.views[served.name][pool]
        for rank in served.fleet.pools[pool].siblings[worker]:
            address = served.fleet.workers[pool][rank]
            sample = read_page(page.body, address.rank)
            if sample == EngineSample():
                self._warn(served, address, ("any",))
                continue
            known = True
            if running is not None:
                served.adapters.running(pool, rank, running.names, running.most)
            self._warn(served, address, missing(sample))
            heard(served.fleet.pools[pool], rank, (sample.running or 0) + (sample.waiting or 0))
            if record(view, rank, sample, self._clock()):
                _log.info("worker %s restarted: its prefix cache is taken to be empty", address.id)
                if self._on_restart is not None:
                    self._on_restart(served, pool, rank)
        return known

    async def _run(self, served: ModelRuntime, pool: int, worker: int) -> None:
        # Spread over the first interval, so that the pages do not arrive all at once.
        pause_s = self.interval_s
        await asyncio.sleep(random.uniform(0, self.interval_s))
        while True:
            if await self.read(served, pool, worker):
                pause_s = self.interval_s
            else:
                for rank in served.fleet.pools[pool].siblings[worker]:
                    heard(served.fleet.pools[pool], rank, 0)
                pause_s = min(2 * pause_s, max(_MAX_PAUSE_S, self.interval_s))
            await asyncio.sleep(pause_s * random.uniform(1 - JITTER, 1 + JITTER))

    def _warn(self, served: ModelRuntime, address: WorkerAddress, fields: Iterable[str]) -> None:
        """Warn once per model about metrics that a page lacks."""
        for field in fields:
            if (served.name, field) in self._warned:
                continue
            self._warned.add((served.name, field))
            if field == "any":
                _log.warning("worker %s of %s tells no metrics known here", address.id, served.name)
            else:
                names = ", ".join(ALIASES[field])
                _log.warning(
                    "worker %s of %s does not tell %s (none of %s)",
                    *(address.id, served.name, field, names),
                )


def _views_of(served: ModelRuntime) -> tuple[TelemetryView, ...]:
    return served.fleet.telemetry or tuple(
        TelemetryView(len(workers)) for workers in served.fleet.workers
    )
