"""A reload replaces models: what is valid is taken over, and what is gone retires."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.admission.terms import AdmissionRequest
from gateway.pipeline.plan import admit
from gateway.ports import Settlement
from gateway.records.estimate import Plan
from gateway.records.request import OPEN
from gateway.routing.routing import ResponseLocation
from gateway.scheduling.scheduler import Job
from gateway.settings import load
from gateway.wiring import reloading
from gateway.wiring.app import Gateway
from tests.builders import length_estimate


def worker(number: int) -> str:
    return f"http://127.0.0.1:{number}"


def pool(*workers: int, window: int = 4096, **more: Any) -> dict[str, Any]:
    urls = [worker(number) for number in workers]
    return {"max_model_len": window, "max_num_seqs": 8, "workers": urls, **more}


class Reloaded:
    """A gateway that is not started, and its file."""

    def __init__(self, path: Path, **more: Any) -> None:
        self.path = path
        self.config: dict[str, Any] = {
            "version": 1,
            "health": {"timeout_s": 0.1},
            "models": [{"name": "m", "pools": {"all": pool(1, 2)}}],
            **more,
        }
        self.write()
        self.gateway = Gateway(load(str(path)))

    def write(self) -> None:
        self.path.write_text(yaml.safe_dump(self.config))

    @property
    def model(self) -> dict[str, Any]:
        found: dict[str, Any] = self.config["models"][0]
        return found

    async def reload(self) -> None:
        self.write()
        await self.gateway.reloading.reload()

    async def close(self) -> None:
        gateway = self.gateway
        for part in (gateway.prober, gateway.discovery, gateway.upstream):
            await part.close()

    async def lease(self, name: str, model: str = "m", pool: int = 0) -> Any:
        ask = AdmissionRequest(
            model=model,
            entitlement="",
            lease_id=name,
            pool=pool,
            alternates=(),
            estimate_tokens=10,
            sequences=1,
            kv_bytes=0,
        )
        return await self.gateway.store.admit(ask)


@pytest.fixture
async def reloaded(tmp_path: Path) -> AsyncIterator[Reloaded]:
    made = Reloaded(tmp_path / "sluice.yaml")
    yield made
    await made.close()


async def test_what_was_learned_stays_through_another_policy(reloaded: Reloaded) -> None:
    (served,) = reloaded.gateway.models
    (held,) = served.fleet.pools
    predictor, prefixes, scheduler = held.predictor, held.prefixes, held.scheduler
    reloaded.model["scheduling"] = {"policy": "sticky"}
    await reloaded.reload()
    (now,) = reloaded.gateway.models
    assert now.estimator is served.estimator
    assert now.fleet.pools == (held,)
    assert (held.predictor, held.prefixes) == (predictor, prefixes)
    assert held.scheduler is not scheduler


async def test_a_scheduler_with_its_queue_stays_where_nothing_of_it_changes(
    reloaded: Reloaded,
) -> None:
    (served,) = reloaded.gateway.models
    (held,) = served.fleet.pools
    scheduler = held.scheduler
    reloaded.model["default_max_tokens"] = 77
    reloaded.model["pools"]["all"]["max_num_seqs"] = 3
    await reloaded.reload()
    (now,) = reloaded.gateway.models
    assert now.fleet.pools[0].scheduler is held.scheduler is scheduler
    assert now.routing.default_max_tokens == 77
    assert held.slots_per_worker == 3


async def test_a_waiting_request_is_placed_anew_by_the_next_policy(reloaded: Reloaded) -> None:
    (served,) = reloaded.gateway.models
    (held,) = served.fleet.pools
    scheduler = held.scheduler
    for number in range(40):  # the engines' speed, without which nothing waits
        known = Job(None, 10_000, 10, 10.0 * number)
        scheduler.submit(known, 10.0 * number)
        scheduler.first_token(known, 10.0 * number + 5)
        scheduler.finished(known, 10.0 * number + 5)
    jobs = [Job(None, 10_000, 10, 400.0) for _ in range(20)]
    for job in jobs:
        scheduler.submit(job, 400.0)
    waiting = next(job for job in jobs if job.state == "waiting")
    waiting.owner = asyncio.get_running_loop().create_future()
    held.queued[waiting] = scheduler
    count = sum(scheduler.waiting)
    reloaded.model["scheduling"] = {"policy": "round-robin"}
    await reloaded.reload()
    assert waiting.state == "nowhere"
    assert await waiting.owner
    assert sum(scheduler.waiting) == count - 1


async def test_a_request_planned_before_a_reload_is_counted_where_it_was_planned(
    reloaded: Reloaded,
) -> None:
    reloaded.model["pools"] = {"small": pool(3, window=1024), "all": pool(1, 2)}
    await reloaded.reload()
    (before,) = reloaded.gateway.models
    small, both = before.fleet.pools
    reloaded.model["pools"] = {"all": pool(1, 2)}
    await reloaded.reload()  # while the request looked for its stored response
    store = reloaded.gateway.store
    plan = Plan(pool=1, alternates=(), reason="long")
    lease = await admit(store, before, OPEN, "one", length_estimate(100), plan)
    assert (small.inflight, both.inflight) == (0, 1)
    store.settle(lease, Settlement(usage=None, unix_s=0.0, dispatched=False))
    assert (small.inflight, both.inflight, store.active) == (0, 0, 0)


async def test_changes_of_a_token_pool_are_logged_before_its_model_is_served(
    tmp_path: Path,
) -> None:
    log = tmp_path / "decisions.jsonl"
    reloaded = Reloaded(tmp_path / "sluice.yaml", request_log={"path": str(log)})
    gateway = reloaded.gateway
    reloaded.config["models"].append(
        {"name": "new", "pools": {"wide": pool(3), "long": pool(4, window=8192)}}
    )
    reloaded.config["entitlements"] = [
        {"name": f"e{n}", "tenant": "t", "model": "new", "max_concurrency": 2}
        for n in range(60)  # more than one step of the outbox
    ]
    async with gateway.pools.running(lambda: None):
        await reloaded.reload()
    assert gateway.log is not None
    await gateway.log.flush()
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert {event["model"] for event in events} == {"new"}
    assert sum(event["event"] == "entitlement" for event in events) == 60
    terms = [event for event in events if event["event"] == "terms"]
    assert terms
    assert all(event["pools"] == ["wide", "long"] for event in terms)
    await reloaded.close()


async def test_series_of_entitlements_and_tenants_that_left_the_file_are_dropped(
    reloaded: Reloaded,
) -> None:
    gateway, names = reloaded.gateway, ("stays", "goes")
    reloaded.config["tenants"] = [{"name": "listed"}]
    reloaded.config["entitlements"] = [
        {"name": name, "tenant": f"of-{name}", "model": "m"} for name in names
    ]
    async with gateway.pools.running(lambda: None):
        await reloaded.reload()
        for name in names:
            gateway.metrics.tokens.add("m", name, "input")
            gateway.metrics.cost.add("m", f"of-{name}")
        gateway.metrics.cost.add("m", "listed")
        del reloaded.config["entitlements"][1]
        del reloaded.config["tenants"]
        await reloaded.reload()
        for _ in range(2):
            await gateway.pools.sweep()
    assert set(gateway.metrics.tokens.values) == {("m", "stays", "input")}
    assert set(gateway.metrics.cost.values) == {("m", "of-stays")}


async def test_a_model_that_is_gone_retires_when_its_last_request_ended(
    reloaded: Reloaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reloading, "GRACE_S", 0.0)
    reloaded.config["models"].append({"name": "n", "pools": {"own": pool(4)}})
    await reloaded.reload()
    gateway = reloaded.gateway
    gateway.metrics.requests.add("n", "own", "ok")
    gateway.metrics.requests.add("m", "all", "ok")
    lease = await reloaded.lease("one", "n")
    del reloaded.config["models"][1]
    await reloaded.reload()
    assert "n" not in gateway.served.by_name
    gateway.reloading.sweep()
    assert [served.name for served in gateway.served.retiring] == ["n"]
    gateway.store.settle(lease, Settlement(usage=None, unix_s=0.0, dispatched=False))
    gateway.reloading.sweep()
    assert gateway.served.retiring == []
    assert list(gateway.metrics.requests.values) == [("m", "all", "ok")]
    assert [model.name for model in gateway.models] == ["m"]


async def test_a_response_is_still_found_after_its_pool_moved(reloaded: Reloaded) -> None:
    (before,) = reloaded.gateway.models
    before.fleet.response_affinity.remember("r1", ResponseLocation("all", 1))
    reloaded.model["pools"] = {"small": pool(3, window=1024), "all": pool(1, 2)}
    await reloaded.reload()
    before.fleet.response_affinity.remember("r2", ResponseLocation("all", 0))  # under way
    (after,) = reloaded.gateway.models
    assert (after.fleet.stored_at("r1"), after.fleet.stored_at("r2")) == ((1, 1), (1, 0))
    assert before.fleet.stored_at("r2") == (0, 0)
    after.fleet.response_affinity.remember("r3", ResponseLocation("small", 0))
    reloaded.model["pools"] = {"all": pool(1, 2)}
    await reloaded.reload()
    (last,) = reloaded.gateway.models
    assert (last.fleet.stored_at("r1"), last.fleet.stored_at("r3")) == ((0, 1), None)


async def test_a_model_that_comes_back_before_it_retired_starts_anew(reloaded: Reloaded) -> None:
    gateway = reloaded.gateway
    more = {"name": "n", "pools": {"own": pool(4)}}
    for models in (2, 1, 2):
        reloaded.config["models"] = [reloaded.model, more][:models]
        await reloaded.reload()
    assert len(gateway.served.retiring) == 1
    assert gateway.served.by_name["n"] not in gateway.served.retiring
    lease = await reloaded.lease("one", "n")
    gateway.store.settle(lease, Settlement(usage=None, unix_s=0.0, dispatched=False))
    assert gateway.served.by_name["n"].fleet.pools[0].inflight == 0
