"""What a plan tells objects and gateways, and which replicas it asks for."""

import copy
from typing import Any

import pytest

from controller.records import Call, Plan
from tests.unit.controller.cluster import NOW, Cluster, deployment, entitlement, token_pool

DEPLOYMENT = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "engines"}
ALLOCATORS = pytest.mark.parametrize("allocator", ["internal", "virtual-node"])


def after(result: Plan, name: str) -> dict[str, Any]:
    """The change of an entitlement's status."""
    calls = [
        call
        for call in result.calls
        if (call.resource.kind, call.name) == ("TokenEntitlement", name)
    ]
    assert [call.verb for call in calls] == ["patch_status"]
    status: dict[str, Any] = calls[0].body["status"]
    return status


def scales(result: Plan) -> list[Call]:
    return [call for call in result.calls if call.verb == "patch_scale"]


def pool_of(cluster: Cluster) -> dict[str, Any]:
    status: dict[str, Any] = cluster.objects["TokenPool"]["qwen"]["status"]
    return status


@ALLOCATORS
def test_places_go_to_those_that_reserve_and_then_by_age(allocator: str) -> None:
    cluster = Cluster(
        allocator,
        token_pool(),
        entitlement("batch", "elastic", 1),
        entitlement("search", "guaranteed", 3),
        entitlement("chat", "dedicated", 2),
        entitlement("scraps", "spot", 4),
    )
    cluster.settle()
    assert cluster.states() == {
        "search": "Bound",
        "chat": "Bound",
        "batch": "Pending",
        "scraps": "Bound",
    }
    assert pool_of(cluster)["allocated"] == {"concurrency": 8}
    assert pool_of(cluster)["entitlements"] == {"total": 4, "bound": 3}
    assert (
        "too little left for concurrency 4; add replicas, or lower"
        in cluster.status("batch")["message"]
    )


@ALLOCATORS
def test_a_guaranteed_one_takes_the_place_of_an_elastic_one(allocator: str) -> None:
    cluster = Cluster(allocator, token_pool(), entitlement("old"), entitlement("new", age=1))
    cluster.settle()
    cluster.put(entitlement("search", "guaranteed", 2))
    cluster.settle()
    assert cluster.states() == {"old": "Bound", "new": "Degraded", "search": "Bound"}
    published = cluster.plan().entitlements
    assert published["new"].verdict == "degraded"
    why = {"internal": "its place was taken", "virtual-node": "its lease pod was preempted"}
    assert why[allocator] in published["new"].message
    del cluster.objects["TokenEntitlement"]["search"]
    cluster.settle()
    assert cluster.states() == {"old": "Bound", "new": "Bound"}


@ALLOCATORS
def test_more_waits_with_what_it_had_and_less_is_free_at_once(allocator: str) -> None:
    cluster = Cluster(allocator, token_pool(), entitlement("a"), entitlement("b", age=1))
    cluster.settle()
    cluster.put(entitlement("a", resources={"concurrency": 7}))
    result = cluster.settle()
    assert cluster.states() == {"a": "Bound", "b": "Bound"}
    assert cluster.status("a")["allocated"] == {"concurrency": 4}
    assert result.entitlements["a"].fields["concurrency"] == 4
    assert "concurrency 7" in cluster.status("a")["message"]
    cluster.put(entitlement("b", age=1, resources={"concurrency": 3}))
    result = cluster.settle()
    assert cluster.status("a")["allocated"] == {"concurrency": 7}
    assert result.entitlements["a"].fields["concurrency"] == 7
    assert "message" not in cluster.status("a")


@ALLOCATORS
def test_a_shrunken_pool_gives_up_the_newest_and_takes_them_back(allocator: str) -> None:
    pool = token_pool(backendRef=DEPLOYMENT)
    cluster = Cluster(allocator, pool, *(entitlement(name, age=i) for i, name in enumerate("abcd")))
    cluster.backends["Deployment", "engines"] = deployment(ready=2)
    cluster.settle()
    cluster.backends["Deployment", "engines"] = deployment(ready=1)
    assert {name: each.verdict for name, each in cluster.plan().entitlements.items()} == {
        "a": "",
        "b": "",
        "c": "degraded",
        "d": "degraded",
    }
    cluster.settle()
    assert "the pool shrank" in cluster.status("d")["message"]
    cluster.backends["Deployment", "engines"] = deployment(ready=2)
    cluster.settle()
    assert set(cluster.states().values()) == {"Bound"}


@ALLOCATORS
def test_a_pool_without_a_ready_replica_takes_nothing_away(allocator: str) -> None:
    pool = token_pool(backendRef=DEPLOYMENT)
    cluster = Cluster(allocator, pool, entitlement("a", age=1), entitlement("s", "spot"))
    cluster.backends["Deployment", "engines"] = deployment(ready=1)
    cluster.settle()
    cluster.put(entitlement("older", age=0, resources={"concurrency": 9}))
    cluster.backends["Deployment", "engines"] = deployment(ready=0)
    result = cluster.settle()
    assert cluster.states() == {"a": "Degraded", "s": "Degraded", "older": "Pending"}
    assert {each.verdict for each in result.entitlements.values()} == {"degraded", "pending"}
    assert cluster.condition("a", "PoolReady")["reason"] == "NoReadyReplica"
    assert pool_of(cluster)["capacity"] == pool_of(cluster)["allocated"] == {"concurrency": 0}
    cluster.backends["Deployment", "engines"] = deployment(ready=1)
    cluster.settle()
    assert cluster.states() == {"a": "Bound", "s": "Bound", "older": "Pending"}


@ALLOCATORS
@pytest.mark.parametrize(("service_class", "spec"), [("spot", {}), ("elastic", {"resources": {}})])
def test_the_demand_of_those_without_a_reserve_starts_the_first_replica(
    allocator: str, service_class: str, spec: dict[str, Any]
) -> None:
    pool = token_pool(backendRef=DEPLOYMENT, scaling={"minReplicas": 0, "maxReplicas": 3})
    cluster = Cluster(allocator, pool, entitlement("s", service_class, **spec))
    cluster.backends["Deployment", "engines"] = deployment(ready=0)
    result = cluster.settle()
    assert (result.entitlements["s"].verdict, scales(result)) == ("", [])  # gateways count it
    assert cluster.condition("s", "PoolReady")["reason"] == "NoReadyReplica"
    cluster.demand = {("Qwen/Qwen3-8B", "short"): 1}
    cluster.settle()
    assert cluster.backends["Deployment", "engines"]["spec"]["replicas"] == 1
    cluster.put(entitlement("s", "elastic", resources={"concurrency": 11}))
    cluster.settle()
    assert cluster.states() == {"s": "Degraded"}  # what it reserves starts replicas
    assert cluster.backends["Deployment", "engines"]["spec"]["replicas"] == 2


@ALLOCATORS
def test_of_a_pool_that_is_gone_gateways_keep_the_reason(allocator: str) -> None:
    cluster = Cluster(allocator, token_pool(), entitlement("a", "guaranteed"))
    cluster.settle()
    gone = cluster.objects["TokenPool"].pop("qwen")
    granted = cluster.settle().entitlements["a"]
    assert granted.verdict == "degraded"
    assert "there is no TokenPool qwen" in granted.message
    assert granted.fields == {"name": "a", "model": "Qwen/Qwen3-8B", "tenant": "acme"}
    cluster.settle()
    cluster.put(gone)
    assert cluster.settle().entitlements["a"].fields["concurrency"] == 4
    assert cluster.states() == {"a": "Bound"}


def test_of_a_pool_that_is_not_there_the_message_says_so() -> None:
    cluster = Cluster("internal", entitlement("a"))
    cluster.settle()
    assert cluster.states() == {"a": "Pending"}
    assert cluster.condition("a", "PoolReady")["reason"] == "NoTokenPool"
    assert "create it" in cluster.status("a")["message"]


@ALLOCATORS
def test_one_that_is_being_deleted_is_gone(allocator: str) -> None:
    cluster = Cluster(allocator, token_pool(), entitlement("a"), entitlement("b", "spot"))
    cluster.settle()
    for it in cluster.objects["TokenEntitlement"].values():
        it["metadata"]["deletionTimestamp"] = "2027-01-15T08:00:00Z"
    assert not cluster.settle().entitlements
    assert pool_of(cluster)["entitlements"] == {"total": 0, "bound": 0}
    assert not cluster.objects["Pod"]


@ALLOCATORS
def test_an_elastic_one_that_becomes_guaranteed_needs_sequences(allocator: str) -> None:
    pool = token_pool(perReplica={"concurrency": 10, "tokensPerSecond": 100})
    rate = {"tokensPerSecond": 50}
    cluster = Cluster(allocator, pool, entitlement("a", resources=rate))
    cluster.settle()
    cluster.put(entitlement("a", "guaranteed", resources={**rate, "concurrency": 11}))
    assert cluster.settle().entitlements["a"].verdict == "degraded"


@ALLOCATORS
def test_one_that_is_suspended_or_expired_holds_nothing(allocator: str) -> None:
    cluster = Cluster(
        allocator,
        token_pool(),
        entitlement("a", expiresAt="2027-01-15T09:00:00Z"),
        entitlement("b", age=1),
        entitlement("c", age=2),
    )
    result = cluster.settle()
    assert result.next_unix_s == (NOW + 3600 if allocator == "internal" else NOW + 300)
    cluster.now_unix_s = NOW + 3600
    cluster.put(entitlement("b", age=1, suspend=True))
    result = cluster.settle()
    assert cluster.states() == {"a": "Expired", "b": "Pending", "c": "Bound"}
    assert pool_of(cluster)["allocated"] == {"concurrency": 4}
    assert [result.entitlements[name].suspended for name in "abc"] == [False, True, False]
    assert result.entitlements["a"].fields["expires_at"] == "2027-01-15T09:00:00Z"
    assert not any(result.entitlements[name].verdict for name in "abc")


def test_gateways_get_the_fields_of_their_configuration() -> None:
    cluster = Cluster(
        "internal",
        token_pool(pool="short", perReplica={"concurrency": 10, "tokensPerSecond": 500}),
        entitlement(
            "search",
            "guaranteed",
            qos={"serviceClass": "guaranteed", "sloTargetMs": 200},
            resources={"concurrency": 4, "tokensPerSecond": 100, "kvCacheGiB": 2.5},
            limits={"kvCacheGiB": 4, "concurrency": 4},
            keys=[{"secretRef": {"name": "keys", "key": "search"}}],
        ),
    )
    cluster.digests = {"keys": {"search": "ab" * 32}}
    assert cluster.settle().entitlements["search"].fields == {
        "name": "search",
        "tenant": "acme",
        "model": "Qwen/Qwen3-8B",
        "service_class": "guaranteed",
        "slo_target_ms": 200,
        "tokens_per_second": 100,
        "kv_cache_gib": 2.5,
        "concurrency": {"short": 4},
        "max_kv_cache_gib": 4,
    }
    published = cluster.plan().entitlements["search"]
    assert published.digests == ("ab" * 32,)
    assert published.source == "TokenEntitlement team/search"
    assert published.created == 1_767_225_600_000


def test_gateways_can_tell_the_age_of_those_that_were_applied_together() -> None:
    """They bind reserves by the time of creation alone: equal ones all together, or none."""
    names = ["c", "a", "b"]
    cluster = Cluster(
        "internal",
        token_pool(),
        *(entitlement(name, "guaranteed", resources={"concurrency": 1}) for name in names),
        entitlement("later", age=1),
    )
    published = cluster.settle().entitlements
    assert [name for name, _ in sorted(published.items(), key=lambda item: item[1].created)] == [
        *("a", "b", "c", "later")
    ]
    assert len({each.created for each in published.values()}) == len(published)


def test_a_key_opens_the_oldest_that_names_it_and_a_missing_one_is_told() -> None:
    keys = [{"secretRef": {"name": "keys", "key": "search"}}]
    lost = [{"secretRef": {"name": "keys", "key": "lost"}}]
    cluster = Cluster(
        "internal",
        token_pool(),
        entitlement("newer", "spot", 2, keys=keys),
        entitlement("older", "spot", 1, keys=keys),
        entitlement("other", "spot", 3, keys=lost),
    )
    cluster.digests = {"keys": {"search": "ab" * 32}}
    published = cluster.settle().entitlements
    assert {name: len(each.digests) for name, each in published.items()} == {
        "older": 1,
        "newer": 0,
        "other": 0,
    }
    assert set(cluster.states().values()) == {"Bound"}
    assert "opens TokenEntitlement older already" in cluster.status("newer")["message"]
    assert (
        "no key in entry lost of Secret keys" in cluster.condition("other", "Accepted")["message"]
    )


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            {"qos": {"serviceClass": "guaranteed"}, "resources": {}},
            "spec.resources.concurrency: a guaranteed entitlement without a baseline",
        ),
        (
            {"limits": {"concurrency": 3}},
            "spec.limits.concurrency: below spec.resources.concurrency; raise spec.limits.conc",
        ),
        (
            {"qos": {"serviceClass": "preemptible"}, "limits": {"tokensPerSecond": 3}},
            "spec.limits.tokensPerSecond: a preemptible entitlement never goes above its own rate",
        ),
        ({"resources": {"concurrency": -1}}, "spec.resources.concurrency: input should be greater"),
        ({"expiresAt": "tomorrow"}, "spec.expiresAt: not a date and time"),
        ({"qos": {"serviceClass": "best"}}, "spec.qos.serviceClass: input should be 'dedicated'"),
    ],
)
def test_what_no_gateway_would_take_is_not_accepted(spec: dict[str, Any], said: str) -> None:
    cluster = Cluster("internal", token_pool(), entitlement("a", **spec))
    result = cluster.settle()
    accepted = cluster.condition("a", "Accepted")
    assert (accepted["status"], accepted["reason"]) == ("False", "Invalid")
    assert accepted["message"].startswith(said)
    assert cluster.status("a")["message"] == accepted["message"]
    assert "tenantId" not in cluster.status("a")
    assert result.entitlements["a"].verdict == "pending"
    assert result.entitlements["a"].fields == {
        "name": "a",
        "tenant": "acme",
        "model": "Qwen/Qwen3-8B",
    }


@ALLOCATORS
@pytest.mark.parametrize("field", [{"tenantId": "other"}, {"poolRef": {"name": "large"}}])
def test_an_identity_that_changed_opens_nothing(allocator: str, field: dict[str, Any]) -> None:
    cluster = Cluster(allocator, token_pool(), token_pool("large"), entitlement("a"))
    cluster.settle()
    cluster.put(entitlement("a", **field))
    result = cluster.settle()
    assert cluster.states() == {"a": "Pending"}
    assert cluster.condition("a", "Accepted")["reason"] == "ImmutableFieldChanged"
    assert cluster.status("a")["tenantId"] == "acme"
    assert result.entitlements["a"].verdict == "pending"
    assert result.entitlements["a"].fields["tenant"] == "acme"
    assert not cluster.objects["Pod"]
    cluster.put(entitlement("a"))
    cluster.settle()
    assert cluster.states() == {"a": "Bound"}


def test_a_status_is_written_where_it_differs_and_times_are_of_transitions() -> None:
    cluster = Cluster("internal", token_pool(), entitlement("a"), entitlement("b", age=1))
    cluster.settle()
    cluster.now_unix_s += 60
    cluster.put(entitlement("a", qos={"serviceClass": "elastic", "sloTargetMs": 50}))
    result = cluster.plan()
    assert [(call.verb, call.name) for call in result.calls] == [("patch_status", "a")]
    assert after(result, "a").keys() == {"observedGeneration", "conditions"}
    assert not result.events
    cluster.put(entitlement("a", suspend=True))
    status = after(cluster.plan(), "a")
    assert status["allocated"] is None
    assert "boundAt" not in status
    since = {each["type"]: each["lastTransitionTime"] for each in status["conditions"]}
    assert since.pop("Bound") == "2027-01-15T08:01:00Z"
    assert set(since.values()) == {"2027-01-15T08:00:00Z"}


def test_an_object_that_cannot_be_read_stops_no_other() -> None:
    cluster = Cluster("internal", token_pool(), entitlement("a"))
    for name, spec in (("b", {}), ("c", {"resources": "all"}), ("d", {"keys": ["k"]})):
        body = entitlement(name)
        cluster.objects["TokenEntitlement"][name] = {
            **body,
            "spec": spec and {**body["spec"], **spec},
        }
    result = cluster.settle()
    assert cluster.states() == {"a": "Bound", "b": "Pending", "c": "Pending", "d": "Pending"}
    assert cluster.condition("b", "Accepted")["reason"] == "Invalid"
    assert all(
        result.entitlements[name].verdict == "pending"
        for name in result.entitlements.keys() - {"a"}
    )


CONDITION = {"type": "Bound", "status": "True", "reason": "x", "lastTransitionTime": "x"}


@pytest.mark.parametrize(
    "status",
    [
        "x",
        [],
        {"conditions": "x"},
        {"conditions": [None]},
        {"conditions": [CONDITION | {"reason": None}]},
        {"allocated": [4]},
        {"allocated": {"concurrency": "4"}},
        {"allocated": {"concurrency": 1e308}},
        {"boundAt": 7},
    ],
)
@ALLOCATORS
def test_a_status_of_another_shape_is_written_anew(allocator: str, status: Any) -> None:
    cluster = Cluster(allocator, token_pool(), token_pool("other"), entitlement("search"))
    cluster.objects["TokenEntitlement"]["search"]["status"] = copy.deepcopy(status)
    cluster.objects["TokenPool"]["other"]["status"] = copy.deepcopy(status)
    assert not cluster.settle().calls
    assert cluster.states() == {"search": "Bound"}
    assert cluster.condition("search", "Bound")["reason"] == "Allocated"


@pytest.mark.parametrize(
    "spec",
    [
        {"replicas": "x"},
        {"replicas": [1]},
        {"replicas": 1e308},
        {"perReplica": {"concurrency": 1e308}},
        {"perReplica": {"concurrency": 1, "kvCacheGiB": 1e308}},
        {"scaling": {"maxReplicas": 1e308}},
    ],
)
@ALLOCATORS
def test_a_pool_beyond_its_definition_stops_no_other(allocator: str, spec: dict[str, Any]) -> None:
    cluster = Cluster(allocator, token_pool(), token_pool("other", **spec), entitlement("search"))
    assert not cluster.settle().calls
    assert cluster.states() == {"search": "Bound"}


def test_a_backend_that_cannot_be_read_keeps_its_replicas() -> None:
    cluster = Cluster("internal", token_pool(backendRef=DEPLOYMENT), entitlement("search"))
    cluster.backends["Deployment", "engines"] = deployment(ready=2)
    cluster.settle()
    cluster.backends.clear()
    cluster.unread = frozenset({"Deployment"})
    assert not cluster.plan().calls
    cluster.unread = frozenset()
    assert cluster.settle().entitlements["search"].verdict == "degraded"


def test_replicas_that_nothing_bounds_stay_within_what_a_status_can_say() -> None:
    resources = {"concurrency": 1_000_000}
    claims = [entitlement(name, age=age, resources=resources) for age, name in enumerate("ab")]
    cluster = Cluster("internal", token_pool(perReplica={"concurrency": 1}), *claims)
    cluster.settle()
    assert pool_of(cluster)["desiredReplicas"] == 1_000_000


def test_events_are_of_transitions() -> None:
    pool = token_pool(backendRef=DEPLOYMENT)
    cluster = Cluster(
        "internal", pool, entitlement("a"), entitlement("b", resources={"concurrency": 9})
    )
    cluster.backends["Deployment", "engines"] = deployment(ready=1)

    def events() -> list[tuple[str, str, str]]:
        result = cluster.plan()
        cluster.apply(result.calls)
        assert not cluster.plan().events
        return [(it.regarding["metadata"]["name"], it.kind, it.reason) for it in result.events]

    assert events() == [
        ("a", "Normal", "Allocated"),
        ("b", "Warning", "Waits"),
        ("qwen", "Normal", "ReplicasReady"),
    ]
    cluster.backends["Deployment", "engines"] = deployment(ready=0)
    assert events() == [("qwen", "Warning", "NoReadyReplica")]
    cluster.backends["Deployment", "engines"] = deployment(ready=1)
    assert events() == [("qwen", "Normal", "ReplicasReady")]
    cluster.put(entitlement("g", "guaranteed", 5, resources={"concurrency": 10}))
    assert events() == [("a", "Warning", "Preempted"), ("g", "Normal", "Allocated")]


@pytest.mark.parametrize(
    ("resources", "demand", "set_replicas", "wanted"),
    [
        ({}, {}, None, 1),
        ({"concurrency": 25}, {}, None, 3),
        ({"concurrency": 1, "tokensPerSecond": 350}, {}, None, 4),
        ({"concurrency": 1, "kvCacheGiB": 8.1}, {}, None, 5),
        ({"concurrency": 99}, {}, None, 1),  # which the most replicas could not hold
        (
            {"concurrency": 25},
            {("Qwen/Qwen3-8B", "short"): 2, ("Qwen/Qwen3-8B", "long"): 2},
            None,
            4,
        ),
        ({"concurrency": 25}, {("other", "short"): 6}, None, 3),
        ({}, {("Qwen/Qwen3-8B", "short"): 50}, None, 6),
        ({"concurrency": 25}, {}, 2, 2),
        ({"concurrency": 25}, {}, 40, 6),
    ],
)
def test_replicas_for_what_is_reserved_and_what_gateways_need(
    resources: dict[str, Any],
    demand: dict[tuple[str, str], int],
    set_replicas: int | None,
    wanted: int,
) -> None:
    pool = token_pool(
        backendRef=DEPLOYMENT,
        perReplica={"concurrency": 10, "tokensPerSecond": 100, "kvCacheGiB": 2},
        scaling={"minReplicas": 1, "maxReplicas": 6},
        replicas=set_replicas,
    )
    cluster = Cluster("internal", pool, entitlement("a", resources=resources))
    cluster.demand = demand
    cluster.backends["Deployment", "engines"] = deployment(ready=1, replicas=3)
    calls = scales(cluster.plan())
    assert [call.body for call in calls] == [{"spec": {"replicas": wanted}}] * (wanted != 3)
    cluster.settle()
    assert pool_of(cluster)["desiredReplicas"] == wanted
    assert cluster.backends["Deployment", "engines"]["spec"]["replicas"] == wanted
    limited = next(it for it in pool_of(cluster)["conditions"] if it["type"] == "ScalingLimited")
    asked = (*demand.values(), set_replicas or 0, resources.get("concurrency", 0) / 10)
    assert (limited["status"] == "True") == (max(asked) > 6)


def test_one_pool_of_a_model_counts_its_own_demand_and_scales_nothing_unasked() -> None:
    cluster = Cluster("internal", token_pool(backendRef=DEPLOYMENT, pool="short"))
    cluster.demand = {("Qwen/Qwen3-8B", "short"): 3, ("Qwen/Qwen3-8B", "long"): 9}
    cluster.backends["Deployment", "engines"] = deployment(ready=1)
    cluster.settle()
    assert pool_of(cluster)["desiredReplicas"] == 3
    assert cluster.backends["Deployment", "engines"]["spec"]["replicas"] == 1
    assert pool_of(cluster)["selector"] == "app=engines"


def test_the_ready_pods_of_an_inference_pool_are_its_replicas() -> None:
    ref = {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "name": "engines",
    }
    scaling = {"minReplicas": 1, "maxReplicas": 9}
    cluster = Cluster("internal", token_pool(backendRef=ref, scaling=scaling), entitlement("a"))
    labels = {"app": "vllm"}
    cluster.backends["InferencePool", "engines"] = {
        "metadata": {"name": "engines"},
        "spec": {"selector": {"matchLabels": labels}},
    }
    for name, status, more in (
        ("one", "True", {}),
        ("two", "True", {}),
        ("loading", "False", {}),
        ("leaving", "True", {"deletionTimestamp": "2027-01-01T00:00:00Z"}),
        ("other", "True", {"labels": {"app": "web"}}),
    ):
        conditions = [{"type": "Ready", "status": status}]
        cluster.objects["Pod"][name] = {
            "metadata": {"name": name, "uid": name, "labels": labels, **more},
            "spec": {"nodeName": "gpu-1"},
            "status": {"conditions": conditions},
        }
    cluster.settle()
    assert pool_of(cluster)["replicas"] == 2
    assert pool_of(cluster)["capacity"] == {"concurrency": 20}
    assert pool_of(cluster)["selector"] == "app=vllm"


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"backendRef": DEPLOYMENT}, "BackendMissing"),
        ({"backendRef": {**DEPLOYMENT, "apiVersion": "apps/v2"}}, "InvalidSpec"),
        ({"backendRef": {**DEPLOYMENT, "kind": "DaemonSet"}}, "InvalidSpec"),
        ({"perReplica": {"tokensPerSecond": 5}}, "InvalidSpec"),
        ({"perReplica": None}, "InvalidSpec"),
    ],
)
def test_a_pool_that_cannot_be_used_says_why(spec: dict[str, Any], reason: str) -> None:
    cluster = Cluster("internal", token_pool(**spec), entitlement("a"))
    cluster.settle()
    ready = pool_of(cluster)["conditions"][0]
    assert (ready["type"], ready["status"], ready["reason"]) == ("Ready", "False", reason)
    assert ready["message"]
    assert cluster.states() == {"a": "Pending"}
