"""What a second process costs: the same offered load on one worker process and on two.

Asked, of everything on and embedded state, at RATE whole answers a second: two workers spend at
most 1.1 times the CPU of one for each request, neither serves more than 65 %, and limits, the
request log, the metrics and the leases stay exact, at every rate and for streams, too.

CPU is the kernel's accounting of the process trees. Beside them two gateways that share nothing
serve half of the load each: what two processes cost this machine before they share anything.
Rounds are interleaved, whoever is not measured is stopped, each ratio is taken within its round.
"""

import asyncio
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from rich.progress import Progress

from bench.everything import MODEL
from bench.overhead_tools import Load, bodies, build_tools, scratch, start_engines
from bench.report import Report, Row, at_most, equals
from bench.workers_books import gauge, held, idle_page, most_at_once, outcomes
from bench.workers_limits import LIMIT, LIMITED, CountingEngine, Held, press
from bench.workers_plot import plot_points
from bench.workers_rounds import CONNECTIONS, Contender, Point, Seen
from sluice.children import Children, free_ports

ROUNDS: Final = int(os.environ.get("SLUICE_BENCH_ROUNDS", "5"))
RUN_S: Final = 4.0 * float(os.environ.get("SLUICE_BENCH_TIME_SCALE", "1"))
ONE, TWO, APART = "1", "2", "1+1"
"""Gateways of so many workers."""
RATE: Final = 2000.0
"""Half of what one process serves on the machine this was written on: below, a second process
is not needed, and each one's wake-ups, for ever fewer requests at a time, are what is measured;
far above, one of them is saturated and answers late."""
POINTS: Final = (
    *(Point("whole", rate) for rate in (200.0, 500.0, 1000.0, RATE)),
    *(Point("stream", rate) for rate in (50.0, 200.0)),
)
MOST_RATIO, MOST_SHARE = 1.1, 0.65
TICK_US: Final = 2000

Rounds = dict[Point, list[dict[str, Seen]]]


def run(plot: Path | None = None) -> Report:
    """All points, then the limits."""
    with scratch() as name:
        folder = Path(name)
        tools = build_tools(folder)
        if tools is None:
            row = Row(metric="not measured", measured=None, note="needs a C compiler (cc or gcc)")
            return Report(name="workers", rows=[row])
        report, rounds = asyncio.run(_measured(folder, *tools))
    if plot is not None:
        plot_points(rounds, plot)
    return report


async def _measured(folder: Path, engine: Path, tool: Path) -> tuple[Report, Rounds]:
    counting = CountingEngine()
    (limited_port,) = free_ports(1)
    server = await asyncio.start_server(counting.serve, "127.0.0.1", limited_port)
    async with server:
        with Children() as children:
            ports = start_engines(children, engine, 4, TICK_US)
            urls = [f"http://127.0.0.1:{port}" for port in ports]
            limited_url = f"http://127.0.0.1:{limited_port}"
            field = [Contender(n, folder, urls, limited_url) for n in (ONE, TWO, APART)]
            rows, rounds = await asyncio.to_thread(_by_turns, field, children, tool, folder)
            for contender in field[:2]:
                contender.go_on()
                rows += await _limits(contender, counting, tool, folder)
                contender.pause()
            for contender in field:
                contender.go_on()
    detail = {str(point): msgspec.to_builtins(found) for point, found in rounds.items()}
    return Report(name="workers", rows=rows, detail=detail), rounds


def _by_turns(
    field: Sequence[Contender], children: Children, tool: Path, folder: Path
) -> tuple[list[Row], Rounds]:
    body = bodies(folder, MODEL)
    idle: list[Row] = []
    for contender in field:
        contender.start(children)
        idle.append(_idle_row(contender))
        contender.pause()
    rounds: Rounds = {point: [] for point in POINTS}
    with Progress(transient=True) as progress:
        task = progress.add_task("rounds", total=(ROUNDS + 1) * len(POINTS) * len(field))
        for number in range(ROUNDS + 1):
            for point in POINTS:
                found = {}
                for turn in range(len(field)):
                    contender = field[(turn + number) % len(field)]
                    contender.go_on()
                    found[contender.name] = contender.run(tool, point, body[point.kind], RUN_S)
                    contender.pause()
                    progress.advance(task)
                if number:  # the first round warms everybody up
                    rounds[point].append(found)
    return [*_rows(rounds), *idle], rounds


def _idle_row(contender: Contender) -> Row:
    return Row(
        metric=f"{_named(contender.name)}: CPU while idle, ms/s",
        measured=contender.idle_ms_per_s(2.0),
        note=f"{contender.rss_mib():.0f} MiB resident",
    )


def _rows(rounds: Rounds) -> list[Row]:
    rows = []
    for point, found in rounds.items():
        rows += [
            ratio_row(point, found, TWO, MOST_RATIO if point == POINT else None),
            ratio_row(point, found, APART, None),
        ]
    shares = [seen[TWO].share for found in rounds.values() for seen in found]
    everyone = [s for found in rounds.values() for seen in found for s in seen.values()]
    unbooked = [abs(s.sent - s.logged) + abs(s.sent - s.counted) for s in everyone]
    return [
        *rows,
        at_most(
            "2 workers: largest share of one, any run",
            max(shares),
            MOST_SHARE,
            note=f"median {statistics.median(shares):.3f} of {len(shares)} runs",
        ),
        equals("requests that failed", sum(s.errors for s in everyone), 0),
        equals(
            "sent, logged and counted: differences",
            sum(unbooked),
            0,
            note=f"{sum(s.sent for s in everyone)} requests in {len(everyone)} runs",
        ),
    ]


POINT: Final = Point("whole", RATE)
"""The offered load that is asked for."""


def ratio_row(
    point: Point, found: Sequence[dict[str, Seen]], name: str, limit: float | None
) -> Row:
    """CPU per request over that of one worker: the median of the rounds' ratios."""
    ratios = sorted(seen[name].cpu_us / seen[ONE].cpu_us for seen in found)
    median = statistics.median(ratios)
    cpu = [statistics.median(seen[n].cpu_us for seen in found) for n in (ONE, name)]
    p99 = [statistics.median(seen[n].first_p99_us for seen in found) for n in (ONE, name)]
    return Row(
        metric=f"{point}: {_named(name)} / one, CPU per request",
        measured=median,
        ratio=median,
        target=None if limit is None else f"<= {limit:g}",
        holds=None if limit is None else median <= limit,
        note=f"{cpu[1]:.0f} and {cpu[0]:.0f} us; rounds "
        + " ".join(f"{ratio:.2f}" for ratio in ratios)
        + f"; p99 first byte {p99[1]:.0f} and {p99[0]:.0f} us",
    )


async def _limits(
    contender: Contender, counting: CountingEngine, tool: Path, folder: Path
) -> list[Row]:
    """The limit beside the other load."""
    url = contender.urls[0]
    before = outcomes(await asyncio.to_thread(idle_page, url))
    load = Load(tool, contender.ports, bodies(folder, MODEL)["whole"])
    work = asyncio.to_thread(load.run, CONNECTIONS, RUN_S, RATE / 4)
    beside = asyncio.ensure_future(work)
    pressed = await press(url, counting, RUN_S)
    other = await beside
    sent = sum(pressed.statuses.values()) + int(other["requests"] + other["errors"])
    lines = await asyncio.to_thread(contender.lines, sent)
    page = await asyncio.to_thread(idle_page, url)
    counted = outcomes(page) - before
    limited = [line for line in lines if line.model == LIMITED]
    refused = pressed.statuses.get(429, 0)
    name = _named(contender.name)
    return [
        equals(
            f"{name}: most at the engine of an entitlement limited to {LIMIT}",
            pressed.most_at_engine,
            LIMIT,
            note=f"{most_at_once(limited)} by the log; {_told(pressed)}",
        ),
        equals(
            f"{name}: refusals seen, logged and counted: differences",
            abs(refused - sum(line.status == 429 for line in limited))
            + abs(refused - counted["refused"])
            + abs(sent - len(lines)),
            0,
            note=f"{refused} refused of {sent}",
        ),
        equals(f"{name}: answers other than 200 and 429", _others(pressed, other), 0),
        equals(
            f"{name}: leases, leased sequences and waiting requests at the end",
            held(page) + gauge(page, "sluice_queue_depth"),
            0,
        ),
    ]


def _others(pressed: Held, other: dict[str, float]) -> float:
    return other["errors"] + sum(n for s, n in pressed.statuses.items() if s not in {200, 429})


def _told(pressed: Held) -> str:
    told = ", ".join(f"{count} {status}" for status, count in sorted(pressed.statuses.items()))
    return f"{told}; reasons {', '.join(sorted(pressed.reasons))}"


def _named(name: str) -> str:
    return {ONE: "one worker", TWO: "two workers", APART: "two gateways apart"}[name]
