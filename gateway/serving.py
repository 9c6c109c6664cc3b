"""One process that serves: uvicorn with the gateway's own protocol, until SIGTERM and drained.

`gateway.app` builds what is served; `gateway.supervisor` starts several of these.
"""

import asyncio
import gc
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from heapq import nlargest
from operator import itemgetter
from types import FrameType
from typing import Any, cast

import uvicorn

from gateway.adapters.heap import give_back_large_blocks
from gateway.adapters.open_files import allow_open_files, files_needed, shortage
from gateway.adapters.shared.seat import Place, Seat
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
            "max_connections": _connections(config, gateway.sharing.count),
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
    ignore_hangup(asyncio.get_running_loop())
    async with gateway.running():
        _calm_gc()
        await server.serve(None if seat is None else [])


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
    _allow_open_files(config, place)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(serve(config, on_ready=on_ready, place=place))
    except KeyboardInterrupt:
        return 0
    except SystemExit:  # uvicorn's, once it has logged why it cannot listen
        return 1
    except (OSError, StateFailure) as error:
        _log.error("%s", error)
        return 1
    return 0


def _allow_open_files(config: Config, place: Place | None) -> None:
    connections = _connections(config, 1 if place is None else place.count)
    workers = sum(len(pool.workers) for model in config.models for pool in model.pools.values())
    allowed = allow_open_files(files_needed(connections, workers))
    said = shortage(connections, workers, allowed)
    if said is not None and (place is None or place.index == 0):
        _log.warning("%s", said)


def _connections(config: Config, processes: int) -> int:
    """Client connections that one of several processes serves at once."""
    return -(-config.server.max_connections // processes)


def ignore_hangup(loop: asyncio.AbstractEventLoop) -> None:
    """SIGHUP asks daemons to read their configuration anew: say that this one does not.

    By itself the signal would end the process, and cut every stream.
    """
    if sys.platform != "win32":
        told = "SIGHUP: the configuration is not read anew; restart to change it"
        loop.add_signal_handler(signal.SIGHUP, _log.warning, told)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What makes the event loop of a process that serves."""
    if sys.platform == "win32":
        return None
    import uvloop  # noqa: PLC0415 - not on Windows

    return uvloop.new_event_loop
