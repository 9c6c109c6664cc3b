"""Whatever happens to a cluster, and wherever a controller stops: what every plan keeps."""

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.plan import plan
from controller.quantity import Amounts, times, within
from controller.records import Call
from controller.virtual_node import POD_LABEL, requests_of
from tests.unit.controller.cluster import Cluster, deployment, entitlement, reserved, token_pool

PAST = "2026-06-01T00:00:00Z"
PER_REPLICA: Amounts = (20, 1024, 5)
POOL: dict[str, Any] = {
    "perReplica": {"tokensPerSecond": 20, "kvCacheGiB": 1, "concurrency": 5},
    "backendRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "engines"},
}
NAMES = st.sampled_from(["a", "b", "c", "d", "e"])
CLASSES = st.sampled_from(["dedicated", "guaranteed", "elastic", "elastic", "spot"])
RESOURCES = st.fixed_dictionaries(
    {"concurrency": st.integers(1, 6)},
    optional={
        "tokensPerSecond": st.integers(1, 25),
        "kvCacheGiB": st.sampled_from([0.1, 0.5, 0.7, 1, 1.25]),
    },
)
STEP = st.one_of(
    st.tuples(st.just("put"), NAMES, CLASSES, RESOURCES),
    st.tuples(st.just("suspend"), NAMES, st.booleans()),
    st.tuples(st.just("remove"), NAMES),
    st.tuples(st.just("ready"), st.integers(0, 4)),
    st.tuples(st.just("pool"), st.booleans()),
    st.tuples(st.just("expire"), NAMES),
)
STOP = st.integers(0, 12)
"""How many calls of a plan are made before its controller is killed."""


def change(cluster: Cluster, step: tuple[Any, ...]) -> None:
    held = cluster.objects["TokenEntitlement"]
    kind, *what = step
    if kind == "put":
        name, service_class, resources = what
        age = "abcde".index(name)
        cluster.put(entitlement(name, service_class, age, resources=resources))
    elif kind == "remove":
        cluster.remove(what[0])
    elif kind == "ready":
        cluster.backends["Deployment", "engines"] = deployment(ready=what[0])
    elif kind == "pool":
        cluster.objects["TokenPool"].clear()
        if what[0]:
            cluster.put(token_pool(**POOL))
    elif what[0] in held:
        fields = {"suspend": what[1]} if kind == "suspend" else {"expiresAt": PAST}
        held[what[0]]["spec"].update(fields)


def capacity_of(cluster: Cluster) -> Amounts:
    if not cluster.objects["TokenPool"]:
        return (0, 0, 0)
    ready = cluster.backends["Deployment", "engines"]["status"]["readyReplicas"]
    return times(PER_REPLICA, ready)


def check(cluster: Cluster) -> tuple[Call, ...]:
    """Check the plan of the present world; its calls."""
    result = cluster.plan()
    assert plan(cluster.world(), cluster.allocator) == result
    assert within(reserved(result, PER_REPLICA), capacity_of(cluster))
    pods = defaultdict(list)
    for pod in cluster.objects["Pod"].values():
        pods[pod["metadata"]["labels"][POD_LABEL]].append(requests_of(pod))
    for first, *others in pods.values():
        assert len(others) <= 1
        assert not any(within(other, first) for other in others), "no growth, but two lease pods"
    return result.calls


@pytest.mark.parametrize("allocator", ["internal", "virtual-node"])
@settings(max_examples=60, deadline=None)
@given(history=st.lists(st.tuples(STEP, STOP, st.booleans()), max_size=12))
def test_a_plan_counts_no_more_than_the_capacity_and_settles(
    allocator: str, history: list[tuple[tuple[Any, ...], int, bool]]
) -> None:
    cluster = Cluster(allocator, token_pool(**POOL))
    cluster.backends["Deployment", "engines"] = deployment(ready=2)
    for step, stop, bind in history:
        change(cluster, step)
        cluster.apply(check(cluster)[:stop])
        check(cluster)
        if bind:
            cluster.schedule()
            check(cluster)
    result = cluster.settle()
    assert not result.calls
    assert not result.events
    check(cluster)
    claims = cluster.objects["TokenEntitlement"]
    known = {name for name in claims if cluster.status(name).get("model")}
    assert result.entitlements.keys() >= (claims.keys() if cluster.objects["TokenPool"] else known)
    if not cluster.objects["TokenPool"]:  # none opens
        assert all(
            each.verdict or each.suspended or "expires_at" in each.fields
            for each in result.entitlements.values()
        )


@settings(max_examples=60, deadline=None)
@given(
    claims=st.dictionaries(NAMES, st.tuples(CLASSES, RESOURCES), min_size=1),
    ready=st.integers(0, 4),
)
def test_both_allocators_come_to_the_same_verdicts(
    claims: dict[str, tuple[str, dict[str, Any]]], ready: int
) -> None:
    verdicts = []
    for allocator in ("internal", "virtual-node"):
        cluster = Cluster(allocator, token_pool(**POOL))
        cluster.backends["Deployment", "engines"] = deployment(ready=ready)
        for name, (service_class, resources) in claims.items():
            change(cluster, ("put", name, service_class, resources))
        published = cluster.settle().entitlements
        verdicts.append((cluster.states(), {name: it.fields for name, it in published.items()}))
    assert verdicts[0] == verdicts[1]
