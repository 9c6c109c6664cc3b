"""Keys and roles: who may do what on each admin route."""

import hashlib
from collections.abc import Mapping

import httpx
import pytest
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from gateway.control.admin import admin_router
from gateway.control.roles import (
    OPERATED,
    NamedKey,
    Role,
    RoleKeys,
    admin_guard,
    dashboard_guard,
    role_for,
    who,
)
from gateway.errors import Refusal
from tests.control import control_of


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


KEYS = RoleKeys(
    admin_sha256=digest("sk-admin"),
    viewer_sha256=digest("sk-viewer"),
    named=(
        NamedKey(name="oncall", sha256=digest("sk-oncall"), role=Role.OPERATOR),
        NamedKey(name="boss", sha256=digest("sk-boss"), role=Role.OWNER),
    ),
)
OPEN = RoleKeys(admin_sha256=digest("sk-admin"), open_dashboard=True)


def app_of(keys: RoleKeys) -> FastAPI:
    app = FastAPI()

    @app.exception_handler(Refusal)
    async def refused(_request: Request, refusal: Refusal) -> Response:
        return Response(refusal.reason, status_code=refusal.status)

    admin = APIRouter(dependencies=[Depends(admin_guard(keys))])
    admin.add_api_route("/admin/pools", who, methods=["GET"])
    admin.add_api_route("/admin/reload", who, methods=["POST"])
    admin.add_api_route("/admin/entitlements", who, methods=["GET", "POST"])
    page = APIRouter(dependencies=[Depends(dashboard_guard(keys))])
    page.add_api_route("/page", lambda: "ok", methods=["GET"])
    app.include_router(admin)
    app.include_router(page)
    return app


async def call(
    keys: RoleKeys, method: str, path: str, key: str = "", headers: Mapping[str, str] | None = None
) -> tuple[int, str]:
    given = {"authorization": f"Bearer {key}"} if key else {}
    transport = httpx.ASGITransport(app=app_of(keys))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8080") as client:
        answer = await client.request(method, path, headers={**given, **(headers or {})})
    return answer.status_code, answer.text.strip('"')


READ, RUN, DECIDE = (
    ("GET", "/admin/pools"),
    ("POST", "/admin/reload"),
    ("POST", "/admin/entitlements"),
)


@pytest.mark.parametrize(
    ("key", "allowed", "reason"),
    [
        ("sk-viewer", [READ], "viewer_cannot_change"),
        ("sk-oncall", [READ, RUN], "operator_cannot_change"),
        ("sk-admin", [READ, RUN, DECIDE], ""),
        ("sk-boss", [READ, RUN, DECIDE], ""),
    ],
)
async def test_each_role_does_what_it_may(
    key: str, allowed: list[tuple[str, str]], reason: str
) -> None:
    for route in (READ, RUN, DECIDE):
        status, said = await call(KEYS, *route, key)
        assert (status, said) == ((200, name_of(key)) if route in allowed else (403, reason))


def name_of(key: str) -> str:
    return {"sk-oncall": "oncall", "sk-boss": "boss"}.get(key, digest(key).hex()[:8])


def test_what_operators_may_change_is_there() -> None:
    routes = [r for r in admin_router(control_of()).routes if isinstance(r, APIRoute)]
    found = {
        (method, r.path): role_for(method, r.path) for r in routes for method in r.methods or ()
    }
    assert {route for route, role in found.items() if role is Role.OPERATOR} == OPERATED
    assert {how for (how, _), role in found.items() if role is Role.VIEWER} == {"GET"}


@pytest.mark.parametrize("path", ["/admin/pools", "/page"])
async def test_other_keys_are_refused(path: str) -> None:
    assert await call(KEYS, "GET", path, "sk-other") == (401, "invalid_admin_key")
    assert await call(KEYS, "GET", path) == (401, "invalid_admin_key")
    assert await call(RoleKeys(), "GET", path, "sk-admin") == (403, "admin_closed")


@pytest.mark.parametrize("host", ["localhost:8080", "127.0.0.1", "[::1]:8080", "LOCALHOST"])
async def test_an_open_dashboard_needs_no_key_on_this_host(host: str) -> None:
    assert await call(OPEN, "GET", "/page", headers={"host": host}) == (200, "ok")
    assert (await call(OPEN, "GET", "/admin/pools", headers={"host": host}))[0] == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example:8080"},
        {"host": "localhost.evil.example"},
        {"host": "[::1].evil.example"},
        {"x-forwarded-for": "10.0.0.9"},
        {"forwarded": "for=10.0.0.9"},
    ],
)
async def test_an_open_dashboard_is_closed_to_other_sites_and_proxies(
    headers: Mapping[str, str],
) -> None:
    assert (await call(OPEN, "GET", "/page", headers=headers))[0] == 401


async def test_a_wrong_key_is_refused_even_where_none_is_needed() -> None:
    assert (await call(OPEN, "GET", "/page", "sk-other"))[0] == 401
