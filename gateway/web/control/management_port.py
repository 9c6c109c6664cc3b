"""Metrics, admin routes and dashboard on a port of their own; the clients' port answers 404."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from gateway.errors import NotFound
from gateway.web.problems import error_body, error_headers

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
        inner = any(path == each or path.startswith(each + "/") for each in INNER)
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
