"""What Kubernetes' scheduler and controllers do with pods, nodes and owned objects.

There is no kubelet: a bound pod stays Pending, and one that is deleted with a grace stays, too.
Each step does at once all that is due at the cluster's time. Pods of equal priority are preempted
newest first; Kubernetes does not say which. A disruption of all nodes is no special case.
"""

from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Final

from controller.records import LEASES, NODES, PODS
from tests.kube.builtin import NOT_READY, UNREACHABLE
from tests.kube.objects import Object, at, quantity
from tests.kube.store import CRDS, NAMESPACES, PROPAGATION, Key, Store

MONITOR_GRACE_S: Final = 40.0
"""A node whose Lease and Ready condition did not change for so long is Unknown."""
STARTUP_GRACE_S: Final = 60.0
"""The same for a node that never had a Ready condition."""
ORPHAN_S: Final = 40.0
"""Pods of a node that is gone are collected after this."""
EFFECTS: Final = ("NoSchedule", "NoExecute")


class Controllers:
    """The scheduler, the node lifecycle controller and the collectors of one cluster."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pods, self._nodes = store.of(PODS), store.of(NODES)
        self._heard: dict[str, tuple[Any, float]] = {}
        """Node -> its heartbeat, and when that changed last."""
        self._missing: dict[str, float] = {}
        """Node that pods name -> since when it is gone."""
        self._tainted: dict[tuple[str, str], float] = {}
        """Node and taint -> since when."""

    def step(self) -> None:
        """Do what is due, until nothing more follows from it."""
        for _ in range(100):
            version = self._store.version
            self._collect_owned()
            self._collect_namespaces()
            self._watch_nodes()
            self._evict()
            self._collect_orphans()
            self._schedule()
            if self._store.version == version:
                return
        raise AssertionError("the controllers do not come to rest")

    # -- the scheduler

    def _schedule(self) -> None:
        waiting = [
            pod
            for pod in self._all_pods()
            if not pod["spec"].get("nodeName")
            and not pod["metadata"].get("deletionTimestamp")
            and pod["spec"]["schedulerName"] == "default-scheduler"
        ]
        waiting.sort(key=lambda pod: -pod["spec"]["priority"])
        for pod in waiting:
            nodes = self._store.list(self._nodes)
            lacking = {node["metadata"]["name"]: self._lacking(pod, node) for node in nodes}
            free = [name for name, reasons in lacking.items() if not reasons]
            if free:
                self._bind(pod, free[0])
            else:
                self._leave(pod, list(lacking.values()), self._preempt(pod, nodes, lacking))

    def _lacking(self, pod: Object, node: Object, without: Mapping[str, Object] = {}) -> list[str]:
        """Why a pod does not run on a node, if the pods `without`, by name, were gone."""
        spec, labels = node.get("spec") or {}, node["metadata"].get("labels") or {}
        if spec.get("unschedulable"):
            return ["node(s) were unschedulable"]
        for taint in spec.get("taints") or ():
            if taint["effect"] in EFFECTS and not _tolerated(pod, taint):
                text = f"{taint['key']}: {taint.get('value', '')}"
                return [f"node(s) had taint {{{text}}}, that the pod didn't tolerate"]
        if any(labels.get(k) != v for k, v in (pod["spec"].get("nodeSelector") or {}).items()):
            return ["node(s) didn't match Pod's node affinity"]
        name, count, used = node["metadata"]["name"], 0, dict[str, Fraction]()
        for other in self._all_pods():
            placed, ahead = other["spec"].get("nodeName"), other["spec"]["priority"]
            if not placed and ahead >= pod["spec"]["priority"] and other is not pod:
                placed = other["status"].get("nominatedNodeName")
            if placed == name and other["metadata"]["uid"] not in without:
                count += 1
                for resource, amount in _requests(other).items():
                    used[resource] = used.get(resource, Fraction()) + amount
        allocatable = {k: quantity(v) for k, v in node["status"].get("allocatable", {}).items()}
        reasons = ["Too many pods"] if count + 1 > allocatable.get("pods", 0) else []
        return reasons + [
            f"Insufficient {resource}"
            for resource, amount in _requests(pod).items()
            if amount and used.get(resource, 0) + amount > allocatable.get(resource, 0)
        ]

    def _bind(self, pod: Object, node: str) -> None:
        status = {k: v for k, v in pod["status"].items() if k != "nominatedNodeName"}
        condition = {"type": "PodScheduled", "status": "True", "lastProbeTime": None}
        placed = {**pod, "spec": {**pod["spec"], "nodeName": node}, "status": status}
        self._commit_pod(_with_condition(placed, condition, self._store))

    def _leave(self, pod: Object, reasons: list[list[str]], nominated: str | None) -> None:
        counted = Counter(reason for of_node in reasons for reason in of_node)
        listed = ", ".join(f"{count} {reason}" for reason, count in sorted(counted.items()))
        some = f"0/{len(reasons)} nodes are available: {listed}."
        condition = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": some if reasons else "no nodes available to schedule pods",
            "lastProbeTime": None,
        }
        left = _with_condition(pod, condition, self._store)
        if nominated:
            left = {**left, "status": {**left["status"], "nominatedNodeName": nominated}}
        if left != pod:
            self._commit_pod(left)

    def _preempt(
        self, pod: Object, nodes: list[Object], lacking: Mapping[str, list[str]]
    ) -> str | None:
        """Delete the pods that a pod takes the place of; the node that they were on."""
        priority, nominated = pod["spec"]["priority"], pod["status"].get("nominatedNodeName")
        if pod["spec"]["preemptionPolicy"] == "Never":
            return None
        placed = [p for p in self._all_pods() if p["spec"].get("nodeName")]
        lower = [p for p in placed if p["spec"]["priority"] < priority]
        for other in lower:  # it waits for the ones that it took the place of
            if other["spec"]["nodeName"] == nominated and "deletionTimestamp" in other["metadata"]:
                return None
        found: list[tuple[tuple[int, int, int], str, list[Object]]] = []
        for node in nodes:
            name = node["metadata"]["name"]
            here = [p for p in lower if p["spec"]["nodeName"] == name]
            gone = {p["metadata"]["uid"]: p for p in here}
            shortage = all(r.startswith(("Insufficient", "Too many")) for r in lacking[name])
            if not here or not shortage or self._lacking(pod, node, gone):
                continue
            for spared in sorted(here, key=lambda p: -p["spec"]["priority"]):
                fewer = {uid: p for uid, p in gone.items() if p is not spared}
                if not self._lacking(pod, node, fewer):
                    gone = fewer
            victims = list(gone.values())
            ranks = [p["spec"]["priority"] for p in victims]
            found.append(((max(ranks), sum(ranks), len(ranks)), name, victims))
        if not found:
            return None
        _, name, victims = min(found, key=lambda candidate: candidate[:2])
        for victim in victims:
            self._delete(victim)
        return name

    # -- nodes

    def _watch_nodes(self) -> None:
        """Nodes that send no heartbeat are Unknown, and conditions become taints."""
        now, store = self._store.clock.now(), self._store
        for known_node in store.list(self._nodes):
            node, name = known_node, known_node["metadata"]["name"]
            lease = store.objects.get((store.of(LEASES).collection, "kube-node-lease", name))
            conditions = {c["type"]: c for c in at(node, ["status", "conditions"]) or ()}
            ready = conditions.get("Ready", {})
            beat = (
                node["metadata"]["uid"],
                at(lease, ["spec", "renewTime"]),
                ready.get("lastHeartbeatTime") if ready.get("status") != "Unknown" else None,
            )
            known, since = self._heard.get(name, (None, now))
            if known is None or any(b and b != k for b, k in zip(beat, known, strict=True)):
                since = now
            self._heard[name] = (beat, since)
            if now - since > (MONITOR_GRACE_S if ready else STARTUP_GRACE_S):
                reason = "NodeStatusUnknown" if ready else "NodeStatusNeverUpdated"
                unknown = {"type": "Ready", "status": "Unknown", "reason": reason}
                unknown["message"] = "Kubelet stopped posting node status."
                node = _with_condition(node, {**ready, **unknown}, store)
            tainted = self._tainted_node(node)
            if tainted != known_node:
                store.commit((self._nodes.collection, "", name), tainted)

    def _tainted_node(self, node: Object) -> Object:
        conditions = {c["type"]: c["status"] for c in at(node, ["status", "conditions"]) or ()}
        wanted = {"False": NOT_READY, "Unknown": UNREACHABLE}.get(conditions.get("Ready", ""), "")
        name, spec = node["metadata"]["name"], node.get("spec") or {}
        taints = [
            taint
            for taint in spec.get("taints") or ()
            if taint["key"] not in (NOT_READY, UNREACHABLE) or taint["key"] == wanted
        ]
        for effect in EFFECTS if wanted else ():
            if not any(t["key"] == wanted and t["effect"] == effect for t in taints):
                taints.append(
                    {"key": wanted, "effect": effect, "timeAdded": self._store.clock.stamp()}
                )
                self._tainted[(name, wanted)] = self._store.clock.now()
        return {**node, "spec": {**spec, "taints": taints}}

    def _evict(self) -> None:
        """Pods leave nodes whose NoExecute taints they do not tolerate (any more)."""
        now = self._store.clock.now()
        nodes = {node["metadata"]["name"]: node for node in self._store.list(self._nodes)}
        for pod in self._all_pods():
            node = nodes.get(pod["spec"].get("nodeName", ""))
            if node is None or pod["metadata"].get("deletionTimestamp"):
                continue
            for taint in (node.get("spec") or {}).get("taints") or ():
                if taint["effect"] != "NoExecute":
                    continue
                since = self._tainted.get((node["metadata"]["name"], taint["key"]), now)
                bearing = [t for t in pod["spec"]["tolerations"] if _tolerates(t, taint)]
                limits = [t["tolerationSeconds"] for t in bearing if "tolerationSeconds" in t]
                if not bearing or (limits and now >= since + min(limits)):
                    self._delete(pod)
                    break

    # -- collectors

    def _collect_orphans(self) -> None:
        """Pods of nodes that are gone."""
        now = self._store.clock.now()
        nodes = {node["metadata"]["name"] for node in self._store.list(self._nodes)}
        named = {p["spec"]["nodeName"] for p in self._all_pods() if p["spec"].get("nodeName")}
        self._missing = {n: self._missing.get(n, now) for n in named - nodes}
        for pod in self._all_pods():
            if now - self._missing.get(pod["spec"].get("nodeName", ""), now) > ORPHAN_S:
                self._delete(pod, gracePeriodSeconds=0)

    def _collect_owned(self) -> None:
        """Objects whose owners are all gone, or are deleted in the foreground."""
        present = {o["metadata"]["uid"]: (key, o) for key, o in self._store.objects.items()}
        owned: dict[str, list[Key]] = {}
        for key, obj in list(self._store.objects.items()):
            owners = obj["metadata"].get("ownerReferences") or ()
            for owner in owners:
                owned.setdefault(owner["uid"], []).append(key)
            living = [
                o for o in owners if o["uid"] in present and present[o["uid"]][0][1] in ("", key[1])
            ]
            if owners and not living:
                self._delete_key(key)
        for uid, (key, obj) in present.items():
            finalizers = obj["metadata"].get("finalizers") or []
            if key not in self._store.objects or not obj["metadata"].get("deletionTimestamp"):
                continue
            dependents = [k for k in owned.get(uid, ()) if k in self._store.objects]
            if PROPAGATION["Orphan"] in finalizers:
                for dependent in dependents:
                    self._disown(dependent, uid)
                self._finish(key, PROPAGATION["Orphan"])
            elif PROPAGATION["Foreground"] in finalizers:
                for dependent in dependents:
                    self._delete_key(dependent)
                if not any(k in self._store.objects for k in dependents):
                    self._finish(key, PROPAGATION["Foreground"])

    def _collect_namespaces(self) -> None:
        for space in self._store.list(self._store.of(NAMESPACES)):
            name = space["metadata"]["name"]
            if not space["metadata"].get("deletionTimestamp"):
                continue
            for key in [key for key in self._store.objects if key[1] == name]:
                self._delete_key(key)
            if not any(key[1] == name for key in self._store.objects):
                self._finish(("namespaces", "", name), "kubernetes")

    # -- objects

    def _all_pods(self) -> list[Object]:
        """Oldest first."""
        name = self._pods.collection
        return [pod for key, pod in self._store.objects.items() if key[0] == name]

    def _commit_pod(self, pod: Object) -> None:
        metadata = pod["metadata"]
        self._store.commit((self._pods.collection, metadata["namespace"], metadata["name"]), pod)

    def _delete(self, pod: Object, **options: Any) -> None:
        metadata = pod["metadata"]
        self._store.delete(self._pods, metadata["namespace"], metadata["name"], options)

    def _delete_key(self, key: Key) -> None:
        if key[0] == self._store.of(CRDS).collection:
            return
        served = next(s for s in self._store.served.values() if s.collection == key[0])
        if key in self._store.objects:
            self._store.delete(served, key[1], key[2])

    def _disown(self, key: Key, uid: str) -> None:
        obj = self._store.objects[key]
        owners = [o for o in obj["metadata"]["ownerReferences"] if o["uid"] != uid]
        metadata = {**obj["metadata"], "ownerReferences": owners}
        self._store.commit(key, {**obj, "metadata": metadata})

    def _finish(self, key: Key, finalizer: str) -> None:
        """Take a finalizer off, after whose work is done; the last one lets the object go."""
        obj = self._store.objects[key]
        left = [f for f in obj["metadata"]["finalizers"] if f != finalizer]
        metadata = {**obj["metadata"], "finalizers": left}
        self._store.commit(key, {**obj, "metadata": metadata} if left else None)


def _requests(pod: Object) -> dict[str, Fraction]:
    total: dict[str, Fraction] = {}
    for container in pod["spec"]["containers"]:
        for name, amount in container["resources"].get("requests", {}).items():
            total[name] = total.get(name, Fraction()) + quantity(amount)
    return total


def _tolerated(pod: Object, taint: Object) -> bool:
    return any(_tolerates(toleration, taint) for toleration in pod["spec"]["tolerations"])


def _tolerates(toleration: Object, taint: Object) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    key, exists = toleration.get("key"), toleration.get("operator") == "Exists"
    same = bool(toleration.get("value", "") == taint.get("value", ""))
    return (exists or same) if key == taint["key"] else (exists and not key)


def _with_condition(obj: Object, condition: Object, store: Store) -> Object:
    """With a condition changed. Its transition is now, where its status is another one."""
    status = obj.get("status") or {}
    conditions = list(status.get("conditions") or ())
    for number, known in enumerate(conditions):
        if known["type"] == condition["type"]:
            same = known["status"] == condition["status"]
            since = known.get("lastTransitionTime") if same else store.clock.stamp()
            conditions[number] = {**condition, "lastTransitionTime": since}
            break
    else:
        conditions.append({**condition, "lastTransitionTime": store.clock.stamp()})
    return {**obj, "status": {**status, "conditions": conditions}}
