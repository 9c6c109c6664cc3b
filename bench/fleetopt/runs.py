"""Simulated runs behind the rows of `bench fleetopt`; two processes share them.

FleetOpt's lengths are drawn evenly: every block of draws holds each part of the distribution in
its proportion. The load of independent draws of a heavy tail varies by several percent, which
would look like a difference between model and simulator.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Final, Literal, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from bench.common.steps import tracked
from planner.workload.library import SHIPPED
from simulator.experiments.fleet_verdicts import judge
from simulator.experiments.paper_fleets import OneMore, by_slots, paged
from simulator.experiments.verdict_records import FleetVerdict, LatencyGoals, faults_of
from simulator.fleet import arrivals
from simulator.fleet.fleet import simulate
from simulator.fleet.outcome import PoolSummary
from simulator.fleet.summary import summarise
from simulator.fleet.traffic import Breakpoints, CdfLengths, Ints, Lengths, Random, traffic
from sluice.children import die_with_parent

WAIT_SLO_S: Final = 0.5
"""What the papers' tables are sized by: the wait alone."""
TTFT_SLO_S: Final = 5.0
_PROCESSES: Final = 2
_SHARE: Final = 0.8

Found = TypeVar("Found")


class FleetCase(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet of one of FleetOpt's workloads at its boundary."""

    workload: str
    nodes: tuple[int, ...]
    gamma: float = 1.0
    counting: Literal["slots", "paged"] = "slots"
    rate_per_s: float = 1000.0
    requests: int
    """Drawn at most."""
    services: int = 10
    """Longest services that a pool's run lasts."""
    even: bool = True
    """Lengths are drawn evenly."""


class Class(msgspec.Struct, frozen=True, kw_only=True):
    """P99s of the requests up to the boundary, or of those above it."""

    ttft_p99_s: float
    tpot_p99_s: float


class PagedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a whole fleet."""

    pools: tuple[PoolSummary, ...]
    faults: tuple[tuple[str, ...], ...]
    """By pool."""
    short: Class
    long: Class
    duration_s: float


class EvenLengths:
    """Totals as CdfLengths has them, each block of draws evenly over the distribution."""

    def __init__(self, breakpoints: Breakpoints, input_share: float = _SHARE) -> None:
        self._edges = np.array([0, *(tokens for tokens, _ in breakpoints)])
        self._shares = np.array([0.0, *(share for _, share in breakpoints)])
        self._input_share = input_share

    def sample(self, count: int, random: Random) -> tuple[Ints, Ints]:
        """See Lengths."""
        at = (random.permutation(count) + random.random(count)) / count
        last = len(self._edges) - 2
        bucket = np.minimum(np.searchsorted(self._shares[1:], at, side="left"), last)
        low, high = self._edges[bucket], self._edges[bucket + 1]
        share = np.maximum(np.diff(self._shares)[bucket], 1e-300)
        within = np.clip((at - self._shares[bucket]) / share, 0.0, 1.0)
        totals = np.minimum(low + 1 + (within * (high - low)).astype(np.int64), high)
        prompts = np.maximum(1, (self._input_share * totals).astype(np.int64))
        return prompts, np.maximum(1, totals - prompts)


def run_all(
    work: Callable[[FleetCase], Found],
    cases: Sequence[FleetCase],
    what: str,
    processes: int = _PROCESSES,
) -> list[Found]:
    """Results in order."""
    if processes == 1:
        return list(tracked(map(work, cases), what, len(cases)))
    with ProcessPoolExecutor(
        processes, mp_context=get_context("spawn"), initializer=die_with_parent
    ) as pool:
        return list(tracked(pool.map(work, cases), what, len(cases)))


def judged(case: FleetCase) -> FleetVerdict:
    """Each pool alone, held to waits as the papers' tables are."""
    shipped = SHIPPED[case.workload]
    make = by_slots if case.counting == "slots" else paged
    return judge(
        make(
            case.nodes,
            boundary=shipped.b_short,
            gamma=case.gamma,
            compressible=shipped.compressible,
        ),
        OneMore(_lengths(case)),
        rate_per_s=case.rate_per_s,
        slo_s=WAIT_SLO_S,
        criterion="wait",
        services=case.services,
        most_drawn=case.requests,
    )


def measured(case: FleetCase) -> PagedRun:
    """The whole fleet at once: so that short and long requests can be told apart in one pool."""
    shipped = SHIPPED[case.workload]
    make = by_slots if case.counting == "slots" else paged
    spec = make(case.nodes, boundary=shipped.b_short)
    random = np.random.default_rng(0)
    at_s = arrivals.poisson(case.rate_per_s, case.requests, random)
    outcome = simulate(spec, traffic(OneMore(_lengths(case)), at_s, random))
    summary = summarise(spec, outcome)
    low_s, _ = outcome.window_s()
    settled = outcome.arrival_s >= low_s
    short = outcome.prompt_tokens + outcome.output_tokens <= shipped.b_short + 1
    goals = LatencyGoals(slo_s=TTFT_SLO_S)
    return PagedRun(
        pools=summary.pools,
        faults=tuple(faults_of(pool, goals) for pool in summary.pools),
        short=_class(outcome.ttft_s[settled & short], outcome.tpot_s[settled & short]),
        long=_class(outcome.ttft_s[settled & ~short], outcome.tpot_s[settled & ~short]),
        duration_s=summary.duration_s,
    )


def _lengths(case: FleetCase) -> Lengths:
    points = SHIPPED[case.workload].workload.as_cdf().points
    return EvenLengths(points) if case.even else CdfLengths(points, _SHARE)


def _class(ttft_s: NDArray[np.float64], tpot_s: NDArray[np.float64]) -> Class:
    return Class(
        ttft_p99_s=float(np.nanquantile(ttft_s, 0.99)),
        tpot_p99_s=float(np.nanquantile(tpot_s, 0.99)),
    )
