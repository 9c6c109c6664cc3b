"""Capacity as the cluster's own scheduler sees it: a node of a pool, and a lease pod of each place.

A virtual node has the pool's capacity as extended resources. A lease pod runs nothing: it requests
an entitlement's baseline, and is bound once `spec.nodeName` is set, whatever its phase. The
scheduler decides who gets a place, and takes places of elastic ones by priority. What it does not
do is decided here: who leaves when the capacity shrinks, and how a pod, which cannot change,
becomes a larger or smaller one.

The name of a lease pod has a hash of what it requests, so a change of anything else keeps it.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from math import ceil
from typing import Any, Final

from controller.allocation import Allocation, Seat, allocate, fit_held, total
from controller.objects import Claim, Pool
from controller.quantity import (
    EXTENDED,
    NOTHING,
    Amounts,
    amounts_of,
    only,
    parse_quantity,
    subtract,
    within,
)
from controller.records import GROUP, NODES, PODS, TOKEN_ENTITLEMENTS, Call, Object, Resource, World
from controller.verdict import Standing, merge_patch, stamp
from gateway.records.record import Record

POOL_LABEL: Final = f"{GROUP}/pool"
"""Of virtual nodes and lease pods: NAMESPACE.POOL."""
POD_LABEL: Final = f"{GROUP}/entitlement"
"""Of lease pods: the uid of their entitlement."""
HEARTBEAT_S: Final = 300.0
"""The condition Ready of a node is written anew so often; its Lease, every 10 seconds."""
_TAINT: Final = {"key": f"{GROUP}/virtual", "value": "true", "effect": "NoSchedule"}
_AWAY: Final = [
    {"key": f"node.kubernetes.io/{state}", "operator": "Exists"}
    for state in ("not-ready", "unreachable")
]
_NO_BALANCER: Final = "node.kubernetes.io/exclude-from-external-load-balancers"
_NO_COMPUTE: Final = {"cpu": "0", "memory": "0"}
"""Of nodes, so that nothing else runs there, and of pods, lest a namespace's defaults are put."""
_POD_SECURITY: Final = {
    "runAsNonRoot": True,
    "runAsUser": 65534,
    "seccompProfile": {"type": "RuntimeDefault"},
}
_CONTAINER_SECURITY: Final = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
LeasePods = Mapping[str, Sequence[Object]]
"""By the uid of their entitlement; without those that are being deleted."""


class _Place(Record, frozen=True, kw_only=True):
    """An entitlement's lease pods."""

    name: str
    """Of the pod that requests what it wants now."""
    current: Object | None
    """That pod."""
    bound: Object | None
    """The one that counts: the current one, or one of an earlier request until that is replaced."""
    stale: Sequence[Object]
    """All others."""


def node_name(namespace: str, pool: str) -> str:
    """The name of a pool's virtual node. A namespace has no dot, so that no other has this name."""
    return _short(f"sluice-{namespace}.{pool}", 253)


def pool_label(namespace: str, pool: str) -> str:
    """The value of POOL_LABEL."""
    return _short(f"{namespace}.{pool}", 63)


def lease_pods(world: World) -> LeasePods:
    """All lease pods of the namespace."""
    by_uid = defaultdict(list)
    for pod in world.pods.values():
        uid = (pod["metadata"].get("labels") or {}).get(POD_LABEL)
        if uid and "deletionTimestamp" not in pod["metadata"]:
            by_uid[uid].append(pod)
    return by_uid


def requests_of(pod: Object) -> Amounts:
    """What a lease pod takes of its node."""
    requests = [
        (each.get("resources") or {}).get("requests") or {} for each in pod["spec"]["containers"]
    ]  # others may have put containers beside it
    rate, kv_mib, sequences = (
        sum(ceil(parse_quantity(each.get(name, 0))) for each in requests) for name in EXTENDED
    )
    return rate, kv_mib, sequences


def lease_plan(
    world: World, pool: Pool, claims: Mapping[str, Claim], capacity: Amounts, pods: LeasePods
) -> tuple[dict[str, Standing], list[Call]]:
    """The standings of the claims that take places in a pool, and what changes of their pods."""
    places = {
        name: _place(_pod_name(world, pool, claim), pods.get(claim.uid, ()))
        for name, claim in claims.items()
    }
    seats = [_seat(claims[name], pool, place) for name, place in places.items()]
    seats.sort(key=lambda seat: (seat.held is None, not seat.reserving, seat.created, seat.name))
    fit, goal = fit_held(capacity, seats), allocate(capacity, seats)
    bound = (pod for claim in claims.values() for pod in pods.get(claim.uid, ()) if _is_bound(pod))
    free = subtract(capacity, total(only(requests_of(pod), pool.per_replica) for pod in bound))
    standings: dict[str, Standing] = {}
    deletes, creates = list[Call](), list[Call]()
    for seat in seats:
        claim, place = claims[seat.name], places[seat.name]
        gone = list(place.stale)
        wanted, lease_pod = place.current is None, place.name
        if place.bound is None:
            if seat.name in fit:  # on the move
                lease_pod = claim.status.get("leasePod", "")
        elif seat.name not in fit:  # it waits with another pod, once this one is gone
            gone, wanted = [*gone, place.bound], False
        else:
            lease_pod = place.bound["metadata"]["name"]
            if place.bound is not place.current:
                wanted, leaving, taken = _replace(seat, place, goal, free)
                gone, free = [*gone, *leaving], subtract(free, taken)
        deletes += map(_delete, gone)
        if wanted and place.name not in world.pods:  # one that is leaving has the name still
            body = _lease_pod(world, pool, claim, place.name)
            creates.append(Call(verb="create", resource=PODS, name=place.name, body=body))
        granted, lacking = fit.get(seat.name), goal.lacking.get(seat.name, ())
        if granted == seat.wanted:
            reason = "Allocated"
        elif granted is None and seat.held is not None:
            reason = "CapacityShrunk"
        elif granted is None and "allocated" in claim.status:
            reason = "LeaseLost"
        else:
            waits = "Waits" if granted is None else "GrowthWaits"
            reason = waits if lacking else "Scheduling"
        standings[seat.name] = Standing(
            granted=granted, reason=reason, lacking=lacking, lease_pod=lease_pod
        )
    return standings, deletes + creates


def _place(name: str, pods: Sequence[Object]) -> _Place:
    alive = [pod for pod in pods if not _is_over(pod)]
    current = next((pod for pod in alive if pod["metadata"]["name"] == name), None)
    bound = [pod for pod in alive if _is_bound(pod)]
    counts = current if current in bound else next(iter(bound), None)
    stale = [pod for pod in pods if pod is not current and pod is not counts]
    return _Place(name=name, current=current, bound=counts, stale=stale)


def _seat(claim: Claim, pool: Pool, place: _Place) -> Seat:
    """A claim's seat: what it holds is what its bound pod requests.

    While its pod is replaced by one of another size, it holds what it was last allocated.
    """
    status = claim.status
    if place.bound is not None:
        return claim.seat(pool, requests_of(place.bound))
    if "allocated" in status and status.get("leasePod") != place.name:
        return claim.seat(pool, amounts_of(status["allocated"]), moving=True)
    return claim.seat(pool, None)


def _replace(
    seat: Seat, place: _Place, goal: Allocation, free: Amounts
) -> tuple[bool, Sequence[Object], Amounts]:
    """How a pod follows a bound one of another size: whether to create it, whom to delete before.

    A larger one is created beside the old one where both fit. Where the old one has to go first,
    it goes only if its place and what is free, or may be taken, hold the new one. The last in the
    answer is what it takes of the free capacity.
    """
    held, old = seat.held or NOTHING, [] if place.bound is None else [place.bound]
    if within(seat.wanted, held):
        return True, old, NOTHING
    if within(seat.wanted, free):
        return True, (), seat.wanted
    if goal.granted.get(seat.name) == seat.wanted:
        return True, old, subtract(seat.wanted, held)
    # Bound beside the old one, a pod that waits already would take the places of others.
    return False, [] if place.current is None else [place.current], NOTHING


def node_calls(world: World, pool: Pool, capacity: Amounts) -> tuple[list[Call], float]:
    """What changes of a pool's virtual node, and when its heartbeat is due in Unix seconds."""
    name, calls = node_name(world.namespace, pool.name), list[Call]()
    labels = {POOL_LABEL: pool_label(world.namespace, pool.name), _NO_BALANCER: "true"}
    node: Object = world.nodes.get(name, {"metadata": {}})
    taints = node.get("spec", {}).get("taints") or []
    tainted = any(_TAINT.items() <= taint.items() for taint in taints)
    if not tainted or not labels.items() <= (node["metadata"].get("labels") or {}).items():
        taints = taints if tainted else [*taints, _TAINT]
        body: Object = {"metadata": {"name": name, "labels": labels}, "spec": {"taints": taints}}
        if name in world.nodes:
            calls.append(Call(verb="patch", resource=NODES, name=name, body=body))
        else:
            body = {"apiVersion": NODES.api_version, "kind": NODES.kind, **body}
            calls.append(Call(verb="create", resource=NODES, name=name, body=body))
    status, now = node.get("status", {}), stamp(world.now_unix_s)
    triples = zip(EXTENDED, capacity, pool.per_replica, strict=True)
    wanted = {key: str(amount) for key, amount, enforced in triples if enforced}
    wanted |= {**_NO_COMPUTE, "pods": "1000000"}
    patch: dict[str, Any] = {}
    for part in ("capacity", "allocatable"):
        ours = {key: value for key, value in status.get(part, {}).items() if key in _RESOURCES}
        # The API writes quantities in its own way: 1000 becomes 1k.
        if {key: parse_quantity(value) for key, value in ours.items()} != {
            key: parse_quantity(value) for key, value in wanted.items()
        }:
            patch[part] = merge_patch(ours, wanted)
    conditions = status.get("conditions") or []
    last: Object = next((c for c in conditions if c["type"] == "Ready"), {})
    ready = last.get("status") == "True"
    due_unix_s = _unix_s(last.get("lastHeartbeatTime")) + HEARTBEAT_S
    if patch or not ready or world.now_unix_s >= due_unix_s:
        heard = {"type": "Ready", "status": "True", "reason": "VirtualNode", "message": ""}
        heard["lastHeartbeatTime"] = now
        heard["lastTransitionTime"] = last["lastTransitionTime"] if ready else now
        patch["conditions"] = [*(c for c in conditions if c is not last), heard]
        body = {"status": patch}
        calls.append(Call(verb="patch_status", resource=NODES, name=name, body=body))
        due_unix_s = _unix_s(now) + HEARTBEAT_S
    return calls, due_unix_s


_RESOURCES: Final = frozenset({*EXTENDED, *_NO_COMPUTE, "pods"})


def leftover_calls(
    world: World, pools: Iterable[str], seated: Iterable[Claim], pods: LeasePods
) -> Iterator[Call]:
    """Deletion of the nodes of pools, and of the pods of entitlements, that have none any more."""
    labels = {pool_label(world.namespace, pool) for pool in pools}
    for node in world.nodes.values():
        label = (node["metadata"].get("labels") or {}).get(POOL_LABEL, "")
        if label not in labels and label.startswith(f"{world.namespace}."):
            yield _delete(node, NODES)
    for uid in sorted(pods.keys() - {claim.uid for claim in seated}):
        yield from map(_delete, pods[uid])


def _delete(target: Object, resource: Resource = PODS) -> Call:
    metadata = target["metadata"]
    return Call(verb="delete", resource=resource, name=metadata["name"], uid=metadata["uid"])


def _is_over(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") in {"Failed", "Succeeded"}


def _is_bound(pod: Object) -> bool:
    return bool(pod["spec"].get("nodeName")) and not _is_over(pod)


def _unix_s(time: str | None) -> float:
    return datetime.fromisoformat(time).timestamp() if time else 0.0


def _priority_class(claim: Claim) -> str:
    return "sluice-reserved" if claim.reserving else "sluice-elastic"


def _requests(claim: Claim, pool: Pool) -> dict[str, str]:
    amounts = zip(EXTENDED, only(claim.wanted, pool.per_replica), strict=True)
    return _NO_COMPUTE | {key: str(amount) for key, amount in amounts if amount}


def _pod_name(world: World, pool: Pool, claim: Claim) -> str:
    request = pool_label(world.namespace, pool.name), _priority_class(claim), _requests(claim, pool)
    return f"{claim.name}-{claim.uid[:8]}-{_hash(json.dumps(request, sort_keys=True))}"


def _lease_pod(world: World, pool: Pool, claim: Claim, name: str) -> Object:
    """A pod that takes a place and runs nothing: there is no kubelet behind its node."""
    label, requests = pool_label(world.namespace, pool.name), _requests(claim, pool)
    owner = {
        "apiVersion": TOKEN_ENTITLEMENTS.api_version,
        "kind": TOKEN_ENTITLEMENTS.kind,
        "name": claim.name,
        "uid": claim.uid,
        "controller": True,
    }
    container = {
        "name": "lease",
        "image": "none",
        "imagePullPolicy": "Never",
        "resources": {"requests": requests, "limits": requests},
        "securityContext": _CONTAINER_SECURITY,
    }
    return {
        "apiVersion": PODS.api_version,
        "kind": PODS.kind,
        "metadata": {
            "name": name,
            "labels": {POD_LABEL: claim.uid, POOL_LABEL: label},
            "ownerReferences": [owner],
        },
        "spec": {
            "nodeSelector": {POOL_LABEL: label},
            "tolerations": [_TAINT | {"operator": "Equal"}, *_AWAY],
            "priorityClassName": _priority_class(claim),
            "terminationGracePeriodSeconds": 0,  # nobody would confirm a later end
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": _POD_SECURITY,
            "containers": [container],
        },
    }


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _short(text: str, most: int) -> str:
    """A name of at most so many characters; a longer one ends in its hash."""
    return text if len(text) <= most else f"{text[: most - 9]}-{_hash(text)}"
