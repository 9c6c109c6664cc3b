"""The composition root: configuration -> objects -> a served application.

The only module that reads settings and knows every adapter. `build` makes the objects of one
process, `run` serves them until SIGTERM.
"""

import asyncio
import gc
import hashlib
import importlib
import importlib.metadata
import logging
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from heapq import nlargest
from operator import itemgetter
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import uvicorn
from uvicorn.server import ServerState

from gateway.adapters.boundary_chore import BoundaryChore, told_totals
from gateway.adapters.decision_ring import DecisionRing
from gateway.adapters.engine_metrics import EngineMetrics
from gateway.adapters.heap import give_back_large_blocks
from gateway.adapters.probes import Prober
from gateway.adapters.request_log import Records, RequestLog
from gateway.adapters.scheduler_notes import EVERY_S as NOTES_EVERY_S
from gateway.adapters.scheduler_notes import SchedulerNotes
from gateway.adapters.shared.seat import Place, Seat
from gateway.adapters.store.learning import Learning
from gateway.adapters.upstream import HttpUpstream
from gateway.adapters.usage_export import UsageExport
from gateway.assembly import TokenPools
from gateway.domain import Principal
from gateway.errors import StateFailure
from gateway.models import by_name, served_model
from gateway.pipeline import Pipeline
from gateway.policy.served import ServedModel
from gateway.rehearsal import Rehearsal
from gateway.settings import Config
from gateway.settings.boundaries import control_of
from gateway.sharing import Sharing
from gateway.stages.authenticate import Keyring, authenticate
from gateway.telemetry import Metrics
from gateway.web.admission_api import admission_router
from gateway.web.admission_desk import AdmissionDesk
from gateway.web.control import control_app
from gateway.web.data_plane import DataPlane
from gateway.web.metrics import MetricsPage
from gateway.web.openapi import openapi_document
from gateway.web.protocol import SWEEP_EVERY_S, GatewayProtocol
from gateway.web.surface import Control
from gateway.web.tenant_api import TenantView, tenant_router

if TYPE_CHECKING:
    from gateway.adapters.compress_workers import CompressWorkers

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
        self.pipeline = Pipeline(
            models=by_name(config, self.models),
            keyring=keyring,
            store=self.store,
            upstream=self.upstream,
            metrics=self.metrics,
            records=records,
            compressor=self.compressor,
            clock=clock,
            wall_clock=time.time,
            log_prompts=config.request_log.prompts,
        )
        names = {name: m.name for name, m in by_name(config, self.models).items() if name != "*"}
        admin_key = config.server.admin_key
        known = Authenticator(keyring)
        self.desk = AdmissionDesk(
            models=by_name(config, self.models),
            store=self.store,
            metrics=self.metrics,
            records=records,
            new_id=new_id,
            clock=clock,
            wall_clock=time.time,
            draining=lambda: self.data_plane.draining,
        )
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
        )
        self._clock = clock
        self.notes = SchedulerNotes(
            self.models, self.sharing.board, secrets.token_hex(6), self._replicas
        )
        self.sharing.connect(self.models, self.ring, self.desk, self.pools.registry, self.metrics)

    def _replicas(self, model: str) -> int:
        """Processes that serve a model: of this host, and with Redis of all that share it."""
        return max(self.sharing.replicas, self.pools.replicas(model))

    def _page(self, clock: Callable[[], float]) -> MetricsPage:
        return MetricsPage(
            self.metrics,
            self.models,
            lambda: self.store.active,
            clock,
            lambda: self.learning.up and self.pools.up,
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
    # An extra: only who compresses needs numpy.
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
        return importlib.metadata.version("sluice")
    except importlib.metadata.PackageNotFoundError:
        return "0"


class Authenticator:
    """Stage 1 for the control plane: who presents the key of this digest, now."""

    def __init__(self, keyring: Keyring) -> None:
        self._keyring = keyring

    def __call__(self, key_digest: bytes | None) -> Principal:
        """Raises Refusal."""
        return authenticate(self._keyring, key_digest, time.time())


class _Server(uvicorn.Server):
    """uvicorn, but the first SIGTERM drains: /ready says 503 while running requests finish."""

    def __init__(
        self,
        config: uvicorn.Config,
        gateway: Gateway,
        on_ready: Callable[[int], None] | None,
    ) -> None:
        super().__init__(config)
        self._gateway = gateway
        self._on_ready = on_ready
        self._seat = gateway.sharing.seat
        self._drain_until_s: float | None = None
        self._next_sweep_s = 0.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self._seat is not None:
            self._seat.link.on_lost = lambda: self.handle_exit(signal.SIGTERM, None)
            self._seat.give_away_with(self._give_away)
            await self._seat.ready(self._connection)
        elif self.started and self._on_ready is not None:
            self._on_ready(self.servers[0].sockets[0].getsockname()[1])

    def _connection(self) -> asyncio.Protocol:
        made: asyncio.Protocol = cast("Any", self.config).http_protocol_class(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made

    def _give_away(self, count: int) -> Iterator[socket.socket]:
        """Idle connections for another process, those used last first."""
        idle = [
            (since_s, connection)
            for connection in self.server_state.connections
            if isinstance(connection, GatewayProtocol)
            and (since_s := connection.idle_since_s) is not None
        ]
        for _, connection in nlargest(count, idle, key=itemgetter(0)):
            if (taken := connection.give_away()) is not None:
                yield taken

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._seat is not None:
            await self._seat.leave()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._drain_until_s is not None:
            super().handle_exit(sig, frame)
            return
        drain_s = self._gateway.config.server.drain_timeout_s
        self._gateway.data_plane.draining = True
        self._drain_until_s = time.monotonic() + drain_s
        _log.info("draining: %d requests running", self._gateway.data_plane.running)

    async def on_tick(self, counter: int) -> bool:
        now_s = time.monotonic()
        if now_s >= self._next_sweep_s:
            self._next_sweep_s = now_s + SWEEP_EVERY_S
            loop_s = asyncio.get_running_loop().time()
            for connection in list(self.server_state.connections):
                if isinstance(connection, GatewayProtocol):
                    connection.sweep(loop_s)
        if self._seat is not None:
            answered = self._gateway.data_plane.answered
            self._seat.count(len(self.server_state.connections), answered)
        if self._drain_until_s is not None:
            idle = self._gateway.data_plane.running == 0
            if idle or time.monotonic() > self._drain_until_s:
                self.should_exit = True
        return await super().on_tick(counter)


async def serve(
    config: Config,
    *,
    on_ready: Callable[[int], None] | None = None,
    place: Place | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; `on_ready` is told the port once it listens.

    `place`: of this process among several; its connections come from their parent.
    """
    seat = None if place is None else Seat(place)
    if seat is not None:
        seat.open()
    gateway = Gateway(config, seat=seat)
    protocol = type(
        "BoundGatewayProtocol",
        (GatewayProtocol,),
        {
            "max_head_bytes": config.server.max_header_bytes,
            "max_connections": -(-config.server.max_connections // gateway.sharing.count),
            "data_plane": gateway.data_plane,
        },
    )
    server = _Server(
        uvicorn.Config(
            cast("Any", gateway.data_plane),
            host=config.server.host,
            port=config.server.port,
            http=protocol,
            ws="none",
            lifespan="off",
            access_log=False,
            proxy_headers=False,
            log_config=None,
            server_header=False,
            date_header=False,
            backlog=4096,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=2,
        ),
        gateway,
        on_ready,
    )
    async with gateway.running(), _rehearsing(config, gateway, protocol, server):
        _calm_gc()
        await server.serve(None if seat is None else [])


@asynccontextmanager
async def _rehearsing(
    config: Config, gateway: Gateway, protocol: type[GatewayProtocol], server: uvicorn.Server
) -> AsyncIterator[None]:
    """Keep the way of a request warm while the block runs."""
    if not config.server.keep_warm:
        yield
        return
    model = served_model(config, config.models[0])
    rehearsal = Rehearsal(model, time.monotonic, processes=gateway.sharing.count)
    server.config.load()
    rehearsal.start(
        protocol(config=server.config, server_state=ServerState(), app_state={}),
        gateway.data_plane,
    )
    try:
        yield
    finally:
        await rehearsal.close()


def _calm_gc() -> None:
    """Keep the collector away from requests: what is built now stays, and cycles are rare.

    It looks at the young only, 50,000 objects at most (some 5 ms): whatever lives as long as a
    stream, an index or a ring of records would be walked through again and again for nothing.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 5, 1_000)


def run(
    config: Config,
    *,
    on_ready: Callable[[int], None] | None = None,
    place: Place | None = None,
) -> int:
    """Serve in this process; the exit status. Raises nothing for a signal: that is a clean end."""
    if not config.entitlements and (place is None or place.index == 0):
        _log.warning("no entitlements are configured: the gateway is open to any key or none")
    give_back_large_blocks()
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(serve(config, on_ready=on_ready, place=place))
    except KeyboardInterrupt:
        return 0
    except (OSError, StateFailure) as error:
        _log.error("%s", error)
        return 1
    return 0


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What makes the event loop of a process that serves."""
    if sys.platform == "win32":
        return None
    import uvloop  # noqa: PLC0415 - not on Windows

    return uvloop.new_event_loop
