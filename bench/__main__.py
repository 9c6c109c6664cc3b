"""`python -m bench NAME`: one command reproduces one table."""

import importlib
import inspect
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from bench.common.report import Report, show
from sluice.build import compiled

BENCHES = {
    "everything": "all five systems on against all off, live: SLOs by tenant, each one's part",
    "gateway-accuracy": "10,000 mixed requests against mocks: misroutes, rescues, ratios",
    "gateway-output": "every client asks for 32,768 tokens: short share on real lengths",
    "gateway-faults": "kill and break engines under load; cancel hundreds of requests",
    "overhead": "CPU, latency and memory beside nginx, HAProxy, the Rust routers and LiteLLM",
    "changing-fleet": "engines come and go by every source, 1,000 reloads: no request fails",
    "scaling": "engines follow the desired replicas, 1x to 4x to 1x: no request fails",
    "attacks": "200,000 hostile cases over raw sockets: answers, memory, leases, /health",
    "operators": "20,000 histories of unlucky operators: no denial is lifted, no change lost",
    "mutations": "60 seeded faults in what decides: at least 90 % are seen by the tests",
    "soak": "half an hour of mixed load, cancels and errors: memory, leases, exact books",
    "telemetry": "what tracing costs a request, a collector that hangs, complete traces",
    "usage": "what prices, the ledger and the usage export cost a request",
    "dashboard": "what the dashboard costs a gateway of 200 workers and 1,000 tenants",
    "scale": "how cost grows with 2,000 workers, 100,000 entitlements, 10,000 leases",
    "redis-outage": "kill and hang Redis under load: no request fails or waits",
    "fleetopt": "FleetOpt's tables: published, ours, what two pools buy; how long a plan takes",
    "plan-serve-replay": "from a log: plan, serve, replay; an engine fewer violates the SLO",
    "pool-routing": "the token-budget paper's tables: published, ours, what cannot be derived",
    "predictor": "QUARTZ's Table 6: coverage of predicted prefills under shifts, and their cost",
    "compressor": "what survives compression, what it costs, whether it fits",
    "compressor-load": "what compressing costs the requests beside it",
    "quartz-live": "QUARTZ and the peers' routers before the same mock engines, in real time",
    "quartz-shadow": "predictions beside least-loaded: coverage, would-be gain, gain of a switch",
    "real-engine": "two real vLLM on the CPU: calibrate, plan, LoRA, all on, openai-python's tests",
    "bfio": "BF-IO's tables and figures: published, ours, what a gateway can have of it",
    "bfio-live": "balanced data-parallel ranks behind a barrier, in virtual and in real time",
    "quartz": "the QUARTZ paper's tables, the scheduler against other routers, ablations, scenes",
    "quartz-loads": "the default scheduler beside four routers: 8 workloads, 3 fleets, 4 loads",
    "quartz-knees": "requests/s at the knee of each workload and fleet, for quartz-loads",
    "budgets": "400 clients on four replicas spend a budget; what budgets cost a request",
    "token-pools": "the token-pools paper's experiments on the shipped policy, in virtual time",
    "token-pools-replicas": "four gateways on one Redis: limits, a killed one, Redis away, observe",
    "token-pools-live": "a flood of spot through a real gateway, with token pools and without",
}


MODULES = {
    "quartz-knees": "quartz_loads.knees",
    "gateway-accuracy": "gateway.accuracy",
    "gateway-output": "gateway.output",
    "gateway-faults": "gateway.faults",
    "scaling": "changing_fleet.scaling",
    "attacks": "attacks",
    "redis-outage": "replicas.redis_outage",
    "plan-serve-replay": "fleetopt.plan_serve_replay",
    "compressor-load": "compressor.load",
    "bfio-live": "bfio.live",
    "token-pools-live": "token_pools.live",
    "token-pools-replicas": "replicas.run",
}
"""Where a bench is that is not `run` in a folder of its name."""


def main(
    name: Annotated[str, typer.Argument(help="One of: " + ", ".join(BENCHES))],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Folder for plots.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder with the traces.")] = None,
    profile: Annotated[bool, typer.Option(help="overhead: the cost of each stage.")] = False,
) -> None:
    """Run one benchmark; exit 1 if a row with a target does not hold."""
    console = Console(stderr=as_json)
    if name not in BENCHES:
        console.print(f"[red]unknown bench '{name}'[/]; there are:")
        for known, text in BENCHES.items():
            console.print(f"  [bold]{known}[/]  {text}")
        raise typer.Exit(2)
    module = importlib.import_module("bench." + MODULES.get(name, name.replace("-", "_") + ".run"))
    given = {"plot": plot, "data": data, "profile": profile}
    wanted = inspect.signature(module.run).parameters
    report: Report = module.run(**{k: v for k, v in given.items() if k in wanted})
    show(report, console)
    console.print("the gateway's decisions ran", "compiled" if compiled() else "interpreted")
    if as_json:
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    raise typer.Exit(0 if report.holds else 1)


if __name__ == "__main__":
    typer.run(main)
