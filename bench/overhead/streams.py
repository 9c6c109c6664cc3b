"""`bench overhead`, streams at an engine's pace: CPU of a chunk with 32 and 120 streams.

Four engines tick every 5 ms; each stream has 64 chunks, and another begins when it ends. An
unsaturated gateway wakes for each chunk, so a chunk costs more than if many are read at once.
Contenders run by turns, the others stopped; ratios are taken within their round.
"""

from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Final

from rich.progress import Progress

from bench.common.everything_on import MODEL
from bench.common.report import Row, at_most
from bench.common.tools import Figures, HttpLoad, bodies
from bench.overhead.contenders import (
    EMBEDDED,
    LEAST_LOADED,
    ROUNDS,
    ROUTER,
    TIME_SCALE,
    alone,
    by_turns,
    field,
)
from bench.overhead.rounds import CHUNKS, cost

CONTENDERS: Final = (EMBEDDED, LEAST_LOADED, ROUTER, "nginx")
STREAMS: Final = (32, 120)
TICK_US: Final = 5000
RUN_S: Final = 4.0 * TIME_SCALE
MAX_RATIO: Final = 1.4
"""Of a chunk's CPU over sglang-router's."""


def streams_section(folder: Path, tools: tuple[Path, Path]) -> list[Row]:
    """CPU-us of a chunk for each contender and number of streams."""
    with ExitStack() as stack:
        found = field(stack, folder, tools, CONTENDERS, tick_us=TICK_US)
        stack.enter_context(by_turns(found))
        body = bodies(folder, MODEL, max_tokens=CHUNKS)["stream"]
        rounds: list[Figures] = []
        with Progress(transient=True) as progress:
            task = progress.add_task("streams", total=(ROUNDS + 1) * len(found.contenders))
            for number in range(ROUNDS + 1):
                figures: Figures = {}
                for name, contender in found.contenders.items():
                    load = HttpLoad(found.load, contender.port, body)
                    with alone(contender):
                        for streams in STREAMS:
                            seen = cost(load, contender, streams, RUN_S, turn=number)
                            figures[f"{name} {streams}"] = seen["cpu_us"] / CHUNKS
                            figures["errors"] = figures.get("errors", 0.0) + seen["errors"]
                    progress.advance(task)
                if number:  # the first round warms everybody up
                    rounds.append(figures)
        return [*streams_rows(rounds, list(found.contenders)), *found.missing]


def streams_rows(rounds: list[Figures], names: list[str]) -> list[Row]:
    """Medians over the rounds, and the gateways' ratios to the router."""
    errors = sum(figures["errors"] for figures in rounds)
    rows = [at_most("streams at an engine's pace: errors", errors, 0.0)]
    for streams in STREAMS:
        for name in names:
            seen = [figures[f"{name} {streams}"] for figures in rounds]
            label = f"{name}: CPU-us of a chunk, {streams} streams"
            note = f"{min(seen):.1f} to {max(seen):.1f}"
            rows.append(Row(metric=label, measured=median(seen), note=note))
            if name in (EMBEDDED, LEAST_LOADED) and ROUTER in names:
                over = [f[f"{name} {streams}"] / f[f"{ROUTER} {streams}"] for f in rounds]
                note = f"{min(over):.2f} to {max(over):.2f}"
                rows.append(at_most(f"{label}, over {ROUTER}", median(over), MAX_RATIO, note))
    return rows
