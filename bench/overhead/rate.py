"""`bench overhead`, chunks/s per core: the number of paced streams relayed without delay.

Eight engines tick every 25 ms, each at another phase: 40 tokens/s per stream, as with real
engines. Streams of 80 chunks begin evenly, so that as many end as begin. The number of streams
rises until something fails, or until the p99 of the time between two pieces of a stream is more
than 5 ms above that of the load generator directly on the engines with as many streams. The
result is chunks/s relayed over the cores spent on it.

Every contender is also shown at the gateway's highest step.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from bench.common.everything_on import MODEL
from bench.common.report import Row
from bench.common.steps import bars, scaled_s
from bench.common.tools import Figures, HttpLoad, bodies, cpu_ns
from bench.overhead.field import EMBEDDED, ROUTER, Contender, Field, field

CONTENDERS: Final = (EMBEDDED, ROUTER, "nginx")
ENGINES: Final = 8
TICK_S: Final = 0.025
CHUNKS: Final = 80
STREAM_S: Final = CHUNKS * TICK_S
WARM_UP_S: Final = STREAM_S + 0.5
WINDOW_S: Final = scaled_s(3.0)
MAX_ADDED_US: Final = 5000.0
LADDER: Final = (100, 200, 300, 400, 500, 640, 800, 1000, 1250, 1600, 2000, 2500, 3200, 4000, 5000)
"""Streams at a time."""
FLEET_CHUNKS_PER_S: Final = 60 * 64 * 40
"""60 engines of 64 sequences at 40 tokens/s each."""


def rate_rows(folder: Path, tools: tuple[Path, Path]) -> list[Row]:
    """Of each contender: at its highest step that held, and at the gateway's."""
    with ExitStack() as stack:
        tick_us = round(TICK_S * 1e6)
        found = field(stack, folder, tools, CONTENDERS, tick_us=tick_us, engines=ENGINES)
        body = bodies(folder, MODEL, max_tokens=CHUNKS)["stream"]
        bar = stack.enter_context(bars())
        steps = _Steps(found, body, bar("steps", 4 * (1 + len(found.contenders))))
        best = {name: steps.best(name) for name in found.contenders}
        ours = best.get(EMBEDDED)
        level = int(ours["streams"]) if ours else LADDER[0]
        beside = {name: steps.at(name, level) for name in found.contenders}
        rows = [*found.missing, _direct_row(steps)]
    for name, figures in best.items():
        rows += rows_of(name, figures, beside[name])
    return rows


class _Steps:
    """Steps of the ladder, each measured once; one that failed twice, the better one counts."""

    def __init__(self, found: Field, body: Path, tell: Callable[[], None]) -> None:
        self._field = found
        self._body = body
        self._tell = tell
        self._seen: dict[tuple[str | None, int], Figures] = {}

    def best(self, name: str | None) -> Figures | None:
        """The highest step that held; None if none did."""
        streams = highest(LADDER, lambda streams: step_holds(self.at(name, streams)))
        return None if streams is None else self.at(name, streams)

    def at(self, name: str | None, streams: int) -> Figures:
        """A contender's step; None for straight to the engines, whose own pace is the measure."""
        if (name, streams) not in self._seen:
            paced_us = self.at(None, streams)["gap_p99_us"] if name else TICK_S * 1e6
            for _ in range(2):
                seen = self._step(name, streams)
                seen["added_p99_us"] = seen["gap_p99_us"] - paced_us
                known = self._seen.setdefault((name, streams), seen)
                if step_holds(seen) or seen["added_p99_us"] < known["added_p99_us"]:
                    self._seen[name, streams] = seen
                if step_holds(seen):
                    break
        return self._seen[name, streams]

    def _step(self, name: str | None, streams: int) -> Figures:
        contender = self._field.contenders[name] if name else None
        ports = [contender.port] if contender else self._field.engine_ports
        load = HttpLoad(self._field.load, ports, self._body).start(
            round(1.25 * streams) + 64,
            WARM_UP_S + WINDOW_S,
            streams / STREAM_S,
            warm_up_s=WARM_UP_S,
        )
        with load as run:
            run.ready()
            run.begin()
            time.sleep(WARM_UP_S)
            spent = _Spent(contender)
            time.sleep(WINDOW_S)
            cores = spent.cores()
            seen = run.found()
        self._tell()
        return {
            "streams": streams,
            "chunks_per_s": seen["chunks"] / WINDOW_S,
            "offered_per_s": streams / TICK_S,
            "gap_p99_us": seen["gap_p99_us"],
            "errors": seen["errors"],
            **cores,
        }


class _Spent:
    """Cores spent since it was made: by a contender, and by the machine as a whole."""

    def __init__(self, contender: Contender | None) -> None:
        self._pid = contender.pids["self"] if contender else None
        self._began_s, self._contender_s, self._machine_s = self._now()

    def cores(self) -> Figures:
        """The two figures."""
        now_s, contender_s, machine_s = self._now()
        took_s = now_s - self._began_s
        return {
            "cores": (contender_s - self._contender_s) / took_s,
            "machine_cores": (machine_s - self._machine_s) / took_s,
        }

    def _now(self) -> tuple[float, float, float]:
        first = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]
        ticks = [int(part) for part in first]
        machine_s = (sum(ticks) - ticks[3] - ticks[4]) / 100  # less idle and waiting for disks
        return time.monotonic(), cpu_ns(self._pid) / 1e9 if self._pid else 0.0, machine_s


def highest(ladder: Sequence[int], holds: Callable[[int], bool]) -> int | None:
    """The highest step that holds, if all below it do: found by halving."""
    low, high = 0, len(ladder)
    while low < high:
        middle = (low + high) // 2
        if holds(ladder[middle]):
            low = middle + 1
        else:
            high = middle
    return ladder[low - 1] if low else None


def step_holds(seen: Figures) -> bool:
    """No error, nothing left behind, nothing late."""
    return (
        seen["errors"] == 0
        and seen["chunks_per_s"] >= 0.95 * seen["offered_per_s"]
        and seen["added_p99_us"] <= MAX_ADDED_US
    )


def _direct_row(steps: _Steps) -> Row:
    label = "engines and load generator alone keep pace up to, chunks/s"
    seen = steps.best(None)
    if seen is None:
        return Row(label, None, "not even with the fewest streams")
    note = f"{seen['streams']:,} streams, p99 {seen['gap_p99_us'] / 1000:.1f} ms"
    if seen["streams"] == LADDER[-1]:
        note += "; the ladder ends here"
    return Row(label, seen["chunks_per_s"], note)


def rows_of(name: str, best: Figures | None, beside: Figures) -> list[Row]:
    """Rows of a contender: at its highest step, and at the gateway's."""
    label = f"{name}: chunks/s per core at added p99 <= {MAX_ADDED_US / 1000:g} ms"
    if best is None:
        rows = [Row(label, None, f"not even {LADDER[0]:,} streams")]
    else:
        per_core = _per_core(best)
        rows = [
            Row(label, per_core, _in_words(best)),
            Row(
                f"{name}: cores for {FLEET_CHUNKS_PER_S:,} chunks/s", FLEET_CHUNKS_PER_S / per_core
            ),
        ]
    level = f"{name}: chunks/s per core with {beside['streams']:,} streams"
    return [*rows, Row(level, _per_core(beside), _in_words(beside))]


def _per_core(seen: Figures) -> float:
    return seen["chunks_per_s"] / max(seen["cores"], 1e-9)


def _in_words(seen: Figures) -> str:
    return (
        f"{seen['streams']:,} streams, {seen['chunks_per_s']:,.0f} chunks/s on "
        f"{seen['cores']:.2f} cores; added p99 {seen['added_p99_us'] / 1000:.1f} ms, "
        f"{seen['errors']:.0f} errors; the machine spent {seen['machine_cores']:.2f} cores"
    )
