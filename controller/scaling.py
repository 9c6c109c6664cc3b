"""Replicas of a pool: those that are ready, and those that it should have."""

from collections.abc import Iterable, Mapping, Sequence

from controller.allocation import Seat, allocate, total
from controller.objects import MAX_REPLICAS, Pool
from controller.quantity import Amounts, times
from controller.records import BACKENDS, Call, Object, World
from gateway.records.record import Record


class Backend(Record, frozen=True, kw_only=True):
    """What serves a pool, as it is now."""

    ready: int
    """Replicas."""
    replicas: int | None = None
    """As its scale subresource has them; None: it has none."""
    selector: str = ""
    """Of its pods; "" if unknown."""
    missing: bool = False
    """The object that the pool refers to is not there."""


class Goal(Record, frozen=True, kw_only=True):
    """How many replicas a pool should have."""

    replicas: int
    asked: int
    """For all that is wanted, whatever the bounds."""


def backend_of(pool: Pool, world: World, engines: Sequence[Object]) -> Backend:
    """The backend of a pool. `engines`: the pods that an InferencePool may select."""
    if pool.problem:
        return Backend(ready=0)
    if pool.backend is None:
        assumed = pool.replicas
        if assumed is None:
            assumed = pool.bounds[0] if pool.bounds else 1
        return Backend(ready=_bounded(assumed, pool))
    source = world.backends.get(pool.backend)
    kinds = {pool.backend[0], "Pod" if pool.backend[0] == "InferencePool" else ""}
    if kinds & world.unread:  # nothing is taken away for that
        status = pool.status
        return Backend(ready=status.get("replicas", 0), selector=status.get("selector", ""))
    if source is None:
        return Backend(ready=0, missing=True)
    spec, status = source.get("spec") or {}, source.get("status") or {}
    if pool.backend[0] == "InferencePool":
        labels = (spec.get("selector") or {}).get("matchLabels") or {}
        ready = sum(1 for pod in engines if labels and _serves(pod, labels))
        return Backend(ready=ready, selector=selector_of(source))
    return Backend(
        ready=status.get("readyReplicas") or 0,
        replicas=spec.get("replicas", 1),
        selector=status.get("hpaPodSelector") or selector_of(source),
    )


def goal_of(pool: Pool, seats: Sequence[Seat], demand: Mapping[tuple[str, str], int]) -> Goal:
    """Replicas for the demand of the gateways, and for every reserve that the bounds can hold."""
    if pool.replicas is not None:
        return Goal(replicas=_bounded(pool.replicas, pool), asked=pool.replicas)
    served = sum(
        replicas
        for (model, name), replicas in demand.items()
        if model == pool.model and pool.gateway_pool in {"", name}
    )
    wanted = total(seat.wanted for seat in seats)
    asked = holding = _replicas(wanted, pool.per_replica)
    if pool.bounds and holding > pool.bounds[1]:  # those that never fit count for nothing
        most = times(pool.per_replica, pool.bounds[1])
        holding = _replicas(total(allocate(most, seats).granted.values()), pool.per_replica)
    return Goal(replicas=_bounded(max(holding, served), pool), asked=max(asked, served))


def scale_calls(pool: Pool, backend: Backend, goal: Goal) -> Iterable[Call]:
    """The change of the backend's scale, where the pool's bounds let the controller make one."""
    if pool.bounds is None or pool.backend is None or backend.replicas in {None, goal.replicas}:
        return
    kind, name = pool.backend
    body = {"spec": {"replicas": goal.replicas}}
    yield Call(verb="patch_scale", resource=BACKENDS[kind], name=name, body=body)


def _replicas(wanted: Amounts, per_replica: Amounts) -> int:
    pairs = zip(wanted, per_replica, strict=True)
    return max((-(-amount // unit) for amount, unit in pairs if unit), default=0)


def _bounded(replicas: int, pool: Pool) -> int:
    fewest, most = pool.bounds or (0, MAX_REPLICAS)
    return min(max(replicas, fewest), most)


def _serves(pod: Object, labels: Mapping[str, str]) -> bool:
    """Whether a pod has these labels, and is ready."""
    metadata, conditions = pod["metadata"], (pod.get("status") or {}).get("conditions") or ()
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
    alike = labels.items() <= (metadata.get("labels") or {}).items()
    return ready and alike and "deletionTimestamp" not in metadata


def selector_of(backend: Object) -> str:
    """The label selector of a backend's pods, as a query has it."""
    selector = (backend.get("spec") or {}).get("selector") or {}
    terms = [f"{name}={value}" for name, value in (selector.get("matchLabels") or {}).items()]
    for rule in selector.get("matchExpressions") or ():
        key, operator = rule["key"], rule["operator"]
        if operator in {"In", "NotIn"}:
            terms.append(f"{key} {operator.lower()} ({','.join(rule['values'])})")
        else:
            terms.append(key if operator == "Exists" else f"!{key}")
    return ",".join(terms)
