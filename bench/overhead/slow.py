"""`bench overhead`, slow streams: memory of 8,000 at a time on one gateway process.

Every feature is on. Two load processes start them evenly over 16 s, four engines give each a
chunk every half second for 24 s: all are open together for some eight seconds.
"""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import httpx

from bench.common.everything_on import MODEL
from bench.common.report import Row, at_least, at_most, equals
from bench.common.tools import Figures, HttpLoad, bodies, rss_kib
from bench.overhead.contenders import EMBEDDED, Field, field, may_open

STREAMS: Final = 8000
LOADS: Final = 2
BEGIN_S: Final = 16.0
TICK_US: Final = 500_000
CHUNKS: Final = 48
MAX_KIB: Final = 45.0
_SPARE_FILES: Final = 1000


def slow_section(folder: Path, tools: tuple[Path, Path]) -> list[Row]:
    """Errors, how many were open at once, KiB of each."""
    lacking = may_open(2 * STREAMS + _SPARE_FILES)
    if lacking:
        return [Row(metric=f"{STREAMS:,} slow streams", measured=None, note=lacking)]
    with ExitStack() as stack:
        found = field(stack, folder, tools, (EMBEDDED,), tick_us=TICK_US)
        if EMBEDDED not in found.contenders:
            return found.missing
        return _rows(*_measure(found, folder))


def _measure(found: Field, folder: Path) -> tuple[list[Figures], float, float]:
    """What each load found; KiB of each stream; most streams that engines had at once."""
    gateway = found.contenders[EMBEDDED]
    pid = gateway.pids["self"]
    for body in bodies(folder, MODEL, max_tokens=2).values():
        HttpLoad(found.load, gateway.port, body).run(64, 1.0)
    idle_kib = rss_kib(pid)
    load = HttpLoad(found.load, gateway.port, bodies(folder, MODEL, max_tokens=CHUNKS)["stream"])
    each = STREAMS // LOADS
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        runs = [
            stack.enter_context(load.start(each, BEGIN_S, each / BEGIN_S)) for _ in range(LOADS)
        ]
        for run in runs:
            run.ready()
        for run in runs:
            run.begin()
        seen = [pool.submit(run.found) for run in runs]
        most_kib = most_open = 0.0
        while not all(future.done() for future in seen):
            most_kib = max(most_kib, rss_kib(pid))
            most_open = max(most_open, sum(map(_running, found.engine_ports)))
            time.sleep(0.5)
        return [future.result() for future in seen], (most_kib - idle_kib) / STREAMS, most_open


def _running(port: int) -> float:
    """Streams that an engine has under way."""
    page = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10.0, trust_env=False).text
    sample = re.search(r"^vllm:num_requests_running\{.*\} (\S+)$", page, re.MULTILINE)
    return float(sample[1]) if sample else 0.0


def _rows(seen: list[Figures], each_kib: float, most_open: float) -> list[Row]:
    errors = sum(figures["errors"] for figures in seen)
    ended = sum(figures["requests"] for figures in seen)
    p99_ms = max(figures["gap_p99_us"] for figures in seen) / 1000
    label = f"{STREAMS:,} slow streams"
    return [
        equals(f"{label}: errors", errors, 0, f"{ended:.0f} ended with [DONE]"),
        at_least(
            f"{label}: open at once",
            most_open,
            0.99 * STREAMS,
            f"as the engines say; between chunks {TICK_US // 1000} ms, p99 {p99_ms:.0f} ms",
        ),
        at_most(f"{label}: KiB each", each_kib, MAX_KIB),
    ]
