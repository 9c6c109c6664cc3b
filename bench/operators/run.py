"""`bench operators`: histories of unlucky operators, in memory and on a real Redis.

The state machine is the tests' own (tests/contract/test_unlucky_operators.py), which runs a few
dozen histories there: two gateways with files that differ, reloads, outages, a directory that
comes back empty or older, sections that leave and return, many revocations. Each process draws its
own. A history fails when a denial that was answered with success opens anything at any gateway, or
when a change that was answered with success is lost.
"""

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from typing import Final

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from bench.common.fleet import RedisServer
from bench.common.report import Report, at_least, equals, scaled
from tests.contract.test_unlucky_operators import InMemory, InRedis, OperatorsMachine, Shared

# -- `python -m bench.operators.run KIND COUNT`: live through so many new histories


STEPS = 20


def live(opener: Callable[[], Shared], count: int) -> int:
    """How many histories held. Raises AssertionError for the first that did not."""
    held = 0

    class Machine(OperatorsMachine):
        def teardown(self) -> None:
            nonlocal held
            super().teardown()
            held += 1

    Machine.opener = staticmethod(opener)
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=count,
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return held


HISTORIES: Final = scaled(20_000, 20)
SHARES: Final = {"memory": 0.75, "redis": 0.25}
PROCESSES: Final = max(2, os.cpu_count() or 2)


async def _live(kind: str, count: int) -> tuple[int, int]:
    """(histories that held, failures)."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.operators.run", kind, str(count)),
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


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    kind, number = sys.argv[1], int(sys.argv[2])
    if kind == "memory":
        print(live(InMemory, number))
    else:
        with RedisServer() as server:
            print(live(lambda: InRedis(server), number))
