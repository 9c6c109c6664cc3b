"""The objects of one process begin and end together, whenever it is told to end."""

import asyncio
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


@pytest.mark.parametrize(("port", "shown"), [(8080, False), (9100, True)])
async def test_the_root_page_names_metrics_where_they_are(port: int, *, shown: bool) -> None:
    server = "server: {port: 8080, management_port: 9100}\n"
    gateway = Gateway(parse(FILE + server, "sluice.yaml", {}), port=9100)
    app: Any = gateway.data_plane
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app), base_url=f"http://gateway:{port}"
    ) as client:
        json = {"accept": "application/json"}
        paths = (await client.get("/", headers=json)).json()["paths"]
        assert (await client.get("/metrics")).status_code == (200 if shown else 404)
        page = await client.get("/dashboard")
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
    gateway = Gateway(parse(FILE + more, "sluice.yaml", {}), port=9100)
    app: Any = gateway.data_plane
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app), base_url="http://gateway:9100"
    ) as client:
        found = await client.get("/v1/models")
        assert (found.status_code, "keys_not_read" in found.text) == (503 if waits else 200, waits)
        said = (await client.get("/ready")).json()["status"]
        assert (said == "the state store was not read: tenants") == waits


async def test_clients_of_anthropic_list_models_and_read_errors_in_its_shape() -> None:
    gateway = Gateway(parse(FILE, "sluice.yaml", {}), port=9100)
    app: Any = gateway.data_plane
    own = {"anthropic-version": "2023-06-01"}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app), base_url="http://gateway:9100"
    ) as client:
        page = (await client.get("/v1/models", headers=own)).json()
        first = page["data"][0]
        assert (first["type"], first["id"], first["display_name"]) == ("model", "m", "m")
        assert first["created_at"].endswith("+00:00")
        assert (page["has_more"], page["first_id"], page["last_id"]) == (False, "m", "m")
        assert (await client.get("/v1/models/m", headers=own)).json() == first
        error = (await client.get("/v1/models/n", headers=own)).json()
        assert (error["type"], error["error"]["type"]) == ("error", "not_found_error")
        assert (await client.get("/v1/models")).json()["data"][0]["object"] == "model"


async def test_gateways_that_start_without_redis_share_limits_by_the_configured_number() -> None:
    managed = "entitlements: [{name: a, tenant: t, model: m, max_concurrency: 8}]\n"
    gateway = Gateway(parse(FILE + ADMIN + REDIS + managed, "sluice.yaml", {}), port=9100)
    assert gateway.pools.replicas("m") == 8


def parts(gateway: Gateway) -> list[Any]:
    """What is started with the process, in order."""
    return [
        gateway.replicas,
        gateway.prober,
        gateway.pools.tenancy,
        gateway.pools.upkeep,
    ]


@pytest.mark.parametrize("number", range(4))
async def test_a_start_that_is_cancelled_leaves_nothing_open(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = Gateway(parse(FILE, "sluice.yaml", {}))
    part, closed, hangs = parts(gateway)[number], [], asyncio.Event()
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
