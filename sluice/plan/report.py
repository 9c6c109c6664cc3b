"""Present a plan as tables and sentences, or as JSON."""

import math
from collections.abc import Iterator
from typing import Any

from rich.console import Console, JustifyMethod
from rich.markup import escape
from rich.table import Table

from planner.records import (
    AskedLimits,
    EqualNodes,
    FleetPlan,
    PhasesCompared,
    PhasesPlan,
    PlanResult,
    PoolPlan,
)
from planner.verdict import fleet_line
from sluice.plan.verify import Verification, verification_json
from sluice.terminal import finite


def plan_json(
    plan: PlanResult, elapsed_ms: float, checked: Verification | None = None
) -> dict[str, Any]:
    """The plan as documented JSON; missing values are null."""
    question, chosen = plan.question, plan.chosen
    boundaries = chosen.boundaries
    return {
        "mode": question.mode,
        "workload": question.workload.name,
        "rate_per_s": question.goals.rate_per_s,
        "rate_said": question.goals.rate_said,
        "b_short": (boundaries[0] if len(boundaries) == 1 else list(boundaries) or None),
        "gamma": chosen.gamma if boundaries else None,
        "pc": None if question.compressible is None else question.compressed_share(plan.chosen),
        "pc_said": question.compressible_said or None,
        "homogeneous": {
            "nodes": plan.one_by_slots.nodes or None,
            "nodes_paged": plan.one_paged.nodes or None,
        },
        "pools": {pool.name: _pool(pool) for pool in chosen.pools},
        "phases": {
            "mode": question.phases,
            "transfer_bytes_per_s": question.transfer_bytes_per_s,
            "compared": [_compared(pool) for pool in plan.compared],
        },
        "floor_nodes": chosen.floor_nodes,
        "total_nodes": chosen.nodes if chosen.feasible else None,
        "total_gpus": chosen.gpus if chosen.feasible else None,
        "cost_per_year_usd": finite(chosen.usd_per_year),
        "savings": plan.savings,
        "savings_against": plan.baseline,
        "feasible": chosen.feasible,
        "elapsed_ms": elapsed_ms,
        "verified": None
        if checked is None or checked.verdict_word == "undecided"
        else checked.holds,
        "verification": verification_json(checked) if checked else None,
        "alternatives": [_fleet(fleet) for fleet in plan.alternatives],
        "closed_form": {
            "savings": plan.closed_form_savings,
            "b_short": plan.closed_form_boundary,
        },
        "archetype": plan.shape.archetype if plan.shape else None,
        "alpha": plan.shape.alpha if plan.shape else None,
        "beta": plan.shape.beta if plan.shape else None,
        "retrofit_nodes": plan.retrofit_nodes,
        "codesign_nodes": plan.codesign_nodes,
        "equal_nodes": _fields(plan.equal_nodes),
        "asked": _fields(plan.asked),
        "cached_share": question.workload.cached_share,
        "preempted_share": question.workload.preempted_share,
        "notes": list(plan.notes),
    }


def show_plan(plan: PlanResult, elapsed_ms: float, console: Console) -> None:
    """Print tables and sentences, one page."""
    question = plan.question
    goals = question.goals
    slo = f"P99 TTFT {1000 * goals.ttft_s:g} ms"
    if goals.tpot_s is not None:
        slo += f", TPOT {1000 * goals.tpot_s:g} ms"
    said = f" ({goals.rate_said})" if goals.rate_said not in {"", "as given"} else ""
    console.print(
        f"[bold]{escape(question.workload.name)}[/] at {goals.rate_per_s:.4g} requests/s{said}, "
        f"{slo}, mode {question.mode}; {elapsed_ms:.1f} ms"
    )
    console.print(_alternatives_table(plan))
    if plan.chosen.feasible:
        console.print(_pools_table(plan.chosen))
    for line in _answers(plan):
        console.print(escape(line))
    for note in plan.notes:
        console.print(f"[dim]-[/] {escape(note)}")


def _alternatives_table(plan: PlanResult) -> Table:
    table = _table(("fleet", "boundary", "gamma", "nodes", "total", "GPUs", "K$/year", "saves"))
    base = plan.one_by_slots if plan.baseline == plan.one_by_slots.label else plan.one_paged
    for fleet in plan.alternatives:
        mark = "[green]>[/] " if fleet == plan.chosen else "  "
        saved = ""
        if fleet.feasible and base.feasible and fleet not in (base, plan.one_by_slots):
            saved = f"{100 * (1 - fleet.weight / base.weight):.1f} %"
        table.add_row(
            mark + escape(fleet.label),
            ", ".join(map(str, fleet.boundaries)),
            f"{fleet.gamma:g}" if fleet.gamma > 1 else "",
            fleet_line(fleet),
            str(fleet.nodes) if fleet.feasible else "",
            str(fleet.gpus) if fleet.feasible else "",
            f"{fleet.usd_per_year / 1000:,.0f}" if fleet.feasible and fleet.usd_per_year else "",
            saved,
        )
    return table


def _pools_table(fleet: FleetPlan) -> Table:
    columns = ("pool", "up to", "nodes", "each", "slots", "req/s", "slots used", "TTFT", "TPOT")
    table = _table(columns)
    for pool in fleet.pools:
        if (prefill := pool.phases) is not None:
            table.add_row(
                f"{pool.name}/prefill",
                "",
                str(prefill.prefill_nodes),
                "",
                str(prefill.prefill_slots),
                "",
                f"{100 * prefill.prefill_utilisation:.0f} %",
                _ms(prefill.prefill_p99_s),
                "",
            )
        table.add_row(
            pool.name,
            str(pool.boundary_tokens or pool.window_tokens),
            str(pool.decode_nodes),
            f"{pool.node.gpus} x {pool.node.gpu}",
            str(pool.slots_per_node),
            f"{pool.rate_per_s:.4g}",
            f"{100 * pool.utilisation:.0f} %",
            _ms(pool.ttft_p99_s),
            _ms(pool.tpot_p99_s),
        )
    return table


def _answers(plan: PlanResult) -> Iterator[str]:
    """The effects of one pool, two pools and compression."""
    if plan.equal_nodes is not None:
        yield from _equal_lines(plan.equal_nodes)
    if plan.retrofit_nodes is not None and plan.codesign_nodes is not None:
        yield (
            f"compression on a fleet sized without it: {plan.retrofit_nodes} nodes; on one sized "
            f"for it: {plan.codesign_nodes}"
        )
    if plan.asked is not None:
        yield from _asked_lines(plan.asked)
    workload = plan.question.workload
    if workload.cached_share is not None:
        yield f"prefix cache: {100 * workload.cached_share:.0f} % of prompt tokens were cached"
    if workload.preempted_share is not None:
        yield f"preemptions: {workload.preempted_share:.3f} a request"


def _equal_lines(equal: EqualNodes) -> Iterator[str]:
    yield (
        f"at {equal.nodes} nodes either way, split at {equal.b_short}: short requests' P99 TTFT "
        f"{_ms(equal.one_short_ttft_s)} in one pool, {_ms(equal.short_ttft_s)} in their own; "
        f"long ones {_ms(equal.one_ttft_s)} and {_ms(equal.long_ttft_s)}"
    )
    yield (
        f"  P99 TPOT {_ms(equal.one_tpot_s)} in one pool; {_ms(equal.short_tpot_s)} short and "
        f"{_ms(equal.long_tpot_s)} long in two"
    )


def _asked_lines(asked: AskedLimits) -> Iterator[str]:
    yield (
        f"asked {asked.asked_mean_tokens:.0f} output tokens on average, used "
        f"{asked.used_mean_tokens:.0f}; {100 * asked.unlimited_share:.0f} % set no limit"
    )
    yield (
        f"  short share {100 * asked.short_share_asked:.1f} % by what is asked, "
        f"{100 * asked.short_share_used:.1f} % by what is used; {_asked_nodes(asked)}"
    )


def _asked_nodes(asked: AskedLimits) -> str:
    by_asked, by_used = asked.nodes_asked, asked.nodes_used
    if by_asked and by_used:
        return f"nodes {by_asked} and {by_used}"
    if not by_asked and not by_used:
        return "without compression no number of nodes meets the goals at this boundary"
    known, other = ("what is asked", "used") if by_asked else ("what is used", "asked")
    return f"{by_asked or by_used} nodes by {known}; by what is {other}, no number meets the goals"


def _pool(pool: PoolPlan) -> dict[str, Any]:
    return {
        "nodes": pool.nodes,
        "serving_nodes": pool.serving_nodes,
        "gpu": pool.node.gpu,
        "gpus_per_node": pool.node.gpus,
        "profile": pool.node.name,
        "window_tokens": pool.window_tokens,
        "boundary_tokens": pool.boundary_tokens,
        "slots_per_node": pool.slots_per_node,
        "rate_per_s": pool.rate_per_s,
        "utilisation": pool.utilisation,
        "ttft_p99_s": finite(pool.ttft_p99_s),
        "tpot_p99_s": finite(pool.tpot_p99_s),
        "phases": _fields(pool.phases),
    }


def _compared(pool: PhasesCompared) -> dict[str, Any]:
    together, apart = pool.together, pool.apart
    return {
        "pool": next((p.name for p in (together, apart) if p is not None), None),
        "apart_wins": pool.apart_wins,
        "together_nodes": together and together.nodes,
        "prefill_nodes": apart and apart.nodes - apart.decode_nodes,
        "decode_nodes": apart and apart.decode_nodes,
    }


def _fleet(fleet: FleetPlan) -> dict[str, Any]:
    return {
        "label": fleet.label,
        "feasible": fleet.feasible,
        "boundaries": list(fleet.boundaries),
        "gamma": fleet.gamma,
        "nodes": [pool.nodes for pool in fleet.pools],
        "total_nodes": fleet.nodes if fleet.feasible else None,
        "cost_per_year_usd": finite(fleet.usd_per_year),
    }


def _fields(record: EqualNodes | AskedLimits | PhasesPlan | None) -> dict[str, Any] | None:
    if record is None:
        return None
    found = {name: getattr(record, name) for name in record.__struct_fields__}
    return {k: finite(v) if isinstance(v, float) else v for k, v in found.items()}


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if math.isfinite(seconds) else "without end"


def _table(columns: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    left = {"fleet", "pool", "each", "nodes", "GPU"}
    for column in columns:
        justify: JustifyMethod = "left" if column in left else "right"
        table.add_column(column, justify=justify, no_wrap=column == "fleet")
    return table
