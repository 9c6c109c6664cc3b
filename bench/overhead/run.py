"""Cost of the gateway with every feature on, compared with its peers on the same machine.

Sections, each in a module of its own; `SLUICE_BENCH_SECTIONS` chooses some:

- main: CPU per whole answer and per 64-chunk stream at saturation, time added to the first
  byte at 50 requests/s, memory; all contenders.
- variants: 1,000 chunks, bodies of 200 KB, 1 and 5,000 open connections.
- streams: 32 and 120 streams at an engine's pace.
- rate: chunks/s per core at an added p99 between tokens of at most 5 ms.
- slow: 8,000 slow streams on one process.
- tenants: what a tenant's key with budgets and limits costs more than an entitlement's own.

CPU is the kernel's accounting of the process tree, so waiting does not count. Rounds are
interleaved, each ratio is taken within its round, and the first round is discarded. The gateway
is that of `bench.common.everything_on`, with embedded state and on a Redis of its own; a leaner
one, `sluice, least-loaded`, matches earlier measurements. Four engines serve all contenders.
"""

import json
import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from bench.common.everything_on import MODEL
from bench.common.report import Report, Row
from bench.common.tools import Figures, bodies, build_tools, scratch
from bench.overhead.contenders import NAMES, by_turns, field, may_open
from bench.overhead.peers import ROOT
from bench.overhead.plot import plot as draw
from bench.overhead.profile import profile_rows
from bench.overhead.rate import rate_section
from bench.overhead.rounds import TICK_US, Round, main_rounds, resident_mib
from bench.overhead.rows import main_rows
from bench.overhead.slow import slow_section
from bench.overhead.streams import streams_section
from bench.overhead.tenants import tenants_section
from bench.overhead.variants import CONTENDERS, MANY, Seen, variant_rounds, variant_rows

SECTIONS: Final = ("main", "variants", "streams", "rate", "slow", "tenants")
WANTED: Final = os.environ.get("SLUICE_BENCH_SECTIONS", "").split() or list(SECTIONS)
HISTORY: Final = ROOT / "bench" / "out" / "overhead.jsonl"


def run(plot: Path | None = None, *, profile: bool = False) -> Report:
    """The sections that are wanted, or with `profile` the cost of each stage."""
    if unknown := set(WANTED) - set(SECTIONS):
        raise SystemExit(f"SLUICE_BENCH_SECTIONS: no {', '.join(unknown)}; there are {SECTIONS}")
    with scratch() as name:
        folder = Path(name)
        if profile:
            body = bodies(folder, MODEL)["whole"].read_bytes().replace(MODEL.encode(), b"m")
            return Report(name="overhead --profile", rows=profile_rows(body))
        tools = build_tools(folder)
        if tools is None:
            row = Row(metric="not measured", measured=None, note="needs a C compiler (cc or gcc)")
            return Report(name="overhead", rows=[row])
        rows, rounds, seen = _by_rounds(folder, tools)
        if "streams" in WANTED:
            rows += streams_section(folder, tools)
        rate: dict[str, Figures] = {}
        if "rate" in WANTED:
            rate_rows, rate = rate_section(folder, tools)
            rows += rate_rows
        if "slow" in WANTED:
            rows += slow_section(folder, tools)
        if "tenants" in WANTED:
            rows += tenants_section(folder, tools)
    variants = {variant.label: found for variant, found in seen.items()}
    detail = {"rounds": rounds, "variants": variants, "rate": rate}
    report = Report(name="overhead", rows=rows, detail=detail)
    _remember(report)
    if plot is not None:
        draw(rounds, seen, rate, plot)
    return report


def _by_rounds(folder: Path, tools: tuple[Path, Path]) -> tuple[list[Row], list[Round], Seen]:
    """Sections main and variants, before the same engines."""
    rows: list[Row] = []
    rounds: list[Round] = []
    seen: Seen = {}
    if not {"main", "variants"} & set(WANTED):
        return rows, rounds, seen
    lacking = may_open(2 * MANY)
    if lacking:
        return [Row(metric="main, variants", measured=None, note=lacking)], rounds, seen
    with ExitStack() as stack:
        names = NAMES if "main" in WANTED else CONTENDERS
        found = field(stack, folder, tools, names, tick_us=TICK_US)
        stack.enter_context(by_turns(found))
        if "main" in WANTED:
            rounds = main_rounds(found, bodies(folder, MODEL))
            rows += main_rows(rounds, resident_mib(found))
        if "variants" in WANTED:
            seen = variant_rounds(found, folder)
            rows += variant_rows(seen)
        rows += found.missing
    return rows, rounds, seen


def _remember(report: Report) -> None:
    """Append the figures to the history file."""
    HISTORY.parent.mkdir(parents=True, exist_ok=True)
    figures = {row.metric: row.measured for row in report.rows}
    entry = {"unix_s": int(time.time()), "sections": WANTED, "figures": figures}
    with HISTORY.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")
