"""`bench operators`: histories of unlucky operators, in memory and on a real Redis.

The state machine is the tests' own (tests/contract/test_unlucky_operators.py), which runs a few
dozen histories there: two gateways with files that differ, reloads, outages, a directory that
comes back empty or older, sections that leave and return, many revocations. Each process draws its
own. A history fails when a denial that was answered with success opens anything at any gateway, or
when a change that was answered with success is lost.
"""

import asyncio
import os
import sys
from typing import Final

from bench.common.report import Report, at_least, equals, scaled

HISTORIES: Final = scaled(20_000, 20)
SHARES: Final = {"memory": 0.75, "redis": 0.25}
PROCESSES: Final = max(2, os.cpu_count() or 2)


async def _live(kind: str, count: int) -> tuple[int, int]:
    """(histories that held, failures)."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.operators.histories", kind, str(count)),
        stdout=asyncio.subprocess.PIPE,
    )
    out = (await process.communicate())[0].decode()
    if process.returncode:
        sys.stderr.write(out)
        return 0, 1
    return int(out), 0


async def _all() -> dict[str, list[tuple[int, int]]]:
    found = {}
    for kind, share in SHARES.items():
        count = -(-round(HISTORIES * share) // PROCESSES)
        found[kind] = await asyncio.gather(*(_live(kind, count) for _ in range(PROCESSES)))
    return found


def run() -> Report:
    """Draw and judge them all."""
    found = asyncio.run(_all())
    held = {kind: sum(held for held, _ in parts) for kind, parts in found.items()}
    rows = [
        equals(
            f"{kind}: denials lifted, changes lost",
            sum(failed for _, failed in parts),
            0,
            note=f"{held[kind]:,} histories",
        )
        for kind, parts in found.items()
    ]
    total = at_least("histories that held", sum(held.values()), HISTORIES)
    return Report(name="operators", rows=[total, *rows])
