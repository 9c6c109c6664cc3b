"""What an entitlement and a pool are told: their status, and the events of what changed."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Literal

from controller.objects import Claim, Pool, granted_fields, identity_of
from controller.quantity import FIELDS, Amounts, only, resources_of
from controller.records import Call, EventNote, Object, Resource
from controller.scaling import Backend, Goal
from gateway.records.record import Record
from gateway.records.tenancy import ClusterEntitlement

State = Literal["Bound", "Degraded", "Pending", "Expired"]
_LOST: Final = frozenset({"Preempted", "CapacityShrunk", "LeaseLost"})
"""Reasons that stay while what was lost is waited for."""
_WAITS: Final = {
    "Waits": "",
    "Preempted": "its place was taken for one that is guaranteed; ",
    "CapacityShrunk": "the pool shrank below what was allocated; ",
    "LeaseLost": "its lease pod was preempted, evicted or deleted; ",
    "GrowthWaits": "it keeps what it had; ",
}


class Readiness(Record, frozen=True, kw_only=True):
    """Whether a pool can hold anything."""

    ready: bool
    reason: str
    message: str = ""


class Standing(Record, frozen=True, kw_only=True):
    """What an allocator gives an entitlement that is in force, in a pool that is ready."""

    granted: Amounts | None
    """None: it has no place. Amounts are of the dimensions that the pool enforces."""
    reason: str = "Allocated"
    lacking: Sequence[int] = ()
    """Dimensions in which the pool has too little left for the rest."""
    lease_pod: str = ""


class Verdict(Record, frozen=True, kw_only=True):
    """What follows for one entitlement."""

    state: State
    reason: str
    """Of its condition Bound."""
    message: str = ""
    allocated: Mapping[str, Any] | None = None
    """None: nothing is set aside."""
    lease_pod: str = ""

    @property
    def bound(self) -> bool:
        """Whether its requests are served."""
        return self.state == "Bound"


def readiness_of(pool: Pool, backend: Backend) -> Readiness:
    """Whether a pool has replicas that serve."""
    if pool.problem:
        return Readiness(ready=False, reason="InvalidSpec", message=pool.problem)
    if backend.missing and pool.backend is not None:
        message = f"there is no {' '.join(pool.backend)}; create it, or correct spec.backendRef"
        return Readiness(ready=False, reason="BackendMissing", message=message)
    if not backend.ready:
        message = f"pool {pool.name} has no ready replica; it is back with the first one"
        return Readiness(ready=False, reason="NoReadyReplica", message=message)
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
    """The verdict on a claim. `standing` None: it holds nothing, and needs nothing."""
    status = claim.status
    waiting: State = "Degraded" if "boundAt" in status else "Pending"
    if claim.expired(now_unix_s):
        message = "it has ended; set spec.expiresAt to a later time, or delete it"
        return Verdict(state="Expired", reason="Expired", message=message)
    if claim.problem is not None:
        return Verdict(state="Pending", reason="NotAccepted", message=claim.problem[1])
    if claim.suspended:
        return Verdict(state="Pending", reason="Suspended", message="spec.suspend is true")
    if pool is None or not readiness.ready:
        return Verdict(
            state=waiting,
            reason="PoolNotReady",
            message=readiness.message,
            allocated=status.get("allocated") if claim.seated else None,
            lease_pod=status.get("leasePod", "") if claim.seated else "",
        )
    if standing is None:
        return Verdict(state="Bound", reason="NoReserve", message=claim.remark)
    reason, lease_pod = standing.reason, standing.lease_pod
    if standing.granted is None:
        if reason == "Waits" and (last := _last_reason(status, "Bound")) in _LOST:
            reason = last
        message = _waits(claim, pool, reason, standing.lacking)
        return Verdict(state=waiting, reason=reason, message=message, lease_pod=lease_pod)
    message = claim.remark
    if reason == "GrowthWaits":
        message = _waits(claim, pool, reason, standing.lacking)
    allocated = _allocated(claim, pool, standing.granted)
    return Verdict(
        state="Bound", reason=reason, message=message, allocated=allocated, lease_pod=lease_pod
    )


def _allocated(claim: Claim, pool: Pool, granted: Amounts) -> dict[str, Any]:
    """Resources as stated, or, where more is waited for, what was granted of them."""
    stated = claim.source["spec"].get("resources") or {}
    partly, enforced = resources_of(granted), only(claim.wanted, pool.per_replica)
    pairs = zip(FIELDS, enforced, granted, strict=True)
    allocated = {f: stated.get(f) if full == has else partly.get(f) for f, full, has in pairs}
    return {field: amount for field, amount in allocated.items() if amount}


def _waits(claim: Claim, pool: Pool, reason: str, lacking: Sequence[int]) -> str:
    """Why something waits. It names no free amounts, which change with every neighbour."""
    if not lacking:
        return f"{_WAITS[reason]}it waits for the scheduler to bind its lease pod"
    wanted = resources_of(claim.wanted)
    asked = " and ".join(f"{FIELDS[at]} {wanted[FIELDS[at]]:g}" for at in lacking)
    lower = " and ".join(f"resources.{FIELDS[at]}" for at in lacking)
    few = f"pool {pool.name} has too little left of {asked}"
    return f"{_WAITS[reason]}{few}; add replicas, or lower {lower}"


def entitlement_status(
    claim: Claim, readiness: Readiness, verdict: Verdict, now_unix_s: float
) -> dict[str, Any]:
    """The whole status that follows."""
    now, before = _stamp(now_unix_s), claim.status
    accepted = claim.problem or ("KeyMissing" if claim.remark else "Accepted", claim.remark)
    ended = verdict.state == "Expired"
    facts = (
        ("Accepted", claim.problem is None, *accepted),
        ("PoolReady", readiness.ready, readiness.reason, readiness.message),
        ("Bound", verdict.bound, verdict.reason, verdict.message),
        ("Expired", ended, "Ended" if ended else "InTime", ""),
    )
    generation = claim.source["metadata"].get("generation", 0)
    status: dict[str, Any] = {
        "observedGeneration": generation,
        "state": verdict.state,
        "conditions": _conditions(before, facts, generation, now),
        **identity_of(claim),
    }
    if verdict.message:
        status["message"] = verdict.message
    if verdict.bound or "boundAt" in before:
        status["boundAt"] = before.get("boundAt", now)
    if verdict.allocated is not None:
        status["allocated"] = verdict.allocated
    if verdict.lease_pod:
        status["leasePod"] = verdict.lease_pod
    return status


def pool_status(
    pool: Pool,
    backend: Backend,
    readiness: Readiness,
    goal: Goal,
    *,
    capacity: Amounts,
    allocated: Amounts,
    entitlements: tuple[int, int],
    now_unix_s: float,
) -> dict[str, Any]:
    """The whole status that follows. `entitlements`: all that name the pool, and the bound ones."""
    facts = [("Ready", readiness.ready, readiness.reason, readiness.message)]
    if pool.bounds:
        limited = goal.replicas != goal.asked
        reason = "TooManyAsked" if goal.asked > goal.replicas else "TooFewAsked"
        message = f"{goal.asked} asked, {pool.bounds[0]} to {pool.bounds[1]} allowed"
        facts.append(
            ("ScalingLimited", limited, reason if limited else "WithinBounds", message * limited)
        )
    generation = pool.source["metadata"].get("generation", 0)
    before = pool.source.get("status") or {}
    return {
        "observedGeneration": generation,
        "replicas": backend.ready,
        "desiredReplicas": goal.replicas,
        "selector": backend.selector,
        "capacity": _measured(capacity, pool.per_replica),
        "allocated": _measured(allocated, pool.per_replica),
        "entitlements": {"total": entitlements[0], "bound": entitlements[1]},
        "conditions": _conditions(before, facts, generation, _stamp(now_unix_s)),
    }


def _measured(amounts: Amounts, enforced: Amounts) -> dict[str, Any]:
    stated = resources_of(amounts)
    return {f: stated.get(f, 0) for f, each in zip(FIELDS, enforced, strict=True) if each}


def _conditions(
    before: Mapping[str, Any],
    facts: Iterable[tuple[str, bool, str, str]],
    generation: int,
    now: str,
) -> list[dict[str, Any]]:
    known = {condition["type"]: condition for condition in before.get("conditions") or ()}
    result = []
    for kind, true, reason, message in facts:
        status, last = "True" if true else "False", known.get(kind, {})
        since = last["lastTransitionTime"] if last.get("status") == status else now
        result.append(
            {
                "type": kind,
                "status": status,
                "observedGeneration": generation,
                "lastTransitionTime": since,
                "reason": reason,
                "message": message,
            }
        )
    return result


def _last_reason(status: Mapping[str, Any], kind: str) -> str:
    """The reason of a condition as last written; "" if it never was."""
    reasons = (each["reason"] for each in status.get("conditions") or () if each["type"] == kind)
    return next(reasons, "")


def _stamp(unix_s: float) -> str:
    return datetime.fromtimestamp(int(unix_s), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def status_calls(resource: Resource, source: Object, status: Mapping[str, Any]) -> Iterator[Call]:
    """The patch of an object's status, where it differs."""
    if patch := merge_patch(source.get("status") or {}, status):
        name, body = source["metadata"]["name"], {"status": patch}
        yield Call(verb="patch_status", resource=resource, name=name, body=body)


def merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON merge patch that makes the one of the other; {} where they are equal."""
    patch: dict[str, Any] = {name: None for name in before if name not in after}
    for name, value in after.items():
        old = before.get(name)
        if old != value:
            both = isinstance(old, Mapping) and isinstance(value, Mapping)
            patch[name] = merge_patch(old, value) if both else value  # type: ignore[arg-type]
    return patch


def entitlement_events(claim: Claim, verdict: Verdict) -> Iterator[EventNote]:
    """What changed for an entitlement. Of a pool that is not ready, the pool's own event tells."""
    status = claim.status
    last = _last_reason(status, "Bound")
    if (status.get("state"), last) == (verdict.state, verdict.reason) or "PoolNotReady" in {
        last,
        verdict.reason,
    }:
        return
    normal = verdict.reason in {"Allocated", "NoReserve", "Suspended", "Expired"}
    allocated = verdict.allocated or {}
    has = ", ".join(f"{field} {amount:g}" for field, amount in allocated.items())
    yield EventNote(
        regarding=claim.source,
        kind="Normal" if normal else "Warning",
        reason=verdict.reason,
        message=verdict.message or (f"it has {has}" if has else "it is served"),
    )


def pool_events(
    pool: Pool, readiness: Readiness, goal: Goal, backend: Backend
) -> Iterator[EventNote]:
    """What changed for a pool."""
    if _last_reason(pool.source.get("status") or {}, "Ready") != readiness.reason:
        yield EventNote(
            regarding=pool.source,
            kind="Normal" if readiness.ready else "Warning",
            reason=readiness.reason,
            message=readiness.message or f"{backend.ready} of {goal.replicas} replicas are ready",
        )


def published(claim: Claim, pool: Pool, verdict: Verdict, namespace: str) -> ClusterEntitlement:
    """What gateways hold of a claim. Who is suspended or expired is refused by that alone."""
    seated = claim.seated and verdict.allocated is not None
    verdicts: dict[str, Literal["", "pending", "degraded"]]
    verdicts = {"Pending": "pending", "Degraded": "degraded"}
    return ClusterEntitlement(
        name=claim.name,
        fields=granted_fields(claim, pool, verdict.allocated or {}) if seated else claim.fields,
        digests=claim.digests,
        created=claim.created,
        verdict="" if verdict.reason == "Suspended" else verdicts.get(verdict.state, ""),
        message="" if verdict.bound else verdict.message,
        suspended=claim.suspended,
        source=f"TokenEntitlement {namespace}/{claim.name}",
        uid=claim.uid,
    )
