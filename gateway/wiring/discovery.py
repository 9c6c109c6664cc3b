"""The sources of engines of all pools, as the configuration names them.

Part of the composition root.
"""

import importlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from gateway.control.metrics_page import SourceReport
from gateway.fleet.discovery_file import FileDiscovery
from gateway.fleet.discovery_runner import Discovering, Source
from gateway.fleet.model_runtime import ModelRuntime
from gateway.fleet.rotation import Rotation
from gateway.ports import Discovery as Port
from gateway.records.attempt import DiscoverySource
from gateway.settings import Config
from gateway.settings.discovery import cluster_access
from gateway.settings.worker import WorkerConfig

if TYPE_CHECKING:
    from gateway.fleet.kubernetes import KubernetesApi


class Discovery:
    """Follows the sources of all pools."""

    def __init__(self, config: Config, models: Sequence[ModelRuntime], rotation: Rotation) -> None:
        self._rotation = rotation
        self._running = Discovering()
        self._api: KubernetesApi | None = None
        for model, served in zip(config.models, models, strict=True):
            for name, pool in model.pools.items():
                for worker in pool.workers:
                    self.add(served.name, name, worker)

    def add(self, model: str, pool: str, worker: WorkerConfig) -> None:
        """Follow a worker's source, if it has one."""
        source = worker.source
        if source is not None:
            self._running.add(
                Source(
                    model,
                    pool,
                    source.url,
                    self._adapter(source, worker.scheme),
                    worker.found,
                    partial(self._rotation.apply_to, model, pool, source.url),
                )
            )

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
                self._running.remove(model, pool, worker.discover)
                if all(worker.discover != other.discover for other in after):
                    await self._rotation.apply_to(model, pool, worker.discover, ())
        for worker in after:
            if worker.discover is not None and worker not in before:
                self.add(model, pool, worker)

    def report(self) -> Iterator[SourceReport]:
        """How the sources fare."""
        for source in self._running.sources.values():
            yield SourceReport(
                model=source.model,
                pool=source.pool,
                source=source.url,
                failing=source.failing,
                engines=source.found or 0,
            )

    async def start(self) -> None:
        """Follow the sources; waits a few seconds for their first sets."""
        await self._running.start()

    async def close(self) -> None:
        await self._running.close()
        if self._api is not None:
            await self._api.close()

    def _adapter(self, source: DiscoverySource, scheme: str) -> Port:
        """The adapter; modules with a client of their own are imported only for it."""
        if source.kind == "file":
            return FileDiscovery(source.name)
        if source.kind == "dns":
            module = importlib.import_module("gateway.fleet.discovery_dns")
            adapter: Port = module.DnsDiscovery(source, scheme)
            return adapter
        if self._api is None:
            module = importlib.import_module("gateway.fleet.kubernetes")
            self._api = module.KubernetesApi(cluster_access())
        module = importlib.import_module("gateway.fleet.kubernetes_engines")
        found: Port = module.KubernetesDiscovery(self._api, source, scheme)
        return found
