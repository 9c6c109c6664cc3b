"""The dashboard's routes over a whole gateway: who may read, what is cut, what is never sent."""

import asyncio
import base64
import hashlib
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest

from gateway.dashboard.snapshot import MAX_HISTORY, MAX_TARGETS, PAGE_ROWS, View
from gateway.records.decision import DecisionRecord, TimingSection
from gateway.settings import parse
from gateway.wiring.app import Gateway
from tests.fakes import FakeClock

WORKERS, TENANTS = 120, 130
FILE = f"""
version: 1
server: {{admin_key: sk-admin, viewer_key: sk-viewer}}
models:
  - name: m
    pools:
      only:
        max_model_len: 4096
        max_num_seqs: 8
        workers: [{", ".join(f"'http://10.0.0.{i}:80'" for i in range(WORKERS))}]
entitlements:
""" + "".join(
    f"  - {{name: e-{i:03}, tenant: t-{i}, model: m, service_class: elastic, max_concurrency: 4,"
    f" slo_target_ms: {500 + i}}}\n"
    for i in range(TENANTS)
)
VIEWER = {"authorization": "Bearer sk-viewer"}


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(1000.0)


@pytest.fixture
async def gateway(clock: FakeClock) -> AsyncIterator[Gateway]:
    made = Gateway(parse(FILE, "sluice.yaml", {}), clock=clock, port=8080)
    async with made.pools.running(made.pipeline.extend):  # no probes
        yield made


def client_of(gateway: Gateway, headers: dict[str, str] | None = None) -> httpx.AsyncClient:
    app: Any = gateway.data_plane
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app),
        base_url="http://127.0.0.1:8080",
        headers=VIEWER if headers is None else headers,
    )


async def figures(gateway: Gateway, **query: Any) -> dict[str, Any]:
    async with client_of(gateway) as client:
        answer = await client.get("/dashboard/snapshot", params=query)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def keep(gateway: Gateway, request_id: str, **fields: Any) -> None:
    given: dict[str, Any] = {"outcome": "ok", "status": 200, "model": "m", "tenant": "t-1"}
    given |= {"schema": 2, "time_unix_s": 1.0, "request_id": request_id, "endpoint": "chat"}
    record = DecisionRecord(**{**given, **fields})
    gateway.ring.append(request_id, msgspec.json.encode(record))


@pytest.mark.parametrize(
    "path", ["snapshot", "history", "events", "decisions", "decisions/r-1", "snapshot?workers=x"]
)
async def test_figures_need_a_key_that_may_read(gateway: Gateway, path: str) -> None:
    for headers in ({}, {"authorization": "Bearer sk-other"}):
        async with client_of(gateway, headers) as client:
            answer = await client.get(f"/dashboard/{path}")
        assert (answer.status_code, answer.headers["x-sluice-reason"]) == (401, "invalid_admin_key")


async def test_tables_are_cut_to_one_page_and_searched(gateway: Gateway) -> None:
    found = await figures(gateway)
    assert len(found["workers"]["rows"]) == len(found["entitlements"]["rows"]) == PAGE_ROWS
    assert (found["workers"]["total"], found["workers"]["pages"]) == (WORKERS, 3)
    assert (found["entitlements"]["total"], found["entitlements"]["pages"]) == (TENANTS, 3)
    last = await figures(gateway, workers_page=99, entitlements="E-12", entitlements_order="name")
    assert (last["workers"]["page"], len(last["workers"]["rows"])) == (2, WORKERS - 2 * PAGE_ROWS)
    assert [row["name"] for row in last["entitlements"]["rows"]] == [f"e-12{i}" for i in range(10)]
    assert last["entitlements"]["rows"][0]["account"]["state"] == "bound"
    assert (last["entitlements"]["found"], last["entitlements"]["total"]) == (10, TENANTS)


async def test_the_busiest_come_first(gateway: Gateway) -> None:
    gateway.metrics.admission.add("e-077", "denied", "kv", by=5)
    pool = gateway.models[0].fleet.pools[0]
    pool.active[33] = 7
    pool.draining[44] = True
    found = await figures(gateway, entitlements_order="refused")
    assert found["entitlements"]["rows"][0]["refused_by"] == {"kv": 5}
    assert found["workers"]["rows"][0]["id"].startswith("10.0.0.33")
    by_state = await figures(gateway, workers_order="state")
    assert by_state["workers"]["rows"][0]["state"] == "draining"


@pytest.mark.parametrize(
    "query", [{"workers": "x" * 200}, {"entitlements_page": -1}, {"entitlements_order": "secret"}]
)
async def test_a_view_is_bounded(gateway: Gateway, query: dict[str, Any]) -> None:
    async with client_of(gateway) as client:
        answer = await client.get("/dashboard/snapshot", params=query)
    assert (answer.status_code, answer.headers["x-sluice-reason"]) == (400, "bad_request")


async def test_one_snapshot_a_second_serves_all_viewers(gateway: Gateway, clock: FakeClock) -> None:
    found = gateway.snapshots
    first = await found.of(View())
    assert await found.of(View()) is first, "the same cut is encoded once"
    assert await found.of(View(entitlements="e-001")) != first
    assert found.built == 1
    clock.advance(1.0)
    await found.of(View())
    assert found.built == 2


async def test_the_last_minutes_are_kept_also_while_nobody_looked(
    gateway: Gateway, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = asyncio.Event()

    async def sleep(period_s: float) -> None:
        clock.advance(period_s)
        if clock() > 1000.0 + 2 * MAX_HISTORY * period_s:
            ends.set()
            await asyncio.get_running_loop().create_future()

    for number in range(2 * MAX_TARGETS):
        ttft_s = TimingSection(ttft_s=0.1 * number)
        for again in range(1 + number):
            keep(
                gateway,
                f"r-{number}-{again}",
                time_unix_s=time.time(),
                stream=True,
                entitlement=f"e-{number:03}",
                timing=ttft_s,
            )
    with monkeypatch.context() as patched:
        patched.setattr("gateway.dashboard.snapshot.asyncio.sleep", sleep)
        task = asyncio.create_task(gateway.snapshots.keep_history())
        await ends.wait()
        task.cancel()
    async with client_of(gateway) as client:
        answer = await client.get("/dashboard/history")
    points = answer.json()
    assert len(points) == MAX_HISTORY
    assert points[0]["traffic"]["requests_per_s"] == 0.0, "a rate needs no viewer"
    assert {"model", "pool", "ready_slots"} < points[-1]["pools"][0].keys()
    (busiest, *_), shown = points[-1]["targets"], len(points[-1]["targets"])
    assert (busiest["entitlement"], busiest["slo_ms"]) == ("e-023", 523)
    assert (busiest["ttft_p99_s"], shown) == (pytest.approx(2.3), MAX_TARGETS)
    now = await figures(gateway)
    assert now["shared"]["targets"] == points[-1]["targets"]


async def test_decisions_are_listed_searched_and_told(gateway: Gateway) -> None:
    keep(gateway, "r-old", outcome="refused", status=429, reason="priority", entitlement="e-001")
    for number in range(600):
        keep(gateway, f"r-{number}", entitlement="e-002")
    found = await figures(gateway, decisions="R-59")
    latest = {f"r-59{i}" for i in range(10)}
    assert {row["id"] for row in found["decisions"]} == latest, "of the newest ones"
    async with client_of(gateway) as client:
        rows = (await client.get("/dashboard/decisions", params={"text": "Priority"})).json()
        assert [row["id"] for row in rows] == ["r-old"]
        rows = (await client.get("/dashboard/decisions", params={"text": "r-59"})).json()
        assert {row["id"] for row in rows} == {"r-59", *latest}, "of all that are kept"
        assert len((await client.get("/dashboard/decisions")).json()) == PAGE_ROWS
        told = (await client.get("/dashboard/decisions/r-old")).json()
        assert told["record"]["reason"] == "priority"
        assert "full of work of at least this priority" in told["steps"][1]["text"]
        missing = await client.get("/dashboard/decisions/nothing")
        assert (missing.status_code, missing.headers["x-sluice-reason"]) == (
            404,
            "decision_not_found",
        )


@pytest.mark.parametrize("path", ["/dashboard", "/docs"])
async def test_a_page_allows_its_own_style_and_script_and_nothing_else(
    gateway: Gateway, path: str
) -> None:
    async with client_of(gateway, {}) as client:
        answer = await client.get(path)
        again = await client.get(path, headers={"if-none-match": answer.headers["etag"]})
    assert (answer.status_code, again.status_code, again.content) == (200, 304, b"")
    policy = dict(
        rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
    for tag, rule in (("style", "style-src"), ("script", "script-src")):
        (block,) = re.findall(rf"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()
        assert policy[rule] == f"'sha256-{digest}'"
        assert "{{" not in block or tag == "script"
    assert "http://" not in answer.text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in answer.text
    assert "innerHTML" not in answer.text
    assert answer.headers["x-frame-options"] == "DENY"
