"""One replica that serves: uvicorn with the gateway's own protocol, until SIGTERM and drained.

`gateway.app` builds what is served; `gateway.supervisor` starts several of these.
"""

import asyncio
import gc
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, cast

import uvicorn

from gateway.adapters.heap import give_back_large_blocks
from gateway.adapters.listening import bound, port_of
from gateway.adapters.open_files import allow_open_files, files_needed, shortage
from gateway.app import Gateway
from gateway.errors import StateFailure
from gateway.settings import Config
from gateway.web.client_connection import SWEEP_EVERY_S
from gateway.web.protocol import GatewayProtocol

_log = logging.getLogger("sluice")


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
        self._drain_until_s: float | None = None
        self._next_sweep_s = 0.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self._on_ready is not None and sockets:
            self._on_ready(port_of(sockets))

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
        if self._drain_until_s is not None:
            idle = self._gateway.data_plane.running == 0
            if idle or time.monotonic() > self._drain_until_s:
                self.should_exit = True
        return await super().on_tick(counter)


async def serve(
    config: Config,
    *,
    on_ready: Callable[[int], None] | None = None,
    parent: int | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; `on_ready` is told the port once it listens.

    `parent`: a descriptor that ends when the supervisor does, which shares its port. Raises
    OSError, also for a port in use.
    """
    listed = config.server
    sockets = bound(listed.host, listed.port, shared=parent is not None)
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
    loop = asyncio.get_running_loop()
    ignore_hangup(loop)
    if parent is not None:
        loop.add_reader(parent, _parent_gone, loop, parent, server)
    async with gateway.running():
        _calm_gc()
        await server.serve(sockets)


def _parent_gone(loop: asyncio.AbstractEventLoop, parent: int, server: _Server) -> None:
    loop.remove_reader(parent)
    server.handle_exit(signal.SIGTERM, None)


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
    parent: int | None = None,
    warns: bool = True,
) -> int:
    """Serve in this process; the exit status. Raises nothing for a signal: that is a clean end.

    `parent`: see `serve`. Without `warns` another process says what the configuration lacks.
    """
    if warns and not config.entitlements:
        _log.warning("no entitlements are configured: the gateway is open to any key or none")
    give_back_large_blocks()
    _allow_open_files(config, warns=warns)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(serve(config, on_ready=on_ready, parent=parent))
    except KeyboardInterrupt:
        return 0
    except SystemExit:  # uvicorn's, once it has logged why it cannot listen
        return 1
    except (OSError, StateFailure) as error:
        _log.error("%s", error)
        return 1
    return 0


def _allow_open_files(config: Config, *, warns: bool) -> None:
    connections = _connections(config)
    workers = sum(len(pool.workers) for model in config.models for pool in model.pools.values())
    allowed = allow_open_files(files_needed(connections, workers))
    said = shortage(connections, workers, allowed)
    if warns and said is not None:
        _log.warning("%s", said)


def _connections(config: Config) -> int:
    """Client connections that one of the host's replicas serves at once."""
    return -(-config.server.max_connections // config.server.workers)


def ignore_hangup(loop: asyncio.AbstractEventLoop) -> None:
    """SIGHUP asks daemons to read their configuration anew: say that this one does not.

    By itself the signal would end the process, and cut every stream.
    """
    if sys.platform != "win32":
        told = "SIGHUP: the configuration is not read anew; restart to change it"
        loop.add_signal_handler(signal.SIGHUP, _log.warning, told)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What makes the event loop of a replica."""
    if sys.platform == "win32":
        return None
    import uvloop  # noqa: PLC0415 - not on Windows

    return uvloop.new_event_loop
