"""A reload lets requests run while it reads, and is tried again if something else fails."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from math import inf
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.errors import BadRequest, StateFailure
from gateway.fleet.engine_pages import Page
from gateway.settings import Config
from gateway.settings import load as load_file
from gateway.settings import parse as parse_text
from gateway.wiring import reloading
from gateway.wiring.app import Gateway


class Case:
    """A gateway that watches its file, with what stands in the file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "sluice.yaml"
        pool = {"max_model_len": 4096, "max_num_seqs": 8, "workers": [self.source("a")]}
        self.config: dict[str, Any] = {
            "version": 1,
            "health": {"timeout_s": 0.1},
            "models": [{"name": "m", "pools": {"all": pool}}],
        }
        self.write()
        self.gateway = Gateway(load_file(str(self.path)))

    @property
    def pool(self) -> dict[str, Any]:
        found: dict[str, Any] = self.config["models"][0]["pools"]["all"]
        return found

    @property
    def sources(self) -> set[str]:
        return {url for _, _, url in self.gateway.discovery._sources}

    def source(self, name: str) -> str:
        return f"file://{self.folder / name}.yaml"

    def write(self) -> None:
        self.path.write_text(yaml.safe_dump(self.config))

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not true():  # noqa: ASYNC110 - nothing reports it
                await asyncio.sleep(0.01)


@pytest.fixture
async def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Case]:
    monkeypatch.setattr(reloading, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(reloading, "RETRY_S", 0.01)
    made = Case(tmp_path)
    yield made
    gateway = made.gateway
    for part in (
        *(gateway.reloading, gateway.prober),
        *(gateway.discovery, gateway.upstream),
    ):
        await part.close()


def failing_once(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
    """Have a method's first call fail as it does while Redis is away."""
    works, failures = getattr(owner, name), iter([StateFailure("no answer")])

    async def call(*arguments: Any) -> Any:
        for failure in failures:
            raise failure
        return await works(*arguments)

    monkeypatch.setattr(owner, name, call)


async def test_files_are_read_beside_the_requests(
    case: Case, monkeypatch: pytest.MonkeyPatch
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
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = case.gateway
    failing_once(monkeypatch, gateway.pools, "prepare")
    case.pool["max_num_seqs"] = 4
    case.write()
    with pytest.raises(StateFailure):
        await gateway.reloading.reload()
    assert not gateway.reloading.status.successful
    await gateway.reloading.start()
    await case.until(lambda: gateway.reloading.status.successful)
    assert gateway.models[0].fleet.pools[0].slots_per_worker == 4


async def test_a_reload_that_fails_leaves_nothing_known_of_its_new_pools(
    case: Case, monkeypatch: pytest.MonkeyPatch
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
    case.config["models"][0]["pools"]["new"] = {
        **case.pool,
        "max_model_len": 8192,
        "workers": ["http://127.0.0.1:1"],
    }
    case.write()
    with pytest.raises(StateFailure):
        await gateway.reloading.reload()
    assert not gateway.prober._known
    assert served.adapters.names == []
    await gateway.reloading.reload()
    assert gateway.models[0].adapters.names == ["tuned"]


async def test_workers_follow_after_a_failure_of_theirs(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = case.gateway
    failing_once(monkeypatch, gateway.discovery, "change")
    case.pool["workers"] = [case.source("b")]
    case.write()
    with pytest.raises(StateFailure):
        await gateway.reloading.reload()
    assert case.sources == {case.source("a")}
    await gateway.reloading.start()
    await case.until(lambda: case.sources == {case.source("b")})


async def test_a_bad_file_is_not_tried_again(case: Case) -> None:
    case.pool["max_num_seqs"] = "many"
    case.write()
    with pytest.raises(BadRequest):
        await case.gateway.reloading.reload()
    assert not case.gateway.reloading.status.successful
    assert case.gateway.reloading._retry_at_s == inf


async def test_sighup_before_the_start_reloads_nothing_and_reports_nothing(case: Case) -> None:
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
