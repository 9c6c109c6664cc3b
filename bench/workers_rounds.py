"""Gateways of one and of two processes under the same offered load, by turns.

Those that are not measured are stopped (SIGSTOP): they use no processor and no cache.
"""

import os
import signal
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Final, Literal

import msgspec

from bench.everything import everything, serve_command
from bench.fleet import read_metrics
from bench.one_core import on_one_core
from bench.overhead_tools import Load, cpu_ns, rss_kib, spent, tree
from bench.workers_books import Line, LogReader, largest_share, outcomes
from bench.workers_limits import with_limited_model
from sluice.children import Children, free_ports

Kind = Literal["whole", "stream"]
CONNECTIONS: Final = 128
WARM_UP_S: Final = 1.0
"""Of the same load, before each run: whoever was stopped comes back first."""
BOOKED_S: Final = 10.0
"""How long the log may take to be complete."""


class Point(msgspec.Struct, frozen=True):
    """An offered load, requests/s in all."""

    kind: Kind
    rate: float
    """0: as many as take one process to NEAR of its core."""
    one_core: bool = False
    """Whether all of the gateway's processes stay on one core, and the load off it."""

    def __str__(self) -> str:
        rate = f"{self.rate:.0f}/s" if self.rate else "as many as one can"
        kind = "streams" if self.kind == "stream" else "whole answers"
        return f"{rate} {kind}{', all on one core' if self.one_core else ''}"


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one contender, its warm-up in the books but not in the CPU."""

    cpu_us: float
    """Of its whole process trees, for each request."""
    sent: int
    errors: int
    logged: int
    """Lines in the request logs."""
    counted: int
    """In /metrics."""
    share: float
    """Of the process that served the most."""
    first_p50_us: float
    first_p99_us: float
    cores: float
    """In use."""
    offered: float
    """Requests/s."""
    served: float
    """Requests/s."""
    caches_lost: float = 0.0
    """What the host took, before or after; see native/quiet.c. 0: not looked at."""


class Contender:
    """A gateway, or several that share the load and nothing else."""

    def __init__(
        self, name: str, folder: Path, engine_urls: Sequence[str], limited_url: str
    ) -> None:
        """`name`: as many gateways as it has words, of as many workers as each says."""
        self.name = name
        workers = [int(word) for word in name.split("+")]
        self.ports = free_ports(len(workers))
        self._files = [
            with_limited_model(everything(folder, port, engine_urls, workers=count), limited_url)
            for port, count in zip(self.ports, workers, strict=True)
        ]
        self._logs = [LogReader(folder / f"requests-{port}.jsonl") for port in self.ports]
        self.pids: list[int] = []

    @property
    def urls(self) -> list[str]:
        """Of its gateways."""
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    def start(self, children: Children) -> None:
        """Start, and wait until it serves."""
        self.pids = [
            children.start(serve_command(file), quiet=True, silent=True).pid for file in self._files
        ]
        for url in self.urls:
            children.wait_for(f"{url}/ready")

    def pause(self) -> None:
        """Stop all of its processes where they are."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """And let them go on."""
        self._signal(signal.SIGCONT)

    def idle_ms_per_s(self, seconds: float) -> float:
        """CPU while nobody asks for anything."""
        before = sum(map(cpu_ns, self.pids))
        time.sleep(seconds)
        return (sum(map(cpu_ns, self.pids)) - before) / 1e6 / seconds

    def rss_mib(self) -> float:
        """Of all of its processes."""
        return sum(map(rss_kib, self.pids)) / 1024

    def counted(self) -> int:
        """Requests on its /metrics pages."""
        return sum(outcomes(read_metrics(url)).total() for url in self.urls)

    def lines(self, count: int) -> list[Line]:
        """New lines of its logs: so many, or what there is after BOOKED_S."""
        found: list[Line] = []
        end_s = time.monotonic() + BOOKED_S
        while True:
            for log in self._logs:
                found += log.new()
            if len(found) >= count or time.monotonic() > end_s:
                return found
            time.sleep(0.1)

    def run(self, tool: Path, point: Point, body: Path, seconds: float) -> Seen:
        """Measure it under a load."""
        with on_one_core(self.pids) if point.one_core else nullcontext():
            return self._run(tool, point, body, seconds)

    def _run(self, tool: Path, point: Point, body: Path, seconds: float) -> Seen:
        counted = self.counted()
        load = Load(tool, self.ports, body)
        warm = load.run(CONNECTIONS, WARM_UP_S, point.rate)
        with load.start(CONNECTIONS, seconds, point.rate) as running:
            found, cpu_s = spent(running, {str(pid): pid for pid in self.pids})
        errors = int(found["errors"] + warm["errors"])
        sent = int(found["requests"] + warm["requests"]) + errors
        lines = self.lines(sent)
        return Seen(
            cpu_us=sum(cpu_s.values()) * 1e6 / max(1.0, found["requests"]),
            sent=sent,
            errors=errors,
            logged=len(lines),
            counted=self.counted() - counted,
            share=largest_share(lines),
            first_p50_us=found["first_p50_us"],
            first_p99_us=found["first_p99_us"],
            cores=sum(cpu_s.values()) / found["seconds"],
            offered=point.rate,
            served=found["requests"] / found["seconds"],
        )

    def _signal(self, sig: signal.Signals) -> None:
        for root in self.pids:
            for pid in tree(root):
                os.kill(pid, sig)
