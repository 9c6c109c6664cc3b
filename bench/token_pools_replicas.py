"""`python -m bench token-pools-replicas`: several gateways on one Redis, real processes.

1 Four gateways, 400 clients, 64 slots: never more in flight than the policy says, exact ledgers.
2 One of four is killed while it holds 50 leases (`replicas_kill`).
3 Redis stops for 20 s, alone and as a cluster's node (`replicas_outage`).
4 Observe mode changes no body and refuses nobody (`replicas_observe`).
5 The store by itself: admissions a second, and their latency (`redis_leases`).

Not one of these figures needs a quiet machine but the last ones.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console

from bench import redis_leases, replicas_kill, replicas_observe, replicas_outage
from bench.fleet import Fleet
from bench.redis_server import RedisServer, redis_program
from bench.replicas_books import (
    Books,
    Entry,
    Snapshot,
    Watch,
    entitlement,
    exports_in,
    ledger,
    settled,
)
from bench.replicas_load import Load, Shape
from bench.report import Report, Row, at_least, at_most, equals
from gateway.policy.admission import overshoot

GATEWAYS: Final = 4
SLOTS: Final = 64
LENGTH_S: Final = 20.0
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
_SHAPE: Final = Shape(output_tokens=32, pause_s=(0.2, 1.2), leaving=0.05)
_MOST_TOKENS: Final = 128
"""Of one request, input and output."""


def run() -> Report:
    """All of it; what goes on is told on stderr."""
    if redis_program() is None:
        row = Row(metric="redis-server", measured="missing", target="on PATH", holds=False)
        return Report(name="token-pools-replicas", rows=[row])
    console = Console(stderr=True)
    parts: dict[str, Callable[[], list[Row]]] = {
        "four gateways, 400 clients": sharing,
        "a gateway is killed": replicas_kill.rows,
        "Redis hangs": replicas_outage.hanging_rows,
        "a cluster's node is killed": replicas_outage.cluster_rows,
        "observe": replicas_observe.rows,
        "the store": store,
    }
    rows: list[Row] = []
    for number, (name, part) in enumerate(parts.items(), start=1):
        began_s = time.monotonic()
        console.print(f"{number}/{len(parts)} {name} ...")
        rows += part()
        console.print(f"    {time.monotonic() - began_s:.0f} s")
    return Report(name="token-pools-replicas", rows=rows)


class Sharing(msgspec.Struct, frozen=True, kw_only=True):
    """What four gateways did together."""

    load: Load
    taken: list[Snapshot]
    engines: list[int]
    """Sequences in the engines, samples."""
    after: Snapshot
    entries: list[Entry]
    length_s: float


def sharing() -> list[Row]:
    """Part 1."""
    with RedisServer() as redis, tempfile.TemporaryDirectory() as folder:
        further, files = exports_in(Path(folder), GATEWAYS)
        config = {
            "state": {"url": redis.url},
            "entitlements": [
                entitlement("guaranteed-a", "guaranteed", concurrency=16),
                entitlement("guaranteed-b", "guaranteed", concurrency=8),
                entitlement("elastic-c", "elastic", concurrency=16, max_concurrency=40),
                entitlement(
                    "metered-d",
                    "elastic",
                    concurrency=8,
                    max_concurrency=24,
                    tokens_per_second=METERED_PER_S,
                    max_tokens_per_second=METERED_PER_S,
                ),
                entitlement("spot-e", "spot", max_concurrency=30),
            ],
            **further[0],
        }
        with (
            Fleet(
                short=2,
                long=0,
                short_window=2048,
                short_slots=SLOTS // 2,
                mock=("--prefix-cache-tokens", "0"),
                config=config,
                further=further[1:],
            ) as fleet,
            redis.client() as client,
        ):
            books = Books(client)
            load = Load([r.url for r in fleet.replicas], _SHAPE)
            began_s = time.monotonic()
            with Watch(books) as watch:
                engines = asyncio.run(_under_load(fleet, load))
            length_s = time.monotonic() - began_s
            after = settled(fleet, books, 15.0)
            found = Sharing(
                load=load,
                taken=watch.taken,
                engines=engines,
                after=after,
                entries=ledger(fleet.replicas[0], files),
                length_s=length_s,
            )
    return [*_sharing_rows(found), *ledger_rows("4 gateways", found.entries, found.after)]


async def _under_load(fleet: Fleet, load: Load) -> list[int]:
    load.start((t, n % GATEWAYS) for t, count in CLIENTS.items() for n in range(count))
    samples = []
    until_s = time.monotonic() + LENGTH_S
    while time.monotonic() < until_s:
        await asyncio.sleep(0.1)
        running = await asyncio.gather(*(asyncio.to_thread(e.running) for e in fleet.engines))
        samples.append(sum(running))
    await load.stop()
    return samples


def _sharing_rows(found: Sharing) -> list[Row]:
    statuses = found.load.statuses()
    over = dict.fromkeys(LIMITS, 0)
    beyond = -SLOTS
    for taken in found.taken:
        protected = sum(taken.tenants.get(name, 0) for name in RESERVED)
        beyond = max(beyond, taken.pool - (SLOTS + overshoot(SLOTS) + protected))
        for name, limit in LIMITS.items():
            over[name] = max(over[name], taken.tenants.get(name, 0) - limit)
    most = max(t.pool for t in found.taken)
    differ = sum(t.pool != t.leases or t.pool != sum(t.tenants.values()) for t in found.taken)
    stated = SLOTS + overshoot(SLOTS) + sum(RESERVED.values())
    metered = next(e for e in found.entries if e.name == "metered-d")
    allowed = metered.depth + METERED_PER_S * found.length_s + LIMITS["metered-d"] * _MOST_TOKENS
    bad = {k: n for k, n in statuses.items() if k.split()[0] not in {"200", "429", "-1"}}
    ended = ", ".join(f"{n} x {k}" for k, n in statuses.most_common())
    return [
        Row(metric="4 gateways: requests", measured=len(found.load.sent), note=ended),
        equals("4 gateways: requests that failed", sum(bad.values()), 0),
        at_most(
            "4 gateways: most in flight, of 64 slots",
            most,
            stated,
            f"{len(found.taken)} snapshots; 64 + overshoot 8 + protected reserve 24",
        ),
        at_most("4 gateways: most beyond slots, overshoot and protected in flight", beyond, 0),
        at_most("4 gateways: most beyond an entitlement's limit", max(over.values()), 0),
        equals("4 gateways: snapshots whose counters differ from their leases", differ, 0),
        at_most("4 gateways: most in the engines", max(found.engines), stated),
        at_most(
            "4 gateways: metered tenant's tokens",
            metered.used,
            round(allowed),
            f"bucket {metered.depth} + {METERED_PER_S}/s x {found.length_s:.1f} s "
            f"+ {LIMITS['metered-d']} requests in flight",
        ),
    ]


def ledger_rows(name: str, entries: list[Entry], after: Snapshot) -> list[Row]:
    """What is left in flight, and whether every ledger is right to the token."""
    used = sum(e.used for e in entries)
    return [
        equals(f"{name}: leases left, and sequences counted", after.leases + after.pool, 0),
        equals(
            f"{name}: tokens that debited - refunded - used is off",
            sum(e.off for e in entries),
            0,
            f"{sum(e.debited for e in entries):,} - {sum(e.refunded for e in entries):,} = "
            f"{used:,}",
        ),
        equals(
            f"{name}: tokens that used differs from what was exported",
            sum(abs(e.used - e.exported) for e in entries),
            0,
        ),
    ]


def store() -> list[Row]:
    """Part 5."""
    load_before = os.getloadavg()[0]
    full = redis_leases.measured(clients=256, entitlements=100, seconds=4.0)
    half = redis_leases.measured(
        clients=0, entitlements=100, seconds=4.0, rate=full.admissions_per_s / 2
    )
    return [
        at_least(
            "store: admissions/s of one process",
            full.admissions_per_s,
            5_000,
            f"256 clients, each with its settlement; p50 {full.p50_ms:.1f} ms; load average "
            f"before {load_before:.1f}",
        ),
        Row(
            metric="store: Redis's CPU at that, us an admission and settlement",
            measured=full.redis_us,
            note=f"{full.redis_share:.0%} of a core; the process {full.own_us:.0f} us, "
            f"{full.own_share:.0%}",
        ),
        at_most(
            "store: admission p50 at half of that, ms",
            half.p50_ms,
            1.0,
            f"{half.admissions_per_s:,.0f}/s at random times, p99 {half.p99_ms:.1f} ms; "
            f"Redis {half.redis_share:.0%} of a core, {half.redis_us:.0f} us each",
        ),
        equals("store: failed round trips", full.failed + half.failed, 0),
    ]
