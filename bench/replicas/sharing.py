"""Four gateways on one Redis share a model: no stated limit may be exceeded.

400 clients of five entitlements ask for 64 slots, as fast as refusals allow; one in twenty
leaves before its answer. Requests in flight are read from Redis in transactions meanwhile.
"""

import asyncio
import os
import time
from collections.abc import Iterator, Mapping
from typing import Final

from bench.common.fleet import Fleet
from bench.common.report import Row, at_most, equals, scaled_s
from bench.replicas.books import (
    ClientLoad,
    LoadShape,
    SnapshotWatch,
    books_rows,
    entitlement,
    exported_row,
    ledger,
    on_redis,
    settled,
)
from gateway.admission.checks import overshoot

GATEWAYS: Final = 4
SLOTS: Final = 64
LENGTH_S: Final = scaled_s(20.0, 5.0)
RESERVED: Final = {"guaranteed-a": 16, "guaranteed-b": 8}
LIMITS: Final = {**RESERVED, "elastic-c": 40, "metered-d": 24, "spot-e": 30}
METERED_PER_S: Final = 200
CLIENTS: Final = {
    "guaranteed-a": 60,
    "guaranteed-b": 40,
    "elastic-c": 120,
    "metered-d": 60,
    "spot-e": 120,
}
_SHAPE: Final = LoadShape(output_tokens=32, pause_s=(0.2, 1.2), leaving=0.05)
_MAX_TOKENS: Final = 128
"""Of one request, input and output."""


def rows() -> Iterator[Row]:
    """All rows."""
    return _shared("4 gateways", LENGTH_S)


def version_rows() -> Iterator[Row]:
    """Every second gateway runs the code of SLUICE_BENCH_OLD, a checkout."""
    name = "an older version beside this one"
    if old := os.environ.get("SLUICE_BENCH_OLD"):
        yield from _shared(name, 3 * LENGTH_S, {"PYTHONPATH": old, "PYTHONSAFEPATH": "1"})
    else:
        note = "not measured: SLUICE_BENCH_OLD is not the path of an older checkout"
        yield Row(name, None, note)


def _shared(name: str, length_s: float, older: Mapping[str, str] | None = None) -> Iterator[Row]:
    """`older`: environment of every second gateway."""
    metered = {"tokens_per_second": METERED_PER_S, "max_tokens_per_second": METERED_PER_S}
    most = {"max_concurrency": LIMITS["metered-d"], **metered}
    entitlements = [
        *(entitlement(n, "guaranteed", concurrency=count) for n, count in RESERVED.items()),
        entitlement("elastic-c", "elastic", concurrency=16, max_concurrency=LIMITS["elastic-c"]),
        entitlement("metered-d", "elastic", concurrency=8, **most),
        entitlement("spot-e", "spot", max_concurrency=LIMITS["spot-e"]),
    ]
    with on_redis(entitlements, GATEWAYS, env=older) as (fleet, files, books):
        load = ClientLoad([r.url for r in fleet.replicas], _SHAPE)
        began_s = time.monotonic()
        with SnapshotWatch(books) as watch:
            engines = asyncio.run(_under_load(fleet, load, length_s))
        took_s, taken = time.monotonic() - began_s, watch.taken
        after, entries = settled(fleet, books, 15.0), ledger(fleet.replicas[0], files)
    statuses = load.statuses()
    note = ", ".join(f"{n} x {k}" for k, n in statuses.most_common())
    yield Row(f"{name}: requests", len(load.sent), note)
    failed = sum(n for k, n in statuses.items() if k.split()[0] not in {"200", "429", "-1"})
    yield equals(f"{name}: requests that failed", failed, 0)
    allowed, reserve = SLOTS + overshoot(SLOTS), sum(RESERVED.values())
    note = (
        f"{len(taken):,} snapshots; {SLOTS} + overshoot {overshoot(SLOTS)} + "
        f"protected reserve {reserve}"
    )
    metric = f"{name}: most in flight, of {SLOTS} slots"
    yield at_most(metric, max(t.pool for t in taken), allowed + reserve, note)
    protected = [sum(t.tenants.get(each, 0) for each in RESERVED) for t in taken]
    beyond = max(t.pool - allowed - p for t, p in zip(taken, protected, strict=True))
    metric = f"{name}: most beyond slots, overshoot and what was protected then"
    yield at_most(metric, beyond, 0, "less than 0: so many short of it")
    differ = sum(t.pool != t.leases or t.pool != sum(t.tenants.values()) for t in taken)
    yield equals(f"{name}: snapshots whose counters differ from their leases", differ, 0)
    note = f"{len(engines)} samples"
    yield at_most(f"{name}: most in the engines", max(engines), allowed + reserve, note)
    over = max(t.tenants.get(each, 0) - limit for t in taken for each, limit in LIMITS.items())
    yield at_most(f"{name}: most beyond an entitlement's limit", over, 0)
    book = next(e for e in entries if e.name == "metered-d")
    running = LIMITS["metered-d"] * _MAX_TOKENS
    note = (
        f"bucket {book.depth} + {METERED_PER_S}/s x {took_s:.1f} s + {running} in flight; refused "
        f"for them {statuses['429 tokens']:,} times"
    )
    tokens = round(book.depth + METERED_PER_S * took_s + running)
    yield at_most(f"{name}: metered tenant's tokens", book.used, tokens, note)
    yield from books_rows(name, after, entries)
    yield exported_row(name, entries)


async def _under_load(fleet: Fleet, load: ClientLoad, length_s: float) -> list[int]:
    """Sequences in the engines, samples."""
    load.start((t, n % GATEWAYS) for t, count in CLIENTS.items() for n in range(count))
    samples = []
    until_s = time.monotonic() + length_s
    while time.monotonic() < until_s:
        await asyncio.sleep(0.1)
        running = await asyncio.gather(*(asyncio.to_thread(e.running) for e in fleet.engines))
        samples.append(sum(running))
    await load.stop()
    return samples
