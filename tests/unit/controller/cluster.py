"""A small model of a cluster: it takes the calls of a plan, and binds lease pods to nodes."""

import copy
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from controller.plan import Allocator, plan
from controller.quantity import (
    EXTENDED,
    Amounts,
    add,
    amounts_of,
    only,
    parse_quantity,
    within,
)
from controller.records import Call, Object, Plan, World
from controller.virtual_node import POOL_LABEL, requests_of
from gateway.admission.entitlement_terms import instant

NOW = 1_800_000_000.0


def token_pool(name: str = "qwen", **spec: Any) -> Object:
    """A TokenPool that assumes one replica of 10 sequences."""
    stated = {"model": "Qwen/Qwen3-8B", "perReplica": {"concurrency": 10}, **spec}
    metadata = {
        "name": name,
        "uid": f"pool-{name}",
        "generation": 1,
        "resourceVersion": "1",
    }
    return {"metadata": metadata, "spec": stated}


def entitlement(
    name: str, service_class: str = "elastic", age: int = 0, pool: str = "qwen", **spec: Any
) -> Object:
    """A TokenEntitlement of 4 sequences, created after `age` seconds."""
    metadata = {
        "name": name,
        "uid": f"{name}-0000-0000",
        "generation": 1,
        "resourceVersion": "1",
        "creationTimestamp": f"2026-01-01T00:{age // 60:02}:{age % 60:02}Z",
    }
    stated = {
        "tenantId": "acme",
        "poolRef": {"name": pool},
        "qos": {"serviceClass": service_class},
        "resources": {"concurrency": 4},
        **spec,
    }
    return {"metadata": metadata, "spec": stated}


def deployment(name: str = "engines", *, ready: int, replicas: int | None = None) -> Object:
    """A Deployment with so many ready replicas."""
    spec = {
        "replicas": ready if replicas is None else replicas,
        "selector": {"matchLabels": {"app": name}},
    }
    return {"metadata": {"name": name}, "spec": spec, "status": {"readyReplicas": ready}}


class Cluster:
    """Objects by kind and name; patches are merged as the API server merges them."""

    def __init__(self, allocator: str = "internal", *objects: Object) -> None:
        self.allocator: Allocator = allocator  # type: ignore[assignment]
        self.now_unix_s = NOW
        self.objects: dict[str, dict[str, Object]] = {
            kind: {} for kind in ("TokenPool", "TokenEntitlement", "Node", "Pod")
        }
        self.backends: dict[tuple[str, str], Object] = {}
        self.digests: dict[str, dict[str, str]] = {}
        self.unread = frozenset[str]()
        self.demand: dict[tuple[str, str], int] = {}
        self._uids = itertools.count(1)
        for each in objects:
            self.put(each)

    def put(self, body: Object) -> Object:
        """Add an object, or replace its spec."""
        kind = "TokenPool" if "perReplica" in body["spec"] else "TokenEntitlement"
        held = self.objects[kind].setdefault(body["metadata"]["name"], copy.deepcopy(body))
        if held["spec"] != body["spec"]:
            held["spec"] = copy.deepcopy(body["spec"])
            held["metadata"]["generation"] += 1
        return held

    def remove(self, name: str) -> None:
        """Delete an entitlement, and with it the pods that it owns."""
        gone, pods = self.objects["TokenEntitlement"].pop(name, None), self.objects["Pod"]
        for pod in list(pods.values()):
            owner = pod["metadata"]["ownerReferences"][0]["uid"]
            if gone is not None and owner == gone["metadata"]["uid"]:
                del pods[pod["metadata"]["name"]]

    def world(self) -> World:
        """What the controller sees."""
        return World(
            namespace="team",
            now_unix_s=self.now_unix_s,
            pools=self.objects["TokenPool"],
            entitlements=self.objects["TokenEntitlement"],
            digests=self.digests,
            backends=self.backends,
            pods=self.objects["Pod"],
            nodes=self.objects["Node"],
            demand=self.demand,
            unread=self.unread,
        )

    def plan(self) -> Plan:
        """The plan of the present world, which it leaves as it is."""
        before = orjson.dumps(self.objects)
        result = plan(self.world(), self.allocator)
        assert orjson.dumps(self.objects) == before
        return result

    def apply(self, calls: Iterable[Call]) -> None:
        """Make calls; those that the API would refuse fail."""
        for call in calls:
            if call.resource.kind not in self.objects:
                self._scale(call)
                continue
            held = self.objects[call.resource.kind]
            if call.verb == "create":
                assert call.name not in held
                held[call.name] = copy.deepcopy(dict(call.body))
                held[call.name]["metadata"]["uid"] = f"uid-{next(self._uids)}"
                held[call.name].pop("status", None)
            elif call.verb == "delete":
                assert held.pop(call.name)["metadata"]["uid"] == call.uid
            else:
                part = {"patch_status": "status", "patch": "spec"}[call.verb]
                assert call.body.keys() <= {"metadata", part}
                _merge(held[call.name], copy.deepcopy(call.body))

    def _scale(self, call: Call) -> None:
        assert call.verb == "patch_scale"
        _merge(self.backends[call.resource.kind, call.name], call.body)

    def schedule(self) -> None:
        """Bind the lease pods that fit; those that reserve take places of elastic ones."""
        pods = self.objects["Pod"]
        for name in [name for name, pod in pods.items() if pod["spec"].get("nodeName") is None]:
            if (pod := pods.get(name)) is None:
                continue
            label = pod["spec"]["nodeSelector"][POOL_LABEL]
            node = next(
                (
                    node
                    for node in self.objects["Node"].values()
                    if node["metadata"]["labels"][POOL_LABEL] == label
                ),
                None,
            )
            if node is None or "status" not in node:
                continue
            there = [
                other
                for other in pods.values()
                if other["spec"].get("nodeName") == node["metadata"]["name"]
            ]
            lower = [
                other
                for other in there
                if other["spec"]["priorityClassName"] == "sluice-elastic"
                and pod["spec"]["priorityClassName"] == "sluice-reserved"
            ]
            victims: list[Object] = []
            while not _fits(node, [pod, *(each for each in there if each not in victims)]):
                if not lower:
                    break
                victims.append(lower.pop())
            else:
                for victim in victims:
                    del pods[victim["metadata"]["name"]]
                pod["spec"]["nodeName"] = node["metadata"]["name"]

    def settle(self, rounds: int = 8) -> Plan:
        """Plan and apply until nothing is left to do; the last plan."""
        for _ in range(rounds):
            result = self.plan()
            if not result.calls:
                self.schedule()
                result = self.plan()
                if not result.calls:
                    return result
            self.apply(result.calls)
            self.schedule()
        raise AssertionError([(call.verb, call.resource.kind, call.name) for call in result.calls])

    def status(self, name: str) -> Mapping[str, Any]:
        """Of an entitlement."""
        status: dict[str, Any] = self.objects["TokenEntitlement"][name].get("status", {})
        return status

    def states(self) -> dict[str, str]:
        """Of all entitlements."""
        return {name: self.status(name)["state"] for name in self.objects["TokenEntitlement"]}

    def condition(self, name: str, kind: str) -> Mapping[str, Any]:
        """Of an entitlement."""
        return next(each for each in self.status(name)["conditions"] if each["type"] == kind)


def reserved(result: Plan, per_replica: Amounts) -> Amounts:
    """What gateways are told to reserve for bound ones, in dimensions that are enforced."""
    used = (0, 0, 0)
    for each in result.entitlements.values():
        if instant(each.fields.get("expires_at")):
            continue  # of those that tests give one, all have passed
        if each.verdict or each.suspended:  # of what has no pool, only its name is told
            continue
        if each.fields["service_class"] not in {"spot", "preemptible"}:
            resources = {
                "tokensPerSecond": each.fields.get("tokens_per_second"),
                "kvCacheGiB": each.fields.get("kv_cache_gib"),
                "concurrency": each.fields.get("concurrency"),
            }
            used = add(used, only(amounts_of(resources), per_replica))
    return used


def _fits(node: Object, pods: Iterable[Object]) -> bool:
    room = node["status"]["allocatable"]
    used = (0, 0, 0)
    for pod in pods:
        requests = pod["spec"]["containers"][0]["resources"]["requests"]
        if any(name in requests and name not in room for name in EXTENDED):
            return False
        used = add(used, requests_of(pod))
    rate, kv_mib, sequences = (int(parse_quantity(room.get(name, 0))) for name in EXTENDED)
    return within(used, (rate, kv_mib, sequences))


def _merge(target: dict[str, Any], patch: Mapping[str, Any]) -> None:
    for name, value in patch.items():
        if value is None:
            target.pop(name, None)
        elif isinstance(value, Mapping):
            if not isinstance(target.get(name), dict):
                target[name] = {}
            _merge(target[name], value)
        else:
            target[name] = value
