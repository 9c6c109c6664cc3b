"""A fleet grows and shrinks under streams, by every source of engines: no client notices."""

import asyncio
import hashlib
import json
import os
import socket
import sys
from pathlib import Path

import httpx
import pytest
import yaml

from bench.changing_fleet.fleet import ADMIN, Engines, Streams, gateway, until_workers
from tests.worlds import KINDS, KubeWorld, world_of


@pytest.mark.parametrize("kind", KINDS)
async def test_a_fleet_grows_and_shrinks_under_streams(kind: str, tmp_path: Path) -> None:
    engines = Engines()
    async with engines.listening(12), world_of(kind, tmp_path, engines.port) as world:
        ips = [engines.address(number) for number in range(1, 13)]
        ids = [f"{ip}:{engines.port}" for ip in ips]
        await world.names(ips[:4])
        env = None
        url = world.url
        if isinstance(world, KubeWorld):
            world.server.token = ""
            env = {**os.environ, "SLUICE_KUBERNETES_URL": world.server.url}
        async with gateway(tmp_path, url, env) as served:
            await until_workers(served, set(ids[:4]))
            async with Streams(served) as streams:
                await asyncio.sleep(0.5)
                await world.names(ips)
                await until_workers(served, set(ids))
                await asyncio.sleep(2.0)
                new = {ip: engines.served[ip] for ip in ips[4:]}
                old = [engines.served[ip] for ip in ips[:4]]
                await world.names(ips[10:])
                await until_workers(served, set(ids[10:]))
                assert not any(engines.running[ip] for ip in ips[:10])
                before = streams.completed
                async with asyncio.timeout(20):
                    while streams.completed < before + 12:  # noqa: ASYNC110
                        await asyncio.sleep(0.02)
            assert streams.failures == []
            assert max(new.values()) < min(old), "new workers start slowly"


async def test_requests_wait_while_a_pool_is_empty(tmp_path: Path) -> None:
    engines = Engines()
    async with engines.listening(1), world_of("file", tmp_path, engines.port) as world:
        await world.names([])
        async with gateway(tmp_path, world.url) as url:
            async with httpx.AsyncClient() as client:
                assert (await client.get(f"{url}/ready")).status_code == 200
            async with Streams(url, clients=3) as streams:
                await asyncio.sleep(0.5)
                assert streams.completed == 0
                await world.names([engines.address(1)])
                async with asyncio.timeout(20):
                    while streams.completed < 3:  # noqa: ASYNC110
                        await asyncio.sleep(0.02)
            assert streams.failures == []


async def test_an_empty_pool_with_limits_asks_for_its_first_worker(tmp_path: Path) -> None:
    key = hashlib.sha256(b"sk-own").hexdigest()
    own = {"name": "e", "tenant": "t", "model": "m", "concurrency": 2, "max_concurrency": 8}
    entitlements = [{**own, "api_keys": [f"sha256:{key}"]}]
    engines = Engines()
    async with engines.listening(1), world_of("file", tmp_path, engines.port) as world:
        await world.names([])
        async with gateway(tmp_path, world.url, entitlements=entitlements) as url:
            desired = 'sluice_pool_desired_replicas{model="m",pool="all"} '
            async with (
                Streams(url, clients=2, key="sk-own") as streams,
                httpx.AsyncClient(base_url=url) as client,
                asyncio.timeout(30),
            ):
                while f"{desired}1" not in (await client.get("/metrics")).text:  # noqa: ASYNC110
                    await asyncio.sleep(0.2)
                await world.names([engines.address(1)])
                while streams.completed < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            assert streams.failures == []


async def test_an_admin_adds_drains_and_removes_workers_under_streams(tmp_path: Path) -> None:
    engines = Engines()
    async with engines.listening(3):
        first, second, third = (f"{engines.address(n)}:{engines.port}" for n in (1, 2, 3))
        async with (
            gateway(tmp_path, [f"http://{first}"]) as url,
            httpx.AsyncClient(headers=ADMIN, base_url=url, timeout=30) as client,
        ):
            async with Streams(url, clients=4) as streams:
                for worker in (second, third):
                    body = {"model": "m", "pool": "all", "url": f"http://{worker}"}
                    assert (await client.post("/admin/workers", json=body)).status_code == 201
                await until_workers(url, {first, second, third})
                drained = await client.post(f"/admin/workers/{first}/drain", params={"wait": 1})
                assert drained.json()["running"] == 0
                assert not engines.running[engines.address(1)]
                assert (await client.delete(f"/admin/workers/{first}")).status_code == 200
                await until_workers(url, {second, third})
                wrong = {"model": "m", "pool": "none", "url": f"http://{first}"}
                answer = await client.post("/admin/workers", json=wrong)
                assert answer.json()["error"]["code"] == "pool_not_found"
            assert streams.failures == []


async def test_a_live_check_names_what_is_wrong_with_its_fix(tmp_path: Path) -> None:
    engines = Engines()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        dead = free.getsockname()[1]
    async with engines.listening(2):
        wrong = {"url": f"http://{engines.address(1)}:{engines.port}", "model": "other"}
        pools: dict[str, dict[str, object]] = {
            "short": {"max_model_len": 4096, "max_num_seqs": 8},
            "long": {"max_model_len": 8192, "max_num_seqs": 8, "workers": [wrong]},
        }
        pools["short"]["workers"] = [
            f"http://{engines.address(2)}:{engines.port}/v1",
            f"http://127.0.0.1:{dead}",
        ]
        path = tmp_path / "sluice.yaml"
        state = {"url": f"redis://:secret@127.0.0.1:{dead}/0"}
        models = [{"name": "m", "pools": pools}]
        path.write_text(yaml.safe_dump({"version": 1, "state": state, "models": models}))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "sluice", "check", "--live", "--json", "-c", str(path)),
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await process.communicate()
    assert process.returncode == 1
    answer = json.loads(out)
    found = {each["worker"]: each for each in answer["workers"]}
    assert not found["store"]["ready"]
    assert found["store"]["fix"].startswith("start it, or correct state.url")
    assert b"secret" not in out
    (note,) = answer["remarks"]
    assert note.startswith(f"http://{engines.address(2)}:{engines.port}/v1 is read as")
    assert note.endswith("remove /v1")
    short = found[f"{engines.address(2)}:{engines.port}"]
    assert short["ready"]
    assert "max_model_len 8192" in short["problem"]
    assert "4096" in short["problem"]
    assert short["fix"] == "set it to the engine's"
    name = found[f"{engines.address(1)}:{engines.port}"]
    assert not name["ready"]
    assert "'m', not 'other'" in name["problem"]
    assert name["fix"] == "set the worker's `model`"
    gone = found[f"127.0.0.1:{dead}"]
    assert not gone["ready"]
    assert gone["fix"].startswith("start the engine")
