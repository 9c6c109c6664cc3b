"""`sluice plan`: the cheapest fleet for a workload, and the cost of alternatives."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from sluice.operate.admin_client import KeyFileOption
from sluice.terminal import (
    JsonOption,
    PlainConsole,
    need_libraries,
    need_plots,
    refuse,
)

if TYPE_CHECKING:
    from planner.records import PlanResult
    from sluice.plan.question import PlannedTenants
    from sluice.plan.verify import Verification

Phases = Literal["never", "auto", "always"]
Mode = Literal["paged", "corrected", "mix", "exact", "paper"]

WORKLOAD = typer.Option(
    "--workload",
    help="A CDF (JSON), a trace (CSV, JSONL), a request log, metrics:URL[,URL], prom:URL, "
    "synthetic:prompt=1500,answer=250, or azure, lmsys, agent-heavy.",
)
WorkloadOption = Annotated[str, WORKLOAD]
FieldsOption = Annotated[
    str | None, typer.Option(help="Fields of a trace: prompt=F,answer=F[,asked=F][,time=F].")
]
InputShareOption = Annotated[
    float | None, typer.Option(help="Prompt's share of a total, where only totals are known.")
]
TtftOption = Annotated[float, typer.Option("--slo-ttft-ms", help="P99 time to first token.")]
TpotOption = Annotated[float | None, typer.Option("--slo-tpot-ms", help="P99 time between tokens.")]
ModeOption = Annotated[Mode, typer.Option(help="paged: provision with this one.")]
ModelOption = Annotated[str, typer.Option(help="The model's name in the catalogue.")]
PcOption = Annotated[
    str | None,
    typer.Option(
        help="Share of the prompts above a boundary that can be cut; or prose=1,code=0. "
        "[default: as the log has it; else nothing is cut]"
    ),
]
WindowOption = Annotated[
    int | None, typer.Option("--max-model-len", help="Longest request served, tokens.")
]

RateOption = Annotated[
    float | None, typer.Option(help="Requests/s. [default: as the trace has it, in busy time]")
]
RateQuantileOption = Annotated[
    float | None,
    typer.Option(help="Take this quantile of a log's five-minute windows as the rate: 0.95."),
]
GammaOption = Annotated[str, typer.Option(help="auto, or a factor; 1: no compression.")]
DtypeOption = Annotated[str | None, typer.Option(help="Type of the weights: bf16, fp8, int4.")]
NodeOption = Annotated[Path | None, typer.Option(help="A measured node (JSON).")]
ExtrapolateOption = Annotated[
    bool,
    typer.Option("--extrapolate", help="Plan beyond what the profile measured, with an interval."),
]
PlotOption = Annotated[Path | None, typer.Option(help="Folder for plots.")]


def plan(
    workload: Annotated[str | None, WORKLOAD] = None,
    live: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Plan for what a running gateway was asked in the last week, and compare its "
            "fleet. Nothing is changed.",
        ),
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(
            help="With --live: its request log, instead of its own sample; with -c and --profile "
            "the verdict of `sluice prove`, too."
        ),
    ] = None,
    admin_key_file: KeyFileOption = None,
    rate: RateOption = None,
    rate_quantile: RateQuantileOption = None,
    slo_ttft_ms: TtftOption = 500.0,
    slo_tpot_ms: TpotOption = None,
    mode: ModeOption = "paged",
    b_short: Annotated[
        str, typer.Option(help="auto, tokens, or a list with commas for more pools.")
    ] = "auto",
    gamma: GammaOption = "auto",
    pc: PcOption = None,
    max_cut: Annotated[float, typer.Option(help="Largest share of a prompt to cut.")] = 0.5,
    gpu: Annotated[
        list[str] | None, typer.Option(help="Repeat it: each pool takes the cheapest.")
    ] = None,
    gpu_short: Annotated[str | None, typer.Option(help="The short pool's GPU.")] = None,
    gpu_long: Annotated[str | None, typer.Option(help="The long pool's GPU.")] = None,
    model: ModelOption = "llama-3-70b",
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="Tensor parallelism. [default: what fits]")
    ] = None,
    dtype: DtypeOption = None,
    usd_per_gpu_hour: Annotated[float | None, typer.Option(help="Replaces our price.")] = None,
    profile: NodeOption = None,
    max_model_len: WindowOption = None,
    extrapolate: ExtrapolateOption = False,
    max_pools: Annotated[int, typer.Option(min=1, max=8, help="Pools at most.")] = 3,
    spare: Annotated[int, typer.Option(min=0, help="Spare nodes per pool: N + this.")] = 0,
    availability: Annotated[float, typer.Option(help="Share of time a node is up.")] = 1.0,
    input_share: InputShareOption = None,
    fields: FieldsOption = None,
    phases: Annotated[
        Phases | None,
        typer.Option(
            help="Nodes for prefill and for decode. auto: where they are fewer. "
            "[default: auto with --transfer-gb-per-s, else never]"
        ),
    ] = None,
    transfer_gb_per_s: Annotated[
        float | None,
        typer.Option(min=0.001, help="KV that a node's link moves to a decode node, GB/s."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the fleet as sluice.yaml.")
    ] = None,
    worker: Annotated[
        list[str] | None, typer.Option(help="URL, or POOL=URL, for -o; repeat it.")
    ] = None,
    entitlements: Annotated[
        Path | None,
        typer.Option(
            "--entitlements", "-c", help="Plan for a sluice.yaml's entitlements; -o changes it."
        ),
    ] = None,
    serves: Annotated[
        str | None, typer.Option(help="The model, where the file or the log has several.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Simulate the fleet: does it hold? Exit 1 if not.")
    ] = False,
    verify_requests: Annotated[
        int, typer.Option(min=1000, help="Requests drawn for each pool's run, at most.")
    ] = 300_000,
    plot: PlotOption = None,
    as_json: JsonOption = False,
) -> None:
    """Plan the cheapest fleet that holds the SLO. Exit 1 when there is none, 2 on bad input."""
    need_libraries()
    from planner.errors import PlanError
    from planner.plan import make_plan
    from sluice.plan.live import against_json, ask, compare, prove, show_against
    from sluice.plan.question import Kinds, load_tenants, load_workload, make_question
    from sluice.plan.report import plan_json, show_plan

    _one_source(workload, live, log)
    try:
        tenants = None if entitlements is None else load_tenants(entitlements, serves)
        served = serves if tenants is None else tenants.model
        running = None if live is None else ask(live, admin_key_file, served, log)
        kinds = Kinds(
            gpus=gpu or (),
            short=gpu_short,
            long=gpu_long,
            model=model,
            gpus_per_node=gpus_per_node,
            dtype=dtype,
            usd_per_gpu_hour=usd_per_gpu_hour,
            profile=profile,
        )
        question = make_question(
            load_workload(workload or "", fields=fields, input_share=input_share, model=served)
            if running is None
            else running.workload,
            kinds,
            rate=rate,
            rate_quantile=rate_quantile,
            mode=mode,
            slo_ttft_ms=slo_ttft_ms,
            slo_tpot_ms=slo_tpot_ms,
            b_short=b_short,
            gamma=gamma,
            pc=pc,
            max_cut=max_cut,
            window_tokens=max_model_len or (None if running is None else running.window_tokens),
            extrapolate=extrapolate,
            reserved=None if tenants is None else tenants.reserved,
            most_pools=max_pools,
            spare_nodes=spare,
            availability=availability,
            phases=phases,
            transfer_gb_per_s=transfer_gb_per_s,
        )
        started_s = time.perf_counter()
        found = make_plan(question)
        elapsed_ms = 1000 * (time.perf_counter() - started_s)
        against = None if running is None else compare(running, question, found)
        proof = None if running is None else prove(found, tenants, log, profile)
    except PlanError as error:
        refuse(error.problem, error.fix)
    console = PlainConsole(stderr=as_json)
    if not as_json:
        show_plan(found, elapsed_ms, console)
        show_against(against, proof, console)
    checked = None
    if verify and found.chosen.feasible:
        checked = _verify(found, tenants, verify_requests, console, as_json=as_json)
    if as_json:
        document = {**plan_json(found, elapsed_ms, checked), "live": against_json(against, proof)}
        typer.echo(json.dumps(document, indent=2))
    if found.chosen.feasible and output is not None:
        _write(found, output, worker or (), tenants, serves or "")
        console.print(f"wrote {output}")
    if plot is not None:
        need_plots()
        from sluice.plan.plot import draw

        for file in draw(found, plot, checked):
            console.print(f"wrote {file}")
    holds = found.chosen.feasible and (checked is None or checked.holds)
    raise typer.Exit(0 if holds else 1)


def _one_source(workload: str | None, live: str | None, log: Path | None) -> None:
    if (workload is None) == (live is None):
        refuse("--workload and --live", "give one of them")
    if live is None and log is not None:
        refuse("--log without --live", "a log alone is a workload: --workload FILE")


def _write(
    found: "PlanResult",
    output: Path,
    worker: Sequence[str],
    tenants: "PlannedTenants | None",
    serves: str,
) -> None:
    """Write the fleet as sluice.yaml, or into the one that was given."""
    from planner.errors import PlanError
    from planner.gateway_file import assign_workers, gateway_file

    workers = assign_workers(found, worker)
    base, name = ("", serves) if tenants is None else (tenants.text, tenants.model)
    try:
        text = gateway_file(found, workers, base, name)
    except PlanError as error:
        refuse(error.problem, error.fix)
    output.write_text(text, encoding="utf-8")


def _verify(
    found: "PlanResult",
    tenants: "PlannedTenants | None",
    requests: int,
    console: Console,
    *,
    as_json: bool,
) -> "Verification":
    """Simulate under a progress bar and print the result."""
    from rich.progress import Progress

    from planner.errors import PlanError
    from sluice.plan.through_gateway import GATEWAY
    from sluice.plan.verify import show_verification, verify

    stderr = PlainConsole(stderr=True)
    with Progress(console=stderr, transient=True, disable=not stderr.is_terminal) as bars:
        names = (*(p.name for p in found.chosen.pools), GATEWAY)
        tasks = {name: bars.add_task(f"{name}, simulated") for name in names}

        def progress(name: str, arrived: int, *, total: int) -> None:
            bars.update(tasks[name], completed=arrived, total=total)

        try:
            checked = verify(
                found,
                base="" if tenants is None else tenants.text,
                model="" if tenants is None else tenants.model,
                most_requests=requests,
                progress=progress,
            )
        except PlanError as error:
            refuse(error.problem, error.fix)
    if not as_json:
        show_verification(checked, console)
    return checked
