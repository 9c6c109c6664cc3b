"""Reloads that change models, pools, policies and names under streams: none is cut or refused."""

import asyncio
import copy
import hashlib
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from bench.changing_fleet.fleet import ADMIN, Engines, Streams, gateway
from tests.asking import eventually

CHAT = "/v1/chat/completions"


def engine(engines: Engines, number: int) -> dict[str, str]:
    return {"url": f"http://{engines.address(number)}:{engines.port}", "model": "m"}


def pool(*workers: object, window: int = 8192) -> dict[str, Any]:
    return {"max_model_len": window, "max_num_seqs": 8, "workers": list(workers)}


class Edited:
    """A gateway whose file a test changes."""

    def __init__(self, path: Path, client: httpx.AsyncClient) -> None:
        self.path = path
        self.client = client
        self.config = yaml.safe_load(path.read_text())

    @property
    def model(self) -> dict[str, Any]:
        found: dict[str, Any] = self.config["models"][0]
        return found

    async def reload(self) -> list[str]:
        """Apply the file; the paths that a restart is needed for."""
        self.path.write_text(yaml.safe_dump(self.config))
        answer = await self.client.post("/admin/reload")
        assert answer.status_code == 200, answer.text
        found: list[str] = answer.json()["restart_needed"]
        return found

    async def ask(self, model: str, key: str = "sk-any") -> httpx.Response:
        body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "stream": True}
        return await self.client.post(CHAT, json=body, headers={"authorization": f"Bearer {key}"})

    async def models(self) -> list[str]:
        return [each["id"] for each in (await self.client.get("/v1/models")).json()["data"]]

    async def pools(self) -> dict[str, list[str]]:
        shown = (await self.client.get("/admin/pools")).json()
        return {each["model"]: [p["name"] for p in each["pools"]] for each in shown}

    async def metrics(self) -> str:
        return (await self.client.get("/metrics")).text


def client_of(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, headers=ADMIN, timeout=30)


async def test_models_come_and_go_with_their_names_figures_and_probes(tmp_path: Path) -> None:
    engines = Engines()
    async with (
        engines.listening(4),
        gateway(tmp_path, [engine(engines, 1)]) as url,
        client_of(url) as client,
        Streams(url) as streams,
    ):
        edited = Edited(tmp_path / "sluice.yaml", client)
        before = copy.deepcopy(edited.config)
        more = {"name": "n", "aliases": ["other"], "pools": {"own": pool(engine(engines, 2))}}
        edited.config["models"].append(more)
        edited.config["aliases"] = [{"name": "either", "split": {"m": 1, "n": 1}}]
        edited.model["fallbacks"] = ["n"]
        assert await edited.reload() == []
        for name in ("n", "other", "either"):
            answer = await edited.ask(name)
            assert (answer.status_code, answer.text.rstrip()[-6:]) == (200, "[DONE]")
        assert set(await edited.models()) == {"m", "n", "other", "either"}
        assert await edited.pools() == {"m": ["all"], "n": ["own"]}
        assert 'sluice_requests_total{model="n"' in await edited.metrics()
        served = engines.served[engines.address(2)]
        running = asyncio.create_task(edited.ask("n"))
        await eventually(lambda: engines.running[engines.address(2)])

        edited.config = before
        assert await edited.reload() == []
        assert (await edited.ask("n")).status_code == 404
        assert (await edited.ask("either")).status_code == 404
        assert await edited.models() == ["m"]
        assert (await running).text.rstrip().endswith("[DONE]")
        assert engines.served[engines.address(2)] == served + 1
        await until(edited, 'model="n"', there=False)
        assert streams.completed
    assert streams.failures == []


async def test_pools_come_go_and_change_their_names_under_streams(tmp_path: Path) -> None:
    engines = Engines()
    async with (
        engines.listening(4),
        gateway(tmp_path, [engine(engines, 1)]) as url,
        client_of(url) as client,
        Streams(url, clients=20) as streams,
    ):
        edited = Edited(tmp_path / "sluice.yaml", client)
        first = edited.model["pools"]["all"]
        small = pool(engine(engines, 2), window=4096)
        large = pool(engine(engines, 3), window=65536)
        for pools in (
            {"all": first, "small": small},
            {"large": large, "small": small},
            {"large": large, "all": first, "small": small},
            {"again": first},
            {"all": first},
        ):
            edited.model["pools"] = pools
            assert await edited.reload() == []
            expected = sorted(pools, key=lambda name: pools[name]["max_model_len"])
            assert await edited.pools() == {"m": expected}
            await further(streams, 40)
        await until(edited, 'pool="large"', there=False)
        await until(edited, 'pool="again"', there=False)
        assert engines.running[engines.address(3)] == 0
    assert streams.failures == []


async def test_policies_and_modes_change_while_requests_wait(tmp_path: Path) -> None:
    engines = Engines()
    async with (
        engines.listening(2),
        gateway(tmp_path, [engine(engines, 1), engine(engines, 2)]) as url,
        client_of(url) as client,
        Streams(url, clients=40) as streams,  # more than there are slots: some wait
    ):
        edited = Edited(tmp_path / "sluice.yaml", client)
        for policy, mode in (
            ("sticky", "enforce"),
            ("quartz", "enforce"),
            ("least-loaded", "enforce"),
            ("quartz", "observe"),
            ("round-robin", "enforce"),
            (None, "enforce"),
        ):
            edited.model["scheduling"] = {"policy": policy, "queue_timeout_s": 20}
            edited.model["mode"] = mode
            assert await edited.reload() == []
            (shown,) = (await client.get("/admin/pools")).json()
            assert shown["mode"] == mode
            await further(streams, 60)
    assert streams.failures == []


@pytest.mark.parametrize("state", ["memory", "sqlite", "redis"])
async def test_a_model_becomes_managed_and_its_limits_hold(
    tmp_path: Path, state: str, request: pytest.FixtureRequest
) -> None:
    engines = Engines()
    url_of = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path}/state.db"}
    state_url = url_of.get(state) or request.getfixturevalue("redis_server").url
    digest = f"sha256:{hashlib.sha256(b'sk-any').hexdigest()}"
    async with (
        engines.listening(3),
        gateway(tmp_path, [engine(engines, 1)], state={"url": state_url}) as url,
        client_of(url) as client,
        Streams(url, clients=3) as streams,
    ):
        edited = Edited(tmp_path / "sluice.yaml", client)
        entitlement = {"name": "e", "tenant": "t", "model": "m", "api_keys": [digest]}
        edited.config["entitlements"] = [{**entitlement, "max_concurrency": 4}]
        assert await edited.reload() == []
        await asyncio.sleep(1)
        answers = await asyncio.gather(*(edited.ask("m") for _ in range(12)))
        assert {answer.status_code for answer in answers} == {200, 429}
        assert (await edited.ask("m", "sk-wrong")).status_code == 401
        pools = edited.model["pools"]
        pools["small"] = pool(engine(engines, 2), window=4096)
        assert await edited.reload() == []
        (shown,) = (await client.get("/admin/entitlements")).json()["data"]
        assert set(shown["usage"]["inflight"]) == {"small", "all"}
        await until(edited, 'sluice_pool_desired_replicas{model="m",pool="small"}')
        await until_slots(client, [8, 8])
        del pools["small"]
        assert await edited.reload() == []
        await until_slots(client, [8])
        del edited.config["entitlements"]
        edited.config["entitlements"] = [entitlement]
        assert await edited.reload() == []
        answers = await asyncio.gather(*(edited.ask("m") for _ in range(12)))
        assert {answer.status_code for answer in answers} == {200}
        await until(edited, "sluice_pool_desired_replicas{", there=False)
    assert [each for each in streams.failures if not each.startswith("429")] == []


@pytest.mark.parametrize(
    "state", ["memory", "sqlite", pytest.param("redis", marks=pytest.mark.redis)]
)
async def test_the_first_budget_comes_and_the_last_goes_by_reload(
    tmp_path: Path, state: str, request: pytest.FixtureRequest
) -> None:
    engines = Engines()
    url_of = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path}/state.db"}
    state_url = url_of.get(state) or request.getfixturevalue("redis_server").url
    digest = f"sha256:{hashlib.sha256(b'sk-any').hexdigest()}"
    async with (
        engines.listening(2),
        gateway(tmp_path, [engine(engines, 1)], state={"url": state_url}) as url,
        client_of(url) as client,
    ):
        edited = Edited(tmp_path / "sluice.yaml", client)
        tenant: dict[str, Any] = {"name": "t", "keys": [{"name": "k", "sha256": digest}]}
        edited.config["tenants"] = [tenant]
        edited.config["entitlements"] = [{"name": "e", "tenant": "t", "model": "m"}]
        assert await edited.reload() == []
        assert (await edited.ask("m")).status_code == 200
        tenant["budgets"] = [{"tokens": 1}]
        assert await edited.reload() == []
        refused = await edited.ask("m")
        assert refused.status_code == 400, "no request fits in one token"
        assert refused.json()["error"]["code"] == "exceeds_entitlement"
        del tenant["budgets"]
        assert await edited.reload() == []
        assert (await edited.ask("m")).status_code == 200


async def until(edited: Edited, text: str, *, there: bool = True) -> None:
    """Wait until the metrics page has a text, or has it no more."""
    async with asyncio.timeout(15):
        while True:
            if (text in await edited.metrics()) == there:
                return
            await asyncio.sleep(0.2)


async def further(streams: Streams, count: int) -> None:
    """Wait until so many more streams have ended."""
    done = streams.completed + count
    await eventually(lambda: streams.completed >= done)


async def until_slots(client: httpx.AsyncClient, slots: list[int]) -> None:
    async with asyncio.timeout(10):
        while True:
            (shown,) = (await client.get("/admin/pools")).json()
            found = [each.get("admission", {}).get("slots") for each in shown["pools"]]
            if found == slots:
                return
            await asyncio.sleep(0.1)
