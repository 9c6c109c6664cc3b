"""What a second process costs: the same offered load on one worker process and on two.

Asked, of everything on and embedded state, at as many whole answers a second as one worker serves
with its core in use to LEAST_UTILISATION and more: two workers spend at most 1.1 times the CPU of
one for each request, neither serves more than 65 %, and limits, the request log, the metrics and
the leases stay exact, at every rate and for streams, too. The other loads are there to be seen.
Each of two is half as busy as the one, and the fewer requests a process gets the more each costs.
How much of the figure is that, and not that there are two, say the rows in which all of a gateway's
processes share one core, and those of two workers over one under half of their load.

CPU is the kernel's accounting of the process trees. Beside them two gateways that share nothing
serve half of the load each: what two processes cost this machine before they share anything.
Rounds are interleaved, whoever is not measured is stopped, each ratio is taken within its round.
Peers (`make bench-peers`, nginx) are measured in one process and two, too: see `workers_peers`.

Which rounds of these loads count, `workers_busy` says; what all of them said is in the note.
"""

import asyncio
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace
from rich.progress import Progress

from bench.everything import MODEL
from bench.one_core import can_be_kept
from bench.overhead_tools import (
    Load,
    bodies,
    build,
    build_tools,
    caches_lost,
    scratch,
    start_engines,
)
from bench.report import Report, Row, at_most, equals
from bench.workers_books import gauge, held, idle_page, most_at_once, outcomes
from bench.workers_busy import APART, BUSY, ONE, ONE_CORE, TWO, NearOne, counting
from bench.workers_limits import LIMIT, LIMITED, CountingEngine, Held, press
from bench.workers_peers import peer_rows
from bench.workers_plot import plot_points
from bench.workers_rounds import CONNECTIONS, Contender, Point, Seen
from sluice.children import Children, free_ports

ROUNDS: Final = int(os.environ.get("SLUICE_BENCH_ROUNDS", "5"))
RUN_S: Final = 4.0 * float(os.environ.get("SLUICE_BENCH_TIME_SCALE", "1"))
POINTS: Final = (
    *(Point("whole", rate) for rate in (200.0, 1000.0, 2000.0, 3000.0)),
    BUSY,
    ONE_CORE,
    *(Point("stream", rate) for rate in (50.0, 200.0)),
)
FOUND: Final = (BUSY, ONE_CORE)
"""Those whose rate is found, anew in each round."""
HALVES: Final = ((1000.0, 2000.0),)
"""Whole answers a second: of one worker, and of two together."""
PEER_RATES: Final = (2000.0, 4500.0)
"""Whole answers a second at which peers are looked at; the higher one is about that of BUSY."""
BESIDE_RATE: Final = 500.0
"""Requests/s beside those whose limit is looked at."""
BUSY_RUN_S: Final = RUN_S / 2
"""Short, as a host seldom is quiet for long."""
MOST_MORE: Final = 8
"""So many times ROUNDS are run at most, until ROUNDS count of those whose rate is found."""
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
            quiet = build(folder, "quiet")
            assert quiet is not None  # the others were built
            tools = tool, quiet
            rows, rounds = await asyncio.to_thread(_by_turns, field, children, tools, folder)
            for contender in field[:2]:
                contender.go_on()
                rows += await _limits(contender, counting, tool, folder)
                contender.pause()
            loads = PEER_RATES, ROUNDS, BUSY_RUN_S
            body = bodies(folder, MODEL)["whole"]
            rows += await asyncio.to_thread(peer_rows, folder, tool, ports, body, loads)
            for contender in field:
                contender.go_on()
    detail = {str(point): msgspec.to_builtins(found) for point, found in rounds.items()}
    return Report(name="workers", rows=rows, detail=detail), rounds


def _by_turns(
    field: Sequence[Contender], children: Children, tools: tuple[Path, Path], folder: Path
) -> tuple[list[Row], Rounds]:
    tool, quiet = tools
    body = bodies(folder, MODEL)
    near = {point: NearOne(point) for point in FOUND}
    idle: list[Row] = []
    for contender in field:
        contender.start(children)
        idle.append(_idle_row(contender))
        contender.pause()
    points = [point for point in POINTS if not point.one_core or can_be_kept()]
    rounds: Rounds = {point: [] for point in points}
    with Progress(transient=True) as progress:
        task = progress.add_task("rounds", total=(ROUNDS + 1) * len(points) * len(field))
        number = 0
        while still := [point for point in points if _wanted(point, rounds, number)]:
            if number > ROUNDS:
                progress.update(
                    task, total=progress.tasks[task].completed + len(still) * len(field)
                )
            for point in still:
                load, seconds = (point, RUN_S) if point.rate else (near[point].point, BUSY_RUN_S)
                found = {}
                lost = caches_lost(quiet) if point is BUSY else 0.0
                for turn in range(len(field)):
                    contender = field[(turn + number) % len(field)]
                    contender.go_on()
                    seen = contender.run(tool, load, body[point.kind], seconds)
                    contender.pause()
                    before, lost = lost, caches_lost(quiet) if point is BUSY else 0.0
                    found[contender.name] = replace(seen, caches_lost=max(before, lost))
                    progress.advance(task)
                if point in near:
                    near[point].saw(found[ONE])
                if number:  # the first round warms everybody up
                    rounds[point].append(found)
            number += 1
    return [*_rows(rounds), *idle], rounds


def _wanted(point: Point, rounds: Rounds, number: int) -> bool:
    """Whether a round of it is to be run, the `number`th after the one that warms up."""
    if number <= ROUNDS:
        return True
    return not point.rate and len(counting(rounds[point])) < ROUNDS and number <= MOST_MORE * ROUNDS


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
            ratio_row(point, found, TWO, MOST_RATIO if point == BUSY else None),
            ratio_row(point, found, APART, None),
        ]
    rows += [half_row(rounds, half, whole) for half, whole in HALVES]
    if ONE_CORE not in rounds:
        metric = f"{ONE_CORE}: {_named(TWO)} / one, CPU per request"
        rows.append(Row(metric=metric, measured=None, note="needs Linux and two cores"))
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


def ratio_row(
    point: Point, found: Sequence[dict[str, Seen]], name: str, limit: float | None
) -> Row:
    """CPU per request over that of one worker: the median of the rounds' ratios."""
    metric = f"{point}: {_named(name)} / one, CPU per request"
    target = None if limit is None else f"<= {limit:g}"
    counted, busy = found, ""
    if point in FOUND:
        counted = counting(found)
        over_all = statistics.median(_ratios(found, name))
        busy = f"; {len(counted)} of {len(found)} rounds count, the median of all {over_all:.2f}"
        if not counted:
            holds = None if limit is None else False
            return Row(metric=metric, measured=None, target=target, holds=holds, note=busy[2:])
        rates = [seen[ONE].offered for seen in counted]
        one, many = (statistics.median(seen[n].cores for seen in counted) for n in (ONE, name))
        busy += (
            f"; {min(rates):.0f} to {max(rates):.0f}/s, one worker at {one:.2f} of a core, "
            f"{_named(name)} at {many:.2f}"
        )
    ratios = _ratios(counted, name)
    median = statistics.median(ratios)
    cpu = [statistics.median(seen[n].cpu_us for seen in counted) for n in (ONE, name)]
    p99 = [statistics.median(seen[n].first_p99_us for seen in counted) for n in (ONE, name)]
    return Row(
        metric=metric,
        measured=median,
        ratio=median,
        target=target,
        holds=None if limit is None else median <= limit,
        note=f"{cpu[1]:.0f} and {cpu[0]:.0f} us; rounds "
        + " ".join(f"{ratio:.2f}" for ratio in ratios)
        + f"; p99 first byte {p99[1]:.0f} and {p99[0]:.0f} us{busy}",
    )


def half_row(rounds: Rounds, half: float, whole: float) -> Row:
    """Two workers over one that gets as many requests as each of them."""
    pairs = zip(rounds[Point("whole", half)], rounds[Point("whole", whole)], strict=True)
    ratios = sorted(two[TWO].cpu_us / one[ONE].cpu_us for one, two in pairs)
    metric = f"{whole:.0f}/s on two workers / {half:.0f}/s on one, CPU per request"
    median = statistics.median(ratios)
    note = "rounds " + " ".join(f"{ratio:.2f}" for ratio in ratios)
    return Row(metric=metric, measured=median, ratio=median, note=note)


def _ratios(found: Sequence[dict[str, Seen]], name: str) -> list[float]:
    return sorted(seen[name].cpu_us / seen[ONE].cpu_us for seen in found)


async def _limits(
    contender: Contender, counting: CountingEngine, tool: Path, folder: Path
) -> list[Row]:
    """The limit beside the other load."""
    url = contender.urls[0]
    before = outcomes(await asyncio.to_thread(idle_page, url))
    load = Load(tool, contender.ports, bodies(folder, MODEL)["whole"])
    work = asyncio.to_thread(load.run, CONNECTIONS, RUN_S, BESIDE_RATE)
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
