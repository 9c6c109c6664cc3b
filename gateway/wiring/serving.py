"""One serving replica: uvicorn with the gateway's own protocol, until SIGTERM and drained.

`gateway.wiring.app` builds its objects; `gateway.wiring.supervisor` starts several replicas.
"""

import asyncio
import gc
import logging
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from functools import partial
from types import FrameType
from typing import Any, Final, cast

import uvicorn
import uvloop

from gateway.background_task import BackgroundTasks
from gateway.errors import StateFailure
from gateway.http.client_connection import SWEEP_EVERY_S
from gateway.http.cors import Cors
from gateway.http.protocol import GatewayProtocol
from gateway.http.tls import TlsListener
from gateway.settings import Config
from gateway.wiring.app import Gateway
from gateway.wiring.handover import (
    BACKLOG,
    READY,
    STOPPING,
    Origin,
    Ports,
    Successor,
    on_signals,
    port_of,
)
from gateway.wiring.process_limits import allow_open_files, give_back_large_blocks
from gateway.wiring.replicas import loopback_of_many

LAST_REQUESTS_S: Final = 1.0
"""Time for open connections to send a last request once nothing runs and nothing listens."""

_log = logging.getLogger("sluice")


class _GatewayServer(uvicorn.Server):
    """uvicorn, but the first SIGTERM drains: /ready answers 503 while running requests finish.

    A replica that shares the clients' port stops listening on it when it drains, so new
    connections reach other replicas. Its open connections are served one more request each.
    Others listen until nothing runs, to tell clients to ask elsewhere. Either way a request on its
    way when the drain ends is still answered.
    """

    def __init__(
        self, gateway: Gateway, origin: Origin, ports: Ports, on_ready: Callable[[int], None]
    ) -> None:
        server = gateway.config.server
        bounds = {
            "max_head_bytes": server.max_header_bytes,
            "max_connections": _connections(gateway.config),
            "keep_alive_s": server.keep_alive_s,
            "cors": Cors(server.allowed_origins),
            "data_plane": gateway.data_plane,
            "bodies": gateway.data_plane.bodies,
        }
        super().__init__(
            uvicorn.Config(
                cast("Any", gateway.data_plane),
                http=type("BoundGatewayProtocol", (GatewayProtocol,), bounds),
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
        )
        self._gateway = gateway
        self._origin = origin
        self._ports = ports
        self._closes = 0
        """Number of listeners to close, from the first; the clients' ones come first."""
        self._shared = origin.supervisor is not None or bool(origin.sockets)
        """Whether other processes share the clients' port."""
        self._drain_until_s: float | None = None
        self._leaves_s: float | None = None
        """When it exits, once nothing runs."""
        self._next_sweep_s = 0.0
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self._listen()
        self._on_ready(port_of(self._ports[0]))

    async def _listen(self) -> None:
        (clients, management), certificates = self._ports, self._gateway.certificates
        # Management stays plain: Prometheus and other replicas ask there, inside.
        await super().startup(management if certificates else [*clients, *management])
        if certificates is None:
            return
        made = cast("Any", self.config.http_protocol_class)  # as uvicorn does without TLS
        state = {"server_state": self.server_state, "app_state": self.lifespan.state}
        listener = TlsListener(
            clients,
            partial(made, config=self.config, **state),
            certificates,
            self._gateway.metrics.tls_failures,
            backlog=BACKLOG,
        )
        self.servers.insert(0, cast("Any", listener))

    async def take_back(self) -> None:
        """Serve again: the process that the ports were left to has ended."""
        plane = self._gateway.data_plane
        plane.draining = plane.last_requests = self.should_exit = False
        self._drain_until_s = self._leaves_s = None
        self._closes, self._shared, self._origin.succeeds = 0, True, True
        self._ports = self._origin.ports(self._gateway.config)
        await self._listen()
        self._origin.service.replaced_by(os.getpid())

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._drain_until_s is not None:
            super().handle_exit(sig, frame)
            return
        self._origin.service.say(STOPPING)
        self._drain()

    def _drain(self) -> None:
        now_s, plane = time.monotonic(), self._gateway.data_plane
        if self._shared:
            self._closes = len(self.servers) - len(self._ports[1])
            plane.last_requests = True
        plane.draining = True
        self._drain_until_s = now_s + self._gateway.config.server.drain_timeout_s
        _log.info("draining: %d requests running", plane.running)

    def leave(self, successor: int | None = None) -> None:
        """Drain and release every port to another process; `successor` is its id, if known."""
        if successor is not None:
            self._origin.service.replaced_by(successor)
        self._shared = True
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
            await self._leave_when_done(now_s, self._drain_until_s)
        return await super().on_tick(counter)

    async def _leave_when_done(self, now_s: float, drain_until_s: float) -> None:
        plane = self._gateway.data_plane
        over = now_s > drain_until_s
        if over:
            plane.last_requests = False
        if plane.running and not over:
            self._leaves_s = None
        elif self._leaves_s is None:
            self._leaves_s = now_s + LAST_REQUESTS_S
            self._closes = sys.maxsize
        # Close each listener once no connection waits in it; the kernel would reset those. Of a
        # socket that systemd holds, too, it is others that accept them.
        closing, self._closes = self.servers[: self._closes], 0
        if not self._origin.sockets:
            waiting = select.poll()
            for sock in (sock for server in closing for sock in server.sockets):
                if sock.fileno() >= 0:  # else it was closed before
                    waiting.register(sock.fileno(), select.POLLIN)
            while waiting.poll(0):  # noqa: ASYNC110 - the loop accepts it
                await asyncio.sleep(0)
        for server in closing:
            server.close()
        if self._leaves_s is not None:
            self.should_exit = now_s >= self._leaves_s or not self.server_state.connections


async def serve(
    config: Config,
    *,
    on_ready: Callable[[int], None] | None = None,
    origin: Origin | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; calls `on_ready` with the port once it listens.

    Raises OSError, also for a port in use.
    """
    loop = asyncio.get_running_loop()
    origin = origin or Origin(os.environ)
    chores = BackgroundTasks()
    chores.start(origin.service.live())
    clients, management = ports = origin.ports(config)
    gateway = Gateway(config, port=port_of(management or clients))

    def ready(port: int) -> None:
        origin.service.say(READY)
        origin.ready()
        if on_ready is not None:
            on_ready(port)

    def reload() -> None:
        origin.service.reloading()
        if gateway.certificates is not None:
            gateway.certificates.look()
        gateway.reloading.hang_up(lambda: origin.service.say(READY))

    server = _GatewayServer(gateway, origin, ports, ready)
    await origin.wait_for_turn(config, [*clients, *management])
    successor = Successor(
        origin, os.environ, server.leave, lambda: chores.start(server.take_back())
    )
    if (pipe := origin.supervisor) is not None:

        def supervisor_gone() -> None:
            """Release every port, because replicas of a new supervisor need them."""
            loop.remove_reader(pipe)
            server.leave()

        loop.add_reader(pipe, supervisor_gone)
    async with gateway.running():
        # Keep garbage collection away from requests: start-up objects stay, and only the young
        # generations are collected, at most 50,000 objects (about 5 ms). Full collections would
        # repeatedly traverse long-lived streams, indices and records, and cycles are rare.
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000, 5, 1_000)
        on_signals(reload=reload, upgrade=server.leave if pipe is not None else successor.start)
        await server.serve()
    successor.end()
    await chores.close()


def run(
    config: Config,
    *,
    on_ready: Callable[[int], None] | None = None,
    origin: Origin | None = None,
    warns: bool = True,
) -> int:
    """Serve in this process; returns the exit status. A signal is a clean end and raises nothing.

    `origin`: where a replica of several comes from. Without `warns`, another process logs warnings
    about the configuration.
    """
    give_back_large_blocks()
    workers = sum(pool.replica_bounds[1] for m in config.models for pool in m.all_pools.values())
    shortage = allow_open_files(_connections(config), workers)
    if warns:
        if not config.entitlements and config.state.controller is None:
            _log.warning("no entitlements are configured: the gateway is open to any key or none")
        for warning in (loopback_of_many(config), shortage):
            if warning is not None:
                _log.warning("%s", warning)
    return until_done(serve(config, on_ready=on_ready, origin=origin))


def until_done(serving: Coroutine[Any, Any, int | None]) -> int:
    """Run a process's main coroutine; returns the exit status."""
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(serving) or 0
    except KeyboardInterrupt:
        return 0
    except SystemExit:  # raised by uvicorn after it logged why it cannot listen
        return 1
    except (OSError, StateFailure) as error:
        _log.error("%s", error)
        return 1


def _connections(config: Config) -> int:
    """Client connections that one replica of the host serves at once."""
    return -(-config.server.max_connections // config.server.workers)
