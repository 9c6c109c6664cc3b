"""Admin routes of workers: added, removed, drained, and waited for."""

import asyncio
from typing import Any

import httpx
import msgspec
import pytest

from gateway.control import admin
from gateway.control.app import control_app
from gateway.control.peers import ReplicaLoad
from gateway.control.surface import NewWorker
from gateway.fleet import fleet
from gateway.fleet.model_runtime import ModelRuntime, drain_worker
from tests.builders import served_model
from tests.control import ADMIN_KEY, Replies, bearer, control_of


class Service:
    """Notes what it is asked."""

    def __init__(self) -> None:
        self.added: list[NewWorker] = []

    def add(self, asked: NewWorker) -> str:
        self.added.append(asked)
        return "h:1"

    def remove(self, worker: str) -> int:
        return int(worker == "short-1")


class Bench:
    def __init__(self) -> None:
        self.served: ModelRuntime = served_model()
        self.service = Service()
        self.active_elsewhere = 0
        """Sequences that another replica has at short-1."""
        control = control_of(
            models=(self.served,),
            drain=self.drain,
            add_worker=self.service.add,
            remove_worker=self.service.remove,
            peers=Replies(self.loads),
            clock=lambda: 0.0,
        )
        self.elsewhere = 0
        """Pools that have the worker, on the replica with the most."""
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(control_app(control)),
            base_url="http://sluice",
            headers=bearer(ADMIN_KEY),
        )

    def loads(self, *_: object) -> list[bytes]:
        active = [self.active_elsewhere]
        load = ReplicaLoad(
            inflight=0, beyond_window_tokens=0, active=active, tokens=[0], ids=("short-1",)
        )
        return [msgspec.msgpack.encode({"m": [load]})]

    async def drain(self, worker: str, on: bool) -> int:
        return max(self.elsewhere, drain_worker([self.served], worker, on=on))

    async def call(self, method: str, path: str, **more: Any) -> tuple[int, Any]:
        response = await self.client.request(method, f"/admin/workers{path}", **more)
        return response.status_code, response.json()


async def test_a_worker_is_added_by_what_the_body_says() -> None:
    bench = Bench()
    body = {"model": "m", "pool": "short", "url": "http://h:1", "ranks": 2}
    assert await bench.call("POST", "", json=body) == (
        201,
        {"worker": "h:1", "model": "m", "pool": "short"},
    )
    assert bench.service.added == [NewWorker(model="m", pool="short", url="http://h:1", ranks=2)]


@pytest.mark.parametrize(
    "body",
    [
        {"model": "m", "pool": "short"},
        {"model": "m", "pool": "short", "url": "http://h:1", "api_key": "two words"},
        {"model": "m", "pool": "short", "url": "http://h:1", "ranks": 1000},
    ],
)
async def test_a_body_that_is_no_worker_is_refused(body: dict[str, object]) -> None:
    bench = Bench()
    status, answer = await bench.call("POST", "", json=body)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert bench.service.added == []


async def test_a_removed_worker_is_told_with_what_still_runs_there() -> None:
    bench = Bench()
    fleet.start(bench.served.fleet.pools[0], 1, 3, 10)
    shown = {"worker": "short-1", "pools": 1, "running": 3}
    assert await bench.call("DELETE", "/short-1") == (200, shown)
    status, answer = await bench.call("DELETE", "/none")
    assert (status, answer["error"]["code"]) == (404, "worker_not_found")


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "LOOK_EVERY_S", 0.001)


async def test_a_drain_can_wait_until_no_replica_runs_anything_there() -> None:
    bench = Bench()
    pool = bench.served.fleet.pools[0]
    fleet.start(pool, 1, 1, 10)
    bench.active_elsewhere = 1
    waiting = asyncio.create_task(bench.call("POST", "/short-1/drain?wait=1"))
    await asyncio.sleep(0.05)
    fleet.finish(pool, 1, 1, 10)
    await asyncio.sleep(0.05)
    assert pool.draining[1]
    assert not waiting.done()
    bench.active_elsewhere = 0
    status, answer = await waiting
    assert (status, answer["running"]) == (200, 0)


async def test_a_drain_waits_for_a_worker_that_only_another_replica_has_left() -> None:
    bench = Bench()
    bench.served.fleet.pools[0].workers[1] = "another"
    bench.elsewhere = bench.active_elsewhere = 1
    waiting = asyncio.create_task(bench.call("POST", "/short-1/drain?wait=1"))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    bench.active_elsewhere = 0
    status, answer = await waiting
    assert (status, answer["running"]) == (200, 0)


async def test_a_drain_counts_a_request_that_was_sent_just_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    looks = iter([0, 1, 1, 0])
    monkeypatch.setattr(admin, "running_at", lambda *_: next(looks, 0))
    status, answer = await bench.call("POST", "/short-1/drain?wait=1")
    assert (status, answer["running"], next(looks, None)) == (200, 0, None)


async def test_a_drain_that_waits_too_long_says_what_still_runs() -> None:
    bench = Bench()
    fleet.start(bench.served.fleet.pools[0], 1, 2, 10)
    status, answer = await bench.call("POST", "/short-1/drain?wait=1&timeout_s=0.01")
    assert (status, answer["running"]) == (200, 2)
