"""What follows from the world: `plan`, a pure function. The loop makes its calls, and asks again.

Each plan is made of the whole world, so a controller may stop after any call. What it publishes
never counts more than a pool's capacity. Calls come in this order: capacity of nodes, places that
are given up, places that are asked for, what objects are told, replicas.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal

from controller import verdict, virtual_node
from controller.allocation import Seat, allocate, total
from controller.objects import Claim, Pool, read_claim, read_pool
from controller.quantity import NOTHING, Amounts, amounts_of, only, times
from controller.records import TOKEN_ENTITLEMENTS, TOKEN_POOLS, Call, EventNote, Plan, World
from controller.scaling import Backend, backend_of, goal_of, scale_calls
from controller.verdict import Readiness, Standing, Verdict
from gateway.records.record import Record
from gateway.records.tenancy import ClusterEntitlement


class Settings(Record, frozen=True, kw_only=True):
    """How the controller allocates."""

    allocator: Literal["internal", "virtual-node"] = "internal"
    """virtual-node: by the cluster's scheduler, with a virtual node for each pool."""


def plan(world: World, settings: Settings) -> Plan:
    """What follows from a world. The same world gives the same plan."""
    pools = {name: read_pool(source) for name, source in sorted(world.pools.items())}
    claims = _read_claims(world, pools)
    by_pool: dict[str, dict[str, Claim]] = defaultdict(dict)
    for claim in claims:
        by_pool[claim.pool][claim.name] = claim
    engines = [
        pod
        for pod in world.pods.values()
        if virtual_node.POD_LABEL not in (pod["metadata"].get("labels") or {})
    ]
    draft = _Draft(world, settings)
    for name, pool in pools.items():
        draft.add_pool(pool, backend_of(pool, world, engines), by_pool.pop(name, {}))
    for name, orphans in by_pool.items():
        for claim in orphans.values():
            draft.add_claim(claim, None, verdict.no_pool(name), None)
    draft.take_leftovers(pools, claims)
    return draft.finish()


class _Draft:
    """A plan while it is made, pool by pool."""

    def __init__(self, world: World, settings: Settings) -> None:
        self._world = world
        self._virtual = settings.allocator == "virtual-node"
        self._due_unix_s: list[float] = []
        self._nodes: list[Call] = []
        self._leases: list[Call] = []
        self._statuses: list[Call] = []
        self._scales: list[Call] = []
        self._events: list[EventNote] = []
        self._published: dict[str, ClusterEntitlement] = {}

    def add_pool(self, pool: Pool, backend: Backend, claims: Mapping[str, Claim]) -> None:
        """Add a pool, and all that name it."""
        world, readiness = self._world, verdict.readiness_of(pool, backend)
        capacity = times(pool.per_replica, backend.ready)
        seated = {
            name: claim
            for name, claim in claims.items()
            if claim.seated and claim.in_force(world.now_unix_s)
        }
        standings: dict[str, Standing] = {}
        seats = [_seat(claim, pool) for claim in seated.values()]
        if self._virtual:
            calls, due_unix_s = virtual_node.node_calls(world, pool, capacity)
            self._nodes += calls
            self._due_unix_s.append(due_unix_s)
            if readiness.ready:
                standings, calls = virtual_node.lease_plan(world, pool, seated, capacity)
                self._leases += calls
        elif readiness.ready:
            standings = _standings(seats, capacity)
        bound, allocated = 0, []
        for name, claim in claims.items():
            standing = standings.get(name)
            if self.add_claim(claim, pool, readiness, standing).bound:
                bound += 1
                allocated.append((standing and standing.granted) or NOTHING)
        goal = goal_of(pool, seats, world.demand)
        status = verdict.pool_status(
            pool,
            backend,
            readiness,
            goal,
            capacity=capacity,
            allocated=total(allocated),
            entitlements=(len(claims), bound),
            now_unix_s=world.now_unix_s,
        )
        self._statuses += verdict.status_calls(TOKEN_POOLS, pool.source, status)
        self._events += verdict.pool_events(pool, readiness, goal, backend)
        self._scales += scale_calls(pool, backend, goal)

    def add_claim(
        self,
        claim: Claim,
        pool: Pool | None,
        readiness: Readiness,
        standing: Standing | None,
    ) -> Verdict:
        """Add an entitlement, of a pool or of none that is there."""
        now_unix_s = self._world.now_unix_s
        result = verdict.judge(claim, pool, readiness, standing, now_unix_s)
        status = verdict.entitlement_status(claim, readiness, result, now_unix_s)
        self._statuses += verdict.status_calls(TOKEN_ENTITLEMENTS, claim.source, status)
        self._events += verdict.entitlement_events(claim, result)
        if claim.expires_unix_s > now_unix_s:
            self._due_unix_s.append(claim.expires_unix_s)
        if pool is not None and claim.fields:
            namespace = self._world.namespace
            self._published[claim.name] = verdict.published(claim, pool, result, namespace)
        return result

    def take_leftovers(self, pools: Mapping[str, Pool], claims: Sequence[Claim]) -> None:
        """Remove nodes and pods that nothing stands behind any more."""
        if self._virtual:
            now_unix_s = self._world.now_unix_s
            seated = (c for c in claims if c.seated and c.in_force(now_unix_s) and c.pool in pools)
            calls = tuple(virtual_node.leftover_calls(self._world, pools, seated))
            self._leases = [*calls, *self._leases]

    def finish(self) -> Plan:
        """The whole plan."""
        return Plan(
            calls=(*self._nodes, *self._leases, *self._statuses, *self._scales),
            entitlements=self._published,
            events=tuple(self._events),
            next_unix_s=min(self._due_unix_s, default=None),
        )


def _read_claims(world: World, pools: Mapping[str, Pool]) -> list[Claim]:
    """All entitlements that are not being deleted, the oldest first.

    A key opens one entitlement: the oldest of those that name it.
    """
    claims = []
    for source in world.entitlements.values():
        if "deletionTimestamp" not in source["metadata"]:
            ref = (source.get("spec") or {}).get("poolRef") or {}
            claims.append(read_claim(source, pools.get(ref.get("name", "")), world.digests))
    claims.sort(key=lambda claim: (claim.created, claim.name))
    owners: dict[str, str] = {}
    for at, claim in enumerate(claims):
        taken = [d for d in claim.digests if owners.setdefault(d, claim.name) != claim.name]
        if taken:
            claims[at] = claim.without(taken, owners[taken[0]])
    return claims


def _seat(claim: Claim, pool: Pool) -> Seat:
    """A claim's seat: what it holds is what its status says."""
    held = None
    if (allocated := claim.status.get("allocated")) is not None:
        held = only(amounts_of(allocated), pool.per_replica)
        if claim.service_class == "guaranteed" and not held[2]:
            held = None  # it was elastic; without sequences it could send nothing
    return Seat(
        name=claim.name,
        created=claim.created,
        reserving=claim.reserving,
        wanted=only(claim.wanted, pool.per_replica),
        held=held,
    )


def _standings(seats: Sequence[Seat], capacity: Amounts) -> dict[str, Standing]:
    """What the internal allocator gives."""
    result, standings = allocate(capacity, seats), {}
    for seat in seats:
        granted = result.granted.get(seat.name)
        if granted is not None:
            reason = "Allocated" if granted == seat.wanted else "GrowthWaits"
        elif seat.name in result.preempted:
            reason = "Preempted"
        else:
            reason = "CapacityShrunk" if seat.name in result.outgrown else "Waits"
        lacking = result.lacking.get(seat.name, ())
        standings[seat.name] = Standing(granted=granted, reason=reason, lacking=lacking)
    return standings
