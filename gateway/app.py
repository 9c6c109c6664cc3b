"""The composition root: configuration -> the objects of one process.

The only module that reads settings and knows every adapter; `gateway.serving` serves what it
builds.
"""

import asyncio
import hashlib
import importlib
import importlib.metadata
import logging
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

from gateway.adapters.body_reader import BodyReader
from gateway.adapters.boundary_chore import BoundaryChore, told_totals
from gateway.adapters.decision_ring import DecisionRing
from gateway.adapters.engine_metrics import EngineMetrics
from gateway.adapters.probes import Prober
from gateway.adapters.request_log import Records, RequestLog
from gateway.adapters.scheduler_notes import EVERY_S as NOTES_EVERY_S
from gateway.adapters.scheduler_notes import SchedulerNotes
from gateway.adapters.shared.seat import Seat
from gateway.adapters.store.learning import Learning
from gateway.adapters.upstream import HttpUpstream
from gateway.adapters.usage_export import UsageExport
from gateway.assembly import TokenPools
from gateway.domain import Principal
from gateway.models import by_name, served_model
from gateway.pipeline import Pipeline
from gateway.policy import prefix_points
from gateway.policy.served import ServedModel
from gateway.settings import Config
from gateway.settings.boundaries import control_of
from gateway.sharing import Sharing
from gateway.stages.authenticate import Keyring, authenticate
from gateway.telemetry import Metrics
from gateway.web.admission_api import admission_router
from gateway.web.admission_desk import AdmissionDesk
from gateway.web.body_bytes import BodyBytes
from gateway.web.control import control_app
from gateway.web.data_plane import DataPlane
from gateway.web.metrics import MetricsPage
from gateway.web.openapi import openapi_document
from gateway.web.surface import Control
from gateway.web.tenant_api import TenantView, tenant_router
from gateway.web.wrong_keys import WrongKeys

if TYPE_CHECKING:
    from gateway.adapters.compress_workers import CompressWorkers
    from gateway.adapters.store.redis_board import RedisBoard

_log = logging.getLogger("sluice")
_TICK_S = 0.25


class Gateway:
    """The objects of one process."""

    def __init__(
        self,
        config: Config,
        *,
        clock: Callable[[], float] = time.monotonic,
        seat: Seat | None = None,
    ) -> None:
        """Build everything; no I/O but opening the request log. Raises OSError for the log.

        `seat`: the place of this process among several that serve the configuration.
        """
        self.config = config
        self.sharing = Sharing(seat)
        self.metrics = Metrics()
        self.models = tuple(served_model(config, model) for model in config.models)
        self.log: RequestLog | None = None
        if config.request_log.path is not None:
            self.log = RequestLog(config.request_log.path, self.metrics)
            self.log.open()
        self.pools = TokenPools(
            config,
            {m.name: m for m in self.models},
            self.metrics,
            clock,
            witness=self.log,
            link=self.sharing.link,
        )
        self.store = self.pools.store
        self.learning = Learning(
            self.sharing.state(config.state.url),
            {f"{m.estimator.profile.name}:{m.name}": m.estimator for m in self.models},
            clock=clock,
        )
        self.upstream = HttpUpstream()
        self.prober = Prober(
            self.models,
            interval_s=config.health.interval_s,
            timeout_s=config.health.timeout_s,
            kv=self.pools.engine_kv,
            upstream=self.upstream,
            clock=clock,
            on_frozen=lambda *which: self.pipeline.frozen(*which),  # noqa: PLW0108 - made below
        )
        controls = {model.name: control_of(model) for model in config.models}
        self.boundaries = BoundaryChore(
            self.models,
            {name: control for name, control in controls.items() if control is not None},
            self.metrics,
            clock=clock,
            ask=told_totals,
        )
        self.telemetry = EngineMetrics(
            (model for model in self.models if model.telemetry),
            clock,
            on_restart=_forget_prefixes,
            upstream=self.upstream,
        )
        self.ring = DecisionRing(config.decisions_kept)
        self.export: UsageExport | None = None
        if config.usage_export.path is not None:
            self.export = UsageExport(config.usage_export.path, self.metrics)
            self.export.open()
        others = () if self.export is None else (self.export,)
        records = Records(self.ring, self.log, *others)
        keyring = self.pools.keyring
        new_id = request_ids()
        self.compressor = _compress_workers(config, self.sharing.count)
        self.reader = BodyReader()
        self.pipeline = Pipeline(
            models=by_name(config, self.models),
            keyring=keyring,
            store=self.store,
            upstream=self.upstream,
            metrics=self.metrics,
            records=records,
            compressor=self.compressor,
            reader=self.reader,
            clock=clock,
            wall_clock=time.time,
            log_prompts=config.request_log.prompts,
        )
        names = {name: m.name for name, m in by_name(config, self.models).items() if name != "*"}
        admin_key = config.server.admin_key
        known = Authenticator(keyring)
        wrong_keys = WrongKeys(clock)
        self.desk = AdmissionDesk(
            models=by_name(config, self.models),
            store=self.store,
            metrics=self.metrics,
            records=records,
            new_id=new_id,
            clock=clock,
            wall_clock=time.time,
            draining=lambda: self.data_plane.draining,
            replicas=self._replicas,
        )
        self.store.on_evict(self._evict)
        control = control_app(
            Control(
                models=self.models,
                names=names,
                metrics=self.sharing.page(self._page(clock), self.metrics),
                peers=self.sharing.peers,
                find_decision=self.ring.find,
                latest_decisions=self.ring.latest,
                registry=self.pools.registry,
                draining=lambda: self.data_plane.draining,
                clock=clock,
                admin_key_sha256=None
                if admin_key is None
                else hashlib.sha256(admin_key.get_secret_value().encode()).digest(),
                authenticate=known,
                version=version(),
                created_unix_s=int(time.time()),
                openapi=lambda: openapi_document(version()),
                wrong_keys=wrong_keys,
            ),
            admission_router(self.desk, known, self.sharing.peers),
            tenant_router(
                TenantView(
                    authenticate=known,
                    terms=self.pools.registry.find,
                    view=self.store.view,
                    managed=self.pools.manages,
                    shapes=self.pools.shapes,
                    metrics=self.metrics,
                    peers=self.sharing.peers,
                )
            ),
        )
        self.data_plane = DataPlane(
            self.pipeline,
            cast("Any", control),
            new_id=new_id,
            max_body_bytes=config.server.max_body_bytes,
            wrong_keys=wrong_keys,
            bodies=BodyBytes(config.server.max_held_body_bytes // self.sharing.count),
        )
        self._clock = clock
        self.board = self._open_board()
        self.notes = SchedulerNotes(
            self.models, self.board or self.sharing.board, secrets.token_hex(6), self._replicas
        )
        self.sharing.connect(self.models, self.ring, self.desk, self.pools.registry, self.metrics)

    def _replicas(self, model: str) -> int:
        """Processes that serve a model: of this host, and with Redis of all that share it."""
        found = max(self.sharing.replicas, self.pools.replicas(model))
        return found if self.board is None else max(found, self.board.replicas(model))

    def _open_board(self) -> "RedisBoard | None":
        """Where the gateways of one Redis hear of one another, if their schedulers need it."""
        models = [model.name for model in self.models if model.schedulers]
        if not models or not self.config.state.url.startswith("redis"):
            return None
        module = importlib.import_module("gateway.adapters.store.redis_board")
        made: RedisBoard = module.RedisBoard(
            self.config.state.url,
            models,
            replica=secrets.token_hex(8),
            seed=module.Seed(since_unix_s=time.time(), value=prefix_points.seed()),
            on_seed=self._digest_by,
            clock=self._clock,
            chance=random.random,
        )
        return made

    def _digest_by(self, seed: int) -> None:
        """Digest prompts by another seed: what is known by the old one is void."""
        prefix_points.use_seed(seed)
        for index in (index for model in self.models for index in model.prefixes):
            for worker in range(index.workers):
                index.forget(worker)

    def _state_up(self) -> bool:
        """Whether everything answers that is shared with other gateways, or kept."""
        board = self.board is None or self.board.up
        return self.learning.up and self.pools.up and board

    def _evict(self, lease_id: str) -> None:
        """Have a lease give way, whosever it is."""
        self.pipeline.evict(lease_id)
        self.desk.evict(lease_id)

    def _page(self, clock: Callable[[], float]) -> MetricsPage:
        return MetricsPage(
            self.metrics,
            self.models,
            lambda: self.store.active,
            clock,
            self._state_up,
            lambda: self.pools.figures,
            lambda: self.pools.store_counts,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Gateway"]:
        """Probe and log while the block runs; close everything after it."""
        for writer in (self.log, self.export):
            if writer is not None:
                writer.start()
        if self.compressor is not None:
            await self.compressor.start()
        await self.learning.start()
        if self.board is not None:
            await self.board.start()
        await self.prober.start()
        await self.boundaries.start()
        await self.telemetry.start()
        async with self.pools.running(self.pipeline.extend):
            self.desk.start()
            self.sharing.start()
            ticking = asyncio.create_task(self._tick())
            try:
                yield self
            finally:
                ticking.cancel()
                await self.boundaries.close()
                await self.telemetry.close()
                await self.prober.close()
                await self.upstream.close()
                await self.desk.close()
                await self.learning.close()
                if self.board is not None:
                    await self.board.close()
                await self.reader.close()
                if self.compressor is not None:
                    await self.compressor.close()
        for writer in (self.log, self.export):
            if writer is not None:
                await writer.close()
        await self.sharing.close()

    async def _tick(self) -> None:
        """Have schedulers look after what no request brings about."""
        told_s = 0.0
        while any(model.schedulers for model in self.models):
            await asyncio.sleep(_TICK_S)
            now_s = self._clock()
            try:
                self.pipeline.tick()
                if now_s - told_s >= NOTES_EVERY_S:
                    told_s = now_s
                    for _ in self.notes.exchange(now_s):
                        await asyncio.sleep(0)
            except Exception:  # noqa: BLE001 - a defect must not end the task
                _log.exception("looking after the schedulers failed")


def _forget_prefixes(served: ServedModel, pool: int, worker: int) -> None:
    """An engine began anew, its prefix cache empty."""
    if served.prefixes:
        served.prefixes[pool].forget(worker)


def _compress_workers(config: Config, shared_by: int) -> "CompressWorkers | None":
    if not any(model.compression.enabled for model in config.models):
        return None
    # numpy takes some 20 MB: only who compresses needs it.
    module = importlib.import_module("gateway.adapters.compress_workers")
    made: CompressWorkers = module.CompressWorkers(
        processes=-(-config.compressor.processes // shared_by),
        time_limit_s=config.compressor.time_limit_ms / 1000,
        queue=config.compressor.queue,
        tokenizers=[
            str(model.compression.tokenizer)
            for model in config.models
            if model.compression.enabled and model.compression.tokenizer is not None
        ],
    )
    return made


def request_ids() -> Callable[[], str]:
    """A source of unique request ids: a random start per process, then a count."""
    prefix = "req-" + secrets.token_hex(6)
    count = 0

    def new_id() -> str:
        nonlocal count
        count += 1
        return f"{prefix}-{count:x}"

    return new_id


def version() -> str:
    """The installed version."""
    try:
        return importlib.metadata.version("sluice-gateway")
    except importlib.metadata.PackageNotFoundError:
        return "0"


class Authenticator:
    """Stage 1 for the control plane: who presents the key of this digest, now."""

    def __init__(self, keyring: Keyring) -> None:
        self._keyring = keyring

    def __call__(self, key_digest: bytes | None) -> Principal:
        """Raises Refusal."""
        return authenticate(self._keyring, key_digest, time.time())
