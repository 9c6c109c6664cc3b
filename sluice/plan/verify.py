"""`sluice plan --verify`: simulate the chosen fleet and compare it with the plan."""

import math
import time
from collections.abc import Iterator
from math import ceil
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from planner.goals import Goals
from planner.records import PlanResult, PoolPlan
from simulator.experiments.fleet_verdicts import judge
from simulator.experiments.verdict_records import ArrivalProgress, FleetVerdict, PoolVerdict
from simulator.fleet.outcome import HORIZON_SERVICES
from sluice.plan.through_gateway import GatewayRun, through_gateway
from sluice.simulated.fleet import Counting, fleet_of_plan, lengths_of
from sluice.simulated.tenant_figures import tenants_json, tenants_table
from sluice.terminal import finite

MAX_REQUESTS: Final = 300_000
_TIMES: Final = ("wait_p99_s", "ttft_p99_s", "tpot_p99_s")
_TITLES: Final = ("slots used", "wait P99", "TTFT P99", "TPOT P99")


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """Each pool as planned and as simulated, in the same order."""

    planned: tuple[PoolPlan, ...]
    verdict: FleetVerdict
    slots: tuple[int, ...]
    """Sequences that a simulated node may run, by pool; with paged KV more than planned for."""
    goals: Goals
    counting: Counting
    elapsed_s: float
    gateway: GatewayRun | None = None
    """The fleet behind the planned configuration; None in modes that count slots by window."""

    @property
    def holds(self) -> bool:
        """Whether every pool met the goals in its run, and every tenant was kept its promises."""
        return self.verdict.holds and (self.gateway is None or self.gateway.holds)

    @property
    def verdict_word(self) -> str:
        """yes, no, or undecided: a goal lies within the bounds of its figure."""
        if not self.holds:
            return "no"
        return "undecided" if self.verdict.undecided else "yes"

    @property
    def slots_used(self) -> tuple[float, ...]:
        """Simulated share of the planned slots, by pool; can exceed 1 with paged KV."""
        return tuple(
            seen.utilisation * slots / planned.slots_per_node
            for planned, seen, slots in zip(
                self.planned, self.verdict.pools, self.slots, strict=True
            )
        )

    @property
    def short_runs(self) -> tuple[PoolVerdict, ...]:
        """Pools whose run is too short for reliable figures."""
        return tuple(pool for pool in self.verdict.pools if pool.short_run)

    @property
    def notes(self) -> tuple[str, ...]:
        """Caveats about the figures."""
        return tuple(line for pool in self.verdict.pools for line in _notes(pool, self.goals))


def verify(
    plan: PlanResult,
    *,
    base: str = "",
    model: str = "",
    most_requests: int = MAX_REQUESTS,
    seed: int = 0,
    progress: ArrivalProgress | None = None,
) -> Verification:
    """Simulate the chosen fleet's serving nodes, pool by pool, under Poisson arrivals.

    Then the whole fleet is run behind the gateway that `-o` configures: `model` of the file `base`,
    where one is given. Engines allocate KV as the plan's mode counts it. `most_requests` limits the
    requests drawn for each run. Raises PlanError if the plan has no fleet.
    """
    question = plan.question
    counting: Counting = "paged" if question.mode == "paged" else "slots"
    spec = fleet_of_plan(
        plan.chosen,
        counting=counting,
        compressible=question.compressed_share(plan.chosen),
        max_cut=question.max_cut,
        transfer_bytes_per_s=question.transfer_bytes_per_s,
    )
    started_s = time.perf_counter()
    verdict = judge(
        spec,
        lengths_of(question.workload),
        rate_per_s=question.goals.rate_per_s,
        slo_s=question.goals.ttft_s,
        tpot_slo_s=question.goals.tpot_s,
        seed=seed,
        most_drawn=most_requests,
        progress=progress,
    )
    gateway = None
    if question.mode == "paged":
        gateway = through_gateway(
            plan,
            counting,
            base,
            model,
            most_requests=most_requests,
            seed=seed,
            progress=progress,
        )
    return Verification(
        planned=plan.chosen.pools,
        verdict=verdict,
        gateway=gateway,
        slots=tuple(pool.profile.max_num_seqs for pool in spec.pools),
        goals=question.goals,
        counting=counting,
        elapsed_s=time.perf_counter() - started_s,
    )


def verification_json(checked: Verification) -> dict[str, Any]:
    """Planned and simulated figures, in seconds; null if not measured."""
    return {
        "verdict": checked.verdict_word,
        "counting": checked.counting,
        "elapsed_s": checked.elapsed_s,
        "pools": {
            planned.name: _pool(planned, seen, used) for planned, seen, used in _beside(checked)
        },
        "refused_share": checked.verdict.refused_share,
        "gateway": None if checked.gateway is None else _gateway_json(checked.gateway),
        "notes": list(checked.notes),
    }


def show_verification(checked: Verification, console: Console) -> None:
    """Print planned and simulated figures, the verdict and caveats."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("pool", "simulated", *_TITLES):
        left = column in {"pool", "simulated"}
        table.add_column(column, justify="left" if left else "right", no_wrap=True)
    for planned, seen, used in _beside(checked):
        table.add_row(escape(planned.name), "planned", *_cells(planned, planned.utilisation))
        table.add_row("", f"{seen.requests:,} requests", *_cells(seen, used))
    console.print(table)
    console.print(_answer(checked))
    for pool in checked.verdict.pools:
        for fault in pool.faults:
            console.print(f"[red]{escape(pool.name)}[/]: {escape(fault)}")
    if checked.verdict.refused_share:
        share = 100 * checked.verdict.refused_share
        console.print(f"[red]refused[/]: no window takes {share:.3g} % of the requests")
    if checked.gateway is not None:
        _show_gateway(checked.gateway, console)
    for note in checked.notes:
        console.print(f"[dim]-[/] {escape(note)}")


def _gateway_json(found: GatewayRun) -> dict[str, Any]:
    return {
        "requests": found.requests,
        "policies": list(found.policies),
        "shares": found.shares_said,
        "coverage": found.covered,
        "pool_shares": {
            name: {"true": planned, "sent": sent} for name, planned, sent in found.pool_shares
        },
        "tenants": tenants_json(found.tenants),
    }


def _show_gateway(found: GatewayRun, console: Console) -> None:
    console.print(
        f"{found.requests:,} requests through the planned gateway ({'; '.join(found.policies)}):"
    )
    console.print(tenants_table(found.tenants))
    for name, planned, sent in found.pool_shares:
        if len(found.pool_shares) > 1:
            console.print(
                f"[dim]-[/] {escape(name)} got {100 * sent:.0f} % of the requests by their "
                f"estimates, {100 * planned:.0f} % by their true lengths"
            )
    for tenant in found.tenants:
        for fault in tenant.faults:
            console.print(f"[red]{escape(tenant.name)}[/]: {escape(fault)}")
    if len(found.tenants) > 1:
        console.print(f"[dim]-[/] shares of the traffic: {escape(found.shares_said)}")


def _beside(checked: Verification) -> Iterator[tuple[PoolPlan, PoolVerdict, float]]:
    return zip(checked.planned, checked.verdict.pools, checked.slots_used, strict=True)


def _answer(checked: Verification) -> str:
    if checked.verdict_word != "yes":
        colour = "red" if not checked.holds else "yellow"
        word = checked.verdict_word
        return f"[{colour}]verified: {word}[/] ({checked.elapsed_s:.1f} s)"
    far = ", as far as runs this short show" if checked.short_runs else ""
    return f"[green]verified: yes[/]{far} ({checked.elapsed_s:.1f} s)"


def _notes(pool: PoolVerdict, goals: Goals) -> list[str]:
    if not pool.requests:
        return [f"{pool.name}: no request reached it in this run"]
    bounds = pool.ttft_p99
    if bounds is None:
        notes = [f"{pool.name}: too few requests for bounds on the P99"]
    else:
        low, high = 1000 * max(0.0, bounds.low), 1000 * bounds.high
        notes = [f"{pool.name}: TTFT P99 within {low:.3g} ... {high:.3g} ms (95 %)"]
    notes += [f"{pool.name}: {doubt}: give more --verify-requests" for doubt in pool.doubts]
    if pool.short_run:
        needed_s = HORIZON_SERVICES * pool.longest_service_s
        notes.append(
            f"{pool.name}: {pool.duration_s:,.0f} s are too short a run, its longest service "
            f"takes {pool.longest_service_s:,.0f} s: give --verify-requests "
            f"{_rounded(needed_s * goals.rate_per_s)}"
        )
    return notes


def _rounded(requests: float) -> int:
    """Round up to two digits."""
    digits = int(10.0 ** max(0, len(str(ceil(requests))) - 2))
    return digits * ceil(requests / digits)


def _cells(pool: PoolPlan | PoolVerdict, used: float) -> list[str]:
    times = (pool.wait_p99_s, pool.ttft_p99_s, pool.tpot_p99_s)
    return [f"{100 * used:.1f} %", *(_time(value) for value in times)]


def _pool(planned: PoolPlan, seen: PoolVerdict, used: float) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: {
            "planned": finite(getattr(planned, name)),
            "simulated": finite(getattr(seen, name)) if seen.requests else None,
        }
        for name in _TIMES
    }
    found["utilisation"] = {"planned": planned.utilisation, "simulated": used}
    bounds = seen.ttft_p99
    return {
        **found,
        "holds": seen.holds,
        "faults": list(seen.faults),
        "requests": seen.requests,
        "duration_s": seen.duration_s,
        "short_run": seen.short_run,
        "ttft_p99_bounds_s": None if bounds is None else [bounds.low, bounds.high],
    }


def _time(value_s: float) -> str:
    if not math.isfinite(value_s):
        return "without end" if value_s > 0 else ""
    return f"{value_s:.2f} s" if value_s >= 1 else f"{1000 * value_s:.3g} ms"
