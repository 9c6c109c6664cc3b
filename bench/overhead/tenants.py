"""`bench overhead`, what tenants cost: a key of an entitlement's own against one of a tenant.

The tenant's key has a model list, two limits and, through its tenant, two budgets; requests are
priced and go to the ledger. Both gateways have everything else on and run by turns.
"""

from contextlib import ExitStack
from pathlib import Path
from statistics import median

from rich.progress import Progress

from bench.common.everything_on import MODEL
from bench.common.report import Row, equals
from bench.common.tools import Figures, HttpLoad, bodies
from bench.overhead.contenders import EMBEDDED, ROUNDS, TENANTS, alone, by_turns, field
from bench.overhead.rounds import CONNECTIONS, KINDS, RUN_S, TICK_US, cost


def tenants_section(folder: Path, tools: tuple[Path, Path]) -> list[Row]:
    """CPU-us of a request with either key, and the difference within each round."""
    with ExitStack() as stack:
        found = field(stack, folder, tools, (EMBEDDED, TENANTS), tick_us=TICK_US)
        stack.enter_context(by_turns(found))
        body = bodies(folder, MODEL)
        rounds: list[Figures] = []
        with Progress(transient=True) as progress:
            task = progress.add_task("tenants", total=2 * (2 * ROUNDS + 1))
            for number in range(2 * ROUNDS + 1):
                figures: Figures = {"errors": 0.0}
                for name, contender in found.contenders.items():
                    with alone(contender):
                        for kind in KINDS:
                            load = HttpLoad(found.load, contender.port, body[kind])
                            seen = cost(load, contender, CONNECTIONS[kind], RUN_S, turn=number)
                            figures[f"{name} {kind}"] = seen["cpu_us"]
                            figures["errors"] += seen["errors"]
                    progress.advance(task)
                if number:  # the first round warms both up
                    rounds.append(figures)
        return [*tenants_rows(rounds), *found.missing]


def tenants_rows(rounds: list[Figures]) -> list[Row]:
    """Medians over the rounds."""
    rows = [equals("tenants: errors", sum(figures["errors"] for figures in rounds), 0.0)]
    for kind in KINDS:
        for name in (EMBEDDED, TENANTS):
            seen = [figures[f"{name} {kind}"] for figures in rounds]
            note = f"{min(seen):.0f} to {max(seen):.0f}"
            rows.append(Row(metric=f"{name}: {kind}, CPU us", measured=median(seen), note=note))
        more = sorted(f[f"{TENANTS} {kind}"] - f[f"{EMBEDDED} {kind}"] for f in rounds)
        note = " ".join(f"{value:.1f}" for value in more)
        metric = f"tenants add to a {kind} answer, CPU us"
        rows.append(Row(metric=metric, measured=median(more), note=note))
    return rows
