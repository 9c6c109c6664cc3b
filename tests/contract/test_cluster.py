"""What the controller relies on in Kubernetes, on the emulated cluster.

Where KUBECONFIG_UNDER_TEST names a kubeconfig of an administrator, the same holds on that cluster
(docs/develop/real-cluster.md). Each test has a namespace and nodes of its own there.
"""

import asyncio
import json
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import yaml
from lightkube.config.client_adapter import AsyncClient, ConnectionParams
from lightkube.config.kubeconfig import KubeConfig, SingleConfig

from tests.kube.cluster import Cluster, emulated_cluster, shipped_crds

Object = dict[str, Any]
REAL: Final = os.environ.get("KUBECONFIG_UNDER_TEST", "")
KUBECONFIG: Final = Path(REAL).read_text(encoding="utf-8") if REAL else ""
WAIT_S: Final = 180.0 if REAL else 10.0
QUIET_S: Final = 3.0 if REAL else 0.1
"""What does not come within this, does not come."""
TOKENS: Final = "sluice.dev/tokens-per-second"
MERGE: Final = {"content-type": "application/merge-patch+json"}
CRS: Final = "/apis/sluice.dev/v1alpha1"
CLASSES: Final = "/apis/scheduling.k8s.io/v1/priorityclasses"
EVER: Final = {"operator": "Exists"}
"""Tolerates whatever befalls a node."""


def answer(response: httpx.Response, status: int = 200) -> Object:
    """The body of an answer with that status."""
    assert response.status_code == status, response.text
    return dict(response.json())


def config_from(kubeconfig: Object) -> SingleConfig:
    """The access that a kubeconfig describes."""
    config = KubeConfig.from_dict(kubeconfig).get()
    assert config is not None
    return config


def stamp() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@dataclass
class ClusterUnderTest:
    """A cluster, with all rights."""

    http: httpx.AsyncClient
    kubeconfig: Object
    emulated: Cluster | None
    namespace: str = ""
    classes: dict[str, str] = field(default_factory=dict)
    """`reserved` and `elastic` -> the PriorityClass."""
    _beats: "dict[str, asyncio.Task[None]]" = field(default_factory=dict)
    _made: list[str] = field(default_factory=list)

    def at(self, plural: str, name: str = "", *, api: str = "/api/v1") -> str:
        """Path of a namespaced collection or object."""
        return f"{api}/namespaces/{self.namespace}/{plural}/{name}".rstrip("/")

    async def get(self, path: str) -> Object:
        return answer(await self.http.get(path))

    async def create(self, path: str, body: Object) -> Object:
        return answer(await self.http.post(path, json=body), 201)

    async def patch(self, path: str, patch: Object) -> httpx.Response:
        return await self.http.patch(path, content=json.dumps(patch), headers=MERGE)

    async def delete(self, path: str, **options: Any) -> httpx.Response:
        return await self.http.request("DELETE", path, json=options)

    async def create_wide(self, path: str, body: Object) -> Object:
        """Create an object of the whole cluster, which goes when the test is done."""
        made = await self.create(path, body)
        self._made.append(f"{path}/{made['metadata']['name']}")
        return made

    async def config_of(self, account: str) -> SingleConfig:
        """How to call as a service account of the namespace."""
        path = self.at("serviceaccounts", f"{account}/token")
        wanted = {"spec": {"expirationSeconds": 3600, "audiences": []}}
        head = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest"}
        token = (await self.create(path, {**head, **wanted}))["status"]["token"]
        users = [{**user, "user": {"token": token}} for user in self.kubeconfig["users"]]
        return config_from({**self.kubeconfig, "users": users})

    async def needs_rules(self) -> None:
        """Skip where CEL rules are unknown: before Kubernetes 1.25."""
        if self.emulated is None:
            minor = int((await self.get("/version"))["minor"].strip("+") or 0)
            path = "/apis/apiregistration.k8s.io/v1/apiservices/v1alpha1.sluice.dev"
            if minor < 25 and not (await self.get(path))["spec"].get("service"):
                pytest.skip("this cluster knows no CEL rules")

    async def passes(self, seconds: float) -> None:
        """The emulated cluster's time is put forward. A real one takes its time in `until`."""
        if self.emulated is not None:
            await self.emulated.advance(seconds)

    async def until(self, holds: Callable[[], Awaitable[Any]]) -> Any:
        """Wait for what comes about sooner or later; gives it."""
        async with asyncio.timeout(WAIT_S):
            while True:
                value = await holds()
                if value:
                    return value
                await asyncio.sleep(0.2 if REAL else 0.005)

    # -- nodes and pods

    async def node(self, *, ready: bool = True, beats: bool = True, **amounts: str) -> str:
        """A virtual node with so many tokens per second; its name, which is a label, too."""
        name = f"virtual-{uuid.uuid4().hex[:8]}"
        capacity = {TOKENS: "240", "pods": "1000", **amounts}
        taint = {"key": "sluice.dev/virtual", "value": "true", "effect": "NoSchedule"}
        made = {
            "metadata": {"name": name, "labels": {"pool": name}},
            "spec": {"taints": [taint]},
            "status": {"capacity": capacity, "allocatable": capacity},
        }
        await self.create_wide("/api/v1/nodes", made)
        if ready:
            await self.beat(name)
            await self.until(lambda: self.is_untainted(name))
        if ready and beats and REAL:
            self._beats[name] = asyncio.create_task(self._keep_beating(name))
        return name

    async def beat(self, node: str) -> None:
        """A kubelet's heartbeat: the Lease and the Ready condition."""
        path = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        spec = {"holderIdentity": node, "leaseDurationSeconds": 40, "renewTime": micro()}
        if (await self.http.get(f"{path}/{node}")).status_code == 404:
            await self.create_wide(path, {"metadata": {"name": node}, "spec": spec})
        else:
            answer(await self.patch(f"{path}/{node}", {"spec": spec}))
        ready = {"type": "Ready", "status": "True", "reason": "Virtual", "message": "", **_now()}
        status = {"status": {"conditions": [ready]}}
        answer(await self.patch(f"/api/v1/nodes/{node}/status", status))

    async def _keep_beating(self, node: str) -> None:
        while True:
            await asyncio.sleep(5)
            await self.beat(node)

    def silence(self, node: str) -> None:
        """Send no heartbeat any more."""
        if node in self._beats:
            self._beats.pop(node).cancel()

    async def is_untainted(self, node: str) -> bool:
        return [t["key"] for t in await self.taints(node)] == ["sluice.dev/virtual"]

    async def is_unreachable(self, node: str) -> bool:
        found = [t["effect"] for t in await self.taints(node) if "unreachable" in t["key"]]
        return sorted(found) == ["NoExecute", "NoSchedule"]

    async def taints(self, node: str) -> list[Object]:
        return list((await self.get(f"/api/v1/nodes/{node}"))["spec"].get("taints", ()))

    def lease_pod(
        self, name: str, node: str, tokens: str | int, *, rank: str = "elastic", **spec: Any
    ) -> Object:
        """A pod that holds tokens of a virtual node."""
        amounts = {TOKENS: str(tokens)}
        container = {"name": "lease", "image": "none", "resources": {"limits": amounts}}
        tolerations = [
            {"key": "sluice.dev/virtual", **EVER},
            {"key": "node.kubernetes.io/not-ready", **EVER},
            {"key": "node.kubernetes.io/unreachable", **EVER},
        ]
        filled = {
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 0,
            "priorityClassName": self.classes[rank],
            "nodeSelector": {"pool": node},
            "tolerations": tolerations,
            "containers": [container],
            **spec,
        }
        return {"metadata": {"name": name}, "spec": filled}

    async def lease(self, name: str, node: str, tokens: str | int, **more: Any) -> Object:
        return await self.create(self.at("pods"), self.lease_pod(name, node, tokens, **more))

    async def bound(self, name: str) -> Object:
        """The pod, once it is bound."""

        async def is_bound() -> Object | None:
            pod = await self.get(self.at("pods", name))
            return pod if pod["spec"].get("nodeName") else None

        return dict(await self.until(is_bound))

    async def unschedulable(self, name: str) -> str:
        """Why a pod cannot be scheduled, once the scheduler said so."""

        async def says() -> str | None:
            pod = await self.get(self.at("pods", name))
            assert not pod["spec"].get("nodeName"), "it is bound"
            for condition in pod["status"].get("conditions", ()):
                if condition["type"] == "PodScheduled" and condition["status"] == "False":
                    assert condition["reason"] == "Unschedulable"
                    return str(condition["message"])
            return None

        return str(await self.until(says))

    async def gone(self, path: str) -> None:
        """Wait until an object is there no more."""

        async def is_gone() -> bool:
            return (await self.http.get(path)).status_code == 404

        await self.until(is_gone)

    async def clean(self) -> None:
        """Delete what was made."""
        for task in self._beats.values():
            task.cancel()
        for path in reversed(self._made):
            await self.delete(path, gracePeriodSeconds=0)


def _now() -> Object:
    return {"lastHeartbeatTime": stamp(), "lastTransitionTime": stamp()}


@pytest.fixture
async def cluster() -> AsyncIterator[ClusterUnderTest]:
    if REAL:
        async with prepared(yaml.safe_load(KUBECONFIG), None) as made:
            yield made
        return
    async with emulated_cluster() as emulated, prepared(emulated.kubeconfig(), emulated) as made:
        yield made


@asynccontextmanager
async def prepared(kubeconfig: Object, emulated: Cluster | None) -> AsyncIterator[ClusterUnderTest]:
    """A namespace and priority classes of this test's own."""
    async with AsyncClient(config_from(kubeconfig), ConnectionParams()) as http:
        made = ClusterUnderTest(http, kubeconfig, emulated)
        if (await http.get(CRS)).status_code == 404:
            for crd in shipped_crds():
                await made.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)

            async def served() -> bool:
                paths = (f"{CRS}/tokenpools", f"{CRS}/tokenentitlements")
                return all([(await http.get(path)).status_code == 200 for path in paths])

            await made.until(served)
        made.namespace = f"contract-{uuid.uuid4().hex[:8]}"
        await made.create_wide("/api/v1/namespaces", {"metadata": {"name": made.namespace}})
        for rank, value, policy in (
            ("reserved", 1000, "PreemptLowerPriority"),
            ("elastic", 100, "Never"),
        ):
            name = made.classes[rank] = f"{made.namespace}-{rank}"
            given = {"metadata": {"name": name}, "value": value, "preemptionPolicy": policy}
            await made.create_wide(CLASSES, given)

        async def has_account() -> bool:
            return (await http.get(made.at("serviceaccounts", "default"))).status_code == 200

        await made.until(has_account)
        try:
            yield made
        finally:
            await made.clean()


# -- the scheduler on virtual nodes


async def test_lease_pods_bind_until_the_node_is_full(cluster: ClusterUnderTest) -> None:
    node = await cluster.node()
    for name, tokens in (("a", 100), ("b", 100), ("c", 40)):
        await cluster.lease(name, node, tokens)
        pod = await cluster.bound(name)
        assert pod["spec"]["nodeName"] == node
        assert pod["status"]["phase"] == "Pending", "nothing runs there"
    await cluster.lease("d", node, 1)
    assert f"Insufficient {TOKENS}" in await cluster.unschedulable("d")


async def test_a_place_that_becomes_free_goes_to_one_that_waits(cluster: ClusterUnderTest) -> None:
    node = await cluster.node()
    for name, tokens in (("a", 240), ("b", 100), ("c", 300)):
        await cluster.lease(name, node, tokens)
        await (cluster.bound if name == "a" else cluster.unschedulable)(name)
    await cluster.delete(cluster.at("pods", "a"))
    await cluster.bound("b")
    more = {"capacity": {TOKENS: "400"}, "allocatable": {TOKENS: "400"}}
    answer(await cluster.patch(f"/api/v1/nodes/{node}/status", {"status": more}))
    await cluster.bound("c")


async def test_capacity_that_shrinks_takes_nothing_away(cluster: ClusterUnderTest) -> None:
    node = await cluster.node()
    await cluster.lease("a", node, 200)
    await cluster.bound("a")
    answer(
        await cluster.patch(
            f"/api/v1/nodes/{node}/status", {"status": {"allocatable": {TOKENS: "1"}}}
        )
    )
    await asyncio.sleep(QUIET_S)
    await cluster.passes(60)
    assert (await cluster.bound("a"))["metadata"].get("deletionTimestamp") is None


async def test_a_higher_priority_takes_whole_places_and_no_more_than_it_needs(
    cluster: ClusterUnderTest,
) -> None:
    node = await cluster.node()
    for name in "abcd":
        await cluster.lease(name, node, 60)
        await cluster.bound(name)
    await cluster.lease("g", node, 100, rank="reserved")
    await cluster.bound("g")
    left = [pod["metadata"]["name"] for pod in (await cluster.get(cluster.at("pods")))["items"]]
    assert "g" in left
    assert len(left) == 3, "100 is two places of 60"


async def test_a_victim_with_a_grace_is_never_gone_since_no_kubelet_ends_it(
    cluster: ClusterUnderTest,
) -> None:
    node = await cluster.node()
    await cluster.lease("a", node, 240, terminationGracePeriodSeconds=30)
    await cluster.bound("a")
    await cluster.lease("g", node, 100, rank="reserved")
    await cluster.unschedulable("g")

    async def is_deleted() -> bool:
        pod = await cluster.get(cluster.at("pods", "a"))
        return "deletionTimestamp" in pod["metadata"]

    await cluster.until(is_deleted)
    await asyncio.sleep(QUIET_S)
    await cluster.passes(35)
    await cluster.unschedulable("g")
    answer(await cluster.delete(cluster.at("pods", "a"), gracePeriodSeconds=0))
    await cluster.bound("g")


async def test_a_class_that_preempts_never_stays_pending(cluster: ClusterUnderTest) -> None:
    node = await cluster.node()
    low = {"metadata": {"name": f"{cluster.namespace}-low"}, "value": 1}
    cluster.classes["low"] = (await cluster.create_wide(CLASSES, low))["metadata"]["name"]
    await cluster.lease("a", node, 240, rank="low")
    await cluster.bound("a")
    await cluster.lease("b", node, 10)
    await cluster.unschedulable("b")
    await asyncio.sleep(QUIET_S)
    assert (await cluster.bound("a"))["metadata"].get("deletionTimestamp") is None
    await cluster.unschedulable("b")


async def test_a_pod_goes_to_the_node_that_it_selects_and_tolerates(
    cluster: ClusterUnderTest,
) -> None:
    node, other = await cluster.node(), await cluster.node()
    await cluster.lease("a", other, 1)
    assert (await cluster.bound("a"))["spec"]["nodeName"] == other
    await cluster.lease("b", node, 1, tolerations=[])
    assert "taint" in await cluster.unschedulable("b")
    await cluster.lease("c", "virtual-none", 1)
    assert "affinity" in await cluster.unschedulable(
        "c"
    ) or "selector" in await cluster.unschedulable("c")


async def test_a_node_without_room_for_pods_takes_none(cluster: ClusterUnderTest) -> None:
    node = await cluster.node(pods="1")
    await cluster.lease("a", node, 1)
    await cluster.bound("a")
    await cluster.lease("b", node, 1)
    assert "Too many pods" in await cluster.unschedulable("b")


@pytest.mark.parametrize(
    ("limit", "request_", "why"),
    [
        ("1500m", "1500m", "must be an integer"),
        ("0.5", "0.5", "must be an integer"),
        ("4", "2", f"must be equal to {TOKENS} limit"),
        (None, "2", "Limit must be set for non overcommitable resources"),
    ],
)
async def test_extended_resources_are_whole_and_never_overcommitted(
    cluster: ClusterUnderTest, limit: str | None, request_: str, why: str
) -> None:
    pod = cluster.lease_pod("a", "virtual-none", 1)
    resources = {"requests": {TOKENS: request_}, **({"limits": {TOKENS: limit}} if limit else {})}
    pod["spec"]["containers"][0]["resources"] = resources
    refused = answer(await cluster.http.post(cluster.at("pods"), json=pod), 422)
    assert refused["reason"] == "Invalid"
    assert why in refused["message"]


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ("1000", "1k"),
        ("1500", "1500"),
        ("100", "100"),
        ("2000000", "2M"),
        ("1024Mi", "1Gi"),
        ("1000Ki", "1000Ki"),
        ("4000m", "4"),
        ("2e3", "2e3"),
    ],
)
async def test_quantities_come_back_in_their_canonical_form(
    cluster: ClusterUnderTest, given: str, stored: str
) -> None:
    pod = await cluster.create(cluster.at("pods"), cluster.lease_pod("a", "virtual-none", given))
    resources = pod["spec"]["containers"][0]["resources"]
    assert resources == {"limits": {TOKENS: stored}, "requests": {TOKENS: stored}}


async def test_a_pod_of_an_unknown_priority_class_is_refused(cluster: ClusterUnderTest) -> None:
    pod = cluster.lease_pod("a", "virtual-none", 1, priorityClassName="no-such-class")
    refused = answer(await cluster.http.post(cluster.at("pods"), json=pod), 403)
    assert "no PriorityClass with name no-such-class was found" in refused["message"]


async def test_the_request_of_a_pod_cannot_be_changed(cluster: ClusterUnderTest) -> None:
    pod = await cluster.create(cluster.at("pods"), cluster.lease_pod("a", "virtual-none", 1))
    container = pod["spec"]["containers"][0]
    container["resources"] = {"limits": {TOKENS: "2"}, "requests": {TOKENS: "2"}}
    patch = {"spec": {"containers": [container]}}
    refused = answer(await cluster.patch(cluster.at("pods", "a"), patch), 422)
    assert "pod updates may not change fields other than" in refused["message"]


# -- nodes


async def test_a_node_that_never_said_that_it_is_ready_is_unreachable_after_a_minute(
    cluster: ClusterUnderTest,
) -> None:
    node, _other = await cluster.node(ready=False), await cluster.node()
    await cluster.until(lambda: cluster.is_untainted(node))  # by no condition
    await cluster.lease("a", node, 1, tolerations=[{"key": "sluice.dev/virtual", **EVER}])
    await cluster.bound("a")
    await cluster.passes(70)
    await cluster.until(lambda: cluster.is_unreachable(node))
    await cluster.lease("b", node, 1, tolerations=[{"key": "sluice.dev/virtual", **EVER}])
    await cluster.unschedulable("b")
    await cluster.beat(node)
    await cluster.bound("b")


async def test_a_node_without_heartbeat_keeps_only_pods_that_tolerate_it(
    cluster: ClusterUnderTest,
) -> None:
    node, _other = await cluster.node(), await cluster.node()  # if all are dead, none is evicted
    until = {"effect": "NoExecute", "tolerationSeconds": 1}
    brief = {"key": "node.kubernetes.io/unreachable", **EVER, **until}
    for name, more in (("a", []), ("b", [brief])):
        own = [{"key": "sluice.dev/virtual", **EVER}, *more]
        pod = {"tolerations": own} if more else {}
        await cluster.lease(name, node, 1, **pod)
        await cluster.bound(name)
    cluster.silence(node)
    await cluster.passes(60)
    await cluster.until(lambda: cluster.is_unreachable(node))
    found = await cluster.get(f"/api/v1/nodes/{node}")
    ready = next(c for c in found["status"]["conditions"] if c["type"] == "Ready")
    assert ready["status"] == "Unknown"
    await cluster.gone(cluster.at("pods", "b"))
    await cluster.lease("c", node, 1)
    await cluster.bound("c")  # as dead as the node is
    await cluster.bound("a")
    await cluster.beat(node)
    await cluster.until(lambda: cluster.is_untainted(node))


async def test_pods_of_a_node_that_is_gone_are_collected(cluster: ClusterUnderTest) -> None:
    node = await cluster.node()
    await cluster.lease("a", node, 1)
    await cluster.bound("a")
    cluster.silence(node)
    answer(await cluster.delete(f"/api/v1/nodes/{node}"))
    await asyncio.sleep(QUIET_S)
    await cluster.bound("a")  # for some 40 s
    await cluster.passes(60)
    await cluster.gone(cluster.at("pods", "a"))


# -- objects, versions and watches


def entitlement(name: str = "a", **spec: Any) -> Object:
    full = {"tenantId": "search", "poolRef": {"name": "qwen"}, **spec}
    head = {"apiVersion": "sluice.dev/v1alpha1", "kind": "TokenEntitlement"}
    return {**head, "metadata": {"name": name}, "spec": full}


def pool(name: str = "qwen", **spec: Any) -> Object:
    full = {"model": "Qwen/Qwen3-8B", "perReplica": {"concurrency": 8}, **spec}
    head = {"apiVersion": "sluice.dev/v1alpha1", "kind": "TokenPool"}
    return {**head, "metadata": {"name": name}, "spec": full}


async def test_a_write_with_an_outdated_version_is_a_conflict(cluster: ClusterUnderTest) -> None:
    path = cluster.at("leases", api="/apis/coordination.k8s.io/v1")
    made = await cluster.create(path, {"metadata": {"name": "a"}, "spec": {"holderIdentity": "x"}})
    old = made["metadata"]["resourceVersion"]
    answer(await cluster.patch(f"{path}/a", {"spec": {"holderIdentity": "y"}}))
    outdated = {**made, "spec": {"holderIdentity": "z"}}
    for response in (
        await cluster.http.put(f"{path}/a", json=outdated),
        await cluster.patch(f"{path}/a", {"metadata": {"resourceVersion": old}, "spec": None}),
    ):
        refused = answer(response, 409)
        assert refused["reason"] == "Conflict"
        assert "the object has been modified" in refused["message"]
    assert answer(await cluster.http.post(path, json=_named("a")), 409)["reason"] == "AlreadyExists"
    unversioned = await cluster.http.put(f"{path}/a", json=_named("a"))
    assert "must be specified for an update" in answer(unversioned, 422)["message"]


def _named(name: str) -> Object:
    return {"metadata": {"name": name}}


async def test_a_write_that_changes_nothing_is_none(cluster: ClusterUnderTest) -> None:
    path = cluster.at("tokenpools", api=CRS)
    made = await cluster.create(path, pool())
    same = answer(await cluster.patch(f"{path}/qwen", {"spec": made["spec"]}))
    assert same["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]


async def test_the_status_is_changed_by_its_own_endpoint_alone(cluster: ClusterUnderTest) -> None:
    path = cluster.at("tokenpools", api=CRS)
    made = await cluster.create(path, {**pool(), "status": {"replicas": 9}})
    assert "status" not in made
    assert made["metadata"]["generation"] == 1
    both = {"spec": {"replicas": 5}, "status": {"replicas": 3}, "metadata": {"labels": {"a": "b"}}}
    done = answer(await cluster.patch(f"{path}/qwen/status", both))
    assert (done["status"], done["metadata"]["generation"]) == ({"replicas": 3}, 1)
    assert "replicas" not in done["spec"]
    assert "labels" not in done["metadata"]
    done = answer(await cluster.patch(f"{path}/qwen", {**both, "status": {"replicas": 7}}))
    assert (done["status"], done["metadata"]["generation"]) == ({"replicas": 3}, 2)
    done = answer(await cluster.patch(f"{path}/qwen", {"metadata": {"labels": {"a": None}}}))
    assert done["metadata"]["generation"] == 2
    assert not done["metadata"].get("labels")


async def test_the_scale_subresource_changes_the_replicas_alone(cluster: ClusterUnderTest) -> None:
    path = cluster.at("tokenpools", api=CRS)
    await cluster.create(path, pool())
    unset = await cluster.http.get(f"{path}/qwen/scale")
    assert "the spec replicas field" in answer(unset, 500)["message"]
    done = answer(await cluster.patch(f"{path}/qwen/scale", {"spec": {"replicas": 4}}))
    assert (done["kind"], done["spec"], done["status"]) == (
        "Scale",
        {"replicas": 4},
        {"replicas": 0},
    )
    reported = {"status": {"replicas": 3, "selector": "app=vllm"}}
    answer(await cluster.patch(f"{path}/qwen/status", reported))
    scale = await cluster.get(f"{path}/qwen/scale")
    assert (scale["apiVersion"], scale["status"]) == ("autoscaling/v1", reported["status"])
    stored = await cluster.get(f"{path}/qwen")
    assert (stored["spec"]["replicas"], stored["metadata"]["generation"]) == (4, 2)
    answer(await cluster.patch(f"{path}/qwen/scale", {"spec": {"replicas": -1}}), 422)


async def test_lists_are_narrowed_by_labels_and_fields(cluster: ClusterUnderTest) -> None:
    path = cluster.at("configmaps")
    for name, labels in (("a", {"app": "x"}), ("b", {"app": "y", "odd": ""}), ("c", {})):
        await cluster.create(path, {"metadata": {"name": name, "labels": labels}})

    async def names(**params: str) -> str:
        found = answer(await cluster.http.get(path, params=params))["items"]
        return "".join(o["metadata"]["name"] for o in found if o["metadata"]["name"] in "abc")

    assert await names(labelSelector="app=x") == "a"
    assert await names(labelSelector="app!=x") == "bc"
    assert await names(labelSelector="app in (x,y),!odd") == "a"
    assert await names(labelSelector="app notin (x)") == "bc"
    assert await names(labelSelector="odd") == "b"
    assert await names(fieldSelector="metadata.name=b") == "b"
    refused = await cluster.http.get(path, params={"fieldSelector": "data.a=b"})
    assert answer(refused, 400)["reason"] == "BadRequest"


async def test_a_list_in_pages_is_of_one_moment(cluster: ClusterUnderTest) -> None:
    path = cluster.at("secrets")
    for name in "abc":
        await cluster.create(path, _named(name))
    chosen = {"limit": "2", "fieldSelector": "type=Opaque"}
    first = answer(await cluster.http.get(path, params=chosen))
    await cluster.delete(f"{path}/c")
    token = first["metadata"]["continue"]
    rest = answer(await cluster.http.get(path, params={**chosen, "continue": token}))
    assert [o["metadata"]["name"] for o in first["items"] + rest["items"]] == ["a", "b", "c"]
    assert rest["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]
    assert "continue" not in rest["metadata"]


async def watched(cluster: ClusterUnderTest, path: str, **params: str) -> list[Object]:
    """The events of a watch, until its time limit."""
    asked = {"watch": "1", "timeoutSeconds": "2" if REAL else "1", **params}
    async with cluster.http.stream("GET", path, params=asked, timeout=100) as response:
        assert response.status_code == 200
        return [json.loads(line) async for line in response.aiter_lines() if line]


async def test_a_watch_goes_on_from_a_version(cluster: ClusterUnderTest) -> None:
    path = cluster.at("configmaps")
    for name in "ab":
        labels = {"app": "x"} if name == "a" else {}
        await cluster.create(path, {"metadata": {"name": name, "labels": labels}})
    since = (await cluster.get(path))["metadata"]["resourceVersion"]
    answer(await cluster.patch(f"{path}/a", {"metadata": {"labels": {"app": "y"}}}))
    answer(await cluster.patch(f"{path}/b", {"metadata": {"labels": {"app": "x"}}}))
    answer(await cluster.patch(f"{path}/b", {"data": {"k": "v"}}))
    await cluster.delete(f"{path}/b")
    events = await watched(cluster, path, resourceVersion=since, labelSelector="app=x")
    told = [(event["type"], event["object"]["metadata"]["name"]) for event in events]
    assert told == [("DELETED", "a"), ("ADDED", "b"), ("MODIFIED", "b"), ("DELETED", "b")]
    versions = [int(event["object"]["metadata"]["resourceVersion"]) for event in events]
    assert versions == sorted(versions)
    assert versions[0] > int(since), "a deletion has a version of its own"


async def test_a_watch_without_a_version_begins_with_what_is_there(
    cluster: ClusterUnderTest,
) -> None:
    path = cluster.at("secrets")
    await cluster.create(path, _named("a"))
    events = await watched(cluster, path, fieldSelector="metadata.name=a")
    assert [event["type"] for event in events] == ["ADDED"]


async def test_bookmarks_move_the_version_on(cluster: ClusterUnderTest) -> None:
    path = cluster.at("secrets")
    since = (await cluster.get(path))["metadata"]["resourceVersion"]
    await cluster.create(path, _named("a"))
    asked = {"resourceVersion": since, "allowWatchBookmarks": "true", "timeoutSeconds": "75"}
    events = await watched(
        cluster,
        path,
        **(asked if REAL else {**asked, "timeoutSeconds": "1"}),
        fieldSelector="metadata.name=b",
    )
    assert {event["type"] for event in events} == {"BOOKMARK"}
    assert int(events[-1]["object"]["metadata"]["resourceVersion"]) > int(since)


async def test_a_version_that_is_forgotten_is_gone(cluster: ClusterUnderTest) -> None:
    if cluster.emulated is not None:
        cluster.emulated.compact()
    (event,) = await watched(cluster, cluster.at("configmaps"), resourceVersion="1")
    assert event["type"] == "ERROR"
    assert (event["object"]["code"], event["object"]["reason"]) == (410, "Expired")


# -- deletion


async def test_a_finalizer_holds_an_object_until_it_is_taken_off(cluster: ClusterUnderTest) -> None:
    path = cluster.at("tokenentitlements", api=CRS)
    made = entitlement()
    made["metadata"]["finalizers"] = ["sluice.dev/held"]
    await cluster.create(path, made)
    answer(await cluster.delete(f"{path}/a"))
    held = await cluster.get(f"{path}/a")
    assert held["metadata"]["deletionTimestamp"]
    assert answer(await cluster.http.post(path, json=entitlement()), 409)
    more = {"metadata": {"finalizers": ["sluice.dev/held", "sluice.dev/more"]}}
    refused = answer(await cluster.patch(f"{path}/a", more), 422)
    assert "no new finalizers can be added if the object is being deleted" in refused["message"]
    answer(await cluster.patch(f"{path}/a", {"metadata": {"finalizers": []}}))
    await cluster.gone(f"{path}/a")


async def test_what_an_object_owns_goes_with_it(cluster: ClusterUnderTest) -> None:
    path, pods = cluster.at("tokenentitlements", api=CRS), cluster.at("pods")
    made = await cluster.create(path, entitlement())
    owner = {
        "apiVersion": made["apiVersion"],
        "kind": made["kind"],
        "name": "a",
        "uid": made["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    pod = cluster.lease_pod("a", "virtual-none", 1)
    pod["metadata"]["ownerReferences"] = [owner]
    await cluster.create(pods, pod)
    await cluster.create(pods, cluster.lease_pod("b", "virtual-none", 1))
    answer(await cluster.delete(f"{path}/a", propagationPolicy="Background"))
    await cluster.gone(f"{pods}/a")
    await cluster.get(f"{pods}/b")


async def test_another_object_of_the_same_name_is_not_deleted(cluster: ClusterUnderTest) -> None:
    path = cluster.at("pods")
    made = await cluster.create(path, cluster.lease_pod("a", "virtual-none", 1))
    other = {"uid": str(uuid.uuid4())}
    refused = answer(await cluster.delete(f"{path}/a", preconditions=other), 409)
    assert refused["reason"] == "Conflict"
    assert "UID" in refused["message"]
    own = {"uid": made["metadata"]["uid"]}
    answer(await cluster.delete(f"{path}/a", preconditions=own))
    await cluster.gone(f"{path}/a")


# -- what is refused


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({"tenantId": ""}, "spec.tenantId"),
        ({"poolRef": {}}, "spec.poolRef.name: Required value"),
        ({"qos": {"serviceClass": "gold"}}, "spec.qos.serviceClass: Unsupported value"),
        ({"resources": {"concurrency": 0}}, "spec.resources.concurrency"),
        ({"resources": {"concurrency": "4"}}, "must be of type integer"),
        ({"keys": [{"secretRef": {"name": "a", "key": "b"}}] * 3}, "spec.keys"),
        ({"expiresAt": "tomorrow"}, "spec.expiresAt"),
    ],
)
async def test_the_schema_says_which_field_is_wrong(
    cluster: ClusterUnderTest, spec: Object, why: str
) -> None:
    path = cluster.at("tokenentitlements", api=CRS)
    refused = answer(await cluster.http.post(path, json=entitlement(**spec)), 422)
    assert refused["message"].startswith('TokenEntitlement.sluice.dev "a" is invalid: ')
    assert why in refused["message"]


async def test_defaults_are_set_and_unknown_fields_left_out(cluster: ClusterUnderTest) -> None:
    path = cluster.at("tokenentitlements", api=CRS)
    made = await cluster.create(path, entitlement(colour="blue"))
    assert made["spec"] == {
        "tenantId": "search",
        "poolRef": {"name": "qwen"},
        "qos": {"serviceClass": "elastic"},
        "suspend": False,
    }


RULES = [
    ("tokenentitlements", entitlement(qos={"serviceClass": "guaranteed"}), "resources.concurrency"),
    (
        "tokenentitlements",
        entitlement(resources={"kvCacheGiB": 2}, limits={"kvCacheGiB": 1.5}),
        "limits.kvCacheGiB is below resources.kvCacheGiB",
    ),
    ("tokenentitlements", entitlement(resources={"kvCacheGiB": 1.0005}), "more than 3 decimals"),
    (
        "tokenpools",
        pool(scaling={"minReplicas": 3, "maxReplicas": 2}),
        "minReplicas is more than maxReplicas",
    ),
]
CHANGES = [
    ("tokenentitlements", entitlement(), {"tenantId": "ads"}, "tenantId cannot be changed"),
    ("tokenentitlements", entitlement(), {"poolRef": {"name": "b"}}, "poolRef.name cannot be"),
    ("tokenpools", pool(), {"model": "other"}, "model cannot be changed"),
    ("tokenpools", pool(), {"pool": "short"}, "pool cannot be added or removed"),
]


@pytest.mark.parametrize(("plural", "made", "why"), RULES)
async def test_rules_hold_for_new_objects(
    cluster: ClusterUnderTest, plural: str, made: Object, why: str
) -> None:
    await cluster.needs_rules()
    refused = await cluster.http.post(cluster.at(plural, api=CRS), json=made)
    assert why in answer(refused, 422)["message"]


@pytest.mark.parametrize(("plural", "made", "change", "why"), CHANGES)
async def test_rules_hold_for_changes(
    cluster: ClusterUnderTest, plural: str, made: Object, change: Object, why: str
) -> None:
    await cluster.needs_rules()
    path = cluster.at(plural, api=CRS)
    await cluster.create(path, made)
    name = made["metadata"]["name"]
    refused = answer(await cluster.patch(f"{path}/{name}", {"spec": change}), 422)
    assert why in refused["message"]
    answer(await cluster.patch(f"{path}/{name}", {"metadata": {"labels": {"a": "b"}}}))


@pytest.mark.parametrize(
    ("labels", "why"), [({"a": "x" * 64}, "metadata.labels"), ({"a/b/c": "x"}, "metadata.labels")]
)
async def test_labels_have_their_bounds(
    cluster: ClusterUnderTest, labels: Object, why: str
) -> None:
    made = {"metadata": {"name": "a", "labels": labels}}
    assert (
        why in answer(await cluster.http.post(cluster.at("configmaps"), json=made), 422)["message"]
    )


async def test_times_of_leases_have_microseconds(cluster: ClusterUnderTest) -> None:
    path = cluster.at("leases", api="/apis/coordination.k8s.io/v1")
    made = {"metadata": {"name": "a"}, "spec": {"renewTime": stamp()}}
    answer(await cluster.http.post(path, json=made), 400)
    made["spec"]["renewTime"] = micro()
    assert (await cluster.create(path, made))["spec"]["renewTime"] == made["spec"]["renewTime"]


async def test_an_event_says_who_did_what(cluster: ClusterUnderTest) -> None:
    path = cluster.at("events", api="/apis/events.k8s.io/v1")
    event = {
        "metadata": {"name": "a"},
        "eventTime": micro(),
        "reportingController": "sluice.dev/controller",
        "reportingInstance": "sluice-controller-0",
        "action": "Bind",
        "reason": "Bound",
        "type": "Normal",
        "note": "all is well",
        "regarding": {"kind": "TokenEntitlement", "name": "a", "namespace": cluster.namespace},
    }
    await cluster.create(path, event)
    wanted = ("eventTime", "reportingController", "reportingInstance", "action", "reason", "type")
    for lacking in wanted:
        rest = {key: value for key, value in event.items() if key != lacking}
        refused = await cluster.http.post(path, json={**rest, "metadata": {"name": "b"}})
        assert lacking in answer(refused, 422)["message"]
    for wrong in ({"regarding": {"kind": "Node", "name": "n"}}, {"note": "x" * 1025}):
        body = {**event, "metadata": {"name": "b"}, **wrong}
        answer(await cluster.http.post(path, json=body), 422)
    again = {"series": {"count": 2, "lastObservedTime": micro()}}
    answer(await cluster.patch(f"{path}/a", again))


# -- who may do what


async def test_an_account_may_do_what_its_roles_say(cluster: ClusterUnderTest) -> None:
    rbac = "/apis/rbac.authorization.k8s.io/v1"
    await cluster.create(cluster.at("serviceaccounts"), _named("c"))
    rules = [
        {"apiGroups": ["sluice.dev"], "resources": ["tokenpools"], "verbs": ["list", "watch"]},
        {"apiGroups": ["sluice.dev"], "resources": ["tokenpools/status"], "verbs": ["patch"]},
        {
            "apiGroups": [""],
            "resources": ["secrets"],
            "resourceNames": ["mine"],
            "verbs": ["get", "list", "watch"],
        },
    ]
    await cluster.create(cluster.at("roles", api=rbac), {**_named("c"), "rules": rules})
    binding = {
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "c"},
        "subjects": [{"kind": "ServiceAccount", "name": "c", "namespace": cluster.namespace}],
    }
    await cluster.create(cluster.at("rolebindings", api=rbac), {**_named("c"), **binding})
    await cluster.create(cluster.at("tokenpools", api=CRS), pool())
    await cluster.create(cluster.at("secrets"), _named("mine"))
    pools, secrets = cluster.at("tokenpools", api=CRS), cluster.at("secrets")
    user = f"system:serviceaccount:{cluster.namespace}:c"
    async with AsyncClient(await cluster.config_of("c"), ConnectionParams()) as http:

        async def asked(method: str, path: str, **more: Any) -> httpx.Response:
            return await http.request(method, path, **more)

        async def may_list() -> bool:  # once the binding is known everywhere
            return (await asked("GET", pools)).status_code == 200

        await cluster.until(may_list)
        patch = {"content": json.dumps({"status": {"replicas": 1}}), "headers": MERGE}
        answer(await asked("PATCH", f"{pools}/qwen/status", **patch))
        answer(await asked("GET", f"{secrets}/mine"))
        answer(await asked("GET", secrets, params={"fieldSelector": "metadata.name=mine"}))
        for method, path, why in (
            ("GET", f"{pools}/qwen", 'cannot get resource "tokenpools" in API group "sluice.dev"'),
            ("DELETE", f"{pools}/qwen", 'cannot delete resource "tokenpools"'),
            ("PATCH", f"{pools}/qwen", 'cannot patch resource "tokenpools"'),
            ("GET", secrets, 'cannot list resource "secrets" in API group "" in the namespace'),
            ("GET", f"{secrets}/other", 'secrets "other" is forbidden'),
            ("GET", "/api/v1/nodes", 'cannot list resource "nodes" in API group "" at the cluster'),
            ("POST", secrets, 'cannot create resource "secrets"'),
        ):
            more = patch if method == "PATCH" else {"json": _named("x")} if method == "POST" else {}
            refused = answer(await asked(method, path, **more), 403)
            assert refused["reason"] == "Forbidden"
            assert f'User "{user}"' in refused["message"]
            assert why in refused["message"]
        unknown = await asked("GET", pools, headers={"authorization": "Bearer nobody"})
        assert unknown.status_code in (200, 401)  # the client sets its own token
