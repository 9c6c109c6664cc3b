"""Controllers in this process, on an emulated cluster and a real Redis, for tests."""

import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from lightkube.config.kubeconfig import KubeConfig

from controller.kube import KubeApi, connection
from controller.loop import LEASE, Controller
from controller.records import LEASES, PODS, TOKEN_ENTITLEMENTS, Object
from gateway.records.tenancy import ClusterEntitlement
from gateway.store.redis.cluster import ClusterStore
from tests.kube.cluster import Cluster

SPACE = "team"
PRIORITIES = tuple(
    {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": name},
        "value": value,
        "preemptionPolicy": policy,
    }
    for name, value, policy in (
        ("sluice-reserved", 1000, "PreemptLowerPriority"),
        ("sluice-elastic", 500, "Never"),
    )
)
"""As the chart has them."""


def token_pool(name: str, *, concurrency: int = 10, **spec: Any) -> Object:
    return {
        "apiVersion": "sluice.dev/v1alpha1",
        "kind": "TokenPool",
        "metadata": {"name": name, "namespace": SPACE},
        "spec": {"model": name, "perReplica": {"concurrency": concurrency}, **spec},
    }


def entitlement(
    name: str, pool: str, concurrency: int, service_class: str = "elastic", **spec: Any
) -> Object:
    return {
        "apiVersion": "sluice.dev/v1alpha1",
        "kind": "TokenEntitlement",
        "metadata": {"name": name, "namespace": SPACE},
        "spec": {
            "tenantId": name,
            "poolRef": {"name": pool},
            "qos": {"serviceClass": service_class},
            "resources": {"concurrency": concurrency},
            "keys": [{"secretRef": {"name": f"{name}-key", "key": "api-key"}}],
            **spec,
        },
    }


def secret(name: str, key: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": f"{name}-key", "namespace": SPACE},
        "data": {"api-key": base64.b64encode(key.encode()).decode()},
    }


def states(cluster: Cluster) -> dict[str, str]:
    """State by entitlement."""
    found = cluster.list(TOKEN_ENTITLEMENTS, SPACE)
    return {it["metadata"]["name"]: it.get("status", {}).get("state", "") for it in found}


def lease_pods(cluster: Cluster) -> dict[str, list[str]]:
    """Names of lease pods, by their entitlement's uid."""
    by_uid: dict[str, list[str]] = {}
    for pod in cluster.list(PODS, SPACE):
        uid = pod["metadata"]["labels"]["sluice.dev/entitlement"]
        by_uid.setdefault(uid, []).append(pod["metadata"]["name"])
    return by_uid


async def until(
    holds: Callable[[], bool], what: Callable[[], object] = lambda: "", within_s: float = 20.0
) -> None:
    """Wait until something holds; the test fails with `what` after the time."""
    try:
        async with asyncio.timeout(within_s):
            while not holds():  # noqa: ASYNC110 - of a server in this process, or not
                await asyncio.sleep(0.01)
    except TimeoutError:
        pytest.fail(f"it does not come to hold: {what()}")


@asynccontextmanager
async def controlling(
    cluster: Cluster,
    redis_url: str,
    *,
    allocator: Any = "internal",
    name: str = "one",
    around: Callable[[Any], Any] = lambda api: api,
) -> AsyncIterator[Controller]:
    """A controller that runs during the block. `around` may wrap its API."""
    api, store = (
        KubeApi(connection(KubeConfig.from_dict(cluster.kubeconfig())), SPACE),
        ClusterStore(redis_url, SPACE),
    )
    controller = Controller(around(api), store, allocator=allocator, identity=name)
    running = asyncio.ensure_future(controller.run())
    try:
        yield controller
        if running.done() and not running.cancelled():
            running.result()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await api.close()
        await store.close()


def expire_lease(cluster: Cluster) -> None:
    """As if its duration had passed since the holder was killed."""
    cluster.patch(LEASES, LEASE, {"spec": {"holderIdentity": ""}}, SPACE)


async def granted(redis_url: str) -> dict[str, ClusterEntitlement]:
    """What gateways read."""
    store = ClusterStore(redis_url)
    try:
        state = await store.read()
        return {} if state is None else {it.name: it for it in state.entitlements}
    finally:
        await store.close()
