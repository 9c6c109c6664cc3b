"""`python -m bench NAME [PART...]`: one command reproduces one table."""

import importlib
import inspect
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console


class Bench(NamedTuple):
    """One bench and its parts."""

    text: str
    parts: dict[str, str]
    """Name -> module and function below `bench`."""
    first: int = 0
    """So many parts run where none is named; 0 for all. `all` names all."""


def _of(module: str, *names: str) -> dict[str, str]:
    return {name: f"{module}:{name.replace('-', '_')}" for name in names}


BENCHES = {
    "everything": Bench(
        "all five systems on against all off, live: SLOs by tenant, each one's part",
        {"everything": "everything.run:run"},
    ),
    "overhead": Bench(
        "CPU, latency and memory beside nginx, the Rust routers and LiteLLM",
        {
            **_of("overhead.run", "main", "streams", "rate", "slow", "features"),
            "profile": "scale.points:run",
        },
    ),
    "scale": Bench(
        "how cost grows with 2,000 workers, 100,000 entitlements, 10,000 leases",
        {"scale": "scale.run:run"},
    ),
    "controller": Bench(
        "a controller that starts on 100 pools with 1,000 entitlements, and one change",
        {"controller": "controller.run:run"},
    ),
    "soak": Bench(
        "half an hour of mixed load, cancels and errors: memory, leases, exact books",
        {"soak": "soak.run:run"},
    ),
    "attacks": Bench(
        "200,000 hostile cases over raw sockets: answers, memory, leases, /health",
        {"attacks": "attacks.run:run"},
    ),
    "operators": Bench(
        "20,000 histories of unlucky operators: no denial is lifted, no change lost",
        {"operators": "operators.run:run"},
    ),
    "mutations": Bench(
        "60 seeded faults in what decides: at least 90 % are seen by the tests",
        {"mutations": "mutations.run:run"},
    ),
    "changing-fleet": Bench(
        "engines come and go by every source and by the load, 1,000 reloads: no request fails",
        _of("changing_fleet.run", "sources", "reloads", "scaling"),
    ),
    "replicas": Bench(
        "four gateways on one Redis: limits, a killed one, Redis away, restarts",
        {
            "sharing": "replicas.sharing:rows",
            "versions": "replicas.sharing:version_rows",
            "killed": "replicas.sharing:killed_rows",
            **_of("replicas.outage", "hanging", "cluster", "stopped", "sentinel"),
            "rolling": "replicas.sharing:rolling_rows",
        },
    ),
    "real-engine": Bench(
        "real vLLM on the CPU: LoRA, mistakes, all on, openai-python's tests, a plan, phases",
        _of("real_engine.run", "adapters", "mistakes", "all-on", "planned", "phases"),
    ),
    "pool-routing": Bench(
        "the token-budget paper's tables; misroutes, rescues and learned ratios on real text",
        {
            "tables": "pool_routing.run:run",
            "accuracy": "pool_routing.accuracy:run",
        },
        1,
    ),
    "fleetopt": Bench(
        "FleetOpt's tables and simulated fleets; from a log: plan, serve, replay",
        {
            "tables": "fleetopt.run:run",
            "replay": "fleetopt.replay:run",
            "boundaries": "fleetopt.boundaries:run",
        },
        1,
    ),
    "phases": Bench(
        "prompts and answers on the same engines or apart; the planner's choice beside a sweep",
        {"phases": "phases.run:run"},
    ),
    "compressor": Bench(
        "what survives compression, what it costs, whether it fits",
        {"tables": "compressor.run:run"},
    ),
    "token-pools": Bench(
        "the token-pools paper's experiments on the shipped policy, and one of them live",
        {"tables": "token_pools.run:run", "live": "token_pools.live:run"},
        1,
    ),
    "bfio": Bench(
        "BF-IO's tables and figures: published, ours, what a gateway can have of it; live",
        {"tables": "bfio.run:run", "live": "bfio.live:run"},
        1,
    ),
    "predictor": Bench(
        "QUARTZ's Table 6: coverage of predicted prefills under shifts, and their cost",
        {"predictor": "predictor.run:run"},
    ),
    "caches": Bench(
        "what QUARTZ would gain if engines told what their prefix caches hold",
        {"caches": "caches.run:run", "knees": "caches.run:knees"},
        1,
    ),
    "quartz": Bench(
        "the QUARTZ paper's tables, ablations, scenes; over loads; the peers' routers live",
        {
            "tables": "quartz.run:run",
            "loads": "quartz.loads:run",
            "knees": "quartz.loads:knees",
            "live": "quartz.live:run",
            "shadow": "quartz.live:shadow",
        },
        1,
    ),
    "batches": Bench(
        "promises of batches and how many are kept; what batches cost live requests; 10^6 items",
        {
            "calibration": "batches.calibration:run",
            "live": "batches.live:live",
            "million": "batches.live:million",
            "prefixes": "batches.prefixes:run",
        },
        1,
    ),
    "quotes": Bench(
        "quotes of the time to first token, and how many come true, by load",
        {"quotes": "quotes.run:run"},
    ),
    "proofs": Bench(
        "changed configurations: what `sluice prove` says, and what comes of them live",
        {"proofs": "proofs.run:run"},
    ),
}


def main(
    name: Annotated[str, typer.Argument(help="One of: " + ", ".join(BENCHES))],
    parts: Annotated[list[str] | None, typer.Argument(help="Parts of it; `all` of them.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
    data: Annotated[Path | None, typer.Option(help="Folder with the traces.")] = None,
    share: Annotated[float, typer.Option(help="How long: 1 for the whole.")] = 1.0,
) -> None:
    """Run one benchmark; exit 1 if a row with a target does not hold."""
    os.environ.setdefault("SLUICE_BENCH_SHARE", str(share))
    import msgspec

    from bench.common.report import Report, show
    from sluice.build import compiled

    console = Console(stderr=as_json)
    bench = BENCHES.get(name)
    if bench is None or not {*(parts or ())} <= {*bench.parts, "all"}:
        known = bench.parts if bench else {each: of.text for each, of in BENCHES.items()}
        console.print(f"[red]no bench '{' '.join([name, *(parts or ())])}'[/]; there are:")
        for each, text in known.items():
            console.print(f"  [bold]{each}[/]  {'' if bench else text}")
        raise typer.Exit(2)
    wanted = parts or list(bench.parts)[: bench.first or None]
    rows: list[Any] = []
    detail: dict[str, Any] = {}
    for part in bench.parts if "all" in wanted else wanted:
        module, _, function = bench.parts[part].partition(":")
        run = getattr(importlib.import_module(f"bench.{module}"), function)
        if len(wanted) > 1 or "all" in wanted:
            Console(stderr=True).print(f"{name} {part} ...")
        found = run(data=data) if "data" in inspect.signature(run).parameters else run()
        report = found if isinstance(found, Report) else Report(name=part, rows=list(found))
        rows += report.rows
        detail[part] = report.detail
    report = Report(name=name, rows=rows, detail=detail)
    show(report, console)
    console.print("the gateway's decisions ran", "compiled" if compiled() else "interpreted")
    if as_json:
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    raise typer.Exit(0 if report.holds else 1)


if __name__ == "__main__":
    typer.run(main)
