"""The composition root: configuration -> the objects of one process.

Within the gateway only the composition root reads settings and knows every adapter;
`gateway.wiring.serving` runs the objects built here.
"""

import asyncio
import importlib
import importlib.metadata
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, cast

import msgspec

from gateway.background_task import BackgroundTasks
from gateway.control.app import control_app
from gateway.control.batch_api import batch_router
from gateway.control.external_admission import AdmissionService, admission_router
from gateway.control.management_port import Management
from gateway.control.metrics_page import MetricsPage
from gateway.control.peers import answer_peers
from gateway.control.surface import Control
from gateway.control.tenant_api import own_decision, tenant_router, usage_router
from gateway.dashboard.api import dashboard_router
from gateway.dashboard.figures import answer_totals
from gateway.dashboard.snapshot import Snapshots
from gateway.fleet.kv_events import KvEvents
from gateway.fleet.model_runtime import ModelRuntime
from gateway.fleet.probes import EnginePages, Prober
from gateway.fleet.rotation import Rotation, RotationLog
from gateway.http.body_bytes import MAX_BYTES, BodyBytes
from gateway.http.data_plane import App, DataPlane, request_ids
from gateway.http.tls import Certificates
from gateway.http.wrong_keys import WrongKeys
from gateway.metrics import Metrics
from gateway.pipeline.pipeline import Pipeline
from gateway.pipeline.quote import Quoter
from gateway.records.request import Principal, RequestHead
from gateway.routing.boundary_controller import BoundaryController
from gateway.settings import Config
from gateway.tenancy.keyring import CLUSTER_GRANTS, authenticate_head
from gateway.upstream import HttpUpstream
from gateway.usage.claims import Claims
from gateway.usage.ledger import Ledger, report
from gateway.usage.report import FleetBill
from gateway.usage.request_log import DecisionRing, Records, RequestLog
from gateway.usage.usage_export import UsageExport
from gateway.wiring.auth import digest_key, role_keys
from gateway.wiring.batches import Batches
from gateway.wiring.discovery import Discovery
from gateway.wiring.models import Served, served_model
from gateway.wiring.process_limits import PARTS, memory_limit
from gateway.wiring.reloading import Reloading
from gateway.wiring.replicas import Replicas
from gateway.wiring.token_pools import AdmissionRuntime
from gateway.wiring.workers import Workers
from gateway.workers.child import MAX_MEMORY_BYTES
from gateway.workers.pool import BodyReader, CompressWorkers

if TYPE_CHECKING:
    from gateway.telemetry.otlp import Telemetry

_log = logging.getLogger("sluice")
_TICK_S = 0.25


class Gateway:
    """The objects of one process."""

    def __init__(
        self,
        config: Config,
        *,
        clock: Callable[[], float] = time.monotonic,
        port: int = 0,
    ) -> None:
        """Build everything. The only I/O is on certificates and log files; it may raise OSError.

        `port` serves metrics and admin routes.
        """
        self.config = config
        self.metrics = Metrics()
        server, tls = config.server, config.server.tls
        self.certificates = None if tls is None else Certificates(tls.cert, tls.key, tls.client_ca)
        self.served = Served(config, [served_model(config, model) for model in config.models])
        self.models: Sequence[ModelRuntime] = self.served.models
        self.log: RequestLog | None = None
        if config.request_log.path is not None:
            self.log = RequestLog(config.request_log.path, self.metrics)
            self.log.open()
        self._digest_key = digest_key(config)
        self.pools = AdmissionRuntime(
            config,
            {m.name: m for m in self.models},
            self.metrics,
            clock,
            event_sink=None if self.log is None else self.log.append,
            decide_anew=lambda: self.reloading.decide_anew(),  # noqa: PLW0108 - made below
        )
        self.role_keys = role_keys(config, self.pools.tokens)
        self.store = self.pools.store
        self.replicas = Replicas(
            config,
            self.models,
            clock,
            port=port,
            counted=self.pools.replicas,
            retiring=self.served.retiring,
        )
        self.bill = FleetBill((m.name, pool) for m in self.models for pool in m.fleet.pools)
        self._clock = clock
        self._port = port
        self.upstream = HttpUpstream()
        self.upstream.generates = EnginePages(self.upstream, config.health.timeout_s).generates
        self._watch_engines()
        self.compressor: CompressWorkers | None = None
        if compressing := [m.compression for m in config.models if m.compression.enabled]:
            self.compressor = CompressWorkers(
                processes=-(-config.compressor.processes // server.workers),
                time_limit_s=config.compressor.time_limit_ms / 1000,
                queue=config.compressor.queue,
                tokenizers=[str(c.tokenizer) for c in compressing if c.tokenizer is not None],
            )
        part_bytes = memory_limit() // (PARTS * server.workers)
        read_bytes = max(part_bytes, 4 * server.max_body_bytes)  # what an ordinary body takes
        self.reader = BodyReader(min(read_bytes, MAX_MEMORY_BYTES))
        held_bytes = server.max_held_body_bytes or min(part_bytes * server.workers, MAX_BYTES)
        self._serve_requests(BodyBytes(max(held_bytes // server.workers, server.max_body_bytes)))

    def _watch_engines(self) -> None:
        """Build the prober, the boundary mover and the reader of engine metrics."""
        config = self.config
        self.rotation_log = RotationLog()
        self.prober = Prober(
            self.models,
            interval_s=config.health.interval_s,
            timeout_s=config.health.timeout_s,
            upstream=self.upstream,
            clock=self._clock,
            on_frozen=lambda *which: self.pipeline.frozen(*which),  # noqa: PLW0108 - made below
        )
        self.boundaries = BoundaryController(self.models, self.metrics, clock=self._clock)
        self.rotation = Rotation(
            self.models,
            self.prober,
            self.metrics,
            self._clock,
            disconnect=self.upstream.disconnect,
            on_join=self.replicas.joined,
        )
        self.kv_events = KvEvents(lambda: self.served.models, self.metrics)
        self.reloading: Reloading = Reloading(self)
        self.workers = Workers(config, self.models, self.rotation)
        self.discovery = Discovery(config, self.models, self.rotation)

    def _serve_requests(self, bodies: BodyBytes) -> None:
        """Build sinks of decisions, pipeline, external admission and the planes."""
        config, new_id, wrong_keys = self.config, request_ids(), WrongKeys(self._clock)
        self.ring = DecisionRing(config.decisions_kept)
        self.tracing: Telemetry | None = None
        if config.telemetry.otlp:
            module = importlib.import_module("gateway.telemetry.otlp")  # of the extra `otel`
            sample = config.telemetry.sample
            self.tracing = module.Telemetry(self.metrics, version=version(), sample=sample)
        self.export: UsageExport | None = None
        self.ledger: Ledger | None = None
        currency = config.currency
        if config.ledger.path is not None:
            keep_days = config.ledger.keep_days
            self.ledger = Ledger(config.ledger.path, keep_days=keep_days, currency=currency)
        if config.usage_export.path is not None or self.ledger is not None:
            path = config.usage_export.path
            self.export = UsageExport(path, self.metrics, self.ledger, currency=currency)
            self.export.open()
        log = None if self.log is None else self.log.append
        self.claims = Claims(config.origin.digest, self.metrics, log)
        others = [self.claims.append]
        others += [sink.append for sink in (self.export, self.tracing) if sink is not None]
        if config.batches is not None:
            others.append(self._note_item)
        records = Records(self.ring, self.log, *others)
        self.pipeline = Pipeline(
            models=self.served.by_name,
            keyring=self.pools.keyring,
            store=self.store,
            upstream=self.upstream,
            metrics=self.metrics,
            records=records.append,
            compressor=self.compressor,
            reader=self.reader,
            clock=self._clock,
            wall_clock=time.time,
            log_prompts=config.request_log.prompts,
            digest_key=self._digest_key,
            splits=self.served.splits,
        )
        self.quoter = Quoter(
            pipeline=self.pipeline,
            store=self.store,
            clock=self._clock,
            wall_clock=time.time,
            currency=currency,
        )
        self.batches: Batches | None = None
        if config.batches is not None:
            self.batches = Batches(
                config,
                self.served,
                pipeline=self.pipeline,
                keyring=self.pools.keyring,
                export=self.export,
                metrics=self.metrics,
                new_id=new_id,
                draining=lambda: self.data_plane.draining,
            )
        # For other proxies, which forward requests themselves.
        self.admission_service = AdmissionService(
            models=self.served.by_name,
            store=self.store,
            metrics=self.metrics,
            records=records.append,
            new_id=new_id,
            clock=self._clock,
            wall_clock=time.time,
            draining=lambda: self.data_plane.draining,
            replicas=self.replicas.count,
        )
        self.store.on_evict(self._evict)
        self.data_plane = DataPlane(
            self.pipeline.serve,
            self.pipeline.know,
            self._control_plane(wrong_keys, bodies),
            new_id=new_id,
            max_body_bytes=config.server.max_body_bytes,
            wrong_keys=wrong_keys,
            bodies=bodies,
            trace=None if self.tracing is None else self.tracing.begin,
        )

    def _control_plane(self, wrong_keys: WrongKeys, bodies: BodyBytes) -> App:
        """The application for every path outside the data plane."""
        port = self._port if self.config.server.management_port != 0 else 0
        surface = Control(
            models=self.models,
            retiring=self.served.retiring,
            names=self.served.names,
            splits=self.served.shares,
            metrics=self.metrics,
            page=MetricsPage(
                self.metrics,
                self.models,
                lambda: self.store.active,
                self._clock,
                self._state_up,
                lambda: self.pools.snapshots,
                lambda: self.pools.store_counts,
                self._replicas,
                self.discovery.report,
                lambda: self.reloading.status,
                lambda: self.certificates,
                lambda: () if self.pools.tokens is None else self.pools.tokens.ages(),
                lambda: None if self.pools.cluster is None else self.pools.cluster.age_s,
                lambda: () if self.batches is None else self.batches.runner.counts(),
            ),
            batches=lambda: () if self.batches is None else self.batches.runner.open(),
            ring=self.ring,
            peers=self.replicas.peers,
            management_port=port,
            drain=self.replicas.drain,
            add_worker=self.workers.add,
            remove_worker=self.workers.remove,
            reload=self.reloading.reload,
            compare=self.reloading.compare,
            claims=self.claims,
            registry=self.pools.entitlements,
            tenants=self.pools.tenants,
            budgets=self.pools.budgets,
            view=self.store.view,
            managed=self.pools.manages,
            shapes=self.pools.shapes,
            replicas=self._replicas,
            store_up=self._state_up,
            draining=lambda: self.data_plane.draining,
            unread=lambda: self.pools.keyring.unread - {CLUSTER_GRANTS},
            clock=self._clock,
            keys=self.role_keys,
            authenticate=self._authenticate,
            version=version(),
            created_unix_s=int(time.time()),
            wrong_keys=wrong_keys,
        )
        self.snapshots = Snapshots(surface)
        reports = None if self.ledger is None else partial(report, self.ledger.path)
        app = control_app(
            surface,
            usage_router(surface, reports),
            dashboard_router(surface, self.snapshots),
            admission_router(self.admission_service, self._authenticate, surface.peers),
            tenant_router(surface, self.quoter, bodies),
            batch_router(surface, None if self.batches is None else self.batches.service, bodies),
        )
        answer_peers(
            surface,
            reload=self.reloading.hang_up,
            own_decision=partial(own_decision, self.ring),
        )
        answer_totals(surface.peers, self.metrics)
        return Management(cast("App", app), port) if port else cast("App", app)

    async def _authenticate(self, head: RequestHead) -> Principal:
        """Stage 1 for the control plane. Raises Refusal."""
        return await authenticate_head(self.pools.keyring, head, time.time())

    def _replicas(self) -> int:
        """Live replicas, this one included."""
        return max((self.replicas.count(model.name) for model in self.models), default=1)

    def _state_up(self) -> bool:
        """Whether all shared and persistent state is reachable."""
        return self.pools.up and self.replicas.up

    def _note_item(self, record: msgspec.Struct) -> None:
        if self.batches is not None:
            self.batches.note(record)

    def _evict(self, lease_id: str) -> None:
        """Evict a lease, held by a request here or for another proxy."""
        self.pipeline.evict(lease_id)
        self.admission_service.evict(lease_id)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Gateway"]:
        """Run background work during the block; then close everything, even if a part fails."""
        writers = [writer for writer in (self.log, self.export) if writer is not None]
        async with AsyncExitStack() as closing:
            for writer in writers:
                writer.start()
                closing.push_async_callback(writer.close)
            if self.tracing is not None:
                closing.push_async_callback(self.tracing.close)
            if self.compressor is not None:
                await self.compressor.start()
                closing.push_async_callback(self.compressor.close)
            closing.push_async_callback(self.reader.close)
            closing.push_async_callback(self.upstream.close)
            for part in (
                self.replicas,
                self.prober,
                self.discovery,
                self.reloading,
            ):
                closing.push_async_callback(part.close)  # also if start is cancelled
                await part.start()
            await closing.enter_async_context(self.pools.running(self.pipeline.extend))
            self.admission_service.start()
            closing.push_async_callback(self.admission_service.close)
            ticking = BackgroundTasks()
            closing.push_async_callback(self.kv_events.close)
            closing.push_async_callback(ticking.close)
            ticking.start(self._tick(), self.snapshots.keep_history())
            if self.certificates is not None:
                ticking.start(self.certificates.watch())
            if self.batches is not None:  # ends first: its items need all the rest
                closing.push_async_callback(self.batches.close)
                await self.batches.start()
            try:
                yield self
            finally:
                for writer in writers:  # before waiting for parts that may be unreachable
                    await writer.flush()

    async def _tick(self) -> None:
        """Do what no request triggers."""
        state_was_up = True

        def charge_fleet() -> None:
            for bill in self.bill.due(self._clock(), self._replicas()):
                self.metrics.fleet_cost.add(bill.model, bill.pool, by=bill.cost_nano)
                if self.export is not None:
                    self.export.bill(bill)

        def log_state() -> None:
            """Once when the state store went or returned; its parts log their own causes."""
            nonlocal state_was_up
            was_up, state_was_up = state_was_up, self._state_up()
            if state_was_up and not was_up:
                _log.warning("the state store is back")
            elif was_up and not state_was_up:
                _log.error(
                    "the state store is away: limits are kept as state.fail_mode says, and changes "
                    "of keys and entitlements do not arrive; have it answer, the gateway returns "
                    "by itself"
                )

        chores = (
            charge_fleet,
            lambda: self.pipeline.tick(self.served.retiring),
            self.rotation.sweep,
            self.kv_events.look,
            self.reloading.sweep,
            self.boundaries.tick,
            lambda: self.rotation_log.look(self.served.models, self._clock()),
            log_state,
        )
        while True:
            await asyncio.sleep(_TICK_S)
            for chore in chores:
                try:
                    chore()
                except Exception:  # noqa: BLE001 - a defect must end neither the task nor others
                    _log.exception("a chore failed")


def version() -> str:
    """The installed version."""
    try:
        return importlib.metadata.version("sluice-gateway")
    except importlib.metadata.PackageNotFoundError:
        return "0"
