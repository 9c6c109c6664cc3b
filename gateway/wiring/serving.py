"""One serving replica: uvicorn with the gateway's own protocol, until SIGTERM and drained.

`gateway.wiring.app` builds its objects; `gateway.wiring.supervisor` starts several replicas.
"""

import asyncio
import gc
import logging
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, cast

import uvicorn

from gateway.adapters.process_limits import (
    allow_open_files,
    files_needed,
    give_back_large_blocks,
    shortage,
)
from gateway.adapters.replicas.listening import bound, port_of
from gateway.errors import StateFailure
from gateway.settings import Config
from gateway.web.http.client_connection import SWEEP_EVERY_S
from gateway.web.http.protocol import GatewayProtocol
from gateway.wiring.app import Gateway
from gateway.wiring.replicas import loopback_of_many

LAST_REQUESTS_S: Final = 1.0
"""Time for open connections to send a last request when a replica leaves a shared port."""

_log = logging.getLogger("sluice")


class _GatewayServer(uvicorn.Server):
    """uvicorn, but the first SIGTERM drains: /ready answers 503 while running requests finish.

    A replica that shares the clients' port stops listening on it when it drains, so new
    connections reach other replicas. Its open connections are served one more request each.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        gateway: Gateway,
        on_ready: Callable[[int], None] | None,
        *,
        shared: int,
    ) -> None:
        """`shared`: number of sockets, from the first, whose port other replicas share."""
        super().__init__(config)
        self._gateway = gateway
        self._on_ready = on_ready
        self._shared = shared
        self._closes = 0
        """Number of listeners to close, from the first."""
        self._drain_until_s: float | None = None
        self._last_requests_until_s = 0.0
        self._next_sweep_s = 0.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self._on_ready is not None and sockets:
            self._on_ready(port_of(sockets))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._drain_until_s is not None:
            super().handle_exit(sig, frame)
            return
        now_s, plane = time.monotonic(), self._gateway.data_plane
        if self._shared:
            self._closes = self._shared
            self._last_requests_until_s = now_s + LAST_REQUESTS_S
            plane.last_requests = True
        plane.draining = True
        self._drain_until_s = now_s + self._gateway.config.server.drain_timeout_s
        _log.info("draining: %d requests running", plane.running)

    def parent_gone(self, loop: asyncio.AbstractEventLoop, parent: int) -> None:
        """Drain and release every port, because replicas of a new supervisor need them."""
        loop.remove_reader(parent)
        if self._drain_until_s is None:
            self.handle_exit(signal.SIGTERM, None)
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
            waits = self.server_state.connections and now_s < self._last_requests_until_s
            idle = self._gateway.data_plane.running == 0 and not waits
            if idle or now_s > self._drain_until_s:
                self.should_exit = True
        return await super().on_tick(counter)

    async def _stop_listening(self) -> None:
        """Close each listener once no connection waits in it; the kernel would reset those."""
        closes, self._closes = self._closes, 0
        for server in self.servers[:closes]:
            waiting = select.poll()
            for listener in server.sockets:
                waiting.register(listener.fileno(), select.POLLIN)
            while waiting.poll(0):  # noqa: ASYNC110 - the loop accepts it
                await asyncio.sleep(0)
            server.close()


async def serve(
    config: Config,
    *,
    on_ready: Callable[[int], None] | None = None,
    parent: int | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; calls `on_ready` with the port once it listens.

    `parent` is a file descriptor that reaches its end when the supervisor ends; with it, the port
    is shared. Raises OSError, also for a port in use.
    """
    listed = config.server
    sockets = bound(listed.host, listed.port, shared=parent is not None)
    shared = 0 if parent is None else len(sockets)
    management = sockets
    if listed.management_port:
        management = bound(listed.host, listed.management_port)
        sockets = [*sockets, *management]
    gateway = Gateway(config, port=port_of(management))
    protocol = type(
        "BoundGatewayProtocol",
        (GatewayProtocol,),
        {
            "max_head_bytes": config.server.max_header_bytes,
            "max_connections": _connections(config),
            "data_plane": gateway.data_plane,
            "bodies": gateway.data_plane.bodies,
        },
    )
    server = _GatewayServer(
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
        shared=shared,
    )
    loop = asyncio.get_running_loop()
    on_hangup(loop, gateway.reloading.hang_up)
    if parent is not None:
        loop.add_reader(parent, server.parent_gone, loop, parent)
    async with gateway.running():
        _calm_gc()
        await server.serve(sockets)


def _calm_gc() -> None:
    """Keep garbage collection away from requests: start-up objects stay, and cycles are rare.

    Collections cover the young generations only, at most 50,000 objects (about 5 ms). Full ones
    would repeatedly traverse long-lived streams, indices and records for nothing.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 5, 1_000)


def run(
    config: Config,
    *,
    on_ready: Callable[[int], None] | None = None,
    parent: int | None = None,
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
    _allow_open_files(config, warns=warns)
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


def _allow_open_files(config: Config, *, warns: bool) -> None:
    connections = _connections(config)
    workers = sum(pool.replica_bounds[1] for m in config.models for pool in m.pools.values())
    allowed = allow_open_files(files_needed(connections, workers))
    said = shortage(connections, workers, allowed)
    if warns and said is not None:
        _log.warning("%s", said)


def _connections(config: Config) -> int:
    """Client connections that one replica of the host serves at once."""
    return -(-config.server.max_connections // config.server.workers)


def on_hangup(loop: asyncio.AbstractEventLoop, reload: Callable[[], None]) -> None:
    """Reload on SIGHUP. Unhandled, the signal would end the process and cut every stream."""
    if sys.platform != "win32":
        loop.add_signal_handler(signal.SIGHUP, reload)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Factory of a replica's event loop; None for the default."""
    if sys.platform == "win32":
        return None
    import uvloop  # noqa: PLC0415 - not on Windows

    return uvloop.new_event_loop
