"""The supervisor's list of its replicas' metrics ports, for Prometheus's `http_sd`."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, cast

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route


class ReplicaList:
    """A small server beside the replicas, while the block runs."""

    def __init__(self, sockets: Sequence[socket.socket], ports: Callable[[], list[int]]) -> None:
        """`sockets` are bound already; `ports` returns the ports of ready replicas."""
        self._sockets = list(sockets)
        config = uvicorn.Config(
            cast("Any", replica_list_app(ports)),
            lifespan="off",
            access_log=False,
            log_config=None,
            ws="none",
            limit_concurrency=100,
            timeout_graceful_shutdown=1,
        )
        self._server = _ListServer(config)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._server.serve(self._sockets))
        return self

    def stop(self) -> None:
        """Leave the port, before the block ends."""
        self._server.should_exit = True

    async def __aexit__(self, *_: object) -> None:
        self.stop()
        if self._task is not None:
            await self._task


class _ListServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the supervisor."""
        yield


def replica_list_app(ports: Callable[[], list[int]]) -> Starlette:
    """`GET /http_sd` and `GET /health`."""

    async def http_sd(request: Request) -> Response:
        """The targets, with the host name that the caller used."""
        host = request.url.hostname or "127.0.0.1"
        host = f"[{host}]" if ":" in host else host
        targets = [f"{host}:{port}" for port in ports()]
        return JSONResponse([{"targets": targets, "labels": {}}])

    async def health(_: Request) -> Response:
        return Response(json.dumps({"status": "ok"}), media_type="application/json")

    return Starlette(routes=[Route("/http_sd", http_sd), Route("/health", health)])
