"""`sluice simulate`: run a fleet under a workload in virtual time and check the SLO."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from sluice.config_file import load_or_exit
from sluice.plan.command import (
    DtypeOption,
    FieldsOption,
    InputShareOption,
    NodeOption,
    PlotOption,
    RateOption,
    TpotOption,
    TtftOption,
    WindowOption,
    WorkloadOption,
)
from sluice.terminal import (
    JsonOption,
    PlainConsole,
    need_libraries,
    need_plots,
    progress_bar,
    refuse,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from simulator.fleet.outcome import FleetOutcome
    from simulator.pipeline.tenants import TenantSummary
    from sluice.simulate.scenario import Ready

Dispatch = Literal["least-loaded", "jsq", "p2c", "round-robin", "random"]


def simulate(
    workload: WorkloadOption,
    rate: RateOption = None,
    fleet: Annotated[
        str | None, typer.Option(help="Nodes of each pool, by window: 284, or 80+2.")
    ] = None,
    b_short: Annotated[str, typer.Option(help="Boundaries between them: 4096.")] = "",
    gamma: Annotated[
        float, typer.Option(help="Totals up to this x boundary are compressed; 1: none.")
    ] = 1.0,
    pc: Annotated[
        float | None, typer.Option(help="Share of those that can be. [default: as the log has it]")
    ] = None,
    spill_queue: Annotated[
        int | None, typer.Option(min=0, help="Spill beyond slots + this. [default: never]")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("-c", "--config", help="Simulate the gateway of a sluice.yaml.")
    ] = None,
    serves: Annotated[
        str | None, typer.Option(help="Its model, where the file has several.")
    ] = None,
    counting: Annotated[
        Literal["paged", "slots"],
        typer.Option(help="paged: KV by block (vLLM). slots: a window each (papers)."),
    ] = "paged",
    dispatch: Annotated[
        Dispatch | None,
        typer.Option(help="Choice of node, with --fleet. [default: least-loaded]"),
    ] = None,
    gpu: Annotated[str, typer.Option(help="The nodes' GPU.")] = "A100",
    model: Annotated[str, typer.Option(help="The model's name in the catalogue.")] = "llama-3-70b",
    gpus_per_node: Annotated[int | None, typer.Option(min=1, help="Tensor parallelism.")] = None,
    dtype: DtypeOption = None,
    profile: NodeOption = None,
    max_model_len: WindowOption = None,
    requests: Annotated[int | None, typer.Option(min=1, help="How many. [default: 100000]")] = None,
    duration: Annotated[
        float | None, typer.Option(help="Simulated seconds, instead of --requests.")
    ] = None,
    arrivals: Annotated[
        Literal["poisson", "gamma", "bursty", "recorded"],
        typer.Option(help="How requests come; recorded: as in the trace, lengths too."),
    ] = "poisson",
    cv: Annotated[float, typer.Option(help="gamma: variation of the gaps.")] = 2.0,
    peak: Annotated[float, typer.Option(help="bursty: rate in a burst over the mean.")] = 3.0,
    burst_share: Annotated[float, typer.Option(help="bursty: share of time.")] = 0.2,
    burst_s: Annotated[float, typer.Option(help="bursty: mean length.")] = 30.0,
    mtbf_h: Annotated[
        float | None, typer.Option(help="Hours between a node's failures. [default: none fail]")
    ] = None,
    repair_s: Annotated[float, typer.Option(help="Mean time until it is back.")] = 300.0,
    slo_ttft_ms: TtftOption = 500.0,
    slo_tpot_ms: TpotOption = None,
    input_share: InputShareOption = None,
    fields: FieldsOption = None,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same result.")] = 0,
    plot: PlotOption = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate a fleet. Exit 1 when it does not hold the SLO, 2 on bad input."""
    need_libraries()
    from planner.errors import PlanError
    from sluice.plan.question import Kinds, load_workload
    from sluice.simulate.scenario import Scenario, p_c_of, prepare
    from sluice.simulated.gateway import model_named

    # First of all: errors in the file are reported with their lines.
    loaded = None if config is None else load_or_exit(config, as_json=as_json)
    try:
        served = None if loaded is None else model_named(loaded, serves, str(config))
        kinds = Kinds(
            gpus=(gpu,), model=model, gpus_per_node=gpus_per_node, dtype=dtype, profile=profile
        )
        lengths = load_workload(workload, fields=fields, input_share=input_share, model=serves)
        scenario = Scenario(
            source=workload,
            fields=fields,
            workload=lengths,
            node=kinds.nodes()[0],
            config=loaded,
            served=served,
            fleet=fleet,
            b_short=b_short,
            gamma=gamma,
            pc=p_c_of(lengths, pc, gamma),
            spill_queue=spill_queue,
            counting=counting,
            dispatch=dispatch,
            window_tokens=max_model_len,
            rate=rate,
            requests=requests,
            duration_s=duration,
            arrivals=arrivals,
            cv=cv,
            peak=peak,
            burst_share=burst_share,
            burst_s=burst_s,
            mtbf_h=mtbf_h,
            repair_s=repair_s,
            seed=seed,
        )
        ready = prepare(scenario)
    except PlanError as error:
        refuse(error.problem, error.fix)
    tpot_s = None if slo_tpot_ms is None else slo_tpot_ms / 1000
    holds = _run(ready, slo_ttft_ms / 1000, tpot_s, seed, plot, as_json=as_json)
    raise typer.Exit(0 if holds else 1)


def _run(
    ready: "Ready",
    ttft_s: float,
    tpot_s: float | None,
    seed: int,
    plot: Path | None,
    *,
    as_json: bool,
) -> bool:
    """Simulate, report and draw; returns whether the goals hold."""
    from simulator.experiments.fleet_verdicts import LatencyGoals
    from simulator.fleet.summary import summarise
    from sluice.simulate.report import SimulationReport, report_json, show
    from sluice.simulated.gateway import policies_of

    console = PlainConsole(stderr=as_json)
    started_s = time.perf_counter()
    with progress_bar() as progress:
        bar = progress.add_task("simulating", total=len(ready.traffic))
        outcome, found = _outcome(
            ready, seed, slo_s=ttft_s, arrived=lambda n: progress.update(bar, completed=n)
        )
    report = SimulationReport(
        spec=ready.spec,
        summary=summarise(ready.spec, outcome),
        goals=LatencyGoals(slo_s=ttft_s, tpot_slo_s=tpot_s),
        seed=seed,
        elapsed_s=time.perf_counter() - started_s,
        tenants=found,
        tenants_said=ready.tenants_said,
        policies=() if ready.gateway is None else policies_of(ready.gateway),
    )
    if as_json:
        typer.echo(json.dumps(report_json(report), indent=2))
    else:
        show(report, console)
    if plot is not None:
        need_plots()
        from sluice.simulate.plot import draw

        for file in draw(ready.spec, outcome, plot, ttft_s):
            console.print(f"wrote {file}")
    return report.holds


def _outcome(
    ready: "Ready", seed: int, *, slo_s: float, arrived: "Callable[[int], None]"
) -> "tuple[FleetOutcome, tuple[TenantSummary, ...]]":
    """Run the gateway of the file, or the fleet of the command line."""
    from simulator.fleet.fleet import simulate as run
    from simulator.pipeline.run import run_pipeline
    from simulator.pipeline.tenants import tenants

    if ready.gateway is None or ready.requests is None:
        found = run(ready.spec, ready.traffic, seed=seed, failures=ready.failures, progress=arrived)
        return found, ()
    served = run_pipeline(
        ready.gateway, ready.requests, seed=seed, failures=ready.failures, progress=arrived
    )
    return served.fleet, tenants(ready.gateway, served, slo_s)
