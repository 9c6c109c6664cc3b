"""The admin routes of tenants: roles, ETags, and a key that is shown once."""

import hashlib
from collections.abc import AsyncIterator

import httpx
import msgspec
import pytest

from gateway.control.app import control_app
from gateway.records.tenancy import DirectoryChange, Written
from tests.control import ADMIN_KEY, bearer, control_of
from tests.tenancy_fakes import TenancyRig


@pytest.fixture
async def rig() -> TenancyRig:
    return await TenancyRig().start()


@pytest.fixture
async def client(rig: TenancyRig) -> AsyncIterator[httpx.AsyncClient]:
    app = control_app(control_of(rig, authenticate=lambda _: pytest.fail("not a client's route")))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://gateway", headers=bearer(ADMIN_KEY)
    ) as client:
        yield client


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


async def test_a_tenant_in_use_is_deleted_with_its_entitlements_by_force_alone(
    client: httpx.AsyncClient, rig: TenancyRig
) -> None:
    await client.post("/admin/tenants", json={"name": "acme"})
    own, key = await rig.entitle("chat"), await rig.add("web")
    kept = await client.delete("/admin/tenants/acme")
    error = kept.json()["error"]
    assert (kept.status_code, error["code"]) == (409, "tenant_in_use")
    assert "'acme' (chat)" in error["message"]
    assert "?force=true" in error["message"]
    assert rig.opens(own)
    assert rig.opens(key)
    gone = await client.delete("/admin/tenants/acme", params={"force": "true"})
    assert (gone.status_code, gone.content) == (204, b"")
    assert not rig.opens(own)
    assert not rig.opens(key)
    for path in ("tenants/acme", "entitlements/chat"):
        assert (await client.get(f"/admin/{path}")).status_code == 404


async def test_a_change_that_no_replica_of_redis_took_is_answered_with_a_warning(
    client: httpx.AsyncClient, rig: TenancyRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = rig.directory.write

    async def alone(change: DirectoryChange, *, floor: int, after: str) -> Written:
        written: Written = await write(change, floor=floor, after=after)
        return msgspec.structs.replace(written, replicated=False)

    await client.post("/admin/tenants", json={"name": "acme"})
    await rig.entitle("chat")
    monkeypatch.setattr(rig.directory, "write", alone)
    for method, path, body, status in (
        ("POST", "tenants", {"name": "beta"}, 201),
        ("PATCH", "tenants/acme", {"suspended": True}, 200),
        ("POST", "tenants/acme/keys", {"name": "web"}, 201),
        ("PATCH", "tenants/acme/keys/web", {"suspended": True}, 200),
        ("POST", "tenants/acme/keys/web/rotate", {}, 200),
        ("DELETE", "tenants/acme/keys/web", None, 200),
        ("PATCH", "entitlements/chat", {"slo_target_ms": 5}, 200),
        ("POST", "entitlements/chat/suspend", None, 200),
        ("POST", "entitlements/chat/keys", None, 201),
        ("DELETE", "entitlements/chat", None, 200),
        ("DELETE", "tenants/acme", None, 200),
    ):
        answer = await client.request(method, f"/admin/{path}", json=body)
        assert answer.status_code == status, answer.text
        assert "No replica of Redis has taken the change" in answer.json()["warning"]
    monkeypatch.undo()
    assert (await client.delete("/admin/tenants/beta")).status_code == 204
