"""Present a simulated fleet as a table or as JSON."""

from math import ceil
from typing import Any, Literal

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from simulator.experiments.fleet_verdicts import LatencyGoals, faults_of
from simulator.fleet.fleet import FleetSpec
from simulator.fleet.outcome import HORIZON_SERVICES, PoolSummary
from simulator.fleet.summary import FleetSummary
from simulator.pipeline.tenants import TenantSummary
from sluice.simulated.fleet import plain
from sluice.simulated.tenant_figures import tenants_json, tenants_table, time_text

_COLUMNS = (
    *("pool", "nodes", "slots", "busy", "queue"),
    *("wait P99", "TTFT P50", "TTFT P99", "TPOT P99", "holds"),
)


class SimulationReport(msgspec.Struct, frozen=True, kw_only=True):
    """A run's figures and its goals."""

    spec: FleetSpec
    summary: FleetSummary
    goals: LatencyGoals
    seed: int
    elapsed_s: float
    tenants: tuple[TenantSummary, ...] = ()
    """By entitlement, where a sluice.yaml was simulated."""
    tenants_said: str = ""
    """What the tenants' shares of the traffic come from."""
    policies: tuple[str, ...] = ()
    """What decides, where a sluice.yaml was simulated."""

    @property
    def faults(self) -> dict[str, tuple[str, ...]]:
        """Violated goals by pool; empty for pools that hold; pools without requests are absent."""
        return {
            pool.name: faults_of(pool, self.goals) for pool in self.summary.pools if pool.requests
        }

    @property
    def holds(self) -> bool:
        """Whether all pools meet the goals and no request was refused or broken."""
        if any(self.faults.values()) or any(tenant.faults for tenant in self.tenants):
            return False
        s = self.summary
        lost = s.requests - s.served - (s.refused if self.tenants else 0)
        return lost == 0

    @property
    def notes(self) -> tuple[str, ...]:
        """Caveats about the figures."""
        s = self.summary
        notes = []
        counts = (
            (s.refused_length, "were longer than the largest window"),
            (s.refused, "were refused"),
            (s.unavailable, "found no instance in the rotation"),
            (s.broken, "broke with their instance"),
        )
        notes += [f"{count} of {s.requests} requests {what}" for count, what in counts if count]
        for pool in s.pools:
            if pool.short_run:
                longest = time_text(pool.longest_service_s)
                notes.append(
                    f"{pool.name}: its longest service takes {longest}, and "
                    f"ten fit no run of {s.duration_s:,.0f} s: give --requests {_enough(s, pool)}"
                )
            bounds = pool.ttft.p99
            if bounds is not None:
                low, high = time_text(max(0.0, bounds.low)), time_text(bounds.high)
                notes.append(f"{pool.name}: TTFT P99 within {low} ... {high} (95 %)")
            elif pool.requests:
                notes.append(f"{pool.name}: too few requests for confidence bounds")
            if pool.preemptions:
                notes.append(f"{pool.name}: {pool.preemptions} preemptions")
        if s.compressed:
            notes.append(f"{s.compressed} requests were compressed")
        if s.spilled:
            notes.append(f"{s.spilled} requests spilled into another pool")
        if s.retried:
            notes.append(f"{s.retried} retries after an instance failed")
        return tuple(notes)


def report_json(report: SimulationReport) -> dict[str, Any]:
    """The report as JSON; times in seconds."""
    return {
        "ok": report.holds,
        "seed": report.seed,
        "elapsed_s": report.elapsed_s,
        "goals": plain(report.goals),
        "fleet": plain(report.spec),
        "summary": plain(report.summary),
        "faults": {name: list(faults) for name, faults in report.faults.items() if faults},
        "tenants": tenants_json(report.tenants),
        "tenants_said": report.tenants_said,
        "policies": list(report.policies),
        "notes": list(report.notes),
    }


def show(report: SimulationReport, console: Console) -> None:
    """Print the table, violated goals and caveats."""
    summary = report.summary
    console.print(
        f"{summary.requests:,} requests in {summary.duration_s:,.0f} simulated seconds "
        f"({report.elapsed_s:.1f} s here); the first 20 % are left out"
    )
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in _COLUMNS:
        justify: Literal["left", "right"] = "left" if column in {"pool", "holds"} else "right"
        table.add_column(column, justify=justify, no_wrap=True)
    for pool in summary.pools:
        table.add_row(*_row(pool, report))
    if len(summary.pools) > 1:
        table.add_row(*_row(summary.whole, report))
    console.print(table)
    if report.tenants:
        console.print(tenants_table(report.tenants))
    broken = report.faults | {one.name: one.faults for one in report.tenants}
    for name, faults in broken.items():
        for fault in faults:
            console.print(f"[red]{escape(name)}[/]: {escape(fault)}")
    for line in report.policies:
        console.print(escape(line))
    if len(report.tenants) > 1:
        console.print(f"shares of the traffic: {escape(report.tenants_said)}")
    for note in report.notes:
        console.print(f"note: {escape(note)}")


def _row(pool: PoolSummary, report: SimulationReport) -> list[str]:
    holds = report.holds if not pool.name else not report.faults.get(pool.name)
    return [
        escape(pool.name) or "fleet",
        str(pool.instances),
        str(pool.slots or ""),
        f"{100 * pool.utilisation:.1f}%",
        f"{pool.queue:,.1f}",
        time_text(pool.wait.p99_s),
        time_text(pool.ttft.p50_s),
        time_text(pool.ttft.p99_s),
        time_text(pool.tpot.p99_s),
        "[green]yes[/]" if holds else "[red]no[/]",
    ]


def _enough(summary: FleetSummary, pool: PoolSummary) -> int:
    """Requests needed for a run of ten longest services, rounded to two digits."""
    needed = summary.requests * HORIZON_SERVICES * pool.longest_service_s / summary.duration_s
    digits = int(10.0 ** max(0, len(str(ceil(needed))) - 2))
    return digits * ceil(needed / digits)
