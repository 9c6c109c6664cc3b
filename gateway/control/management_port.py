"""Metrics, admin routes and dashboard on a port of their own; the clients' port answers 404.

The supervisor lists its replicas' ports for Prometheus's `http_sd`.
"""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.errors import NotFound
from gateway.http.problems import error_body, error_headers

Scope = dict[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]

INNER: Final = ("/metrics", "/admin", "/internal", "/dashboard")


class Management:
    """ASGI middleware that refuses paths belonging to another port."""

    def __init__(self, app: App, port: int) -> None:
        """`port` is the only one that serves INNER paths."""
        self._app = app
        self._port = port

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Serve one request."""
        path = str(scope.get("path", ""))
        inner = any(path == prefix or path.startswith(prefix + "/") for prefix in INNER)
        if scope["type"] != "http" or not inner or managed(scope, self._port):
            await self._app(scope, receive, send)
            return
        refusal = NotFound(
            "Metrics and admin routes are on this gateway's management port.", reason="unknown_path"
        )
        await send(
            {
                "type": "http.response.start",
                "status": refusal.status,
                "headers": error_headers(refusal),
            }
        )
        await send({"type": "http.response.body", "body": error_body(refusal)})


def managed(scope: Mapping[str, Any], port: int) -> bool:
    """Whether a request came to the management port; always true for port 0 (none apart)."""
    return port == 0 or (scope.get("server") or ("", None))[1] == port


class _ListServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the supervisor."""
        yield


@contextlib.asynccontextmanager
async def replica_list(
    sockets: Sequence[socket.socket], ports: Callable[[], list[int]]
) -> AsyncIterator[Callable[[], None]]:
    """A small server beside the replicas, while the block runs; yields what has it end before.

    `sockets` are bound already; `ports` returns the ports of ready replicas.
    """
    config = uvicorn.Config(
        cast("Any", replica_list_app(ports)),
        lifespan="off",
        access_log=False,
        log_config=None,
        ws="none",
        limit_concurrency=100,
        timeout_graceful_shutdown=1,
    )
    server = _ListServer(config)

    def stop() -> None:
        server.should_exit = True

    task = asyncio.create_task(server.serve(list(sockets)))
    try:
        yield stop
    finally:
        stop()
        await task


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
