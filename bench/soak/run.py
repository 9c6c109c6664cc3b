"""Half an hour of mixed load on a gateway with every feature on: leftovers and growth.

First every bounded structure is filled (`bench.soak.fill`), so that later growth is unbounded.
Then the load is half of one process's measured capacity: whole answers and streams of several
lengths from C programs, and clients of all sorts (`bench.soak.visits`): conversations, compressed
prompts, four endpoints, clients that leave while waiting or streaming, exceeded limits, mistakes.
Two engines answer 500, reset, stall or are busy now and then.

Targets: memory grows by less than 3 % from minutes 5 to 8 to the last three; no lease, no waiting
request, no sequence at an engine and no open file is left; every request is one line of the log
and one count of the metrics; every error has a known cause. A shorter run says less of growth.
"""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Final

import httpx
import msgspec

from bench.common.fleet import read_metrics
from bench.common.gateway_books import LogReader, held, idle_page, outcomes
from bench.common.report import Report, Row, at_most, equals
from bench.common.steps import bars, scaled_s
from bench.common.tools import build_tools, scratch
from bench.soak.books import LogTotals, book_rows
from bench.soak.bulk import KINDS, UTILISATION, Bulk, capacity, offer
from bench.soak.fill import fill
from bench.soak.gateway import GatewaySample, SoakGateway
from bench.soak.trend import memory_row, most
from bench.soak.visits import Visitors
from sluice.children import Children

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
        found = await asyncio.to_thread(self._gateway.connections)
        self._connections = ", ".join(f"{n} {what}" for what, n in sorted(found.items()))
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
        note = f"{self._fds_before} before, {highest.fds} at most; left: {self._connections}"
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
