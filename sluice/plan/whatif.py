"""`sluice whatif`: the plan at other rates, or on other GPUs."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from sluice.plan.command import (
    FieldsOption,
    GammaOption,
    InputShareOption,
    ModelOption,
    ModeOption,
    PcOption,
    TpotOption,
    TtftOption,
    WindowOption,
    WorkloadOption,
)
from sluice.terminal import JsonOption, PlainConsole, need_libraries, refuse

if TYPE_CHECKING:
    from planner.records import PlanResult

_COLUMNS = ("rate", "GPU", "fleet", "boundary", "gamma", "nodes", "one", "GPUs", "K$/year")


def whatif(
    workload: WorkloadOption,
    rates: Annotated[str, typer.Option(help="Requests/s, with commas.")] = "",
    gpus: Annotated[str, typer.Option(help="GPUs, with commas.")] = "A100",
    slo_ttft_ms: TtftOption = 500.0,
    slo_tpot_ms: TpotOption = None,
    mode: ModeOption = "paged",
    b_short: Annotated[str, typer.Option(help="auto, or tokens.")] = "auto",
    gamma: GammaOption = "auto",
    pc: PcOption = None,
    model: ModelOption = "llama-3-70b",
    max_model_len: WindowOption = None,
    input_share: InputShareOption = None,
    fields: FieldsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Plan at several rates and on several GPUs. Exit 1 when none is feasible, 2 on bad input."""
    need_libraries()
    from planner.errors import PlanError
    from planner.plan import make_plan
    from sluice.plan.question import Kinds, load_workload, make_question

    try:
        lengths = load_workload(workload, fields=fields, input_share=input_share)
        plans = [
            make_plan(
                make_question(
                    lengths,
                    Kinds(gpus=(gpu,), model=model),
                    rate=rate,
                    mode=mode,
                    slo_ttft_ms=slo_ttft_ms,
                    slo_tpot_ms=slo_tpot_ms,
                    b_short=b_short,
                    gamma=gamma,
                    pc=pc,
                    window_tokens=max_model_len,
                )
            )
            for rate in _rates(rates)
            for gpu in filter(None, gpus.split(","))
        ]
    except PlanError as error:
        refuse(error.problem, error.fix)
    if as_json:
        rows = [_row(found) for found in plans]
        typer.echo(json.dumps({"workload": workload, "mode": mode, "rows": rows}, indent=2))
    else:
        PlainConsole().print(_table(plans))
    raise typer.Exit(0 if any(found.chosen.feasible for found in plans) else 1)


def _rates(text: str) -> Iterator[float | None]:
    from planner.errors import PlanError

    if not text:
        yield None
        return
    for part in text.split(","):
        try:
            yield float(part)
        except ValueError:
            raise PlanError(f"--rates {text}", "give numbers with commas") from None


def _row(found: "PlanResult") -> dict[str, Any]:
    fleet = found.chosen
    return {
        "rate_per_s": found.question.goals.rate_per_s,
        "gpu": found.question.nodes[0].gpu,
        "profile": found.question.nodes[0].name,
        "feasible": fleet.feasible,
        "fleet": fleet.label,
        "boundaries": list(fleet.boundaries),
        "gamma": fleet.gamma,
        "nodes": [pool.nodes for pool in fleet.pools],
        "total_nodes": fleet.nodes or None,
        "one_pool_nodes": found.one_paged.nodes or None,
        "total_gpus": fleet.gpus or None,
        "cost_per_year_usd": fleet.usd_per_year if fleet.feasible else None,
        "savings": found.savings,
    }


def _table(plans: list["PlanResult"]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in _COLUMNS:
        left = column in {"GPU", "fleet", "nodes"}
        table.add_column(column, justify="left" if left else "right", no_wrap=left)
    for found in plans:
        row = _row(found)
        node, fleet = found.question.nodes[0], found.chosen
        table.add_row(
            f"{row['rate_per_s']:g}",
            f"{node.gpus} x {node.gpu}",
            escape(fleet.label) if fleet.feasible else "not feasible",
            ", ".join(map(str, fleet.boundaries)),
            f"{fleet.gamma:g}" if fleet.gamma > 1 else "",
            " + ".join(map(str, row["nodes"])),
            str(row["one_pool_nodes"] or ""),
            str(row["total_gpus"] or ""),
            f"{fleet.usd_per_year / 1000:,.0f}" if fleet.feasible and fleet.usd_per_year else "",
        )
    return table
