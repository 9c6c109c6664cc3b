"""The chart's pods, run by hand: the default values serve, and a pod that ends cuts no stream."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.fleet.kubernetes import SLICES
from sluice.children import free_ports
from sluice.hash_key import hashed_key
from tests.chart import HELM, Manifest, rendered
from tests.kube.discovery import KubeServer, slice_of
from tests.pod import Pod

pytestmark = [
    pytest.mark.helm,
    pytest.mark.skipif(HELM is None, reason="helm is not installed (make helm)"),
]
KEYS = {f"SLUICE_{n.upper()}_KEY_HASH": f"sk-{n}" for n in ("guaranteed", "elastic", "spot")}
SECRET = {name: hashed_key(key) for name, key in KEYS.items()} | {"SLUICE_ADMIN_KEY": "sk-admin"}
ADDRESSES = {"engines-short": "127.0.1.1", "engines-long": "127.0.1.2"}


def spec_of(manifests: list[Manifest], name: str) -> Any:
    (found,) = [
        m["spec"]["template"]["spec"]
        for m in manifests
        if (m["kind"], m["metadata"]["name"]) == ("Deployment", name)
    ]
    return found


@contextlib.asynccontextmanager
async def fleet(folder: Path, *options: str) -> AsyncIterator[Pod]:
    """The chart, its mock engines, and an API server with their endpoints; gives the gateway."""
    manifests = rendered("--set=mocks.enabled=true", "--set=mocks.speed=2", *options)
    async with contextlib.AsyncExitStack() as stack:
        kube = await stack.enter_async_context(KubeServer().serving())
        kube.token = ""
        engine_port, http, management = free_ports(3)
        for name, address in ADDRESSES.items():
            spec = on_this_machine(spec_of(manifests, name), address, engine_port)
            at = f"http://{address}:{engine_port}"
            await stack.enter_async_context(Pod.running(spec, at, {}, folder))
            found = slice_of(f"{name}-a", name, address, port=engine_port)
            await kube.put(SLICES.format("default"), found)
        (text,) = [m["data"]["sluice.yaml"] for m in manifests if m["kind"] == "ConfigMap"]
        for there, here in (("host: 0.0.0.0", "host: 127.0.0.1"), (" 8080", f" {http}")):
            text = text.replace(there, here)
        text = text.replace(" 9100", f" {management}")
        text = re.sub(r"(k8s://\S+):8000", rf"\1:{engine_port}", text)
        file = folder / "etc/sluice/sluice.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(text, encoding="utf-8")
        environment = {**SECRET, "SLUICE_KUBERNETES_URL": kube.url}
        spec, at = spec_of(manifests, "sluice"), f"http://127.0.0.1:{http}"
        managed = f"http://127.0.0.1:{management}"
        yield await stack.enter_async_context(
            Pod.running(spec, at, environment, folder, management=managed)
        )


def on_this_machine(spec: Any, address: str, port: int) -> Any:
    """A mock engine's pod that listens on an address of its own."""
    (container,) = spec["containers"]
    ours = {"--host=0.0.0.0": f"--host={address}", "--port=8000": f"--port={port}"}
    args = [ours.get(word, word) for word in container["args"]]
    return {**spec, "containers": [{**container, "args": args}]}


async def stream(client: httpx.AsyncClient, key: str, tokens: int, started: asyncio.Event) -> str:
    """One streamed answer, whole; sets `started` at the first byte."""
    body = {
        "model": "gpt-4o-mini",
        "stream": True,
        "max_tokens": tokens,
        "ignore_eos": True,
        "messages": [{"role": "user", "content": "Tell me a long story."}],
    }
    headers = {"authorization": f"Bearer {key}"}
    text = ""
    async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
        async for part in answer.aiter_text():
            started.set()
            text += part
    return text if answer.status_code == 200 else f"{answer.status_code} {text}"


async def test_a_pod_that_ends_serves_its_streams_to_their_end(tmp_path: Path) -> None:
    async with (
        fleet(tmp_path, "--set=preStopSleepSeconds=2") as pod,
        httpx.AsyncClient(base_url=pod.url, timeout=60) as client,
    ):
        begun = [asyncio.Event() for _ in range(12)]
        keys = list(KEYS.values())
        streams = [
            asyncio.create_task(stream(client, keys[n % 3], 600, event))
            for n, event in enumerate(begun)
        ]
        async with asyncio.timeout(30):
            await asyncio.gather(*(event.wait() for event in begun))
        ending = asyncio.create_task(pod.end())
        late = await stream(client, "sk-elastic", 5, asyncio.Event())
        assert late.endswith("data: [DONE]\n\n"), "it comes while load balancers still learn"
        async with asyncio.timeout(20):
            while await pod.passes("readinessProbe"):  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(0.05)
        assert await pod.passes("livenessProbe")
        unfinished = [task for task in streams if not task.done()]
        assert unfinished, "streams have to run on after SIGTERM"
        answers = await asyncio.gather(*streams)
        await ending
    assert [a[-200:] for a in answers if not a.endswith("data: [DONE]\n\n")] == []
    assert all('"finish_reason":"' in answer for answer in answers)
    assert (pod.status, pod.killed) == (0, False)


async def test_a_drain_timeout_that_is_over_ends_the_pod_within_its_grace(tmp_path: Path) -> None:
    options = ("--set=preStopSleepSeconds=0", "--set=config.server.drain_timeout_s=1")
    async with (
        fleet(tmp_path, *options) as pod,
        httpx.AsyncClient(base_url=pod.url, timeout=60) as client,
    ):
        begun = asyncio.Event()
        running = asyncio.create_task(stream(client, "sk-elastic", 4000, begun))
        await begun.wait()
        async with asyncio.timeout(11):
            await pod.end()
        with pytest.raises(httpx.RemoteProtocolError):
            await running
    assert (pod.status, pod.killed) == (0, False)
