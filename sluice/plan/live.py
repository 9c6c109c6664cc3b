"""`sluice plan --live`: what a running gateway was asked for, and its fleet beside the plan."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.markup import escape

from gateway.estimate.live_demand import HOUR_S, HOURS
from planner.errors import PlanError
from planner.gateway_file import gateway_file
from planner.plan import make_plan
from planner.readers.demand import read_demand
from planner.readers.fields import readable
from planner.readers.traces import workload_of
from planner.records import FleetPlan, PlanResult, Question
from planner.workload.rate import Rate
from planner.workload.workload import Workload
from sluice.operate.gateway_client import GatewayClient, NotRead
from sluice.plan.question import PlannedTenants, load_workload
from sluice.prove.proof import Proof, prove_all
from sluice.prove.report import show
from sluice.simulated.fleet import plain
from sluice.terminal import progress_bar, table

FEWEST: Final = 100
"""Requests below which a sample says nothing of lengths."""
_SOON_S: Final = 600.0
"""Shorter parts of an hour state no rate, unless there are no others."""


class PoolInForce(msgspec.Struct, frozen=True, kw_only=True):
    """A pool of the running gateway."""

    name: str
    boundary_tokens: int | None
    window_tokens: int
    nodes: int
    """Engines that it has, in the rotation or not."""


class Live(msgspec.Struct, frozen=True, kw_only=True):
    """What a running gateway tells of one model."""

    model: str
    pools: tuple[PoolInForce, ...]
    gamma: float
    workload: Workload

    @property
    def window_tokens(self) -> int:
        """The longest request that it serves."""
        return self.pools[-1].window_tokens

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Those in force, in tokens."""
        return tuple(pool.boundary_tokens for pool in self.pools if pool.boundary_tokens)


class Against(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet in force beside the one that is planned for the same demand."""

    live: Live
    needed: FleetPlan
    """The cheapest fleet at the boundaries in force."""
    planned: FleetPlan

    @property
    def lacks(self) -> dict[str, int]:
        """Nodes that each pool in force lacks at its boundary; below 0: those it could spare."""
        if not self.needed.feasible or len(self.needed.pools) != len(self.live.pools):
            return {}
        pairs = zip(self.live.pools, self.needed.pools, strict=True)
        return {own.name: pool.nodes - own.nodes for own, pool in pairs}

    @property
    def saves(self) -> int | None:
        """Nodes that the planned fleet has less than the one in force."""
        nodes = sum(pool.nodes for pool in self.live.pools)
        return nodes - self.planned.nodes if self.planned.feasible else None


def ask(url: str, key_file: Path | None, model: str | None, log: Path | None) -> Live:
    """Ask the gateway; raises PlanError for what cannot be planned for."""
    gateway = GatewayClient(url, None, key_file)
    try:
        return _asked(gateway, model, log)
    except NotRead as error:
        gateway.give_up(error)


def _asked(gateway: GatewayClient, model: str | None, log: Path | None) -> Live:
    models = {str(row["model"]): row for row in gateway.get("admin", "pools")}
    if model is None and len(models) > 1:
        raise PlanError(
            f"the gateway serves {len(models)} models", f"give --serves with one of: {_all(models)}"
        )
    name = model or next(iter(models), "")
    if name not in models:
        raise PlanError(f"the gateway serves no model {name}", f"it serves {_all(models)}")
    row = models[name]
    if any(pool["phase"] for pool in row["pools"]):
        raise PlanError(f"{name} has pools in phases", "plan from the log: --workload FILE")
    if log is not None:
        workload = load_workload(str(log), model=name)
    else:
        workload = _sampled(gateway.get("admin", "demand", params={"model": name})["data"], name)
    return Live(
        model=name,
        pools=tuple(
            PoolInForce(
                name=pool["name"],
                boundary_tokens=pool["b_short"],
                window_tokens=pool["max_model_len"],
                nodes=len({worker["id"].partition("#")[0] for worker in pool["workers"]}),
            )
            for pool in row["pools"]
        ),
        gamma=row["gamma"] or 1.0,
        workload=workload,
    )


def _all(models: Mapping[str, object]) -> str:
    return ", ".join(sorted(models)) or "none"


def _sampled(replicas: Sequence[Mapping[str, Any]], name: str) -> Workload:
    """The lengths of all replicas' samples, thinned alike, at the rate of the busiest hour."""
    stride = max(replica["stride"] for replica in replicas)
    records = [
        readable(record)
        for replica in replicas
        for record in replica["records"][:: stride // replica["stride"]]
    ]
    if len(records) < FEWEST:
        raise PlanError(
            f"the gateway knows of {len(records)} requests to {name} since its start",
            f"plan once there are {FEWEST}, or give its request log: --log FILE",
        )
    which = f"every {stride}th request" if stride > 1 else "every request"
    first_s = max(
        min(replica["first_unix_s"] for replica in replicas if replica["hours"]),
        max(replica["last_unix_s"] for replica in replicas) - HOURS * HOUR_S,
    )
    rate = _busiest(replicas)
    found = workload_of(read_demand(records, name), name)
    return msgspec.structs.replace(
        found,
        times_s=None,
        rate_per_s=rate.per_s,
        rate_said=rate.said,
        source=f"{which} since {_when(first_s)}, prompts as clients sent them",
    )


def _busiest(replicas: Sequence[Mapping[str, Any]]) -> Rate:
    """The rate of the busiest hour of a week; in the first and last one over the time seen."""
    rates: Counter[int] = Counter()
    short: Counter[int] = Counter()
    asked: Counter[int] = Counter()
    unserved: Counter[int] = Counter()
    for replica in replicas:
        for start_s, count, lost in replica["hours"]:
            end_s = min(start_s + HOUR_S, replica["last_unix_s"])
            seen_s = end_s - max(start_s, replica["first_unix_s"])
            (rates if seen_s >= _SOON_S else short)[start_s] += count / max(seen_s, 1.0)
            asked[start_s] += count
            unserved[start_s] += lost
    hour, per_s = max((rates or short).items(), key=lambda item: item[1])
    said = f"the busiest hour of {len(asked)}, from {_when(hour)}"
    if not rates:
        said = "the mean over the few minutes that the gateway has been asked anything"
    if unserved[hour]:
        said += f"; {100 * unserved[hour] / asked[hour]:.1f} % of it was not served"
    return Rate(per_s=per_s, said=said)


def _when(unix_s: float) -> str:
    return f"{datetime.fromtimestamp(unix_s, UTC):%A, %d %B, %H:%M} UTC"


def compare(live: Live, question: Question, plan: PlanResult) -> Against:
    """Plan for the boundaries in force as well."""
    if not live.boundaries:
        return Against(live=live, needed=plan.one_paged, planned=plan.chosen)
    gamma = live.gamma if question.compressible and len(live.boundaries) == 1 else 1.0
    fixed = msgspec.structs.replace(question, b_short=live.boundaries, gamma=gamma)
    return Against(live=live, needed=make_plan(fixed).chosen, planned=plan.chosen)


def show_against(found: Against | None, proof: Proof | None, console: Console) -> None:
    """The table and what follows from it, in words; nothing without a running gateway."""
    if found is None:
        return
    live, needed, planned = found.live, found.needed, found.planned
    made = table("", "boundary", "nodes", "K$/year")
    nodes = [pool.nodes for pool in live.pools]
    made.add_row(
        "in force",
        _tokens(live.boundaries),
        " + ".join(f"{pool.nodes} {pool.name}" for pool in live.pools),
        _thousands(_usd_per_year(needed, nodes)),
    )
    for name, fleet in (("needed at its boundary", needed), ("planned today", planned)):
        each = " + ".join(f"{pool.nodes} {pool.name}" for pool in fleet.pools)
        made.add_row(
            name,
            _tokens(fleet.boundaries if fleet.feasible else live.boundaries),
            each if fleet.feasible else "no number meets the goals",
            _thousands(fleet.usd_per_year if fleet.feasible else None),
        )
    console.print(made)
    for line in _words(found):
        console.print(escape(line))
    if proof is None:
        console.print("no verdict on it: `sluice prove` needs -c, --log and --profile")
    else:
        show(proof, console)


def _words(found: Against) -> Iterator[str]:
    lacks = {name: count for name, count in found.lacks.items() if count > 0}
    spare = {name: -count for name, count in found.lacks.items() if count < 0}
    if not found.lacks:
        yield "the fleet in force: no number of nodes meets the goals at its boundary"
    elif lacks:
        yield f"the fleet in force lacks {_counted(lacks)} for this demand"
    else:
        yield "the fleet in force meets the goals at this demand"
    if spare:
        yield f"at its boundary it could spare {_counted(spare)}"
    if found.saves is None:
        yield "no fleet meets the goals"
    elif found.saves > 0:
        yield f"the planned fleet saves {_nodes(found.saves)}"
    elif found.saves < 0:
        yield f"the planned fleet takes {_nodes(-found.saves)} more"
    else:
        yield "the planned fleet has as many nodes"
    yield "nothing was changed; -o writes the planned fleet"


def prove(
    found: PlanResult, tenants: PlannedTenants | None, log: Path | None, profile: Path | None
) -> Proof | None:
    """The verdict on the planned fleet; None where something that it needs was not given."""
    if tenants is None or log is None or profile is None or not found.chosen.feasible:
        return None
    engines = {
        pool.name: [f"http://{pool.name}-{i}.invalid:8000" for i in range(pool.decode_serving)]
        for pool in found.chosen.pools
    }
    text = gateway_file(found, engines, tenants.text, tenants.model)
    with TemporaryDirectory() as folder, progress_bar() as bar:
        file = Path(folder) / "planned.yaml"
        file.write_text(text, encoding="utf-8")
        show_done = partial(bar.update, bar.add_task("proving", total=None))
        return prove_all([file], log, rate=None, profile=profile, progress=show_done)


def _counted(nodes: Mapping[str, int]) -> str:
    return ", ".join(f"{_nodes(count)} in {pool}" for pool, count in nodes.items())


def _nodes(count: int) -> str:
    return f"{count} {'node' if count == 1 else 'nodes'}"


def _tokens(boundaries: Sequence[int]) -> str:
    return ", ".join(map(str, boundaries)) or "none"


def _usd_per_year(like: FleetPlan, nodes: Sequence[int]) -> float | None:
    """The cost of so many nodes of the kinds that a fleet has; None where it has other pools."""
    if len(like.pools) != len(nodes):
        return None
    pairs = zip(like.pools, nodes, strict=True)
    pools = tuple(msgspec.structs.replace(pool, nodes=n) for pool, n in pairs)
    return msgspec.structs.replace(like, pools=pools).usd_per_year


def _thousands(usd: float | None) -> str:
    return f"{usd / 1000:,.0f}" if usd else ""


def against_json(found: Against | None, proof: Proof | None) -> dict[str, Any] | None:
    """The same for machines; null where no number of nodes meets the goals."""
    if found is None:
        return None
    live, needed = found.live, found.needed
    return {
        "model": live.model,
        "boundaries": list(live.boundaries),
        "nodes": {pool.name: pool.nodes for pool in live.pools},
        "cost_per_year_usd": _usd_per_year(needed, [pool.nodes for pool in live.pools]),
        "needed_nodes": [pool.nodes for pool in needed.pools] if needed.feasible else None,
        "lacks": found.lacks or None,
        "saves_nodes": found.saves,
        "proof": None if proof is None else plain(proof),
    }
