"""With a management port, metrics and admin routes are unknown on the clients' port."""

from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from gateway.control.management_port import Management, replica_list_app


def client(port: int) -> httpx.AsyncClient:
    async def inner(request: Any) -> PlainTextResponse:
        return PlainTextResponse(request.url.path)

    app: Any = Management(Starlette(routes=[Route("/{path:path}", inner)]), port=9)
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(transport=transport, base_url=f"http://gateway:{port}")


@pytest.mark.parametrize("path", ["/metrics", "/admin/pools", "/internal/replicas/load"])
async def test_what_is_the_operator_s_is_on_its_own_port(path: str) -> None:
    async with client(9) as inside, client(8) as outside:
        assert (await inside.get(path)).text == path
        refused = await outside.get(path)
    assert refused.status_code == 404
    assert "management port" in refused.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/metricsx", "/v1/sluice/me"])
async def test_all_else_is_on_both(path: str) -> None:
    for port in (8, 9):
        async with client(port) as any_port:
            assert (await any_port.get(path)).text == path


async def test_prometheus_finds_the_replicas_by_the_name_it_used() -> None:
    app = replica_list_app(lambda: [9101, 9102])
    for base, host in (("http://gw.example:9100", "gw.example"), ("http://[::1]:9100", "[::1]")):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url=base) as http:
            found = (await http.get("/http_sd")).json()
            assert found == [{"targets": [f"{host}:9101", f"{host}:9102"], "labels": {}}]
            assert (await http.get("/health")).json() == {"status": "ok"}
