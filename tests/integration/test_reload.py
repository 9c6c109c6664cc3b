"""Reloads under streams: workers, limits and entitlements change, bad files do not, none is cut."""

import asyncio
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import httpx
import yaml

from bench.changing_fleet.fleet import ADMIN, Engines, Streams, gateway, until_workers


def edit(path: Path, change: Any) -> None:
    """Change the configuration file as a ConfigMap does: a new file under the old name."""
    config = yaml.safe_load(path.read_text())
    change(config)
    new = path.with_suffix(".new")
    new.write_text(yaml.safe_dump(config))
    new.rename(path)


def workers_are(urls: list[str]) -> Any:
    def change(config: Any) -> None:
        config["models"][0]["pools"]["all"]["workers"] = urls

    return change


async def metric(client: httpx.AsyncClient, name: str) -> float:
    page = (await client.get("/metrics")).text
    return next(float(line.split()[1]) for line in page.splitlines() if line.startswith(name + " "))


SUCCESSFUL = "sluice_config_last_reload_successful"


async def test_a_hundred_reloads_under_streams_fail_no_request(tmp_path: Path) -> None:
    engines = Engines()
    path = tmp_path / "sluice.yaml"
    async with engines.listening(6):
        urls = [f"http://{engines.address(n)}:{engines.port}" for n in range(1, 7)]
        async with (
            gateway(tmp_path, urls[:2]) as url,
            httpx.AsyncClient(base_url=url, headers=ADMIN, timeout=30) as client,
            Streams(url) as streams,
        ):
            good = path.read_text()
            for number in range(100):
                if number % 10 == 9:
                    path.write_text(good.replace("max_num_seqs", "max_num_seq"))
                    answer = await client.post("/admin/reload")
                    assert answer.status_code == 400
                    assert "max_num_seqs" in answer.json()["error"]["message"]
                    assert await metric(client, SUCCESSFUL) == 0
                    path.write_text(good)
                else:
                    edit(path, workers_are(urls[: 1 + number % 6]))
                    answer = await client.post("/admin/reload")
                    assert answer.status_code == 200, answer.text
                    assert answer.json()["restart_needed"] == []
                    assert await metric(client, SUCCESSFUL) == 1
            edit(path, workers_are(urls[3:]))
            await client.post("/admin/reload")
            await until_workers(url, {each.removeprefix("http://") for each in urls[3:]})
            assert streams.completed
        assert streams.failures == []


async def test_a_changed_file_is_noticed_by_its_content(tmp_path: Path) -> None:
    engines = Engines()
    async with engines.listening(2):
        urls = [f"http://{engines.address(n)}:{engines.port}" for n in (1, 2)]
        async with gateway(tmp_path, urls[:1]) as url:
            edit(tmp_path / "sluice.yaml", workers_are(urls[1:]))
            await until_workers(url, {urls[1].removeprefix("http://")})


async def test_limits_and_entitlements_change_and_what_cannot_is_named(tmp_path: Path) -> None:
    engines = Engines()
    path = tmp_path / "sluice.yaml"
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True}
    digest = "sha256:" + "a" * 64
    own = {"name": "e", "tenant": "t", "model": "m", "concurrency": 2, "max_concurrency": 2}

    def change(config: Any) -> None:
        key = hashlib.sha256(b"sk-new").hexdigest()
        config["server"]["drain_timeout_s"] = 1
        config["models"][0]["pools"]["all"]["max_num_seqs"] = 4
        config["models"][0]["scheduling"]["queue_timeout_s"] = 7
        config["entitlements"] = [{**own, "api_keys": [f"sha256:{key}"]}]

    async with engines.listening(1):
        workers = [f"http://{engines.address(1)}:{engines.port}"]
        entitlements = [{**own, "api_keys": [digest]}]
        async with (
            gateway(tmp_path, workers, entitlements=entitlements) as url,
            httpx.AsyncClient(base_url=url, headers=ADMIN, timeout=30) as client,
        ):
            await until_workers(url, {workers[0].removeprefix("http://")})
            key = {"authorization": "Bearer sk-new"}
            chat = "/v1/chat/completions"
            assert (await client.post(chat, json=body, headers=key)).status_code == 401
            edited = tmp_path / "edited.yaml"
            edited.write_text(path.read_text())
            edit(edited, change)
            command = (sys.executable, "-m", "sluice", "check", "--diff", url, "--json")
            check = await asyncio.create_subprocess_exec(
                *(*command, "-c", str(edited)),
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, "SLUICE_ADMIN_KEY": "sk-admin"},
            )
            shown, _ = await check.communicate()
            edited.rename(path)
            answer = (await client.post("/admin/reload")).json()
            assert json.loads(shown)["changes"] == answer["changes"]
            changed = {each["path"]: (each["before"], each["after"]) for each in answer["changes"]}
            assert changed["models[m].pools[all].max_num_seqs"] == ("8", "4")
            assert changed["models[m].scheduling.queue_timeout_s"] == ("20.0", "7.0")
            assert answer["restart_needed"] == ["server.drain_timeout_s"]
            assert (await client.post(chat, json=body, headers=key)).status_code == 200
            (model,) = (await client.get("/admin/pools")).json()
            assert model["pools"][0]["max_num_seqs"] == 4
            assert model["pools"][0]["admission"]["slots"] == 4
            again = (await client.post("/admin/reload")).json()
            assert [each["path"] for each in again["changes"]] == ["server.drain_timeout_s"]
