"""Keys and roles: an admin changes, a viewer reads, nobody else does either."""

import hashlib
from collections.abc import Mapping

import httpx
import pytest
from fastapi import APIRouter, Depends, FastAPI, Request
from starlette.responses import Response

from gateway.errors import Refusal
from gateway.web.control.roles import Role, RoleKeys, admin_guard, dashboard_guard


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


KEYS = RoleKeys(admin_sha256=digest("sk-admin"), viewer_sha256=digest("sk-viewer"))
OPEN = RoleKeys(admin_sha256=digest("sk-admin"), open_dashboard=True)


def app_of(keys: RoleKeys) -> FastAPI:
    app = FastAPI()

    @app.exception_handler(Refusal)
    async def refused(_request: Request, refusal: Refusal) -> Response:
        return Response(refusal.reason, status_code=refusal.status)

    admin = APIRouter(dependencies=[Depends(admin_guard(keys))])
    admin.add_api_route("/admin", lambda: "ok", methods=["GET", "POST", "DELETE"])
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


def test_one_function_says_the_role_of_a_key() -> None:
    assert KEYS.role_of("sk-admin") is Role.ADMIN
    assert KEYS.role_of("sk-viewer") is Role.VIEWER
    assert KEYS.role_of("sk-other") is None
    assert KEYS.role_of("") is None
    assert RoleKeys().role_of("") is None


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
async def test_the_admin_key_reads_and_changes(method: str) -> None:
    assert await call(KEYS, method, "/admin", "sk-admin") == (200, "ok")


async def test_the_viewer_key_reads_and_changes_nothing() -> None:
    assert await call(KEYS, "GET", "/admin", "sk-viewer") == (200, "ok")
    for method in ("POST", "DELETE"):
        assert await call(KEYS, method, "/admin", "sk-viewer") == (403, "viewer_cannot_change")


@pytest.mark.parametrize("path", ["/admin", "/page"])
async def test_other_keys_are_refused(path: str) -> None:
    assert await call(KEYS, "GET", path, "sk-other") == (401, "invalid_admin_key")
    assert await call(KEYS, "GET", path) == (401, "invalid_admin_key")
    assert await call(RoleKeys(), "GET", path, "sk-admin") == (403, "admin_closed")


async def test_the_dashboard_takes_both_keys() -> None:
    assert await call(KEYS, "GET", "/page", "sk-viewer") == (200, "ok")
    assert await call(KEYS, "GET", "/page", "sk-admin") == (200, "ok")


@pytest.mark.parametrize("host", ["localhost:8080", "127.0.0.1", "[::1]:8080", "LOCALHOST"])
async def test_an_open_dashboard_needs_no_key_on_this_host(host: str) -> None:
    assert await call(OPEN, "GET", "/page", headers={"host": host}) == (200, "ok")
    assert (await call(OPEN, "GET", "/admin", headers={"host": host}))[0] == 401


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
