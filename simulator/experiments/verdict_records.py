"""Records of a verdict on a fleet: the figures and violated goals of each pool."""

from typing import Final, Literal, Protocol

import msgspec

from simulator.fleet.outcome import PoolSummary, Tail
from simulator.fleet.statistics import Interval

SATURATED: Final = 0.999

Criterion = Literal["wait", "ttft"]


class ArrivalProgress(Protocol):
    """Called with a pool's name, its arrivals so far, and its arrivals in all."""

    def __call__(self, name: str, arrived: int, *, total: int) -> None:
        """Called every few thousand arrivals, and at the last."""


class PoolVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """One pool: its figures, and the goals that it violates (none if it holds)."""

    name: str
    instances: int
    requests: int
    utilisation: float
    wait_p99_s: float
    ttft_p99_s: float
    tpot_p99_s: float
    duration_s: float
    """Simulated seconds; the wait of an overloaded pool grows with them."""
    drifting: bool
    short_run: bool
    """Whether it lasted less than ten of its longest services: too short to show drift."""
    longest_service_s: float
    ttft_p99: Interval | None
    """95 % bounds of the P99, seconds; None with too few requests."""
    faults: tuple[str, ...]
    doubts: tuple[str, ...] = ()
    """Goals within the bounds of the figures: neither met nor violated for certain."""

    @property
    def holds(self) -> bool:
        """Whether it violates no goal."""
        return not self.faults


class FleetVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """All pools of a fleet."""

    pools: tuple[PoolVerdict, ...]
    criterion: Criterion
    slo_s: float
    refused_share: float = 0.0
    """Share of requests that no window takes."""

    @property
    def holds(self) -> bool:
        """Whether every pool holds, and no request is longer than all windows."""
        return self.refused_share == 0 and all(pool.holds for pool in self.pools)

    @property
    def undecided(self) -> bool:
        """Whether it holds as far as the run can tell, but not for certain."""
        return self.holds and any(pool.doubts for pool in self.pools)


class LatencyGoals(msgspec.Struct, frozen=True, kw_only=True):
    """Goals of every pool at P99, in seconds."""

    slo_s: float
    tpot_slo_s: float | None = None
    criterion: Criterion = "ttft"
    """The time that `slo_s` limits."""


def faults_of(pool: PoolSummary, goals: LatencyGoals) -> tuple[str, ...]:
    """The goals that a pool violates, in words; empty if it holds."""
    faults = []
    if pool.drifting or pool.utilisation > SATURATED:
        faults.append("overloaded: waits depend on how long it runs")
    tail = pool.wait if goals.criterion == "wait" else pool.ttft
    if _beyond(tail, goals.slo_s):
        faults.append(f"{goals.criterion} P99 {tail.p99_s:.3g} s, above {goals.slo_s:g} s")
    if goals.tpot_slo_s is not None and _beyond(pool.tpot, goals.tpot_slo_s):
        faults.append(f"TPOT P99 {pool.tpot.p99_s:.3g} s, above {goals.tpot_slo_s:g} s")
    return tuple(faults)


def doubts_of(pool: PoolSummary, goals: LatencyGoals) -> tuple[str, ...]:
    """The goals that lie within the bounds of what was simulated: this run cannot tell."""
    tail = pool.wait if goals.criterion == "wait" else pool.ttft
    judged: list[tuple[str, Tail, float]] = [(goals.criterion, tail, goals.slo_s)]
    if goals.tpot_slo_s is not None:
        judged.append(("TPOT", pool.tpot, goals.tpot_slo_s))
    return tuple(
        f"{name} P99 {1000 * max(0.0, found.p99.low):.3g} ... {1000 * found.p99.high:.3g} ms (95 %)"
        f" has the goal of {1000 * goal:.3g} ms within it"
        for name, found, goal in judged
        if found.p99 is not None and found.p99.low <= goal < found.p99.high
    )


def _beyond(tail: Tail, goal_s: float) -> bool:
    """Whether a P99 is above its goal for certain: its whole interval, where it has one."""
    least = tail.p99_s if tail.p99 is None else min(tail.p99.low, tail.p99_s)
    return not least <= goal_s


def verdict_of(found: PoolSummary, duration_s: float, goals: LatencyGoals) -> PoolVerdict:
    """Judge the figures of a run of so many simulated seconds."""
    return PoolVerdict(
        name=found.name,
        instances=found.instances,
        requests=found.requests,
        utilisation=found.utilisation,
        wait_p99_s=found.wait.p99_s,
        ttft_p99_s=found.ttft.p99_s,
        tpot_p99_s=found.tpot.p99_s,
        duration_s=duration_s,
        drifting=found.drifting,
        short_run=found.short_run,
        longest_service_s=found.longest_service_s,
        ttft_p99=found.ttft.p99,
        faults=faults_of(found, goals),
        doubts=doubts_of(found, goals),
    )
