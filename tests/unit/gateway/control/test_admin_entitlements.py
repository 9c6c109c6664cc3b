"""The admin routes of entitlements over HTTP: who may, what they answer, how they refuse."""

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from gateway.control.admin import admin_router
from gateway.control.app import control_app
from gateway.control.roles import RoleKeys
from gateway.control.surface import MAX_BODY_BYTES
from gateway.errors import StateFailure
from gateway.http.wrong_keys import DELAY_S, FREE
from gateway.metrics import Metrics
from gateway.payload.head import digest_of
from tests.control import ADMIN_KEY, KEYS, bearer, control_of
from tests.tenancy_fakes import TenancyRig

ADMIN = bearer(ADMIN_KEY)
NEW = {"name": "a", "tenant": "acme", "model": "m", "concurrency": 8, "service_class": "guaranteed"}


def app_of(rig: TenancyRig, keys: RoleKeys = KEYS, metrics: Metrics | None = None) -> Any:
    return control_app(control_of(rig, keys=keys, metrics=metrics or Metrics()))


@pytest.fixture
async def rig() -> TenancyRig:
    return await TenancyRig().start()


@pytest.fixture
async def client(rig: TenancyRig) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app_of(rig))
    async with httpx.AsyncClient(
        transport=transport, base_url="http://gateway", headers=ADMIN
    ) as client:
        yield client


ROUTES = [
    (method, re.sub(r"\{[^}]*\}", "a", route.path))
    for route in admin_router(control_of()).routes
    if isinstance(route, APIRoute)
    for method in route.methods or ()
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_every_route_needs_the_admin_key_and_a_viewer_only_reads(
    client: httpx.AsyncClient, rig: TenancyRig, method: str, path: str
) -> None:
    made = (await client.post("/admin/entitlements", json=NEW)).json()
    for key in ("Bearer sk-other", f"Basic {ADMIN_KEY}", "", f"Bearer {made['key']}"):
        answer = await client.request(method, path, headers={"authorization": key})
        assert (answer.status_code, answer.headers["x-sluice-reason"]) == (401, "invalid_admin_key")
    if method != "GET":
        viewed = await client.request(method, path, headers=bearer("sk-viewer"))
        assert viewed.headers["x-sluice-reason"] == "viewer_cannot_change"
    closed = httpx.ASGITransport(app=app_of(rig, RoleKeys()))
    async with httpx.AsyncClient(transport=closed, base_url="http://gateway") as other:
        answer = await other.request(method, path, headers=ADMIN)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "admin_closed")
    assert len(rig.entitlements.audit(10)) == 1


async def test_who_tries_admin_keys_waits_and_the_right_key_does_not(
    client: httpx.AsyncClient,
) -> None:
    async def refused() -> None:
        answer = await client.get("/admin/pools", headers={"authorization": "Bearer no"})
        assert answer.status_code == 401

    for _ in range(FREE):
        await refused()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await refused()
    async with asyncio.timeout(DELAY_S / 2):
        assert (await client.get("/admin/pools")).status_code == 200


async def test_no_redirect_leads_to_a_host_that_the_client_named(client: httpx.AsyncClient) -> None:
    for path in ("/admin/pools/", "/health/", "/v1/models/x/"):
        answer = await client.get(path, headers={"host": "evil.example"})
        assert "location" not in answer.headers
        assert answer.status_code == 404


async def test_an_entitlement_s_life(client: httpx.AsyncClient, rig: TenancyRig) -> None:
    made = await client.post("/admin/entitlements", json=NEW)
    assert (made.status_code, made.headers["cache-control"]) == (201, "no-store")
    key = made.json()["key"]
    assert rig.keyring.find(digest_of(key.encode())) is not None
    shown = (await client.get("/admin/entitlements/a")).json()
    assert (shown["concurrency"], shown["state"], "key" in shown) == (8, "bound", False)
    patched = await client.patch("/admin/entitlements/a", json={"slo_target_ms": 500})
    assert (patched.status_code, patched.json()["slo_target_ms"]) == (200, 500)
    assert (await client.post("/admin/entitlements/a/suspend")).json()["state"] == "suspended"
    assert (await client.post("/admin/entitlements/a/resume")).json()["state"] == "bound"
    second = await client.post("/admin/entitlements/a/keys")
    assert (second.status_code, second.headers["cache-control"]) == (201, "no-store")
    assert (await client.post("/admin/entitlements/a/keys")).status_code == 409
    fingerprint = made.json()["keys"][0]
    left = await client.delete(f"/admin/entitlements/a/keys/{fingerprint}")
    assert left.json()["keys"] == second.json()["keys"][1:]
    assert rig.keyring.find(digest_of(key.encode())) is None
    at = {"at": "2031-01-01T00:00:00Z"}
    expired = await client.post("/admin/entitlements/a/expire", json=at)
    assert expired.json()["expires_at"] == "2031-01-01T00:00:00+00:00"
    assert (await client.post("/admin/entitlements/a/expire")).status_code == 200
    assert rig.store.defined["m", "a"].expires_unix_s == rig.clock()
    rig.store.inflight["a"] = 1
    assert (await client.delete("/admin/entitlements/a")).status_code == 409
    rig.store.inflight["a"] = 0
    gone = await client.delete("/admin/entitlements/a")
    assert (gone.status_code, gone.content) == (204, b"")
    assert (await client.get("/admin/entitlements/a")).status_code == 404
    audit = (await client.get("/admin/audit")).json()["data"]
    assert {record["who"] for record in audit} == {
        hashlib.sha256(ADMIN_KEY.encode()).hexdigest()[:8]
    }
    assert [record["what"] for record in audit] == [
        *("delete", "expire", "expire", "revoke_key", "add_key"),
        *("resume", "suspend", "change", "create"),
    ]
    short = (await client.get("/admin/audit", params={"limit": 1})).json()["data"]
    assert short == audit[:1]


async def test_a_change_for_a_revision_is_made_of_that_one_only(
    client: httpx.AsyncClient, rig: TenancyRig
) -> None:
    made = await client.post("/admin/entitlements", json=NEW)
    seen = {"if-match": made.headers["etag"]}
    assert made.headers["etag"] == f'"{made.json()["revision"]}"'
    path, slower = "/admin/entitlements/a", {"slo_target_ms": 500}
    first = await client.patch(path, json=slower, headers=seen)
    assert (first.status_code, first.headers["etag"] != made.headers["etag"]) == (200, True)
    late = [
        await client.patch(path, json={"slo_target_ms": 7}, headers=seen),
        await client.post(f"{path}/suspend", headers=seen),
        await client.delete(f"{path}/keys/{made.json()['keys'][0]}", headers=seen),
        await client.delete(path, headers=seen),
    ]
    for answer in late:
        assert (answer.status_code, answer.json()["error"]["code"]) == (412, "entitlement_changed")
    shown = await client.get(path)
    assert (shown.headers["etag"], shown.json()["slo_target_ms"]) == (first.headers["etag"], 500)
    for wrong in ("W/x", "1, 2", "9" * 40, "-1", "²"):
        answer = await client.patch(path, json={}, headers={b"if-match": wrong.encode()})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "if-match")
    assert (await client.delete(path, headers={"if-match": "*"})).status_code == 204
    assert rig.names() == []


async def test_the_list_is_paged_and_filtered(client: httpx.AsyncClient) -> None:
    for n in range(5):
        new = {"name": f"e{n}", "tenant": "even" if n % 2 == 0 else "odd", "model": "m"}
        await client.post("/admin/entitlements", json=new)
    first = (await client.get("/admin/entitlements", params={"limit": 3})).json()
    rest = await client.get("/admin/entitlements", params={"after": first["next"], "model": "m"})
    names = [e["name"] for e in first["data"] + rest.json()["data"]]
    assert (names, rest.json()["next"]) == ([f"e{n}" for n in range(5)], None)
    odd = (await client.get("/admin/entitlements", params={"tenant": "odd"})).json()
    assert [e["name"] for e in odd["data"]] == ["e1", "e3"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param"),
    [
        ("POST", "", b"", 400, None),
        ("POST", "", b"{", 400, None),
        ("POST", "", b"[1]", 400, None),
        ("POST", "", b'{"name": "\xff"}', 400, None),
        ("POST", "", b" " * (MAX_BODY_BYTES + 1), 413, None),
        ("POST", "", b'{"name": "b", "tenant": "t", "model": "x"}', 400, "model"),
        ("POST", "", b'{"name": "a", "tenant": "t", "model": "m"}', 409, "name"),
        ("PATCH", "/a", b'{"slo_target_ms": -5}', 400, "slo_target_ms"),
        ("PATCH", "/nobody", b"{}", 404, None),
        ("DELETE", "/nobody", b"", 404, None),
        ("DELETE", "/a/keys/abc", b"", 404, None),
        ("POST", "/nobody/suspend", b"", 404, None),
        ("POST", "/a/expire", b'{"at": 5}', 400, "at"),
        ("POST", "/a/expire", b'{"when": "now"}', 400, "at"),
        ("POST", "/a/expire", b'{"at": "soon"}', 400, "expires_at"),
        ("GET", "?limit=0", b"", 400, "query.limit"),
        ("GET", "?limit=1001", b"", 400, "query.limit"),
        ("GET", "?after=x", b"", 400, "after"),
        ("PUT", "", b"{}", 405, None),
        ("GET", "/a/b/c", b"", 404, None),
    ],
)
async def test_refusals_have_openai_s_shape_and_change_nothing(
    client: httpx.AsyncClient,
    rig: TenancyRig,
    method: str,
    path: str,
    body: bytes,
    status: int,
    param: str | None,
) -> None:
    await client.post("/admin/entitlements", json=NEW)
    before = await rig.directory.read(0, "")
    answer = await client.request(method, f"/admin/entitlements{path}", content=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param)
    assert set(error) == {"message", "type", "param", "code"}
    assert await rig.directory.read(0, "") == before


async def test_a_directory_that_is_away_is_a_503_that_says_when_to_ask_again(
    client: httpx.AsyncClient, rig: TenancyRig
) -> None:
    rig.directory.fail_with = StateFailure("away")
    answer = await client.post("/admin/entitlements", json=NEW)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert answer.json()["error"]["code"] == "state_unavailable"
    assert (await client.get("/admin/entitlements")).json() == {"data": [], "next": None}


async def test_pools_show_what_admission_counts(client: httpx.AsyncClient, rig: TenancyRig) -> None:
    (model,) = (await client.get("/admin/pools")).json()
    assert [p["admission"]["desired_replicas"] for p in model["pools"]] == [2, 2]
    assert model["pools"][0]["admission"]["inflight"] == 3
    rig.store.fail_with = StateFailure("away")
    (model,) = (await client.get("/admin/pools")).json()
    assert [p["admission"] for p in model["pools"]] == [None, None]
