"""What entitlements and pools are told: status, conditions, and events of what changed.

A message names no amount that changes with every neighbour: a status is written only where it
differs, and one that waits would be written with every change of the pool.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Literal

from controller.objects import Claim, Pool, granted_fields
from controller.quantity import FIELDS, Amounts, only, resources_of, times
from controller.records import Call, EventNote, Object, Resource
from controller.scaling import Backend, Goal
from gateway.records.record import Record
from gateway.records.tenancy import ClusterEntitlement

_LOST: Final = {
    "Preempted": "its place was taken for one that is guaranteed; ",
    "CapacityShrunk": "the pool shrank below what was allocated; ",
    "LeaseLost": "its lease pod was preempted, evicted or deleted; ",
}
"""Reasons that stay while the place is waited for, in words."""
_QUIET: Final = frozenset({"PoolNotReady", "Scheduling"})
"""Reasons without events: the pool has one of its own, and schedulers take milliseconds."""
_NORMAL: Final = frozenset({"Allocated", "NoReserve", "Suspended", "Expired", "ReplicasReady"})
"""Reasons of events that ask for nothing."""


class Readiness(Record, frozen=True, kw_only=True):
    """Whether a pool can hold anything."""

    ready: bool
    reason: str
    message: str = ""
    on_demand: bool = False
    """It is not ready, but the first request of one that reserves nothing starts a replica."""


class Standing(Record, frozen=True, kw_only=True):
    """What an allocator gives an entitlement that is in force, in a pool that is ready."""

    granted: Amounts | None
    """None: it has no place. Amounts are of the dimensions that the pool enforces."""
    reason: str
    lacking: Sequence[int] = ()
    """Dimensions in which the pool has too little left for the rest."""
    lease_pod: str = ""


class Verdict(Record, frozen=True, kw_only=True):
    """What follows for one entitlement."""

    state: Literal["Bound", "Degraded", "Pending", "Expired"]
    reason: str
    """Of its condition Bound."""
    message: str = ""
    allocated: Mapping[str, Any] | None = None
    """None: nothing is set aside."""
    lease_pod: str = ""


def readiness_of(pool: Pool, backend: Backend) -> Readiness:
    """Whether a pool has replicas that serve."""
    if pool.problem:
        return Readiness(ready=False, reason="InvalidSpec", message=pool.problem)
    if backend.missing and pool.backend is not None:
        message = f"there is no {' '.join(pool.backend)}; create it, or correct spec.backendRef"
        return Readiness(ready=False, reason="BackendMissing", message=message)
    if not backend.ready:
        message = f"pool {pool.name} has no ready replica; it is back with the first one"
        on_demand = pool.bounds is not None and not pool.bounds[0]
        return Readiness(ready=False, reason="NoReadyReplica", message=message, on_demand=on_demand)
    return Readiness(ready=True, reason="ReplicasReady")


def no_pool(name: str) -> Readiness:
    """Of a pool that is not there."""
    message = f"there is no TokenPool {name}; create it, or delete this TokenEntitlement"
    return Readiness(ready=False, reason="NoTokenPool", message=message)


def judge(
    claim: Claim,
    pool: Pool | None,
    readiness: Readiness,
    standing: Standing | None,
    now_unix_s: float,
) -> Verdict:
    """The verdict on a claim. `standing` None: its class takes no place in the pool."""
    status = claim.status
    waiting: Literal["Degraded", "Pending"] = "Degraded" if "boundAt" in status else "Pending"
    if claim.expired(now_unix_s):
        message = "it has ended; set spec.expiresAt to a later time, or delete it"
        return Verdict(state="Expired", reason="Expired", message=message)
    if claim.problem is not None:
        return Verdict(state="Pending", reason="NotAccepted", message=claim.problem[1])
    if claim.suspended:
        return Verdict(state="Pending", reason="Suspended", message="spec.suspend is true")
    reserves = claim.seated and any(claim.wanted)
    if readiness.on_demand and not reserves:  # gateways refuse its requests, and count them
        return Verdict(state="Bound", reason="NoReserve", message=claim.remark)
    if pool is None or not readiness.ready:  # its place is kept for when the pool is back
        return Verdict(
            state=waiting,
            reason="PoolNotReady",
            message=readiness.message,
            allocated=status.get("allocated") if claim.seated else None,
            lease_pod=status.get("leasePod", "") if claim.seated else "",
        )
    if standing is None:
        return Verdict(state="Bound", reason="NoReserve", message=claim.remark)
    reason, message = standing.reason, claim.remark
    if reason in {"Waits", "Scheduling"} and (last := _last_reason(status, "Bound")) in _LOST:
        reason = last
    if reason != "Allocated":
        message = f"{_LOST.get(reason, '')}{_lack(claim, pool, standing.lacking)}"
    bound, granted = standing.granted is not None, standing.granted
    return Verdict(
        state="Bound" if bound else waiting,
        reason=reason,
        message=message,
        allocated=None if granted is None else _allocated(claim, pool, granted),
        lease_pod=standing.lease_pod,
    )


def _allocated(claim: Claim, pool: Pool, granted: Amounts) -> dict[str, Any]:
    """Resources as stated, or, where more is waited for, what was granted of them."""
    stated = claim.source["spec"].get("resources") or {}
    partly, wanted = resources_of(granted), only(claim.wanted, pool.per_replica)
    triples = zip(FIELDS, wanted, granted, strict=True)
    allocated = {f: stated.get(f) if full == has else partly.get(f) for f, full, has in triples}
    return {field: amount for field, amount in allocated.items() if amount}


def _lack(claim: Claim, pool: Pool, lacking: Sequence[int]) -> str:
    if not lacking:
        return "it waits for the scheduler to bind its lease pod"
    wanted, fields = resources_of(claim.wanted), [FIELDS[at] for at in lacking]
    asked = " and ".join(f"{field} {wanted[field]:.15g}" for field in fields)
    lower = " and ".join(f"resources.{field}" for field in fields)
    return f"pool {pool.name} has too little left for {asked}; add replicas, or lower {lower}"


def entitlement_status(
    claim: Claim, readiness: Readiness, verdict: Verdict, now_unix_s: float
) -> dict[str, Any]:
    """The whole status that follows."""
    now, before = stamp(now_unix_s), claim.status
    bound, ended = verdict.state == "Bound", verdict.state == "Expired"
    accepted = claim.problem or ("KeyMissing" if claim.remark else "Accepted", claim.remark)
    facts = (
        ("Accepted", claim.problem is None, *accepted),
        ("PoolReady", readiness.ready, readiness.reason, readiness.message),
        ("Bound", bound, verdict.reason, verdict.message),
        ("Expired", ended, "Ended" if ended else "InTime", ""),
    )
    generation = claim.source["metadata"].get("generation", 0)
    optional = {
        "message": verdict.message or None,
        "boundAt": before.get("boundAt", now if bound else None),
        "allocated": verdict.allocated,
        "leasePod": verdict.lease_pod or None,
        "model": claim.fields.get("model"),
    }
    return {
        "observedGeneration": generation,
        "state": verdict.state,
        "conditions": _conditions(before, facts, generation, now),
        **claim.identity,
        **{name: value for name, value in optional.items() if value is not None},
    }


def pool_status(
    pool: Pool,
    backend: Backend,
    goal: Goal,
    *,
    allocated: Amounts,
    total: int,
    bound: int,
    now_unix_s: float,
) -> dict[str, Any]:
    """The whole status that follows. `total` and `bound`: entitlements that name the pool."""
    readiness = readiness_of(pool, backend)
    facts = [("Ready", readiness.ready, readiness.reason, readiness.message)]
    if pool.bounds:
        limited = goal.asked > pool.bounds[1]
        reason = "TooManyReplicas" if limited else "WithinBounds"
        message = f"it would take {goal.asked} replicas; raise scaling.maxReplicas" * limited
        facts.append(("ScalingLimited", limited, reason, message))
    generation = pool.source["metadata"].get("generation", 0)
    before = pool.status
    return {
        "observedGeneration": generation,
        "replicas": backend.ready,
        "desiredReplicas": goal.replicas,
        "selector": backend.selector,
        "capacity": _measured(times(pool.per_replica, backend.ready), pool),
        "allocated": _measured(allocated, pool),
        "entitlements": {"total": total, "bound": bound},
        "conditions": _conditions(before, facts, generation, stamp(now_unix_s)),
    }


def _measured(amounts: Amounts, pool: Pool) -> dict[str, Any]:
    stated, enforced = resources_of(amounts), zip(FIELDS, pool.per_replica, strict=True)
    return {field: stated.get(field, 0) for field, amount in enforced if amount}


def _conditions(
    before: Mapping[str, Any],
    facts: Iterable[tuple[str, bool, str, str]],
    generation: int,
    now: str,
) -> list[dict[str, Any]]:
    """Conditions of (type, whether true, reason, message). The time is of the last transition."""
    former = {condition["type"]: condition for condition in before.get("conditions") or ()}
    result = []
    for kind, true, reason, message in facts:
        status, last = "True" if true else "False", former.get(kind, {})
        condition = {"type": kind, "status": status, "observedGeneration": generation}
        since = last["lastTransitionTime"] if last.get("status") == status else now
        result.append(
            {**condition, "lastTransitionTime": since, "reason": reason, "message": message}
        )
    return result


def stamp(unix_s: float) -> str:
    """A time as objects have it."""
    return datetime.fromtimestamp(int(unix_s), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def status_calls(resource: Resource, source: Object, status: Mapping[str, Any]) -> Iterator[Call]:
    """The patch of an object's status, where it differs.

    It requires the version that was read: of another object of that name, created since, such a
    patch would say in part what the former one had, and what it can never change.
    """
    before = source.get("status")
    if before != status:
        before = before if isinstance(before, dict) else {}
        metadata = source["metadata"]
        body = {
            "metadata": {"resourceVersion": metadata["resourceVersion"]},
            "status": merge_patch(before, status),
        }
        yield Call(verb="patch_status", resource=resource, name=metadata["name"], body=body)


def merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON merge patch that makes the one of the other; {} where they are equal."""
    patch: dict[str, Any] = {name: None for name in before if name not in after}
    for name, value in after.items():
        old = before.get(name)
        if isinstance(old, dict) and isinstance(value, dict) and old != value:
            patch[name] = merge_patch(old, value)
        elif old != value:
            patch[name] = value
    return patch


def _last_reason(status: Mapping[str, Any], kind: str) -> str:
    """The reason of a condition as last written; "" if it never was."""
    conditions = status.get("conditions") or ()
    return next((c["reason"] for c in conditions if c["type"] == kind), "")


def entitlement_events(claim: Claim, verdict: Verdict) -> Iterator[EventNote]:
    """What changed for an entitlement. That its pool is away or back, the pool's events tell."""
    last = _last_reason(claim.status, "Bound")
    changed = (claim.status.get("state"), last) != (verdict.state, verdict.reason)
    if changed and verdict.reason not in _QUIET and last != "PoolNotReady":
        has = ", ".join(f"{name} {value:.15g}" for name, value in (verdict.allocated or {}).items())
        yield _event(claim.source, verdict.reason, verdict.message or f"it has {has or 'the rest'}")


def pool_events(pool: Pool, backend: Backend, goal: Goal) -> Iterator[EventNote]:
    """What changed for a pool."""
    readiness = readiness_of(pool, backend)
    if _last_reason(pool.status, "Ready") != readiness.reason:
        ready = f"{backend.ready} of {goal.replicas} replicas are ready"
        yield _event(pool.source, readiness.reason, readiness.message or ready)


def _event(regarding: Object, reason: str, message: str) -> EventNote:
    kind: Literal["Normal", "Warning"] = "Normal" if reason in _NORMAL else "Warning"
    return EventNote(regarding=regarding, kind=kind, reason=reason, message=message)


def published(
    claim: Claim, pool: Pool | None, verdict: Verdict, namespace: str
) -> ClusterEntitlement:
    """What gateways hold of a claim. One that is suspended or expired is refused for that alone."""
    verdicts: dict[str, Literal["", "pending", "degraded"]]
    verdicts = {"Bound": "", "Pending": "pending", "Degraded": "degraded"}
    fields = claim.fields
    if pool is not None and verdict.allocated is not None:
        fields = granted_fields(claim, pool, verdict.allocated)
    # Gateways refuse with 403 what is suspended or has ended.
    ended = verdict.state == "Expired" and "expires_at" in fields
    refused = ended or verdict.reason == "Suspended"
    return ClusterEntitlement(
        name=claim.name,
        fields=fields,
        digests=claim.digests,
        created=claim.created,
        verdict="" if refused else verdicts.get(verdict.state, "degraded"),
        message="" if verdict.state == "Bound" else verdict.message,
        suspended=claim.suspended,
        source=f"TokenEntitlement {namespace}/{claim.name}",
        uid=claim.uid,
    )
