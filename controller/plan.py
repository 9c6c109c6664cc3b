"""What follows from the world: `plan`, a pure function. The loop makes its calls, and asks again.

Each plan is made of the whole world, so a controller may stop after any call. What it publishes
never counts more than a pool's capacity. Calls come in this order: capacity of nodes, places that
are given up, places that are asked for, what objects are told, replicas.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from controller import verdict, virtual_node
from controller.allocation import Seat, allocate, total
from controller.objects import Claim, Pool, created_of, read_claim, read_pool
from controller.quantity import Amounts, amounts_of, times
from controller.records import TOKEN_ENTITLEMENTS, TOKEN_POOLS, Call, EventNote, Plan, World
from controller.scaling import Backend, backend_of, goal_of, scale_calls
from controller.verdict import Readiness, Standing
from gateway.records.tenancy import ClusterEntitlement

Allocator = Literal["internal", "virtual-node"]
"""virtual-node: the cluster's scheduler, with a virtual node for each pool."""


def plan(world: World, allocator: Allocator) -> Plan:
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
    draft = _Draft(world, virtual=allocator == "virtual-node")
    for name, pool in pools.items():
        draft.add_pool(pool, backend_of(pool, world, engines), by_pool.pop(name, {}))
    for name, orphans in by_pool.items():
        for claim in orphans.values():
            draft.add_claim(claim, None, verdict.no_pool(name), None)
    return draft.finish(pools, claims)


class _Draft:
    """A plan while it is made, pool by pool."""

    def __init__(self, world: World, *, virtual: bool) -> None:
        self._world = world
        self._virtual = virtual
        self._pods = virtual_node.lease_pods(world)
        self._due_unix_s: list[float] = []
        self._nodes: list[Call] = []
        self._leases: list[Call] = []
        self._statuses: list[Call] = []
        self._scales: list[Call] = []
        self._events: list[EventNote] = []
        self._published: dict[str, ClusterEntitlement] = {}

    def add_pool(self, pool: Pool, backend: Backend, claims: Mapping[str, Claim]) -> None:
        """Add a pool, and all that name it."""
        readiness = verdict.readiness_of(pool, backend)
        seated = {name: claim for name, claim in claims.items() if self._takes_place(claim)}
        seats = [_seat(claim, pool) for claim in seated.values()]
        standings = self._standings(pool, backend, seated, seats)
        bound = [
            name
            for name, claim in claims.items()
            if self.add_claim(claim, pool, readiness, standings.get(name))
        ]
        granted = (standings[name].granted for name in bound if name in standings)
        goal = goal_of(pool, seats, self._world.demand)
        status = verdict.pool_status(
            pool,
            backend,
            goal,
            allocated=total(filter(None, granted)),
            total=len(claims),
            bound=len(bound),
            now_unix_s=self._world.now_unix_s,
        )
        self._statuses += verdict.status_calls(TOKEN_POOLS, pool.source, status)
        self._events += verdict.pool_events(pool, backend, goal)
        self._scales += scale_calls(pool, backend, goal)

    def add_claim(
        self, claim: Claim, pool: Pool | None, readiness: Readiness, standing: Standing | None
    ) -> bool:
        """Add an entitlement, of a pool or of none that is there. Returns whether it is bound."""
        now_unix_s = self._world.now_unix_s
        result = verdict.judge(claim, pool, readiness, standing, now_unix_s)
        status = verdict.entitlement_status(claim, readiness, result, now_unix_s)
        self._statuses += verdict.status_calls(TOKEN_ENTITLEMENTS, claim.source, status)
        self._events += verdict.entitlement_events(claim, result)
        if claim.expires_unix_s > now_unix_s:
            self._due_unix_s.append(claim.expires_unix_s)
        if claim.fields:
            namespace = self._world.namespace
            self._published[claim.name] = verdict.published(claim, pool, result, namespace)
        return result.state == "Bound"

    def finish(self, pools: Mapping[str, Pool], claims: Sequence[Claim]) -> Plan:
        """The whole plan, once all pools and claims were added."""
        leases = self._leases
        if self._virtual:
            seated = (c for c in claims if c.pool in pools and self._takes_place(c))
            left = virtual_node.leftover_calls(self._world, pools, seated, self._pods)
            leases = [*left, *leases]
        return Plan(
            calls=(*self._nodes, *leases, *self._statuses, *self._scales),
            entitlements=self._published,
            events=tuple(self._events),
            next_unix_s=min(self._due_unix_s, default=None),
        )

    def _takes_place(self, claim: Claim) -> bool:
        return claim.seated and claim.in_force(self._world.now_unix_s)

    def _standings(
        self, pool: Pool, backend: Backend, claims: Mapping[str, Claim], seats: Sequence[Seat]
    ) -> dict[str, Standing]:
        """By the allocator; {} while the pool has no ready replica, when nothing is given up."""
        capacity = times(pool.per_replica, backend.ready)
        if self._virtual:
            calls, due_unix_s = virtual_node.node_calls(self._world, pool, capacity)
            self._nodes += calls
            self._due_unix_s.append(due_unix_s)
        if not backend.ready:
            return {}
        if not self._virtual:
            return _allocated(capacity, seats)
        standings, calls = virtual_node.lease_plan(self._world, pool, claims, capacity, self._pods)
        self._leases += calls
        return standings


def _read_claims(world: World, pools: Mapping[str, Pool]) -> list[Claim]:
    """All entitlements that are not being deleted, the oldest first.

    A key opens one entitlement: the oldest of those that name it. Kubernetes counts seconds; here
    each is a millisecond younger than the one before, because gateways go by that time alone.
    """
    present = [s for s in world.entitlements.values() if "deletionTimestamp" not in s["metadata"]]
    present.sort(key=lambda source: (created_of(source), source["metadata"]["name"]))
    owners: dict[str, str] = {}
    claims: list[Claim] = []
    for source in present:
        claim = read_claim(source, pools, world.digests, owners)
        created = max(claim.created, claims[-1].created + 1 if claims else 0)
        claims.append(msgspec.structs.replace(claim, created=created))
    return claims


def _seat(claim: Claim, pool: Pool) -> Seat:
    """A claim's seat: what it holds is what its status says."""
    allocated = claim.status.get("allocated")
    return claim.seat(pool, None if allocated is None else amounts_of(allocated))


def _allocated(capacity: Amounts, seats: Sequence[Seat]) -> dict[str, Standing]:
    """By the internal allocator."""
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
