"""The sources of engines of all pools, as the configuration names them.

Part of the composition root.
"""

import asyncio
import importlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from gateway.background_task import BackgroundTasks
from gateway.control.metrics_page import SourceReport
from gateway.fleet.discovery import Source, sets_of_file
from gateway.fleet.model_runtime import ModelRuntime
from gateway.fleet.rotation import Rotation
from gateway.ports import Sets
from gateway.records.attempt import DiscoverySource
from gateway.settings import Config
from gateway.settings.worker import WorkerConfig, cluster_access

if TYPE_CHECKING:
    from gateway.fleet.kubernetes import KubernetesApi

FIRST_SET_S: Final = 5.0
"""How long the start waits for the sources' first sets."""


class Discovery:
    """Follows the sources of all pools."""

    def __init__(self, config: Config, models: Sequence[ModelRuntime], rotation: Rotation) -> None:
        self._rotation = rotation
        self._sources: dict[tuple[str, str, str], Source] = {}
        """(model, pool, URL) -> source."""
        self._background = BackgroundTasks()
        self._started = False
        self._api: KubernetesApi | None = None
        for model, served in zip(config.models, models, strict=True):
            for name, pool in model.all_pools.items():
                for worker in pool.workers:
                    self._add(served.name, name, worker)

    def _add(self, model: str, pool: str, worker: WorkerConfig) -> None:
        """Follow a worker's source, if it has one: from the start on, or at once."""
        source = worker.source
        if source is None:
            return
        key = (model, pool, source.url)
        apply = partial(self._rotation.apply_to, *key)
        sets = self._sets(source, worker.scheme)
        self._sources[key] = Source(*key, sets, worker.addresses_for, apply)
        if self._started:
            self._background.start(self._sources[key].run(), key=key)

    async def change(
        self,
        model: str,
        pool: str,
        before: Sequence[WorkerConfig],
        after: Sequence[WorkerConfig],
    ) -> None:
        """Follow a pool's new sources, and drop the engines of those that are not named now."""
        for worker in before:
            if worker.discover is not None and worker not in after:
                self._sources.pop((model, pool, worker.discover), None)
                self._background.end((model, pool, worker.discover))
                if all(worker.discover != other.discover for other in after):
                    await self._rotation.apply_to(model, pool, worker.discover, ())
        for worker in after:
            if worker.discover is not None and worker not in before:
                self._add(model, pool, worker)

    def report(self) -> Iterator[SourceReport]:
        """How the sources fare."""
        for source in self._sources.values():
            yield SourceReport(
                model=source.model,
                pool=source.pool,
                source=source.url,
                failing=source.failing,
                engines=source.found or 0,
            )

    async def start(self) -> None:
        """Follow the sources; waits a few seconds for their first sets."""
        self._started = True
        for key, source in self._sources.items():
            self._background.start(source.run(), key=key)
        firsts = [asyncio.ensure_future(source.first.wait()) for source in self._sources.values()]
        if firsts:
            _, late = await asyncio.wait(firsts, timeout=FIRST_SET_S)
            for waiting in late:
                waiting.cancel()

    async def close(self) -> None:
        await self._background.close()
        if self._api is not None:
            await self._api.close()

    def _sets(self, source: DiscoverySource, scheme: str) -> Callable[[], Sets]:
        """What the source names; modules with a client of their own are imported only for it."""
        if source.kind == "file":
            return partial(sets_of_file, source.name)
        if source.kind == "dns":
            module = importlib.import_module("gateway.fleet.discovery_dns")
            return partial(module.sets_of_dns, source, scheme)
        module = importlib.import_module("gateway.fleet.kubernetes")
        if self._api is None:
            self._api = module.KubernetesApi(cluster_access())
        return partial(module.sets_of_kubernetes, self._api, source, scheme)
