"""The objects of one process begin and end together, whenever it is told to end."""

import asyncio
from operator import attrgetter
from typing import Any

import httpx
import pytest

from gateway.settings import parse
from gateway.wiring.app import Gateway

FILE = """
version: 1
models:
  - name: m
    pools:
      only: {max_model_len: 4096, max_num_seqs: 8, workers: ["http://127.0.0.1:9"]}
"""


def client(more: str = "", port: int = 9100) -> httpx.AsyncClient:
    """One of a gateway with this configuration."""
    app: Any = Gateway(parse(FILE + more, "sluice.yaml", {}), port=9100).data_plane
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(transport=transport, base_url=f"http://gateway:{port}")


@pytest.mark.parametrize(("port", "shown"), [(8080, False), (9100, True)])
async def test_the_root_page_names_metrics_where_they_are(port: int, *, shown: bool) -> None:
    server = "server: {port: 8080, management_port: 9100}\n"
    async with client(server, port) as asking:
        json = {"accept": "application/json"}
        paths = (await asking.get("/", headers=json)).json()["paths"]
        assert (await asking.get("/metrics")).status_code == (200 if shown else 404)
        page = await asking.get("/dashboard")
        assert page.status_code == (200 if shown else 404)
    assert ("Prometheus" in paths) == ("dashboard" in paths) == shown


REDIS = 'state: {url: "redis://127.0.0.1:1/0"}\n'
ADMIN = "server: {port: 8080, management_port: 9100, workers: 8, admin_key: k}\n"


@pytest.mark.parametrize(
    ("more", "waits"),
    [
        (ADMIN + REDIS, True),
        (ADMIN.replace(", workers: 8", ""), False),
        (ADMIN.replace(", admin_key: k", "") + REDIS, False),
    ],
)
async def test_no_key_opens_before_what_administrators_share_was_read(
    more: str, *, waits: bool
) -> None:
    async with client(more) as asking:
        found = await asking.get("/v1/models")
        assert (found.status_code, "keys_not_read" in found.text) == (503 if waits else 200, waits)
        said = (await asking.get("/ready")).json()["status"]
        assert (said == "the state store was not read: tenants") == waits


async def test_clients_of_anthropic_list_models_and_read_errors_in_its_shape() -> None:
    own = {"anthropic-version": "2023-06-01"}
    async with client() as asking:
        page = (await asking.get("/v1/models", headers=own)).json()
        first = page["data"][0]
        assert (first["type"], first["id"], first["display_name"]) == ("model", "m", "m")
        assert first["created_at"].endswith("+00:00")
        assert (page["has_more"], page["first_id"], page["last_id"]) == (False, "m", "m")
        assert (await asking.get("/v1/models/m", headers=own)).json() == first
        error = (await asking.get("/v1/models/n", headers=own)).json()
        assert (error["type"], error["error"]["type"]) == ("error", "not_found_error")
        assert (await asking.get("/v1/models")).json()["data"][0]["object"] == "model"


async def test_gateways_that_start_without_redis_share_limits_by_the_configured_number() -> None:
    managed = "entitlements: [{name: a, tenant: t, model: m, max_concurrency: 8}]\n"
    gateway = Gateway(parse(FILE + ADMIN + REDIS + managed, "sluice.yaml", {}), port=9100)
    assert gateway.pools.replicas("m") == 8


@pytest.mark.parametrize("name", ["replicas", "prober", "pools.tenancy", "pools.upkeep"])
async def test_a_start_that_is_cancelled_leaves_nothing_open(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = Gateway(parse(FILE, "sluice.yaml", {}))
    part, closed, hangs = attrgetter(name)(gateway), [], asyncio.Event()
    ends = getattr(part, "sync", part)
    start, close = part.start, ends.close

    async def hanging(*given: Any, **more: Any) -> None:
        await start(*given, **more)
        hangs.set()
        await asyncio.Event().wait()

    async def closing() -> None:
        closed.append(part)
        await close()

    monkeypatch.setattr(part, "start", hanging)
    monkeypatch.setattr(ends, "close", closing)
    before = asyncio.all_tasks()
    run = asyncio.create_task(run_until_cancelled(gateway))
    async with asyncio.timeout(10):
        await hangs.wait()
        run.cancel()
        await asyncio.wait([run])
    assert run.cancelled()
    assert closed == [part]
    assert asyncio.all_tasks() == before


async def run_until_cancelled(gateway: Gateway) -> None:
    async with gateway.running():
        pytest.fail("it has not started")
