"""A reload lets requests run, is tried again if it fails, and replaces models.

What is valid is taken over, and what is gone retires.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from math import inf
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from gateway.errors import BadRequest, StateFailure
from gateway.fleet.probes import Page
from gateway.pipeline.plan import admit
from gateway.ports import Settlement
from gateway.records.estimate import Plan
from gateway.records.request import OPEN
from gateway.routing.routing import ResponseLocation
from gateway.scheduling.scheduler import Job
from gateway.scheduling.schedulers import make_scheduler
from gateway.settings import Config
from gateway.settings import load as load_file
from gateway.settings import parse as parse_text
from gateway.wiring import reloading
from gateway.wiring.app import Gateway
from tests.builders import ask, length_estimate

NOT_SENT = Settlement(usage=None, unix_s=0.0, dispatched=False)


def pool(*workers: int, window: int = 4096, **more: Any) -> dict[str, Any]:
    urls = [f"http://127.0.0.1:{number}" for number in workers]
    return {"max_model_len": window, "max_num_seqs": 8, "workers": urls, **more}


class Reloaded:
    """A gateway that is not started, and what stands in its file."""

    def __init__(self, folder: Path, **more: Any) -> None:
        self.folder = folder
        self.path = folder / "sluice.yaml"
        self.config: dict[str, Any] = {
            "version": 1,
            "health": {"timeout_s": 0.1},
            "models": [{"name": "m", "pools": {"all": pool(1, 2)}}],
            **more,
        }
        self.write()
        self.gateway = Gateway(load_file(str(self.path)))

    @property
    def model(self) -> dict[str, Any]:
        found: dict[str, Any] = self.config["models"][0]
        return found

    @property
    def pool(self) -> dict[str, Any]:
        found: dict[str, Any] = self.model["pools"]["all"]
        return found

    @property
    def sources(self) -> set[str]:
        return {url for _, _, url in self.gateway.discovery._sources}

    def source(self, name: str) -> str:
        return f"file://{self.folder / name}.yaml"

    def write(self) -> None:
        self.path.write_text(yaml.safe_dump(self.config))

    async def reload(self) -> None:
        self.write()
        await self.gateway.reloading.reload()

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not true():  # noqa: ASYNC110 - nothing reports it
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        gateway = self.gateway
        for part in (gateway.reloading, gateway.prober, gateway.discovery, gateway.upstream):
            await part.close()

    async def lease(self, name: str, model: str = "m", pool: int = 0) -> Any:
        asked = msgspec.structs.replace(ask(name, model=model, pool=pool), entitlement="")
        return await self.gateway.store.admit(asked)


@pytest.fixture
async def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Reloaded]:
    monkeypatch.setattr(reloading, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(reloading, "RETRY_S", 0.01)
    made = Reloaded(tmp_path)
    yield made
    await made.close()


def failing_once(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
    """Have a method's first call fail as it does while Redis is away."""
    works, failures = getattr(owner, name), iter([StateFailure("no answer")])

    async def call(*arguments: Any) -> Any:
        for failure in failures:
            raise failure
        return await works(*arguments)

    monkeypatch.setattr(owner, name, call)


async def test_files_are_read_beside_the_requests(
    case: Reloaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def load(file: str) -> Config:
        threads.append(threading.current_thread())
        return load_file(file)

    def parse(*arguments: Any) -> Config:
        threads.append(threading.current_thread())
        return parse_text(*arguments)

    monkeypatch.setattr(reloading, "load", load)
    monkeypatch.setattr(reloading, "parse", parse)
    case.pool["max_num_seqs"] = 4
    case.write()
    await case.gateway.reloading.compare(case.path.read_text())
    await case.gateway.reloading.reload()
    assert len(threads) == 2
    assert threading.main_thread() not in threads


async def test_a_reload_that_fails_for_another_reason_is_told_and_tried_again(
    case: Reloaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = case.gateway
    failing_once(monkeypatch, gateway.pools, "prepare")
    case.pool["max_num_seqs"] = 4
    with pytest.raises(StateFailure):
        await case.reload()
    assert not gateway.reloading.status.successful
    await gateway.reloading.start()
    await case.until(lambda: gateway.reloading.status.successful)
    assert gateway.models[0].fleet.pools[0].slots_per_worker == 4


async def test_a_reload_that_fails_leaves_nothing_known_of_its_new_pools(
    case: Reloaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = case.gateway
    (served,) = gateway.models
    lists = b'{"data":[{"id":"m"},{"id":"tuned","parent":"m"}]}'

    async def get(_address: object, path: str, *_: object) -> Page:
        return Page(200, lists if path == "/v1/models" else b"{}")

    monkeypatch.setattr(gateway.prober._pages, "get", get)
    failing_once(monkeypatch, gateway.pools, "prepare")
    case.config["models"][0] |= {"discover_loras": True}
    served.adapters.use((), discovers=True)
    case.model["pools"]["new"] = pool(9, window=8192)
    with pytest.raises(StateFailure):
        await case.reload()
    assert list(gateway.prober._served) == list(served.fleet.pools)
    assert served.adapters.names == []
    await gateway.reloading.reload()
    assert gateway.models[0].adapters.names == ["tuned"]


async def test_a_reload_that_cannot_make_a_scheduler_changes_nothing(
    case: Reloaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.config["models"].append({"name": "n", "pools": {"all": pool(3)}})
    await case.reload()
    served = list(case.gateway.served.models)
    before = [pool.scheduler for model in served for pool in model.fleet.pools]
    for model in case.config["models"]:
        model["scheduling"] = {"policy": "sticky"}
    calls = iter([True, False])

    def make(*arguments: Any, **more: Any) -> Any:
        if next(calls):
            return make_scheduler(*arguments, **more)
        raise MemoryError

    monkeypatch.setattr("gateway.wiring.models.make_scheduler", make)
    with pytest.raises(MemoryError):
        await case.reload()
    assert case.gateway.served.models == served
    assert [pool.scheduler for model in served for pool in model.fleet.pools] == before


async def test_workers_follow_after_a_failure_of_theirs(
    case: Reloaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = case.gateway
    case.pool["workers"] = [case.source("a")]
    await case.reload()
    failing_once(monkeypatch, gateway.discovery, "change")
    case.pool["workers"] = [case.source("b")]
    with pytest.raises(StateFailure):
        await case.reload()
    assert case.sources == {case.source("a")}
    await gateway.reloading.start()
    await case.until(lambda: case.sources == {case.source("b")})


async def test_a_bad_file_is_not_tried_again(case: Reloaded) -> None:
    case.pool["max_num_seqs"] = "many"
    with pytest.raises(BadRequest):
        await case.reload()
    assert not case.gateway.reloading.status.successful
    assert case.gateway.reloading._retry_at_s == inf


async def test_sighup_before_the_start_reloads_nothing_and_reports_nothing(case: Reloaded) -> None:
    done: list[bool] = []
    gateway = case.gateway
    gateway.reloading.hang_up(lambda: done.append(True))
    case.pool["max_num_seqs"] = 4
    case.write()
    await gateway.reloading.start()
    await case.until(lambda: gateway.models[0].fleet.pools[0].slots_per_worker == 4)
    assert done == []
    gateway.reloading.hang_up(lambda: done.append(True))
    await case.until(lambda: done == [True])


# --- models that are replaced


async def test_what_was_learned_stays_through_another_policy(case: Reloaded) -> None:
    (served,) = case.gateway.models
    (held,) = served.fleet.pools
    predictor, prefixes, scheduler = held.predictor, held.prefixes, held.scheduler
    case.model["scheduling"] = {"policy": "sticky"}
    await case.reload()
    (now,) = case.gateway.models
    assert now.estimator is served.estimator
    assert now.fleet.pools == (held,)
    assert (held.predictor, held.prefixes) == (predictor, prefixes)
    assert held.scheduler is not scheduler


async def test_a_scheduler_with_its_queue_stays_where_nothing_of_it_changes(
    case: Reloaded,
) -> None:
    (served,) = case.gateway.models
    (held,) = served.fleet.pools
    scheduler = held.scheduler
    case.model["default_max_tokens"] = 77
    case.model["pools"]["all"]["max_num_seqs"] = 3
    await case.reload()
    (now,) = case.gateway.models
    assert now.fleet.pools[0].scheduler is held.scheduler is scheduler
    assert now.routing.default_max_tokens == 77
    assert held.slots_per_worker == 3


async def test_a_waiting_request_is_placed_anew_by_the_next_policy(case: Reloaded) -> None:
    (served,) = case.gateway.models
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
    case.model["scheduling"] = {"policy": "round-robin"}
    await case.reload()
    assert waiting.state == "nowhere"
    assert await waiting.owner
    assert sum(scheduler.waiting) == count - 1


async def test_a_request_planned_before_a_reload_is_counted_where_it_was_planned(
    case: Reloaded,
) -> None:
    case.model["pools"] = {"small": pool(3, window=1024), "all": pool(1, 2)}
    await case.reload()
    (before,) = case.gateway.models
    small, both = before.fleet.pools
    case.model["pools"] = {"all": pool(1, 2)}
    await case.reload()  # while the request looked for its stored response
    store = case.gateway.store
    plan = Plan(pool=1, alternates=(), reason="long")
    lease = await admit(store, before, OPEN, "one", length_estimate(100), plan)
    assert (small.inflight, both.inflight) == (0, 1)
    store.settle(lease, NOT_SENT)
    assert (small.inflight, both.inflight, store.active) == (0, 0, 0)


async def test_changes_of_a_token_pool_are_logged_before_its_model_is_served(
    tmp_path: Path,
) -> None:
    log = tmp_path / "decisions.jsonl"
    case = Reloaded(tmp_path, request_log={"path": str(log)})
    gateway = case.gateway
    case.config["models"].append(
        {"name": "new", "pools": {"wide": pool(3), "long": pool(4, window=8192)}}
    )
    case.config["entitlements"] = [
        {"name": f"e{n}", "tenant": "t", "model": "new", "max_concurrency": 2}
        for n in range(60)  # more than one step of the outbox
    ]
    async with gateway.pools.running(lambda: None):
        await case.reload()
    assert gateway.log is not None
    await gateway.log.flush()
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert {event["model"] for event in events} == {"new"}
    assert sum(event["event"] == "entitlement" for event in events) == 60
    terms = [event for event in events if event["event"] == "terms"]
    assert terms
    assert all(event["pools"] == ["wide", "long"] for event in terms)
    await case.close()


async def test_series_of_entitlements_and_tenants_that_left_the_file_are_dropped(
    case: Reloaded,
) -> None:
    gateway, names = case.gateway, ("stays", "goes")
    case.config["tenants"] = [{"name": "listed"}]
    case.config["entitlements"] = [
        {"name": name, "tenant": f"of-{name}", "model": "m"} for name in names
    ]
    async with gateway.pools.running(lambda: None):
        await case.reload()
        for name in names:
            gateway.metrics.tokens.add("m", name, "input")
            gateway.metrics.cost.add("m", f"of-{name}")
        gateway.metrics.cost.add("m", "listed")
        del case.config["entitlements"][1]
        del case.config["tenants"]
        await case.reload()
        for _ in range(2):
            await gateway.pools.sweep()
    assert set(gateway.metrics.tokens.values) == {("m", "stays", "input")}
    assert set(gateway.metrics.cost.values) == {("m", "of-stays")}


async def test_a_model_that_is_gone_retires_when_its_last_request_ended(
    case: Reloaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reloading, "GRACE_S", 0.0)
    case.config["models"].append({"name": "n", "pools": {"own": pool(4)}})
    await case.reload()
    gateway = case.gateway
    gateway.metrics.requests.add("n", "own", "ok")
    gateway.metrics.requests.add("m", "all", "ok")
    lease = await case.lease("one", "n")
    del case.config["models"][1]
    await case.reload()
    assert "n" not in gateway.served.by_name
    gateway.reloading.sweep()
    assert [served.name for served in gateway.served.retiring] == ["n"]
    gateway.store.settle(lease, NOT_SENT)
    gateway.reloading.sweep()
    assert gateway.served.retiring == []
    assert list(gateway.metrics.requests.values) == [("m", "all", "ok")]
    assert [model.name for model in gateway.models] == ["m"]


async def test_a_response_is_still_found_after_its_pool_moved(case: Reloaded) -> None:
    (before,) = case.gateway.models
    before.fleet.response_affinity.remember("r1", ResponseLocation("all", 1))
    case.model["pools"] = {"small": pool(3, window=1024), "all": pool(1, 2)}
    await case.reload()
    before.fleet.response_affinity.remember("r2", ResponseLocation("all", 0))  # under way
    (after,) = case.gateway.models
    assert (after.fleet.stored_at("r1"), after.fleet.stored_at("r2")) == ((1, 1), (1, 0))
    assert before.fleet.stored_at("r2") == (0, 0)
    after.fleet.response_affinity.remember("r3", ResponseLocation("small", 0))
    case.model["pools"] = {"all": pool(1, 2)}
    await case.reload()
    (last,) = case.gateway.models
    assert (last.fleet.stored_at("r1"), last.fleet.stored_at("r3")) == ((0, 1), None)


async def test_a_model_that_comes_back_before_it_retired_starts_anew(case: Reloaded) -> None:
    gateway = case.gateway
    more = {"name": "n", "pools": {"own": pool(4)}}
    for models in (2, 1, 2):
        case.config["models"] = [case.model, more][:models]
        await case.reload()
    assert len(gateway.served.retiring) == 1
    assert gateway.served.by_name["n"] not in gateway.served.retiring
    lease = await case.lease("one", "n")
    gateway.store.settle(lease, NOT_SENT)
    assert gateway.served.by_name["n"].fleet.pools[0].inflight == 0


async def test_adapters_of_a_pool_that_is_gone_are_gone_with_it(case: Reloaded) -> None:
    case.model["pools"]["wide"] = pool(3, window=8192)
    await case.reload()
    (before,) = case.gateway.models
    for place, name in enumerate(("kept", "gone")):
        before.adapters.listed(before.fleet.pools[place], 0, [name])
    del case.model["pools"]["wide"]
    await case.reload()
    assert case.gateway.models[0].adapters.names == ["kept"]
