"""One serving replica: uvicorn with the gateway's own protocol, until SIGTERM and drained.

`gateway.wiring.app` builds its objects; `gateway.wiring.supervisor` starts several replicas.
SIGUSR2 starts the program anew beside this process, which leaves once the new one listens.
"""

import asyncio
import gc
import logging
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Collection
from functools import partial
from types import FrameType
from typing import Any, Final, cast

import uvicorn

from gateway.background_task import BackgroundTasks
from gateway.errors import StateFailure
from gateway.http.client_connection import SWEEP_EVERY_S
from gateway.http.cors import Cors
from gateway.http.protocol import GatewayProtocol
from gateway.http.tls_listener import TlsListener
from gateway.settings import Config
from gateway.wiring.app import Gateway
from gateway.wiring.handover import (
    BACKLOG,
    Parent,
    Ports,
    listening,
    on_signals,
    taken_over,
)
from gateway.wiring.listening import port_of, take_no_more
from gateway.wiring.process_limits import (
    allow_open_files,
    files_needed,
    give_back_large_blocks,
    shortage,
)
from gateway.wiring.replicas import loopback_of_many
from gateway.wiring.service_manager import READY, STOPPING, ServiceManager
from gateway.wiring.successor import Started, Successor

LAST_REQUESTS_S: Final = 1.0
"""Time for open connections to send a last request once nothing runs and nothing listens."""
HANDSHAKES_S: Final = 0.2
"""Time for handshakes under way to end when a replica leaves a shared port."""

_log = logging.getLogger("sluice")


class _GatewayServer(uvicorn.Server):
    """uvicorn, but the first SIGTERM drains: /ready answers 503 while running requests finish.

    A replica that shares the clients' port stops listening on it when it drains, so new
    connections reach other replicas. Its open connections are served one more request each.
    Others listen until nothing runs, to tell clients to ask elsewhere. Either way a request on its
    way when the drain ends is still answered.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        gateway: Gateway,
        on_ready: Callable[[int], None],
        manager: ServiceManager,
        *,
        clients: int,
        shared: int,
        held: Collection[int],
    ) -> None:
        """`clients`: number of clients' sockets, which come first.

        `shared`: number of sockets, from the first, whose port other processes share.

        `held`: descriptors of sockets that other processes hold too, so closing them here loses
        no connection.
        """
        super().__init__(config)
        self._gateway = gateway
        self._on_ready = on_ready
        self._clients = clients
        self._shared = shared
        self._manager = manager
        self._held = held
        self._closes = 0
        """Number of listeners to close, from the first."""
        self._drain_until_s: float | None = None
        self._leaves_s: float | None = None
        """When it exits, once nothing runs."""
        self._next_sweep_s = 0.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self._listen(sockets)
        if self.started and sockets:
            self._on_ready(port_of(sockets))

    async def _listen(self, sockets: list[socket.socket] | None) -> None:
        certificates = self._gateway.certificates
        if certificates is None or sockets is None:
            await super().startup(sockets)
        else:
            # Management stays plain: Prometheus and other replicas ask there, inside.
            clients, others = sockets[: self._clients], sockets[self._clients :]
            await super().startup(others)
            listener = TlsListener(
                clients,
                self._protocol,
                certificates,
                self._gateway.metrics.tls_failures,
                backlog=BACKLOG,
            )
            self.servers.insert(0, cast("Any", listener))

    async def take_back(self, ports: Ports) -> None:
        """Serve again, on these ports: the process that they were left to has ended."""
        plane = self._gateway.data_plane
        plane.draining = plane.last_requests = self.should_exit = False
        self._drain_until_s = self._leaves_s = None
        self._closes, self._shared, self._held = 0, len(ports.clients), ports.held
        await self._listen(ports.sockets)
        self._manager.replaced_by(os.getpid())

    def _protocol(self) -> GatewayProtocol:
        """Serve a new connection, as uvicorn does by itself without TLS."""
        made = cast("Any", self.config.http_protocol_class)
        served: GatewayProtocol = made(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return served

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._drain_until_s is not None:
            super().handle_exit(sig, frame)
            return
        self._manager.say(STOPPING)
        self._drain()

    def _drain(self) -> None:
        now_s, plane = time.monotonic(), self._gateway.data_plane
        if self._shared:
            self._closes = self._shared
            plane.last_requests = True
        plane.draining = True
        self._drain_until_s = now_s + self._gateway.config.server.drain_timeout_s
        _log.info("draining: %d requests running", plane.running)

    def parent_gone(self, loop: asyncio.AbstractEventLoop, parent: int) -> None:
        """Drain and release every port, because replicas of a new supervisor need them."""
        loop.remove_reader(parent)
        self.leave()

    def leave(self, successor: int | None = None) -> None:
        """Drain and release every port to another process; `successor` is its id, if known."""
        if successor is not None:
            self._manager.replaced_by(successor)
        self._shared = sys.maxsize
        if self._drain_until_s is None:
            self._drain()
        self._closes = sys.maxsize

    async def on_tick(self, counter: int) -> bool:
        now_s = time.monotonic()
        if now_s >= self._next_sweep_s:
            self._next_sweep_s = now_s + SWEEP_EVERY_S
            loop_s = asyncio.get_running_loop().time()
            for connection in list(self.server_state.connections):
                if isinstance(connection, GatewayProtocol):
                    connection.sweep(loop_s)
        if self._drain_until_s is not None:
            await self._stop_listening()
            await self._leave_when_done(self._drain_until_s)
        return await super().on_tick(counter)

    async def _leave_when_done(self, drain_until_s: float) -> None:
        now_s, plane = time.monotonic(), self._gateway.data_plane
        over = now_s > drain_until_s
        if over:
            plane.last_requests = False
        if plane.running and not over:
            self._leaves_s = None
        elif self._leaves_s is None:
            self._leaves_s = now_s + LAST_REQUESTS_S
            self._closes = sys.maxsize
            await self._stop_listening()
        if self._leaves_s is not None:
            self.should_exit = now_s >= self._leaves_s or not self.server_state.connections

    async def _stop_listening(self) -> None:
        """Close each listener once no connection waits in it; the kernel would reset those."""
        closes, self._closes = self._closes, 0
        listeners = [
            sock
            for server in self.servers[:closes]
            for sock in server.sockets
            if sock.fileno() not in self._held
        ]
        if listeners:
            for listener in listeners:
                take_no_more(listener)
            await asyncio.sleep(HANDSHAKES_S)
            waiting = select.poll()
            for listener in listeners:
                waiting.register(listener.fileno(), select.POLLIN)
            while waiting.poll(0):  # noqa: ASYNC110 - the loop accepts it
                await asyncio.sleep(0)
        for server in self.servers[:closes]:
            server.close()


async def serve(
    config: Config,
    *,
    on_ready: Callable[[int], None] | None = None,
    parent: Parent | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; calls `on_ready` with the port once it listens.

    With a `parent` the port is shared. Raises OSError, also for a port in use.
    """
    loop = asyncio.get_running_loop()
    manager = ServiceManager({} if parent else os.environ)
    started = Started({} if parent else os.environ)
    chores = BackgroundTasks()
    chores.start(manager.live())
    ports = listening(config, parent, started)
    gateway = Gateway(config, port=port_of(ports.management))

    def ready(port: int) -> None:
        manager.say(READY)
        started.ready()
        if on_ready is not None:
            on_ready(port)

    server = _GatewayServer(
        _uvicorn_config(config, gateway),
        gateway,
        ready,
        manager,
        clients=len(ports.clients),
        shared=len(ports.clients) if parent or ports.held else 0,
        held=ports.held,
    )
    await taken_over(config, started, ports.sockets)

    def take_back() -> None:
        chores.start(server.take_back(listening(config, parent, started, again=True)))

    successor = Successor(loop, started, os.environ, server.leave, take_back)
    if parent is not None:
        loop.add_reader(parent.pipe, server.parent_gone, loop, parent.pipe)
    async with gateway.running():
        # Keep garbage collection away from requests: start-up objects stay, and only the young
        # generations are collected, at most 50,000 objects (about 5 ms). Full collections would
        # repeatedly traverse long-lived streams, indices and records, and cycles are rare.
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000, 5, 1_000)
        on_signals(
            loop,
            reload=partial(_reload, gateway, manager),
            upgrade=server.leave if parent else successor.start,
        )
        await server.serve(ports.sockets)
    successor.end()
    await chores.close()


def _uvicorn_config(config: Config, gateway: Gateway) -> uvicorn.Config:
    protocol = type(
        "BoundGatewayProtocol",
        (GatewayProtocol,),
        {
            "max_head_bytes": config.server.max_header_bytes,
            "max_connections": _connections(config),
            "keep_alive_s": config.server.keep_alive_s,
            "cors": Cors(config.server.allowed_origins),
            "data_plane": gateway.data_plane,
            "bodies": gateway.data_plane.bodies,
        },
    )
    return uvicorn.Config(
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
        backlog=BACKLOG,
        timeout_graceful_shutdown=2,
    )


def run(
    config: Config,
    *,
    on_ready: Callable[[int], None] | None = None,
    parent: Parent | None = None,
    warns: bool = True,
) -> int:
    """Serve in this process; returns the exit status. A signal is a clean end and raises nothing.

    `parent`: see `serve`. Without `warns`, another process logs warnings about the configuration.
    """
    if warns and not config.entitlements:
        _log.warning("no entitlements are configured: the gateway is open to any key or none")
    if warns and (said := loopback_of_many(config)) is not None:
        _log.warning("%s", said)
    give_back_large_blocks()
    connections = _connections(config)
    workers = sum(pool.replica_bounds[1] for m in config.models for pool in m.pools.values())
    allowed = allow_open_files(files_needed(connections, workers))
    if warns and (said := shortage(connections, workers, allowed)) is not None:
        _log.warning("%s", said)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(serve(config, on_ready=on_ready, parent=parent))
    except KeyboardInterrupt:
        return 0
    except SystemExit:  # raised by uvicorn after it logged why it cannot listen
        return 1
    except (OSError, StateFailure) as error:
        _log.error("%s", error)
        return 1
    return 0


def _connections(config: Config) -> int:
    """Client connections that one replica of the host serves at once."""
    return -(-config.server.max_connections // config.server.workers)


def _reload(gateway: Gateway, manager: ServiceManager) -> None:
    manager.reloading()
    if gateway.certificates is not None:
        gateway.certificates.look()
    gateway.reloading.hang_up(lambda: manager.say(READY))


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Factory of a replica's event loop; None for the default."""
    if sys.platform == "win32":
        return None
    import uvloop  # noqa: PLC0415 - not on Windows

    return uvloop.new_event_loop
