"""Rows of `bench fleetopt` from the simulator: verdicts, agreement, paged engines, speed."""

import gc
import time
from typing import Final

import msgspec

from bench.common.report import Row, beside, judged
from bench.common.steps import scaled
from bench.fleetopt.runs import TTFT_SLO_S, Class, FleetCase, PagedRun, measured, run_all
from bench.fleetopt.runs import judged as verdict_of
from planner.goals import Goals
from planner.plan import make_plan
from planner.records import FleetPlan, PlanResult, PoolPlan, Question
from planner.search import Mode
from planner.workload.library import SHIPPED
from simulator.experiments.speed import INSTANCES, SLOTS, stated_load
from simulator.experiments.verdict_records import FleetVerdict, PoolVerdict
from simulator.fleet.fleet import simulate

NAMES: Final = {"azure": "Azure", "lmsys": "LMSYS", "agent-heavy": "Agent-heavy"}
RATES: Final = {"azure": 1000.0, "lmsys": 1000.0, "agent-heavy": 100.0}
"""Agent-heavy requests take four minutes; at 1,000/s ten of them are 2.6 million requests."""
PAGED_RATE: Final = 100.0
PAGED_REQUESTS: Final = 120_000
REQUESTS: Final = {"azure": 1_000_000, "lmsys": 5_000_000, "agent-heavy": 900_000}
SERVICES: Final = {"azure": 10, "lmsys": 10, "agent-heavy": 40}
"""A pool whose iterations are seven times as long as empty ones settles as much more slowly."""
_ONE_POOL_REQUESTS: Final = {"azure": 500_000, "lmsys": 1_500_000, "agent-heavy": 500_000}
_PUBLISHED_REQUESTS: Final = 500_000
_MIN_COMPARED: Final = 1000
_SPEED_RUNS: Final = scaled(5)

# Published fleets that compress, and published ones that do not with Table 5's simulated use.
_REJECTED: Final = (
    ("azure", (47, 45), 1.5),
    ("azure", (48, 2), 2.0),
    ("lmsys", (7, 52), 2.0),
)
_TABLE_5: Final = {
    "azure": ((43, 131), (0.865, 0.847)),
    "lmsys": ((7, 74), (0.792, 0.853)),
}


def speed(runs: int = _SPEED_RUNS, requests: int = 100_000) -> Row:
    """The stated load, best of some."""
    spec, asked = stated_load(SHIPPED["azure"].workload.as_cdf().points, requests)
    taken = []
    for _ in range(runs):
        gc.collect()
        started_s = time.perf_counter()
        simulate(spec, asked)
        taken.append(time.perf_counter() - started_s)
    best = min(taken)
    return Row(
        f"simulator: {requests:,} requests on {INSTANCES} x {SLOTS} slots, s",
        best,
        f"aim: 1; reserved load, no prefix cache, jsq; best of {runs}, worst {max(taken):.2f}",
    )


def verdict_rows(scale: float = 1.0, processes: int = 2) -> list[Row]:
    """Published and corrected fleets by slots; `scale` makes runs shorter."""
    rejected = [
        _scaled(
            FleetCase(workload=w, nodes=n, gamma=g, requests=_PUBLISHED_REQUESTS, even=False), scale
        )
        for w, n, g in _REJECTED
    ]
    routed = [
        _scaled(FleetCase(workload=w, nodes=nodes, requests=_PUBLISHED_REQUESTS), scale)
        for w, (nodes, _) in _TABLE_5.items()
    ]
    planned = [(w, fleet) for w in SHIPPED for fleet in corrected_fleets(w)]
    corrected = [_scaled(_case(w, fleet), scale) for w, fleet in planned]
    found = run_all(verdict_of, [*rejected, *routed, *corrected], "fleets by slots", processes)
    rows = [_verdict(c, v, wanted=False) for c, v in zip(rejected, found, strict=False)]
    for case, seen in zip(routed, found[len(rejected) :], strict=False):
        rows += [_verdict(case, seen, wanted=None), *_table_5(case, seen)]
    for case, (_, fleet), seen in zip(corrected, planned, found[-len(corrected) :], strict=True):
        rows += [_verdict(case, seen, wanted=True), *agreement(case, fleet, seen)]
    return rows


def paged_rows(requests: int = PAGED_REQUESTS, processes: int = 2) -> list[Row]:
    """Three fleets of every workload on engines that allocate KV by block, and what pools buy."""
    cases, plans = [], []
    for name in SHIPPED:
        plan = _plan(name, "paged", 1.0, PAGED_RATE)
        plans.append((name, plan))
        cases += [
            FleetCase(
                workload=name,
                nodes=tuple(pool.serving_nodes for pool in fleet.pools),
                counting="paged",
                rate_per_s=PAGED_RATE,
                requests=requests,
            )
            for fleet in (plan.one_by_slots, plan.one_paged, plan.two)
        ]
    found = run_all(measured, cases, "paged fleets", processes)
    rows = []
    for i, (name, plan) in enumerate(plans):
        three = found[3 * i : 3 * i + 3]
        fleets = (plan.one_by_slots, plan.one_paged, plan.two)
        labels = ("homogeneous by slots", "homogeneous paged", "two pools")
        for label, fleet, run in zip(labels, fleets, three, strict=True):
            rows.append(_paged(f"paged engines, {NAMES[name]}: {label}", fleet, run))
        rows += _bought(NAMES[name], fleets[1:], three[1:])
    return rows


def corrected_fleets(name: str) -> list[FleetPlan]:
    """What `plan --mode corrected` answers at the paper's boundary: one pool, and by gamma."""
    plans = [_plan(name, "corrected", gamma, RATES[name]) for gamma in (1.0, 1.5, 2.0)]
    return [plans[0].one_by_slots, *(plan.chosen for plan in plans)]


def agreement(case: FleetCase, fleet: FleetPlan, verdict: FleetVerdict) -> list[Row]:
    """Planned against simulated, pool by pool; pools that few requests reach are left out."""
    rows = []
    for planned, seen in zip(fleet.pools, verdict.pools, strict=True):
        if seen.requests < _MIN_COMPARED:
            continue
        at = f"corrected, {_name(case)}, {planned.name}"
        used = 3.0 if planned.name == "short" else 2.0
        # Azure's requests end at 16,384 tokens.
        heavy = case.workload != "azure" and planned.name != "short"
        first = 15.0 if heavy else 5.0
        rows += [
            _compared(f"{at}: slots in use, %", 100 * planned.utilisation, 100 * seen.utilisation,
                      used, _why_used(planned, seen)),
            _compared(f"{at}: P99 TTFT, ms", 1000 * planned.ttft_p99_s, 1000 * seen.ttft_p99_s,
                      first, _why_ttft(planned, seen)),
        ]  # fmt: skip
    return rows


def _compared(metric: str, planned: float, seen: float, limit: float, why: str) -> Row:
    off = 100 * (planned / seen - 1)
    holds, note = abs(off) <= limit, f"planned {planned:.4g}, {off:+.1f} %"
    said = note if holds else f"{note}; {why}"
    row = judged(metric, seen, f"planned within {limit:g} %", holds, said)
    return msgspec.structs.replace(row, ratio=planned / seen)


def _why_used(planned: PoolPlan, seen: PoolVerdict) -> str:
    if seen.short_run:
        return "the run is shorter than ten of its longest services: slots are still filling"
    return (
        "what is resident grows as t = W / (1 - k/n) does: here 1 % more work makes "
        f"{planned.step_s / planned.node.w_s:.1f} %, and the pool settles as slowly"
    )


def _why_ttft(planned: PoolPlan, seen: PoolVerdict) -> str:
    if seen.wait_p99_s > 0.2 * seen.ttft_p99_s + planned.wait_p99_s:
        return (
            f"P99 wait {1000 * seen.wait_p99_s:.3g} ms: half an iteration to join and the "
            "queue at one node, where the model has one queue for all"
        )
    return (
        f"P99 wait {1000 * seen.wait_p99_s:.3g} ms, planned {1000 * planned.wait_p99_s:.3g}: "
        "a request joins at the next iteration, and iterations vary about their mean"
    )


def _verdict(case: FleetCase, found: FleetVerdict, *, wanted: bool | None) -> Row:
    words = {True: "accepted", False: "rejected"}
    label = {True: "corrected", False: "published", None: "published"}[wanted]
    worst = max(found.pools, key=lambda pool: pool.wait_p99_s)
    note = f"P99 wait {worst.wait_p99_s:.3g} s ({worst.name}), after {worst.duration_s:,.0f} s"
    note += " and growing" if worst.drifting else ""
    metric, measured = f"verdict by slots, {label}: {_name(case)}", words[found.holds]
    if wanted is None:
        return Row(metric, measured, note)
    return judged(metric, measured, words[wanted], found.holds == wanted, note)


def _table_5(case: FleetCase, found: FleetVerdict) -> list[Row]:
    note = "published with every slot taken; iterations are shorter with fewer running"
    name = f"Table 5, {NAMES[case.workload]}: rho simulated"
    return [
        beside(f"{name}, {pool.name}", pool.utilisation, published, note)
        for pool, published in zip(found.pools, _TABLE_5[case.workload][1], strict=True)
    ]


def _paged(metric: str, fleet: FleetPlan, run: PagedRun) -> Row:
    faults = [
        f"{pool.name}: {fault}"
        for pool, of in zip(run.pools, run.faults, strict=True)
        for fault in of
    ]
    running = " and ".join(f"{pool.running / pool.instances:.0f}" for pool in run.pools)
    planned = " and ".join(f"{p.utilisation * p.slots_per_node:.0f}" for p in fleet.pools)
    return Row(
        metric,
        f"{' + '.join(str(p.instances) for p in run.pools)}: "
        + ("does not hold" if faults else "holds"),
        "; ".join(
            [
                f"{running} sequences a node, planned {planned}",
                *(f"{p.name} P99 TTFT {1000 * p.ttft.p99_s:.3g} ms" for p in run.pools),
                f"preemptions {sum(p.preemptions for p in run.pools)}",
                *faults,
                *_short(run),
            ]
        ),
    )


def _short(run: PagedRun) -> list[str]:
    longest_s = max(pool.longest_service_s for pool in run.pools)
    times = run.duration_s / longest_s
    return [f"{times:.1f} of its longest services: a short run"] if times < 10 else []


def _bought(name: str, fleets: tuple[FleetPlan, ...], runs: list[PagedRun]) -> list[Row]:
    one, two = runs
    note = f"{fleets[1].nodes} nodes in two pools, {fleets[0].nodes} in one: one pool "
    rows = []
    for which, alone, split in (("short", one.short, two.short), ("long", one.long, two.long)):
        for what in ("ttft", "tpot"):
            before, after = _p99(alone, what), _p99(split, what)
            rows.append(
                Row(
                    f"paged engines, {name}: {which} requests' P99 {what.upper()}, two pools, ms",
                    1000 * after,
                    ratio=after / before,
                    note=f"{note}{1000 * before:.4g} ms",
                )
            )
    return rows


def _p99(of: Class, what: str) -> float:
    return of.ttft_p99_s if what == "ttft" else of.tpot_p99_s


def _plan(name: str, mode: Mode, gamma: float, rate: float) -> PlanResult:
    shipped = SHIPPED[name]
    return make_plan(
        Question(
            workload=shipped.workload,
            goals=Goals(rate_per_s=rate, ttft_s=TTFT_SLO_S),
            mode=mode,
            compressible=shipped.compressible,
            b_short=(shipped.b_short,),
            gamma=gamma,
            most_pools=2,
        )
    )


def _case(name: str, fleet: FleetPlan) -> FleetCase:
    return FleetCase(
        workload=name,
        nodes=tuple(pool.serving_nodes for pool in fleet.pools),
        gamma=fleet.gamma,
        rate_per_s=RATES[name],
        services=SERVICES[name],
        requests=(REQUESTS if len(fleet.pools) > 1 else _ONE_POOL_REQUESTS)[name],
    )


def _scaled(case: FleetCase, scale: float) -> FleetCase:
    return msgspec.structs.replace(case, requests=int(scale * case.requests))


def _name(case: FleetCase) -> str:
    rate = f", {case.rate_per_s:g} req/s" if case.rate_per_s != 1000 else ""
    gamma = f" (gamma {case.gamma:g})" if len(case.nodes) > 1 else ""
    return f"{NAMES[case.workload]} {' + '.join(map(str, case.nodes))}{gamma}{rate}"
