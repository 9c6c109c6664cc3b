"""Manifests to served requests: a cluster, its controller, a gateway, a mock engine, the client."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from bench.common.fleet import ADMIN_KEY, MODEL, Fleet, RedisServer
from controller.records import BACKENDS, TOKEN_ENTITLEMENTS, TOKEN_POOLS
from tests.chart import rendered
from tests.kube.cluster import Cluster, emulated_cluster

KEY = "sk-search-7f3a"
TEAM = "prod"
SOON_S = 300.0
DEPLOYMENT = BACKENDS["Deployment"]


def manifests() -> list[dict[str, Any]]:
    """What an operator applies: a pool, two entitlements, a key."""
    text = f"""
apiVersion: v1
kind: Secret
metadata: {{ name: search-key }}
stringData: {{ api-key: {KEY} }}
---
apiVersion: apps/v1
kind: Deployment
metadata: {{ name: engines }}
spec:
  replicas: 2
  selector: {{ matchLabels: {{ app: engines }} }}
  template:
    metadata: {{ labels: {{ app: engines }} }}
    spec: {{ containers: [{{ name: vllm, image: vllm }}] }}
---
apiVersion: sluice.dev/v1alpha1
kind: TokenPool
metadata: {{ name: chat }}
spec:
  model: {MODEL}
  backendRef: {{ apiVersion: apps/v1, kind: Deployment, name: engines }}
  perReplica: {{ concurrency: 8, tokensPerSecond: 2000 }}
---
apiVersion: sluice.dev/v1alpha1
kind: TokenEntitlement
metadata: {{ name: first }}
spec:
  tenantId: other
  poolRef: {{ name: chat }}
  qos: {{ serviceClass: guaranteed }}
  resources: {{ concurrency: 8, tokensPerSecond: 1000 }}
---
apiVersion: sluice.dev/v1alpha1
kind: TokenEntitlement
metadata: {{ name: search }}
spec:
  tenantId: search
  poolRef: {{ name: chat }}
  qos: {{ serviceClass: guaranteed, sloTargetMs: 500 }}
  resources: {{ concurrency: 4, tokensPerSecond: 1000 }}
  keys: [{{ secretRef: {{ name: search-key, key: api-key }} }}]
"""
    return list(yaml.safe_load_all(text))


@asynccontextmanager
async def controlling(
    cluster: Cluster, token: str, redis: RedisServer, folder: Path, allocator: str
) -> AsyncIterator[None]:
    """`sluice controller` with the rights of this token."""
    file = folder / "kubeconfig.yaml"
    file.write_text(yaml.safe_dump(cluster.kubeconfig(token, TEAM)))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sluice", "controller", "--namespace", TEAM),
        *("--allocator", allocator, "--state-url", redis.url, "--port", "0"),
        env={"PATH": "", "KUBECONFIG": str(file), "PYTHONPATH": ":".join(sys.path)},
    )
    try:
        yield
        assert process.returncode is None, "the controller ended by itself"
    finally:
        process.terminate()
        await process.wait()


def rights(allocator: str) -> list[dict[str, Any]]:
    """The chart's roles for the controller, and nothing else."""
    manifests = rendered(
        *("--set", "controller.enabled=true,redis.enabled=true"),
        *("--set", f"controller.allocator={allocator}"),
    )
    kinds = {"Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding", "PriorityClass"}
    return [manifest for manifest in manifests if manifest["kind"] in kinds]


async def until(seen: Callable[[], object]) -> None:
    async with asyncio.timeout(SOON_S):
        while not seen():  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.05)


@pytest.mark.redis
@pytest.mark.helm
@pytest.mark.parametrize("allocator", ["internal", "virtual-node"])
async def test_manifests_serve_degrade_recover_and_expire(
    allocator: str, redis_server: RedisServer, tmp_path: Path
) -> None:
    state = {"url": redis_server.url, "controller": {}}
    fleet = Fleet(short=1, long=0, config={"state": state})
    async with emulated_cluster() as cluster:
        token = cluster.account(TEAM, "sluice-controller", *rights(allocator))
        cluster.apply(*manifests(), namespace=TEAM)

        def ready(replicas: int) -> None:
            status = {"status": {"readyReplicas": replicas, "replicas": replicas}}
            cluster.patch(DEPLOYMENT, "engines", status, TEAM, sub="status")

        def state_of(name: str) -> object:
            found = cluster.get(TOKEN_ENTITLEMENTS, name, TEAM) or {}
            return (found.get("status") or {}).get("state")

        async with controlling(cluster, token, redis_server, tmp_path, allocator):
            await asyncio.to_thread(fleet.__enter__)
            try:
                await walk(cluster, fleet, ready, state_of)
            finally:
                await asyncio.to_thread(fleet.__exit__, None, None, None)


async def walk(
    cluster: Cluster,
    fleet: Fleet,
    ready: Callable[[int], None],
    state_of: Callable[[str], object],
) -> None:
    client = openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key=KEY, max_retries=0)

    async def ask() -> tuple[int, str]:
        """Status, and the words of a refusal or the text of the stream."""
        try:
            stream = await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "Where is the station?"}],
                max_tokens=8,
                stream=True,
            )
            pieces = [
                chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices
            ]
        except openai.APIStatusError as error:
            return error.status_code, str(error.body)
        return 200, "".join(pieces)

    async def answers(status: int, *words: str) -> None:
        async with asyncio.timeout(SOON_S):
            while True:
                code, text = await ask()
                if code == status and text and all(word in text for word in words):
                    return
                await asyncio.sleep(0.1)

    async with client:
        # No replica is ready yet: it waits, by name.
        await until(lambda: state_of("search") == "Pending")
        await answers(503, "no ready replica")
        ready(2)
        await until(lambda: state_of("search") == "Bound")
        await answers(200)
        pool = cluster.get(TOKEN_POOLS, "chat", TEAM)
        assert pool is not None
        assert pool["status"]["entitlements"] == {"total": 2, "bound": 2}
        # Where it comes from is said, and it is not changed here.
        admin = {"authorization": f"Bearer {ADMIN_KEY}"}
        async with httpx.AsyncClient(base_url=fleet.url, headers=admin, trust_env=False) as http:
            shown = (await http.get("/admin/entitlements/search")).raise_for_status().json()
            assert (shown["origin"], shown["state"]) == ("kubernetes", "bound")
            changed = await http.patch("/admin/entitlements/search", json={"concurrency": 6})
            assert changed.status_code == 409
            assert "TokenEntitlement prod/search" in changed.text
        # The capacity is cut to what the older one has.
        ready(1)
        await until(lambda: state_of("search") == "Degraded")
        assert state_of("first") == "Bound"
        await answers(
            *(503, "The entitlement 'search' is degraded", "pool chat has too little left"),
            "lower resources.concurrency",
        )
        ready(2)
        await until(lambda: state_of("search") == "Bound")
        await answers(200)
        past = (datetime.now(UTC) - timedelta(minutes=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
        cluster.patch(TOKEN_ENTITLEMENTS, "search", {"spec": {"expiresAt": past}}, TEAM)
        await until(lambda: state_of("search") == "Expired")
        await answers(403, "expired")
        cluster.delete(TOKEN_ENTITLEMENTS, "search", TEAM)
        await answers(401, "Incorrect API key")
