"""The chart's roles are what the controller asks of the API server: none lacks, none is idle."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from itertools import chain
from typing import Any

import pytest
import yaml
from lightkube.config.kubeconfig import KubeConfig

from bench.common.fleet import RedisServer
from controller.kube import KubeApi, connection
from controller.loop import Controller
from controller.records import (
    BACKENDS,
    LEASES,
    NODES,
    PODS,
    TOKEN_ENTITLEMENTS,
    TOKEN_POOLS,
    Resource,
)
from gateway.store.redis.cluster import ClusterStore
from tests.chart import HELM, ROOT, Manifest, rendered
from tests.kube.cluster import Cluster, emulated_cluster

pytestmark = [
    pytest.mark.redis,
    pytest.mark.helm,
    pytest.mark.skipif(HELM is None, reason="helm is not installed (make helm)"),
]
RBAC = "rbac.authorization.k8s.io/v1"
POOLS = {
    kind: {
        "apiVersion": TOKEN_POOLS.api_version,
        "kind": TOKEN_POOLS.kind,
        "metadata": {"name": kind.lower()},
        "spec": {
            "model": kind,
            "backendRef": {"apiVersion": resource.api_version, "kind": kind, "name": "engines"},
            "perReplica": {"concurrency": 8},
            "scaling": {"minReplicas": 2, "maxReplicas": 4},
        },
    }
    for kind, resource in BACKENDS.items()
}
"""One pool on each kind of backend."""


def chart(*options: str) -> list[Manifest]:
    return rendered("--set=redis.enabled=true,controller.enabled=true", *options)


def recipe() -> list[Manifest]:
    """The pool and the entitlements that the documentation shows."""
    text = (ROOT / "deploy/kubernetes/tokenpool.yaml").read_text(encoding="utf-8")
    pool, *entitlements = yaml.safe_load_all(text)
    del pool["spec"]["backendRef"]
    return [pool, *entitlements]


def definition(resource: Resource) -> Manifest:
    """What others install for their kind: anything goes."""
    scale = {"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas"}
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {
        "name": resource.version,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": anything},
        "subresources": {"status": {}, "scale": scale},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{resource.plural}.{resource.group}"},
        "spec": {
            "group": resource.group,
            "scope": "Namespaced",
            "names": {"kind": resource.kind, "plural": resource.plural},
            "versions": [version],
        },
    }


def start_engines(cluster: Cluster) -> None:
    """Engines of each kind: one replica, ready."""
    cluster.apply(*(definition(r) for r in BACKENDS.values() if r.group != "apps"))
    labels = {"matchLabels": {"app": "engines"}}
    for resource in BACKENDS.values():
        spec = {"replicas": 1, "selector": labels}
        cluster.create(resource, {"metadata": {"name": "engines"}, "spec": spec}, "prod")
        ready = {"status": {"replicas": 1, "readyReplicas": 1}}
        cluster.patch(resource, "engines", ready, "prod", sub="status")
    pod = {
        "metadata": {"name": "engine-0", "labels": labels["matchLabels"]},
        "spec": {"containers": [{"name": "e", "image": "e"}]},
    }
    cluster.create(PODS, pod, "prod")
    conditions = [{"type": "Ready", "status": "True"}]
    cluster.patch(PODS, "engine-0", {"status": {"conditions": conditions}}, "prod", sub="status")


@contextlib.asynccontextmanager
async def controlled(
    redis: RedisServer, roles: list[Manifest], allocator: Any
) -> AsyncIterator[Cluster]:
    """A cluster with the chart's objects for it, and a controller with these rights alone."""
    async with emulated_cluster() as cluster:
        whole = chart("--set=controller.allocator=virtual-node")
        classes = [m for m in whole if m["kind"] == "PriorityClass"]
        token = cluster.account("prod", "sluice-controller", *roles, *classes)
        start_engines(cluster)
        cluster.apply(*POOLS.values(), *recipe(), namespace="prod")
        config = connection(KubeConfig.from_dict(cluster.kubeconfig(token)))
        api, store = KubeApi(config, "prod"), ClusterStore(redis.url)
        running = asyncio.create_task(
            Controller(api, store, allocator=allocator, identity="c_1").run()
        )
        try:
            yield cluster
        finally:
            running.cancel()
            ended, _ = await asyncio.wait([running], timeout=120)
            assert ended
            await api.close()
            await store.close()


async def until(true: Callable[[], object], limit_s: float = 300.0) -> None:
    end_s = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end_s
        await asyncio.sleep(0.05)


def granted(roles: list[Manifest]) -> set[tuple[str, str, str]]:
    """(namespace, resource, verb) of the controller's rules."""
    return {
        (role["metadata"].get("namespace", ""), resource, verb)
        for role in roles
        if "rules" in role
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def used(cluster: Cluster) -> set[tuple[str, str, str]]:
    """The same of the calls that a service account made; a list and its watch count as one."""
    verbs = {"POST": "create", "PATCH": "patch", "PUT": "update", "DELETE": "delete"}
    found = set()
    for call in cluster.calls:
        if not call.user.startswith("system:serviceaccount:"):
            continue
        parts = call.path.strip("/").split("/")
        parts = parts[2:] if parts[0] == "api" else parts[3:]
        space = ""
        if parts[0] == "namespaces":
            space, parts = parts[1], parts[2:]
        resource = "/".join([parts[0], *parts[2:3]])
        if call.method == "GET" and not parts[1:]:
            found |= {(space, resource, verb) for verb in ("list", "watch")}
        else:
            found.add((space, resource, verbs.get(call.method, "get")))
    return found


@pytest.mark.parametrize("allocator", ["internal", "virtual-node"])
async def test_the_roles_hold_each_right_that_the_controller_uses_and_no_other(
    redis_server: RedisServer, allocator: str
) -> None:
    roles = [
        manifest
        for manifest in chart(f"--set=controller.allocator={allocator}")
        if manifest["apiVersion"] == RBAC and manifest["metadata"]["name"].endswith("controller")
    ]
    async with controlled(redis_server, roles, allocator) as cluster:

        def states() -> dict[str, str]:
            objects = cluster.list(TOKEN_ENTITLEMENTS, "prod")
            return {o["metadata"]["name"]: o.get("status", {}).get("state", "") for o in objects}

        def found(resource: Resource, name: str) -> Any:
            return cluster.get(resource, name, "prod")

        await until(lambda: set(states().values()) == {"Bound"})
        scaled = [r for r in BACKENDS.values() if r.kind != "InferencePool"]

        def replicas() -> set[int]:
            return {found(r, "engines")["spec"]["replicas"] for r in scaled}

        await until(lambda: replicas() == {2})
        if allocator == "virtual-node":
            node = "sluice-prod.deployment"
            await until(lambda: cluster.get(LEASES, node, "kube-node-lease"))
            cluster.patch(TOKEN_ENTITLEMENTS, "search", {"spec": {"suspend": True}}, "prod")
            cluster.patch(NODES, node, {"spec": {"taints": None}})
            cluster.delete(TOKEN_POOLS, "statefulset", "prod")
            await until(lambda: found(NODES, "sluice-prod.statefulset") is None)
            await until(
                lambda: not any("search" in p["metadata"]["name"] for p in cluster.list(PODS))
            )
            await until(lambda: found(NODES, node)["spec"].get("taints"))
        # Until the Leases are renewed.
        await asyncio.sleep(2.5)
    refused = [call for call in cluster.calls if call.status == 403]
    assert refused == []
    assert used(cluster) == granted(roles)


@pytest.mark.parametrize(
    "lost", ["tokenentitlements/status", "secrets", "deployments/scale"], ids=lambda r: r
)
async def test_a_right_that_lacks_is_noticed(redis_server: RedisServer, lost: str) -> None:
    """So that the test above can fail."""
    roles = [m for m in chart() if m["apiVersion"] == RBAC and "controller" in str(m["metadata"])]
    for rule in chain.from_iterable(role.get("rules", ()) for role in roles):
        rule["resources"] = [resource for resource in rule["resources"] if resource != lost]
    async with controlled(redis_server, roles, "internal") as cluster:
        await until(lambda: [call for call in cluster.calls if call.status == 403])
