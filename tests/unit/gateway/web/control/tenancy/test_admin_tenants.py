"""The admin routes of tenants: roles, ETags, and a key that is shown once."""

import hashlib
from collections.abc import AsyncIterator

import httpx
import pytest

from gateway.metrics import Metrics
from gateway.web.control.app import control_app
from gateway.web.control.roles import RoleKeys
from gateway.web.control.surface import Control
from gateway.web.metrics.page import MetricsPage
from tests.builders import served_model, short_and_long
from tests.entitlement_fakes import EntitlementRig
from tests.fakes import nothing_drained
from tests.tenant_fakes import TenantRig

ROUTES = [
    ("GET", "/admin/tenants"),
    ("POST", "/admin/tenants"),
    ("GET", "/admin/tenants/acme"),
    ("PATCH", "/admin/tenants/acme"),
    ("DELETE", "/admin/tenants/acme"),
    ("POST", "/admin/tenants/acme/keys"),
    ("PATCH", "/admin/tenants/acme/keys/web"),
    ("POST", "/admin/tenants/acme/keys/web/rotate"),
    ("DELETE", "/admin/tenants/acme/keys/web"),
]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    tenants, entitlements = await TenantRig().start(), await EntitlementRig().start()
    admin, viewer = (hashlib.sha256(key.encode()).digest() for key in ("sk-admin", "sk-viewer"))
    control = Control(
        models=(served_model(table=short_and_long()),),
        names={"m": "m"},
        metrics=MetricsPage(Metrics(), [], lambda: 0, lambda: 0.0),
        find_decision=lambda _: None,
        latest_decisions=lambda _: [],
        registry=entitlements.registry,
        tenants=tenants.registry,
        draining=lambda: False,
        drain=nothing_drained,
        clock=tenants.clock,
        keys=RoleKeys(admin_sha256=admin, viewer_sha256=viewer),
        authenticate=lambda _: pytest.fail("not a client's route"),
        version="0",
        created_unix_s=0,
        openapi=dict,
    )
    transport = httpx.ASGITransport(app=control_app(control))
    async with httpx.AsyncClient(
        transport=transport, base_url="http://gateway", headers=bearer("sk-admin")
    ) as client:
        yield client


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_a_viewer_reads_and_nobody_else_does(
    client: httpx.AsyncClient, method: str, path: str
) -> None:
    await client.post("/admin/tenants", json={"name": "acme"})
    await client.post("/admin/tenants/acme/keys", json={"name": "web"})
    viewed = await client.request(method, path, headers=bearer("sk-viewer"))
    assert viewed.status_code == (200 if method == "GET" else 403)
    assert (await client.request(method, path, headers=bearer("sk-x"))).status_code == 401


async def test_a_key_is_shown_in_one_answer_that_no_cache_keeps(client: httpx.AsyncClient) -> None:
    assert (await client.post("/admin/tenants", json={"name": "acme"})).status_code == 201
    for path, status in (("keys", 201), ("keys/web/rotate", 200)):
        body = {"name": "web"} if path == "keys" else None
        answer = await client.post(f"/admin/tenants/acme/{path}", json=body)
        assert (answer.status_code, answer.headers["cache-control"]) == (status, "no-store")
        key = answer.json()["key"]
        shown = await client.get("/admin/tenants/acme")
        assert key not in shown.text
        assert hashlib.sha256(key.encode()).hexdigest() not in shown.text


async def test_a_change_of_an_older_revision_is_refused(client: httpx.AsyncClient) -> None:
    old = (await client.post("/admin/tenants", json={"name": "acme"})).headers["etag"]
    for body, tag, status in (
        ({"display_name": "one"}, old, 200),
        ({"display_name": "two"}, old, 412),
    ):
        answer = await client.patch("/admin/tenants/acme", json=body, headers={"if-match": tag})
        assert answer.status_code == status
    assert (await client.get("/admin/tenants")).json()["data"][0]["display_name"] == "one"
    gone = await client.delete(
        "/admin/tenants/acme", headers={"if-match": answer.headers.get("etag", "*")}
    )
    assert gone.status_code == 204
    assert (await client.get("/admin/tenants/acme")).status_code == 404
