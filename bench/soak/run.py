"""Half an hour of mixed load on a gateway with every feature on: leftovers and growth.

First every bounded structure is filled (`bench.soak.visits`), so that later growth is unbounded.
Then the load is half of one process's measured capacity: whole answers and streams of several
lengths from C programs, and clients of all sorts (`bench.soak.visits`): conversations, compressed
prompts, four endpoints, clients that leave while waiting or streaming, exceeded limits, mistakes.
Two engines answer 500, reset, stall or are busy now and then.

Targets: memory grows by less than 3 % from minutes 5 to 8 to the last three; no lease, no waiting
request, no sequence at an engine and no open file is left; every request is one line of the log
and one count of the metrics; every error has a known cause. A shorter run says less of growth.
"""

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Final

import httpx
import msgspec

from bench.common.fleet import read_metrics
from bench.common.gateway_books import Line, LogReader, held, idle_page, outcomes
from bench.common.report import Report, Row, at_most, bars, equals, judged, scaled_s
from bench.common.tools import build_tools, scratch
from bench.soak.gateway import (
    KINDS,
    TIGHT,
    UTILISATION,
    Bulk,
    GatewaySample,
    SoakGateway,
    capacity,
    offer,
)
from bench.soak.visits import Visitors, fill
from sluice.children import Children

# -- growth of sampled memory, by windows


WARM: Final = (1 / 6, 8 / 30)
"""Of the load's duration: minutes 5 to 8 of 30. All bounded structures are full before."""
LAST: Final = (0.9, 1.0)
"""Minutes 27 to 30."""
MAX_GROWTH: Final = 0.03


def window(
    samples: Sequence[GatewaySample], duration_s: float, part: tuple[float, float]
) -> list[GatewaySample]:
    """The samples of a part of the duration; at least the nearest one."""
    low, high = part[0] * duration_s, part[1] * duration_s
    found = [sample for sample in samples if low <= sample.at_s <= high]
    middle = (low + high) / 2
    return found or [min(samples, key=lambda sample: abs(sample.at_s - middle))]


def growth(samples: Sequence[GatewaySample], duration_s: float) -> float:
    """Median memory of the last part over that after warm-up, less one."""
    warm = statistics.median(s.rss_kib for s in window(samples, duration_s, WARM))
    last = statistics.median(s.rss_kib for s in window(samples, duration_s, LAST))
    return last / warm - 1


def memory_row(samples: Sequence[GatewaySample], duration_s: float) -> Row:
    """What memory did."""
    grown = growth(samples, duration_s)
    first, last = samples[0], samples[-1]
    note = (
        f"RSS of the process tree {first.rss_kib / 1024:.0f} MiB at first, "
        f"{last.rss_kib / 1024:.0f} at last"
    )
    metric = "memory: median of the last tenth over that after warm-up, less 1"
    return judged(metric, grown, f"< {MAX_GROWTH:g}", grown < MAX_GROWTH, note)


def most(samples: Sequence[GatewaySample]) -> GatewaySample:
    """The largest of each figure."""
    return msgspec.structs.replace(
        samples[0],
        leases=max(s.leases for s in samples),
        waiting=max(s.waiting for s in samples),
        fds=max(s.fds for s in samples),
    )


# -- the soak's books: compare clients' counts with the request log, and the log with /metrics


BROKEN: Final = "upstream_error"
EXAMPLES: Final = 8


class LogTotals:
    """What the request log says, added up as it is read."""

    def __init__(self, failing: Iterable[str]) -> None:
        """`failing`: engines that fail now and then."""
        self._failing = frozenset(failing)
        self.outcomes: Counter[str] = Counter()
        self.statuses: Counter[int | str] = Counter()
        """Of refusals."""
        self.compressed = 0
        self.waited = 0
        """Requests that waited in the gateway."""
        self.left_waiting = 0
        """Clients that left while their request waited, or before its first token."""
        self.caused = 0
        """Errors of engines that fail now and then."""
        self.uncaused: list[str] = []
        self.uncaused_count = 0

    def add(self, lines: Iterable[Line]) -> None:
        """Take over new lines."""
        for line in lines:
            self.outcomes[line.outcome] += 1
            if line.outcome in {"refused", "error"}:
                self.statuses[line.status] += 1
            self.compressed += line.compression.compressed != "none"
            self.waited += line.timing.queue_ms > 1.0
            if line.outcome == "disconnected" and line.model == TIGHT:
                self.left_waiting += 1
            if line.outcome in {BROKEN, "internal_error"} or str(line.status) >= "500":
                self._judge(line)

    @property
    def count(self) -> int:
        """Lines."""
        return self.outcomes.total()

    def _judge(self, line: Line) -> None:
        if line.outcome == BROKEN and any(try_.worker in self._failing for try_ in line.attempts):
            self.caused += 1
            return
        self.uncaused_count += 1
        if len(self.uncaused) < EXAMPLES:
            tries = ", ".join(f"{try_.worker} {try_.result}" for try_ in line.attempts)
            self.uncaused.append(f"{line.request_id} {line.status} {line.reason}: {tries}")


def book_rows(
    totals: LogTotals,
    counted: Mapping[str, int],
    ended: Mapping[tuple[str, str], int],
    bulk_ok: int,
    bulk_failed: int,
) -> list[Row]:
    """Requests by how they ended: clients, log, metrics. `counted`: /metrics by outcome."""
    by_end: Counter[str] = Counter()
    for (_, how), count in ended.items():
        by_end[how] += count
    sent = by_end.total() + bulk_ok + bulk_failed
    outcomes = set(counted) | set(totals.outcomes)
    differ = sum(abs(counted.get(o, 0) - totals.outcomes[o]) for o in outcomes)
    wrong, unseen = refusal_gaps(by_end, totals.statuses)
    whole = sum(by_end[how] for how in ("ok", "left", "broken", "lost")) + bulk_ok + bulk_failed
    whole += sum(count for how, count in by_end.items() if how.startswith("http 5"))
    served = sum(totals.outcomes[o] for o in ("ok", "disconnected", "evicted", BROKEN))
    told = ", ".join(f"{how} {count}" for how, count in sorted(by_end.items()))
    refused = {str(status): count for status, count in totals.statuses.items()}
    return [
        equals("sent - logged", sent - totals.count, 0, note=f"{sent} requests; visitors: {told}"),
        equals("logged and counted, by outcome: differences", differ, 0, note=_listed(counted)),
        equals(
            "refusals by status, clients and log: differences",
            wrong,
            0,
            note=f"{_listed(refused)}; {unseen} had left before they could see it",
        ),
        equals("served, clients - log", whole - unseen - served, 0),
        equals("bulk requests that failed", bulk_failed, 0),
    ]


def refusal_gaps(by_end: Mapping[str, int], logged: Mapping[int | str, int]) -> tuple[int, int]:
    """Refusals that differ, and those that nobody saw: whoever left may have been refused, too."""
    statuses = {str(status): count for status, count in logged.items()}
    seen = {
        how.removeprefix("http "): count
        for how, count in by_end.items()
        if how.startswith("http 4")
    }
    gaps = [statuses.get(s, 0) - seen.get(s, 0) for s in statuses.keys() | seen.keys()]
    unseen = sum(gap for gap in gaps if gap > 0)
    too_few = -sum(gap for gap in gaps if gap < 0)
    return too_few + max(0, unseen - by_end.get("left", 0)), unseen


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()) if count)


MINUTES: Final = scaled_s(30.0, 0.5)
SAMPLE_S: Final = 5.0
VISITS_PER_S: Final = 25.0
IDLE_S: Final = 6.0
"""By then the gateway has closed its idle connections to engines."""
MAX_VISITS: Final = 512
"""At once; beyond it nobody comes: a gateway that hangs does not fill this process."""
SETTLED_S: Final = 30.0
"""After the load, until nothing may be left."""


def run() -> Report:
    """Half an hour, or a share of it."""
    with scratch() as name:
        folder = Path(name)
        tools = build_tools(folder)
        if tools is None:
            row = Row("not measured", None, "needs a C compiler (cc or gcc)")
            return Report(name="soak", rows=[row])
        with Children() as children:
            soak = Soak(SoakGateway(folder, children, tools[0]), tools[1], folder, MINUTES * 60)
            asyncio.run(soak.run())
            rows = soak.rows()
    detail = {"samples": [msgspec.to_builtins(sample) for sample in soak.samples]}
    return Report(name="soak", rows=rows, detail=detail)


class Soak:
    """One run."""

    def __init__(self, gateway: SoakGateway, tool: Path, folder: Path, duration_s: float) -> None:
        self.samples: list[GatewaySample] = []
        self._gateway = gateway
        self._tool = tool
        self._folder = folder
        self._duration_s = duration_s
        self._visitors = Visitors(gateway.url)
        self._totals = LogTotals(gateway.failing)
        self._log = LogReader(gateway.log, forget=True)
        self._usage = LogReader(gateway.usage, forget=True)
        self._bulks: list[Bulk] = []
        self._bulk_ok = self._bulk_failed = 0
        self._turned_away = self._missed = 0
        self._over = False

    async def run(self) -> None:
        """Capacity, filling, load, what is left."""
        for kind in KINDS:
            work = asyncio.to_thread(capacity, self._gateway, self._tool, self._folder, kind)
            bulk, found = await work
            self._bulks.append(bulk)
            self._count(found)
        for found in await fill(self._gateway, self._tool, self._folder, self._visitors):
            self._count(found)
        await asyncio.to_thread(idle_page, self._gateway.url)
        await asyncio.sleep(IDLE_S)
        self._read()
        self._lines_before = self._totals.count
        self._fds_before = self._gateway.fds()
        self._begin_s = time.monotonic()
        self._cpu_before_s = self._gateway.cpu_s()
        visiting = asyncio.create_task(self._visit())
        watching = asyncio.create_task(self._watch())
        for found in await offer(self._gateway, self._tool, self._bulks, self._duration_s):
            self._count(found)
        await visiting
        self._busy = (self._gateway.cpu_s() - self._cpu_before_s) / self._duration_s
        self._over = True
        await watching
        self._visitors.close()
        await self._settled()

    def rows(self) -> list[Row]:
        """What was found."""
        counted = outcomes(self._page)
        return [
            memory_row(self.samples, self._duration_s),
            *self._left_rows(),
            *book_rows(
                self._totals, counted, self._visitors.ended, self._bulk_ok, self._bulk_failed
            ),
            self._error_row(),
            *self._load_rows(),
        ]

    # -- while the load lasts

    async def _visit(self) -> None:
        """Visitors at random times, whatever the gateway does."""
        rng, due_s = Random("soak"), self._begin_s
        under_way: set[asyncio.Task[None]] = set()
        while True:
            due_s += rng.expovariate(VISITS_PER_S)
            if due_s - self._begin_s > self._duration_s:
                break
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            if len(under_way) >= MAX_VISITS:
                self._turned_away += 1
                continue
            for visit in self._visitors.choose():
                task = asyncio.create_task(self._visitors.make(visit))
                under_way.add(task)
                task.add_done_callback(under_way.discard)
        await asyncio.gather(*under_way)

    async def _watch(self) -> None:
        """Sample, and read the log as it grows."""
        every_s = min(SAMPLE_S, self._duration_s / 60)
        with bars() as bar:
            step = bar("soak", round(self._duration_s / every_s))
            while not self._over:
                at_s = time.monotonic() - self._begin_s
                try:
                    self.samples.append(await asyncio.to_thread(self._gateway.sample, at_s))
                except httpx.TransportError:
                    self._missed += 1  # its page did not come within 5 s
                await asyncio.to_thread(self._read)
                step()
                await asyncio.sleep(every_s)

    def _read(self) -> None:
        self._totals.add(self._log.new())
        self._usage.new()

    def _count(self, found: dict[str, float]) -> None:
        self._bulk_ok += int(found["requests"])
        self._bulk_failed += int(found["errors"])

    # -- afterwards

    async def _settled(self) -> None:
        """Until nothing is left, or SETTLED_S."""
        end_s = time.monotonic() + SETTLED_S
        while True:
            await asyncio.to_thread(self._read)
            self._page = await asyncio.to_thread(idle_page, self._gateway.url)
            self._last = await asyncio.to_thread(
                self._gateway.sample, time.monotonic() - self._begin_s
            )
            self._at_engines = await asyncio.to_thread(self._gateway.running_at_engines)
            kept = self._last.leases + self._last.waiting + self._at_engines
            files = self._last.fds > self._fds_before
            if not (kept or files) or time.monotonic() > end_s:
                break
            await asyncio.sleep(0.5)
        await asyncio.sleep(1.0)
        await asyncio.to_thread(self._read)
        self._page = await asyncio.to_thread(read_metrics, self._gateway.url)

    def _left_rows(self) -> Iterator[Row]:
        highest = most(self.samples)
        note = f"{highest.leases:.0f} at most"
        yield equals("leases at the end", held(self._page), 0, note)
        note = f"{highest.waiting:.0f} seen"
        yield equals("waiting in the gateway", self._last.waiting, 0, note)
        yield equals("sequences at the engines", self._at_engines, 0)
        note = f"{self._fds_before} before, {highest.fds} at most"
        more = self._last.fds - self._fds_before
        yield at_most("open files after the load less before", more, 0, note)

    def _error_row(self) -> Row:
        examples = [*self._totals.uncaused, *self._visitors.strange]
        lost = sum(count for (_, how), count in self._visitors.ended.items() if how == "lost")
        note = "; ".join(examples) or f"{self._totals.caused} that engines caused"
        return equals("errors that nobody caused", self._totals.uncaused_count + lost, 0, note)

    def _load_rows(self) -> Iterator[Row]:
        rates = "; ".join(
            f"{b.kind.name} {b.rate_per_s:.0f}/s of {b.capacity_per_s:.0f}" for b in self._bulks
        )
        note = (
            f"offered {UTILISATION:.0%} of capacity, visitors included: {rates}; "
            f"{min(bulk.cores for bulk in self._bulks):.2f} cores or more when that was measured"
        )
        yield Row("cores in use by the gateway", self._busy, note)
        note = (
            f"{self._totals.compressed} compressed, {self._totals.waited} waited, "
            f"{self._totals.left_waiting} left the tight model's line; "
            f"{self._turned_away} visitors turned away; "
            f"{self._log.read_bytes / 1e9:.2f} GB of request log"
        )
        asked = self._totals.count - self._lines_before
        yield Row("requests/s", asked / self._duration_s, note)
        note = f"{len(self.samples)} that it gave"
        yield Row("samples that the gateway did not give within 5 s", self._missed, note)
