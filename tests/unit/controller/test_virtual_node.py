"""The virtual node of a pool, and the lease pods of its entitlements."""

import copy
from typing import Any

import pytest

from controller.records import Object, Plan
from controller.virtual_node import node_name, pool_label
from tests.unit.controller.cluster import NOW, Cluster, entitlement, token_pool

RICH = token_pool(perReplica={"concurrency": 10, "tokensPerSecond": 1000, "kvCacheGiB": 0.7})


def virtual(*objects: Object) -> Cluster:
    cluster = Cluster("virtual-node", *objects)
    cluster.settle()
    return cluster


def changes(result: Plan) -> list[tuple[str, str]]:
    """What changes of pods and nodes."""
    return [
        (call.verb, call.name) for call in result.calls if call.resource.kind in {"Node", "Pod"}
    ]


def lease(cluster: Cluster, name: str) -> Object:
    """The only lease pod of an entitlement."""
    (pod,) = (
        it for it in cluster.objects["Pod"].values() if it["metadata"]["name"].startswith(name)
    )
    return pod


def node(cluster: Cluster) -> dict[str, Any]:
    (found,) = cluster.objects["Node"].values()
    return found


def pool_of(cluster: Cluster) -> dict[str, Any]:
    status: dict[str, Any] = cluster.objects["TokenPool"]["qwen"]["status"]
    return status


def step(cluster: Cluster) -> list[tuple[str, str]]:
    """One plan and the scheduler's answer; what changed."""
    result = cluster.plan()
    cluster.apply(result.calls)
    cluster.schedule()
    return [(verb, name.split("-")[0]) for verb, name in changes(result)]


def test_a_node_has_the_capacity_of_its_pool_and_room_for_nothing_else() -> None:
    cluster = virtual(RICH)
    assert node(cluster)["metadata"]["name"] == "sluice-team.qwen"
    assert node(cluster)["metadata"]["labels"]["sluice.dev/pool"] == "team.qwen"
    assert node(cluster)["spec"]["taints"] == [
        {"key": "sluice.dev/virtual", "value": "true", "effect": "NoSchedule"}
    ]
    status = node(cluster)["status"]
    assert status["capacity"] == status["allocatable"]
    assert status["capacity"] == {
        "sluice.dev/tokens-per-second": "1000",
        "sluice.dev/kv-cache-mib": "716",
        "sluice.dev/concurrency": "10",
        "cpu": "0",
        "memory": "0",
        "pods": "1000000",
    }


def test_a_node_is_left_alone_as_the_api_and_others_write_it() -> None:
    cluster = virtual(RICH)
    status = node(cluster)["status"]
    for part in ("capacity", "allocatable"):
        status[part] |= {"sluice.dev/tokens-per-second": "1k", "hugepages-2Mi": "0"}
    status["conditions"].append({"type": "MemoryPressure", "status": "Unknown"})
    node(cluster)["spec"]["taints"].append({"key": "example.com/ours", "effect": "NoSchedule"})
    assert not cluster.plan().calls
    cluster.put(token_pool(perReplica={"concurrency": 20}))
    cluster.settle()
    assert node(cluster)["status"]["allocatable"] == {
        "sluice.dev/concurrency": "20",
        "cpu": "0",
        "memory": "0",
        "pods": "1000000",
        "hugepages-2Mi": "0",
    }
    assert {it["type"] for it in node(cluster)["status"]["conditions"]} == {
        "Ready",
        "MemoryPressure",
    }
    assert len(node(cluster)["spec"]["taints"]) == 2


def test_a_node_is_heard_of_every_five_minutes_and_when_it_was_thought_dead() -> None:
    cluster = virtual(token_pool())
    assert cluster.plan().next_unix_s == NOW + 300
    cluster.now_unix_s += 299
    assert not cluster.plan().calls
    cluster.now_unix_s += 1
    assert changes(cluster.plan()) == [("patch_status", "sluice-team.qwen")]
    cluster.settle()
    (ready,) = node(cluster)["status"]["conditions"]
    assert ready["lastTransitionTime"] < ready["lastHeartbeatTime"] == "2027-01-15T08:05:00Z"
    cluster.now_unix_s += 60
    ready["status"] = "Unknown"
    cluster.settle()
    (ready,) = node(cluster)["status"]["conditions"]
    assert ready["status"] == "True"
    assert ready["lastTransitionTime"] == ready["lastHeartbeatTime"] == "2027-01-15T08:06:00Z"


def test_labels_and_taint_come_back() -> None:
    cluster = virtual(token_pool())
    before = copy.deepcopy(node(cluster))
    node(cluster)["metadata"]["labels"] = {"sluice.dev/pool": "team.qwen"}
    node(cluster)["spec"]["taints"] = [{"key": "example.com/ours", "effect": "NoSchedule"}]
    cluster.settle()
    assert node(cluster)["spec"]["taints"].pop(0)["key"] == "example.com/ours"
    assert node(cluster) == before


def test_the_node_of_a_pool_that_is_gone_goes_and_those_of_others_stay() -> None:
    cluster = virtual(token_pool(), entitlement("a"))
    other = copy.deepcopy(node(cluster))
    other["metadata"] |= {"name": "other", "labels": {"sluice.dev/pool": "teams.qwen"}}
    cluster.objects["Node"]["other"] = other
    cluster.objects["TokenPool"].clear()
    cluster.settle()
    assert list(cluster.objects["Node"]) == ["other"]
    assert not cluster.objects["Pod"]


def test_names_stay_within_what_the_api_takes() -> None:
    long = pool_label("n" * 63, "p" * 63)
    assert len(long) == 63
    assert long != pool_label("n" * 63, "p" * 62)
    assert len(node_name("n" * 63, "p" * 253)) == 253
    assert node_name("team", "a-b") != node_name("team-a", "b")


def test_a_lease_pod_takes_its_place_and_runs_nothing() -> None:
    resources = {"concurrency": 4, "kvCacheGiB": 0.1}
    cluster = virtual(RICH, entitlement("a", "dedicated", resources=resources), entitlement("b"))
    pod = lease(cluster, "a")
    assert pod["metadata"]["ownerReferences"][0] == {
        "apiVersion": "sluice.dev/v1alpha1",
        "kind": "TokenEntitlement",
        "name": "a",
        "uid": "a-0000-0000",
        "controller": True,
    }
    spec = pod["spec"]
    (container,) = spec["containers"]
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert container["resources"]["requests"] == {
        "sluice.dev/concurrency": "4",
        "sluice.dev/kv-cache-mib": "103",
        "cpu": "0",
        "memory": "0",
    }
    assert spec["terminationGracePeriodSeconds"] == 0
    assert spec["automountServiceAccountToken"] is False
    assert spec["nodeSelector"] == {"sluice.dev/pool": "team.qwen"}
    assert {it["key"] for it in spec["tolerations"] if "tolerationSeconds" not in it} == {
        "sluice.dev/virtual",
        "node.kubernetes.io/not-ready",
        "node.kubernetes.io/unreachable",
    }
    assert spec["priorityClassName"] == "sluice-reserved"
    assert lease(cluster, "b")["spec"]["priorityClassName"] == "sluice-elastic"
    assert cluster.status("a")["leasePod"] == pod["metadata"]["name"]


def test_spot_holds_no_place() -> None:
    cluster = virtual(token_pool(), entitlement("a", "spot"), entitlement("b", "preemptible"))
    assert cluster.states() == {"a": "Bound", "b": "Bound"}
    assert not cluster.objects["Pod"]


def test_a_change_of_anything_but_the_request_keeps_the_pod() -> None:
    cluster = virtual(token_pool(), entitlement("a"))
    cluster.put(entitlement("a", qos={"serviceClass": "elastic", "sloTargetMs": 9}, keys=[]))
    assert not changes(cluster.plan())


@pytest.mark.parametrize(
    "spec",
    [{"resources": {"concurrency": 3}}, {"qos": {"serviceClass": "dedicated"}}],
)
def test_a_smaller_one_and_another_class_take_the_place_of_the_old_one(
    spec: dict[str, Any],
) -> None:
    cluster = virtual(token_pool(), entitlement("a"), entitlement("b", age=1))
    cluster.put(entitlement("a", **spec))
    result = cluster.plan()
    cluster.apply(result.calls)
    assert [verb for verb, _ in changes(result)] == ["delete", "create"]
    for _ in range(2):  # its new pod is not bound yet
        result = cluster.plan()
        assert result.entitlements["a"].verdict == ""
        cluster.apply(result.calls)
    cluster.settle()
    assert cluster.states() == {"a": "Bound", "b": "Bound"}


def test_a_larger_one_is_put_beside_the_old_one_where_both_fit() -> None:
    cluster = virtual(token_pool(), entitlement("a"))
    cluster.put(entitlement("a", resources={"concurrency": 6}))
    assert step(cluster) == [("create", "a")]
    assert cluster.status("a")["allocated"] == {"concurrency": 4}
    assert step(cluster) == [("delete", "a")]
    assert cluster.status("a")["allocated"] == {"concurrency": 6}
    assert not cluster.plan().calls


def test_a_larger_one_follows_the_old_one_where_only_its_place_makes_it_fit() -> None:
    cluster = virtual(token_pool(), entitlement("a"), entitlement("b", age=1))
    cluster.put(entitlement("a", resources={"concurrency": 6}))
    assert step(cluster) == [("delete", "a"), ("create", "a")]
    cluster.settle()
    assert cluster.status("a")["allocated"] == {"concurrency": 6}
    assert cluster.states() == {"a": "Bound", "b": "Bound"}


def test_of_two_that_grow_the_second_counts_on_no_room_of_the_first() -> None:
    pool = token_pool(perReplica={"concurrency": 14})
    cluster = virtual(pool, entitlement("a"), entitlement("b", age=1))
    for age, name in enumerate("ab"):
        cluster.put(entitlement(name, age=age, resources={"concurrency": 6}))
    assert step(cluster) == [("delete", "b"), ("create", "a"), ("create", "b")]
    cluster.settle()
    assert pool_of(cluster)["allocated"] == {"concurrency": 12}


def test_a_place_that_went_to_another_while_its_pod_was_replaced_is_lost() -> None:
    cluster = virtual(token_pool(), entitlement("a"), entitlement("b"), entitlement("c", age=1))
    cluster.put(entitlement("c", age=1, resources={"concurrency": 5}))
    cluster.settle()
    cluster.put(entitlement("a", resources={"concurrency": 3}))
    assert step(cluster) == [("delete", "a"), ("create", "a")]
    cluster.settle()
    assert cluster.states() == {"a": "Degraded", "b": "Bound", "c": "Bound"}


def test_who_loses_in_a_pool_that_shrinks_leaves_its_node_and_waits() -> None:
    pool = token_pool(replicas=2)
    cluster = virtual(pool, *(entitlement(name, age=age) for age, name in enumerate("abc")))
    cluster.put(token_pool(replicas=1))
    assert step(cluster) == [("patch_status", "sluice"), ("delete", "c")]
    assert step(cluster) == [("create", "c")]
    cluster.settle()
    assert "nodeName" not in lease(cluster, "c")["spec"]
    assert "the pool shrank" in cluster.status("c")["message"]


def test_a_larger_one_that_fits_nowhere_keeps_its_pod() -> None:
    cluster = virtual(token_pool(), entitlement("a"), entitlement("b", age=1))
    pod = lease(cluster, "a")
    cluster.put(entitlement("a", resources={"concurrency": 7}))
    cluster.settle()
    assert lease(cluster, "a") is pod
    assert cluster.status("a")["leasePod"] == pod["metadata"]["name"]


def test_whoever_had_a_place_from_the_internal_allocator_keeps_it() -> None:
    cluster = Cluster("internal", token_pool(), entitlement("b", age=1), entitlement("c", age=2))
    cluster.settle()
    cluster.put(entitlement("a", age=0))
    cluster.settle()
    cluster.allocator = "virtual-node"
    for _ in range(4):
        verdicts = {name: it.verdict for name, it in cluster.plan().entitlements.items()}
        assert verdicts == {"a": "pending", "b": "", "c": ""}
        step(cluster)
    assert not cluster.plan().calls


def test_a_pod_that_is_over_is_replaced_and_one_that_is_leaving_is_waited_for() -> None:
    cluster = virtual(token_pool(), entitlement("a"))
    pod = lease(cluster, "a")
    pod["metadata"]["deletionTimestamp"] = "2027-01-15T08:00:00Z"
    assert step(cluster) == []
    assert cluster.states() == {"a": "Degraded"}
    assert "was preempted, evicted or deleted" in cluster.status("a")["message"]
    del pod["metadata"]["deletionTimestamp"]
    pod["status"] = {"phase": "Failed"}
    assert step(cluster) == [("delete", "a")]
    cluster.settle()
    assert cluster.states() == {"a": "Bound"}
