"""What admission and validation do with the kinds that Kubernetes brings: what matters here."""

import base64
import copy
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from tests.kube.objects import Object, Refused, canonical, quantity

if TYPE_CHECKING:
    from tests.kube.store import Store

NOT_READY: Final = "node.kubernetes.io/not-ready"
UNREACHABLE: Final = "node.kubernetes.io/unreachable"
MICRO_TIME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}(Z|[+-]\d\d:\d\d)")
CLASSES: Final = "priorityclasses.scheduling.k8s.io"


def admitted(collection: str, obj: Object, old: Object | None, store: "Store") -> Object:
    """With what the API server sets by itself. Raises Refused."""
    obj = copy.deepcopy(obj)
    if collection == "pods":
        _canonical_pod(obj)
        if old is None:
            _admit_pod(obj, store)
    elif collection == "nodes":
        status = obj.setdefault("status", {})
        for field in ("capacity", "allocatable"):
            if field in status:
                status[field] = _canonical(status[field])
        for condition in status.get("conditions", ()):  # times have whole seconds
            for field in ("lastHeartbeatTime", "lastTransitionTime"):
                if condition.get(field):
                    condition[field] = re.sub(r"\.\d+", "", condition[field])
        if "capacity" in status:
            status.setdefault("allocatable", status["capacity"])
        if old is None:
            taints = obj.setdefault("spec", {}).setdefault("taints", [])
            taints.append({"key": NOT_READY, "effect": "NoSchedule"})
    elif collection == "secrets":
        data = obj.setdefault("data", {})
        for key, text in (obj.pop("stringData", None) or {}).items():
            data[key] = base64.b64encode(text.encode()).decode()
        obj.setdefault("type", "Opaque")
    elif collection == "namespaces":
        obj.setdefault("status", {"phase": "Active"})
    elif collection == CLASSES:
        obj.setdefault("preemptionPolicy", "PreemptLowerPriority")
    elif collection == "customresourcedefinitions.apiextensions.k8s.io":
        kinds = ("NamesAccepted", "Established")
        conditions = [{"type": kind, "status": "True", "reason": "Emulated"} for kind in kinds]
        obj["status"] = {"conditions": conditions, "acceptedNames": obj["spec"]["names"]}
    elif collection.endswith(".apps"):
        obj.setdefault("spec", {}).setdefault("replicas", 1)
    return obj


def problems(collection: str, obj: Object, old: Object | None) -> list[str]:
    """What is invalid in an object. Raises Refused for what is none of its kind."""
    checks: dict[str, Callable[[Object, Object | None], Iterator[str]]] = {
        "pods": _pod_problems,
        "nodes": _node_problems,
        CLASSES: _class_problems,
        "events.events.k8s.io": _event_problems,
        "leases.coordination.k8s.io": _lease_problems,
        "secrets": _secret_problems,
        "deployments.apps": _workload_problems,
        "statefulsets.apps": _workload_problems,
    }
    return list(checks[collection](obj, old)) if collection in checks else []


def grace_s(pod: Object, options: Mapping[str, Any]) -> int:
    """Seconds that a pod's deletion waits for its kubelet: 0 where it has none."""
    if not pod["spec"].get("nodeName") or pod["status"]["phase"] in ("Succeeded", "Failed"):
        return 0
    given = options.get("gracePeriodSeconds")
    return int(pod["spec"]["terminationGracePeriodSeconds"] if given is None else given)


def is_extended(name: str) -> bool:
    """A resource that only whole numbers of can be had, and never more than there is."""
    domain, slash, _ = name.partition("/")
    return bool(slash) and not (domain == "kubernetes.io" or domain.endswith(".kubernetes.io"))


# -- pods


def _admit_pod(pod: Object, store: "Store") -> None:
    spec = pod["spec"]
    defaults = {
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": 30,
        "schedulerName": "default-scheduler",
        "serviceAccountName": "default",
        "tolerations": [],
    }
    for field, value in defaults.items():
        spec.setdefault(field, value)
    name = pod["metadata"]["name"]
    wanted, given = spec.get("priorityClassName"), spec.get("priority")
    spec["priority"], spec["preemptionPolicy"] = 0, "PreemptLowerPriority"
    if wanted:
        found = store.objects.get((CLASSES, "", wanted))
        if found is None:
            why = f"no PriorityClass with name {wanted} was found"
            raise Refused(403, "Forbidden", f'pods "{name}" is forbidden: {why}')
        spec["priority"], spec["preemptionPolicy"] = found["value"], found["preemptionPolicy"]
    if given not in (None, spec["priority"]):
        why = f"the integer value of priority ({given}) must not be provided in pod spec"
        raise Refused(403, "Forbidden", f'pods "{name}" is forbidden: {why}')
    for key in (NOT_READY, UNREACHABLE):
        if not any(t.get("key", key) == key for t in spec["tolerations"]):
            own = {"key": key, "operator": "Exists", "effect": "NoExecute"}
            spec["tolerations"] = [*spec["tolerations"], {**own, "tolerationSeconds": 300}]
    pod["status"] = {"phase": "Pending", "qosClass": "BestEffort"}


def _canonical(amounts: Mapping[str, Any]) -> Object:
    try:
        return {name: canonical(amount) for name, amount in amounts.items()}
    except ValueError as error:
        raise Refused(400, "BadRequest", f"unable to parse quantity's suffix: {error}") from None


def _canonical_pod(pod: Object) -> None:
    for container in (pod.get("spec") or {}).get("containers") or ():
        resources = container.setdefault("resources", {})
        for field in ("limits", "requests"):
            if field in resources:
                resources[field] = _canonical(resources[field])
        if "limits" in resources:  # what is not requested is as limited
            resources["requests"] = {**resources["limits"], **resources.get("requests", {})}


def _pod_problems(pod: Object, old: Object | None) -> Iterator[str]:
    spec = pod.get("spec") or {}
    if old is not None:
        free = ("tolerations", "activeDeadlineSeconds", "containers")
        kept, given = ({k: v for k, v in s.items() if k not in free} for s in (old["spec"], spec))
        images = [{**c, "image": ""} for c in spec["containers"]]
        if kept != given or images != [{**c, "image": ""} for c in old["spec"]["containers"]]:
            what = "`spec.containers[*].image`, `spec.initContainers[*].image`"
            yield f"spec: Forbidden: pod updates may not change fields other than {what}"
    for number, toleration in enumerate(spec.get("tolerations", ())):
        if "tolerationSeconds" in toleration and toleration.get("effect") != "NoExecute":
            where = f"spec.tolerations[{number}].effect: Invalid value"
            yield f"{where}: effect must be 'NoExecute' when `tolerationSeconds` is set"
    if not spec.get("containers"):
        yield "spec.containers: Required value"
    for number, container in enumerate(spec.get("containers") or ()):
        path = f"spec.containers[{number}]"
        for field in ("name", "image"):
            if not container.get(field):
                yield f"{path}.{field}: Required value"
        limits = container["resources"].get("limits", {})
        requests = container["resources"].get("requests", {})
        for field, amounts in (("limits", limits), ("requests", requests)):
            for name, amount in amounts.items():
                where = f"{path}.resources.{field}[{name}]: Invalid value: {amount}"
                if quantity(amount) < 0:
                    yield f"{where}: must be greater than or equal to 0"
                if is_extended(name) and quantity(amount).denominator != 1:
                    yield f"{where}: must be an integer"
        for name, amount in requests.items():
            limit, where = limits.get(name), f"{path}.resources.requests: Invalid value"
            if is_extended(name) and limit is None:
                why = "Limit must be set for non overcommitable resources"
                yield f"{path}.resources.limits: Required value: {why}"
            elif is_extended(name) and quantity(amount) != quantity(limit):
                yield f'{where}: "{amount}": must be equal to {name} limit'
            elif limit is not None and quantity(amount) > quantity(limit):
                yield f'{where}: "{amount}": must be less than or equal to {name} limit'


# -- the others


def _node_problems(node: Object, _old: Object | None) -> Iterator[str]:
    for field in ("capacity", "allocatable"):
        for name, amount in node["status"].get(field, {}).items():
            if is_extended(name) and quantity(amount).denominator != 1:
                where = f"status.{field}.{name}: Invalid value: {amount}"
                yield f"{where}: must be an integer"


def _class_problems(given: Object, old: Object | None) -> Iterator[str]:
    for field in ("value", "preemptionPolicy"):
        if old is not None and old[field] != given[field]:
            yield f"{field}: Forbidden: may not be changed in an update."
    if given["value"] > 1_000_000_000:
        yield "value: Forbidden: maximum allowed value of a user defined priority is 1000000000"


def _event_problems(event: Object, old: Object | None) -> Iterator[str]:
    _check_times(event, "eventTime")
    before = event if old is None else old
    for field, value in event.items():
        if field not in ("metadata", "series") and before.get(field) != value:
            yield f"{field}: Invalid value: field is immutable"
    series = event.get("series")
    if series is not None and (series.get("count", 0) < 2 or not series.get("lastObservedTime")):
        yield "series.count: Invalid value: should be at least 2, and lastObservedTime is required"
    if not event.get("eventTime"):
        yield "eventTime: Required value"
    for field in ("reportingController", "reportingInstance", "action", "reason"):
        if not event.get(field):
            yield f"{field}: Required value"
        elif len(event[field]) > 128:
            yield f"{field}: Invalid value: can have at most 128 characters"
    if event.get("type") not in ("Normal", "Warning"):
        yield 'type: Invalid value: "": has invalid value'
    if len(event.get("note", "")) > 1024:
        yield "note: Invalid value: can have at most 1024 characters"
    namespace = event["metadata"]["namespace"]
    if not event.get("regarding", {}).get("namespace") and namespace not in (
        "default",
        "kube-system",
    ):
        yield 'involvedObject.namespace: Invalid value: "": does not match event.namespace'


def _lease_problems(lease: Object, _old: Object | None) -> Iterator[str]:
    spec = lease.get("spec") or {}
    _check_times(spec, "renewTime", "acquireTime")
    bounds = {"leaseDurationSeconds": (1, "0"), "leaseTransitions": (0, "or equal to 0")}
    for field, (least, bound) in bounds.items():
        value = spec.get(field)
        if value is not None and not isinstance(value, int):
            raise Refused(400, "BadRequest", f"Lease cannot be handled as a Lease: {field}")
        if value is not None and value < least:
            yield f"spec.{field}: Invalid value: {value}: must be greater than {bound}"


def _secret_problems(secret: Object, old: Object | None) -> Iterator[str]:
    if old is not None and old["type"] != secret["type"]:
        yield f'type: Invalid value: "{secret["type"]}": field is immutable'


def _workload_problems(workload: Object, _old: Object | None) -> Iterator[str]:
    status, replicas = workload.get("status") or {}, workload["spec"]["replicas"]
    if replicas < 0:
        why = "must be greater than or equal to 0"
        yield f"spec.replicas: Invalid value: {replicas}: {why}"
    ready = status.get("readyReplicas", 0)
    if ready > status.get("replicas", 0):
        why = "cannot be greater than status.replicas"
        yield f"status.readyReplicas: Invalid value: {ready}: {why}"


def _check_times(obj: Mapping[str, Any], *fields: str) -> None:
    """Times with microseconds have six digits of them. Raises Refused."""
    for field in fields:
        if obj.get(field) and not MICRO_TIME.fullmatch(obj[field]):
            layout = "2006-01-02T15:04:05.000000Z07:00"
            why = f'parsing time "{obj[field]}" as "{layout}": cannot parse'
            raise Refused(400, "BadRequest", why)
