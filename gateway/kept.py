"""What the parent of several worker processes keeps for them, put together.

Part of the composition root. With embedded state it is all that one process keeps for itself:
token pools and their leases, the directory of entitlements, what was learned. Gateways on Redis
share those there, and only talk by way of the parent.
"""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from gateway.adapters.request_log import RequestLog
from gateway.adapters.shared.directory import DirectoryDesk
from gateway.adapters.shared.figures import FiguresDesk
from gateway.adapters.shared.health import Drains, Mirror
from gateway.adapters.shared.hub import Hub
from gateway.adapters.shared.learned import LearnedDesk
from gateway.adapters.shared.leases_desk import LeasesDesk
from gateway.adapters.store.learning import open_state
from gateway.adapters.store.memory import MemoryLeases
from gateway.assembly import TokenPools
from gateway.models import served_model
from gateway.policy.figures import counted
from gateway.settings import Config
from gateway.telemetry import Metrics
from gateway.web.metrics_shared import merged_counts


class Kept:
    """The objects of the parent."""

    def __init__(self, config: Config) -> None:
        """No I/O but opening the request log. Raises OSError for it."""
        self.hub = Hub()
        self.metrics = Metrics()
        self._drains = Drains(self.hub)
        self._figures = FiguresDesk(
            self.hub, merged_counts, lambda: msgspec.msgpack.encode(counted(self.metrics))
        )
        self._log: RequestLog | None = None
        self._pools: TokenPools | None = None
        self._learned: LearnedDesk | None = None
        if not config.state.url.startswith("redis"):
            self._embed(config)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Hub]:
        """Keep everything current while the block runs."""
        if self._pools is None or self._learned is None:
            yield self.hub
            return
        if self._log is not None:
            self._log.start()
        await self._learned.start()
        try:
            async with self._pools.running(None):
                yield self.hub
        finally:
            await self._learned.close()
            if self._log is not None:
                await self._log.close()

    def _embed(self, config: Config) -> None:
        if config.request_log.path is not None:
            # For what changes the pools: the requests are in the workers' own batches.
            self._log = RequestLog(config.request_log.path, self.metrics)
            self._log.open()
        models = {model.name: served_model(config, model) for model in config.models}
        self._pools = pools = TokenPools(
            config, models, self.metrics, time.monotonic, witness=self._log
        )
        store = pools.store
        if not isinstance(store, MemoryLeases):
            raise TypeError("embedded state is in memory")
        self._learned = LearnedDesk(
            self.hub,
            [f"{m.estimator.profile.name}:{name}" for name, m in models.items()],
            open_state(config.state.url),
        )
        self._leases = LeasesDesk(self.hub, store, pools.keeper.pools)
        self._mirror = Mirror(self.hub, models, pools.engine_kv, lambda: pools.up)
        self._directory = DirectoryDesk(self.hub, pools.directory, self._follow)
        self._sync = pools.sync

    async def _follow(self) -> None:
        """Take over changed entitlements; what was decided by the old terms is entered before."""
        await self._leases.pledges.recall_all()
        await self._sync.poll()
        await self._leases.pledges.recall_all()
