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
from datetime import UTC, datetime
from math import ceil
from typing import Any, Final

from controller.allocation import Seat, allocate, fit_held, total
from controller.objects import Claim, Pool
from controller.quantity import (
    EXTENDED,
    Amounts,
    add,
    amounts_of,
    only,
    parse_quantity,
    subtract,
    within,
)
from controller.records import GROUP, NODES, PODS, TOKEN_ENTITLEMENTS, Call, Object, World
from controller.verdict import Standing, merge_patch
from gateway.records.record import Record

POOL_LABEL: Final = f"{GROUP}/pool"
"""Of virtual nodes: NAMESPACE.POOL."""
POD_LABEL: Final = f"{GROUP}/entitlement"
"""Of lease pods: the uid of their entitlement."""
TAINT: Final = {"key": f"{GROUP}/virtual", "value": "true", "effect": "NoSchedule"}
NO_BALANCER: Final = "node.kubernetes.io/exclude-from-external-load-balancers"
HEARTBEAT_S: Final = 300.0
"""The condition Ready of a node is written anew so often; its Lease, every 10 seconds."""
PODS_PER_NODE: Final = "1000000"


class Place(Record, frozen=True, kw_only=True):
    """The lease pods of one entitlement."""

    name: str
    """Of the pod that requests what the entitlement wants now."""
    pods: tuple[Object, ...] = ()

    @property
    def current(self) -> Object | None:
        """The pod of that name."""
        return next((pod for pod in self.pods if pod["metadata"]["name"] == self.name), None)

    @property
    def placed(self) -> Object | None:
        """The bound pod that counts: the current one, before one of an earlier request."""
        bound = [pod for pod in self.pods if is_placed(pod)]
        bound.sort(key=lambda pod: pod["metadata"]["name"] != self.name)
        return bound[0] if bound else None


def node_name(namespace: str, pool: str) -> str:
    """The name of a pool's virtual node."""
    return _bounded(f"sluice-{namespace}-{pool}", 253)


def pool_label(namespace: str, pool: str) -> str:
    """The value of POOL_LABEL: of a node, and what lease pods select it by."""
    return _bounded(f"{namespace}.{pool}", 63)


def is_placed(pod: Object) -> bool:
    """Whether a pod has its place on a node."""
    over = (pod.get("status") or {}).get("phase") in {"Failed", "Succeeded"}
    leaving = "deletionTimestamp" in pod["metadata"]
    return bool((pod.get("spec") or {}).get("nodeName")) and not over and not leaving


def requests_of(pod: Object) -> Amounts:
    """What a lease pod takes of its node."""
    requests = pod["spec"]["containers"][0].get("resources", {}).get("requests", {})
    rate, kv_mib, sequences = (ceil(parse_quantity(requests.get(name, 0))) for name in EXTENDED)
    return rate, kv_mib, sequences


def places_of(world: World, pool: Pool, claims: Iterable[Claim]) -> dict[str, Place]:
    """The lease pods of a pool's claims, by name."""
    by_uid = lease_pods(world)
    return {
        claim.name: Place(
            name=_pod_name(world.namespace, pool, claim), pods=tuple(by_uid.get(claim.uid, ()))
        )
        for claim in claims
    }


def lease_pods(world: World) -> Mapping[str, Sequence[Object]]:
    """All lease pods, by the uid of their entitlement."""
    by_uid = defaultdict(list)
    for pod in world.pods.values():
        if uid := (pod["metadata"].get("labels") or {}).get(POD_LABEL):
            by_uid[uid].append(pod)
    return by_uid


def seat_of(claim: Claim, pool: Pool, place: Place) -> Seat:
    """A claim's seat: what it holds is what its bound pod requests.

    While its pod is replaced by one of another size, it holds what it was last allocated.
    """
    held, moving, status = None, False, claim.status
    if (pod := place.placed) is not None:
        held = only(requests_of(pod), pool.per_replica)
    elif "allocated" in status and status.get("leasePod") != place.name:
        held, moving = only(amounts_of(status["allocated"]), pool.per_replica), True
    return Seat(
        name=claim.name,
        created=claim.created,
        reserving=claim.reserving,
        wanted=only(claim.wanted, pool.per_replica),
        held=held,
        moving=moving,
    )


class _Changes:
    """The lease pods to delete and to create for one pool."""

    def __init__(self, world: World, pool: Pool) -> None:
        self._world = world
        self._pool = pool
        self.deletes: list[Call] = []
        self.creates: list[Call] = []

    def delete(self, *pods: Object) -> None:
        self.deletes += [delete_call(pod) for pod in pods]

    def create(self, claim: Claim, place: Place) -> None:
        if place.name not in self._world.pods:  # one that is leaving still has the name
            body = _lease_pod(self._world.namespace, self._pool, claim, place.name)
            self.creates.append(Call(verb="create", resource=PODS, name=place.name, body=body))


def lease_plan(
    world: World, pool: Pool, claims: Mapping[str, Claim], capacity: Amounts
) -> tuple[dict[str, Standing], list[Call]]:
    """The standings of a pool's claims that take places, and the changes of their lease pods."""
    places = places_of(world, pool, claims.values())
    seats = [seat_of(claims[name], pool, place) for name, place in places.items()]
    seats.sort(key=lambda seat: (seat.held is None, not seat.reserving, seat.created, seat.name))
    fit, goal = fit_held(capacity, seats), allocate(capacity, seats)
    placed = [pod for place in places.values() for pod in place.pods if is_placed(pod)]
    free = subtract(capacity, total(only(requests_of(pod), pool.per_replica) for pod in placed))
    changes, standings = _Changes(world, pool), {}
    for seat in seats:
        claim, place = claims[seat.name], places[seat.name]
        current, pod = place.current, place.placed
        stale = [each for each in place.pods if each is not current and each is not pod]
        name = place.name if pod is None or seat.name not in fit else pod["metadata"]["name"]
        if current is not None and _is_over(current):
            stale.append(current)
        if pod is not None and seat.name not in fit:
            stale.append(pod)  # it waits again with a new one, once this one is gone
        elif pod is None:
            changes.create(claim, place)
            if seat.moving and seat.name in fit:
                name = claim.status.get("leasePod", "")
        elif pod is not current:
            free = _replace(seat, claim, place, changes, free=free, goal=goal.granted)
        changes.delete(*stale)
        reason = _reason(seat, fit, lost="allocated" in claim.status)
        lacking = goal.lacking.get(seat.name, ())
        standings[seat.name] = Standing(
            granted=fit.get(seat.name), reason=reason, lacking=lacking, lease_pod=name
        )
    return standings, changes.deletes + changes.creates


def _replace(
    seat: Seat,
    claim: Claim,
    place: Place,
    changes: _Changes,
    *,
    free: Amounts,
    goal: Mapping[str, Amounts],
) -> Amounts:
    """Put a pod of another size in the place of a bound one. Returns what stays free.

    A larger one is created beside the old one where both fit. Where the old one has to go first,
    it goes only if its place and what is free, or may be taken, hold the new one.
    """
    old = place.placed
    if old is None or seat.held is None:
        return free
    if within(seat.wanted, seat.held):
        changes.delete(old)
        changes.create(claim, place)
    elif within(seat.wanted, free):
        changes.create(claim, place)
        return subtract(free, seat.wanted)
    elif goal.get(seat.name) == seat.wanted:
        changes.delete(old)
        changes.create(claim, place)
        return subtract(add(free, seat.held), seat.wanted)
    elif place.current is not None:  # bound beside the old one, it would take places of others
        changes.delete(place.current)
    return free


def _reason(seat: Seat, fit: Mapping[str, Amounts], *, lost: bool) -> str:
    if seat.name in fit:
        return "Allocated" if fit[seat.name] == seat.wanted else "GrowthWaits"
    if seat.held is not None:
        return "CapacityShrunk"
    return "LeaseLost" if lost else "Waits"


def delete_call(pod: Object) -> Call:
    """The deletion of a lease pod."""
    metadata = pod["metadata"]
    return Call(verb="delete", resource=PODS, name=metadata["name"], uid=metadata.get("uid", ""))


def node_calls(world: World, pool: Pool, capacity: Amounts) -> tuple[list[Call], float]:
    """The changes of a pool's virtual node, and when its heartbeat is due."""
    name = node_name(world.namespace, pool.name)
    node: Object | None = world.nodes.get(name)
    labels = {POOL_LABEL: pool_label(world.namespace, pool.name), NO_BALANCER: "true"}
    calls, now = [], datetime.fromtimestamp(int(world.now_unix_s), UTC)
    if node is None:
        node = {
            "apiVersion": NODES.api_version,
            "kind": NODES.kind,
            "metadata": {"name": name, "labels": labels},
            "spec": {"taints": [TAINT]},
        }
        calls.append(Call(verb="create", resource=NODES, name=name, body=node))
    elif patch := _identity_patch(node, labels):
        calls.append(Call(verb="patch", resource=NODES, name=name, body=patch))
    status, stamp = node.get("status") or {}, now.strftime("%Y-%m-%dT%H:%M:%SZ")
    wanted = {
        **{
            key: str(n)
            for key, n, each in zip(EXTENDED, capacity, pool.per_replica, strict=True)
            if each
        },
        "cpu": "0",
        "memory": "0",
        "pods": PODS_PER_NODE,
    }
    patch = {}
    for part in ("capacity", "allocatable"):
        ours = {key: value for key, value in status.get(part, {}).items() if key in _OURS}
        same = ours.keys() == wanted.keys() and all(
            parse_quantity(ours[key]) == parse_quantity(value) for key, value in wanted.items()
        )
        if not same:
            patch[part] = merge_patch(ours, wanted)
    conditions = status.get("conditions") or []
    last: Object = next((each for each in conditions if each["type"] == "Ready"), {})
    beat_s = _unix_s(last.get("lastHeartbeatTime"))
    ready = last.get("status") == "True"
    if patch or not ready or world.now_unix_s >= beat_s + HEARTBEAT_S:
        beat_s = now.timestamp()
        heard = {
            "type": "Ready",
            "status": "True",
            "reason": "VirtualNode",
            "message": "capacity of a TokenPool",
            "lastHeartbeatTime": stamp,
            "lastTransitionTime": last.get("lastTransitionTime", stamp) if ready else stamp,
        }
        others = [each for each in conditions if each["type"] != "Ready"]
        body = {"status": {**patch, "conditions": [*others, heard]}}
        calls.append(Call(verb="patch_status", resource=NODES, name=name, body=body))
    return calls, beat_s + HEARTBEAT_S


_OURS: Final = frozenset({*EXTENDED, "cpu", "memory", "pods"})


def leftover_calls(world: World, pools: Iterable[str], seated: Iterable[Claim]) -> Iterator[Call]:
    """Deletion of the nodes of pools, and of the pods of entitlements, that have none any more."""
    labels = {pool_label(world.namespace, pool) for pool in pools}
    for name, node in world.nodes.items():
        label = (node["metadata"].get("labels") or {}).get(POOL_LABEL, "")
        if label not in labels and label.startswith(f"{world.namespace}."):
            uid = node["metadata"].get("uid", "")
            yield Call(verb="delete", resource=NODES, name=name, uid=uid)
    uids = {claim.uid for claim in seated}
    for uid, pods in lease_pods(world).items():
        if uid not in uids:
            yield from map(delete_call, pods)


def _identity_patch(node: Object, labels: Mapping[str, str]) -> dict[str, Any]:
    """What a node lacks of its labels and its taint."""
    patch: dict[str, Any] = {}
    have = node["metadata"].get("labels") or {}
    if missing := {key: value for key, value in labels.items() if have.get(key) != value}:
        patch["metadata"] = {"labels": missing}
    taints = (node.get("spec") or {}).get("taints") or []
    if not any(TAINT.items() <= taint.items() for taint in taints):
        patch["spec"] = {"taints": [*taints, TAINT]}
    return patch


def _unix_s(stamp: str | None) -> float:
    return datetime.fromisoformat(stamp).timestamp() if stamp else 0.0


def _is_over(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") in {"Failed", "Succeeded"}


def _priority_class(claim: Claim) -> str:
    return "sluice-reserved" if claim.reserving else "sluice-elastic"


def _requests(claim: Claim, pool: Pool) -> dict[str, str]:
    amounts = only(claim.wanted, pool.per_replica)
    extended = {key: str(n) for key, n in zip(EXTENDED, amounts, strict=True) if n}
    return {"cpu": "0", "memory": "0", **extended}  # 0: no namespace's default is put there


def _pod_name(namespace: str, pool: Pool, claim: Claim) -> str:
    identity = [pool_label(namespace, pool.name), _priority_class(claim), _requests(claim, pool)]
    return f"{claim.name}-{claim.uid[:8]}-{_hash(json.dumps(identity, sort_keys=True))}"


def _lease_pod(namespace: str, pool: Pool, claim: Claim, name: str) -> Object:
    """A pod that takes a place and runs nothing: there is no kubelet behind its node."""
    label, requests = pool_label(namespace, pool.name), _requests(claim, pool)
    owner = {
        "apiVersion": TOKEN_ENTITLEMENTS.api_version,
        "kind": TOKEN_ENTITLEMENTS.kind,
        "name": claim.name,
        "uid": claim.uid,
        "controller": True,
    }
    away = [
        {"key": f"node.kubernetes.io/{state}", "operator": "Exists"}
        for state in ("not-ready", "unreachable")
    ]
    container = {
        "name": "lease",
        "image": "none",
        "imagePullPolicy": "Never",
        "resources": {"requests": requests, "limits": requests},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
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
            "tolerations": [{**TAINT, "operator": "Equal"}, *away],
            "priorityClassName": _priority_class(claim),
            "terminationGracePeriodSeconds": 0,  # nobody would confirm a later end
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 65534,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
        },
    }


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _bounded(text: str, most: int) -> str:
    """A name of at most so many characters; a longer one ends in its hash."""
    return text if len(text) <= most else f"{text[: most - 9]}-{_hash(text)}"
