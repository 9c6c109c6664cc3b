"""`bench operators`: histories of unlucky operators, in memory and on a real Redis.

The state machine is the tests' own (tests/contract/test_unlucky_operators.py), which runs a few
dozen histories there: two gateways with files that differ, reloads, outages, a directory that
comes back empty or older, sections that leave and return, hundreds of revocations. Each process
draws its own. A history fails when a denial that was answered with success opens anything at any
gateway, or when a change that was answered with success is lost.
"""

import asyncio
import os
import re
import sys
from typing import Final

from bench.common.report import Report, at_least, equals

HISTORIES: Final = int(os.environ.get("SLUICE_BENCH_CASES", "20000"))
PARTS: Final = {"memory": 0.75, "redis": 0.25}
"""Shares of the histories."""
PROCESSES: Final = max(2, os.cpu_count() or 2)
_FILE: Final = "tests/contract/test_unlucky_operators.py"
_RAN: Final = re.compile(r"(\d+) passing, (\d+) failing, and \d+ invalid test cases")


async def _hunt(kind: str, count: int) -> tuple[int, int, str]:
    """(histories that held, that failed, what pytest printed)."""
    command = (
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", _FILE, "-k", kind),
        *("--show-capture=no", "--hypothesis-show-statistics", "-p", "no:xdist"),
    )
    process = await asyncio.create_subprocess_exec(
        *command,
        env={**os.environ, "SLUICE_HISTORIES": str(count), "PYTEST_ADDOPTS": ""},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out = (await process.communicate())[0].decode(errors="replace")
    ran = [(int(good), int(bad)) for good, bad in _RAN.findall(out)]
    good, bad = sum(good for good, _ in ran), sum(bad for _, bad in ran)
    if process.returncode and not bad:
        bad = 1
    return good, bad, out


async def _all() -> dict[str, tuple[int, int, str]]:
    jobs = {
        kind: [round(HISTORIES * share / PROCESSES) + 1 for _ in range(PROCESSES)]
        for kind, share in PARTS.items()
    }
    found = {}
    for kind, counts in jobs.items():
        parts = await asyncio.gather(*(_hunt(kind, count) for count in counts))
        printed = "\n".join(out for _, bad, out in parts if bad)
        found[kind] = (sum(p[0] for p in parts), sum(p[1] for p in parts), printed)
    return found


def run() -> Report:
    """Draw and judge them all; SLUICE_BENCH_CASES sets how many."""
    found = asyncio.run(_all())
    for _, _, printed in found.values():
        if printed:
            sys.stderr.write(printed)
    total = sum(good for good, _, _ in found.values())
    rows = [
        equals(f"{kind}: denials lifted, changes lost", bad, 0, note=f"{good:,} histories")
        for kind, (good, bad, _) in found.items()
    ]
    return Report(name="operators", rows=[at_least("histories that held", total, HISTORIES), *rows])
