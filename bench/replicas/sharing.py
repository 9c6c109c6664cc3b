"""Four gateways on one Redis share a model: no stated limit may be exceeded.

400 clients of five entitlements ask for 64 slots, as fast as refusals allow; one in twenty
leaves before its answer. Requests in flight are read from Redis in transactions meanwhile.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from bench.common.fleet import Fleet
from bench.common.redis_server import RedisServer
from bench.common.report import Row, at_most, equals
from bench.common.steps import scaled_s
from bench.replicas.books import (
    Books,
    Entry,
    Snapshot,
    SnapshotWatch,
    entitlement,
    exports_in,
    fleet_of,
    ledger,
    settled,
)
from bench.replicas.load import ClientLoad, LoadShape
from gateway.admission.admission import overshoot

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


class Sharing(msgspec.Struct, frozen=True, kw_only=True):
    """What four gateways did together."""

    name: str
    load: ClientLoad
    taken: list[Snapshot]
    engines: list[int]
    """Sequences in the engines, samples."""
    after: Snapshot
    entries: list[Entry]
    length_s: float


def rows() -> list[Row]:
    """All rows."""
    return _shared("4 gateways", LENGTH_S, None)


def version_rows() -> list[Row]:
    """Every second gateway runs the code of SLUICE_BENCH_OLD, a checkout."""
    name = "an older version beside this one"
    old = os.environ.get("SLUICE_BENCH_OLD")
    if old is None:
        note = "not measured: SLUICE_BENCH_OLD is not the path of an older checkout"
        return [Row(name, None, note)]
    return _shared(name, 3 * LENGTH_S, {"PYTHONPATH": old, "PYTHONSAFEPATH": "1"})


def _shared(name: str, length_s: float, older: Mapping[str, str] | None) -> list[Row]:
    """`older`: environment of every second gateway."""
    with RedisServer() as redis, tempfile.TemporaryDirectory() as folder:
        gateways, files = exports_in(Path(folder), GATEWAYS)
        unstarted = _fleet(redis.url, gateways)
        for replica in unstarted.replicas[1::2]:
            replica.env = older
        with unstarted as fleet, redis.client() as client:
            token_pools = Books(client)
            load = ClientLoad([r.url for r in fleet.replicas], _SHAPE)
            began_s = time.monotonic()
            with SnapshotWatch(token_pools) as watch:
                engines = asyncio.run(_under_load(fleet, load, length_s))
            length_s = time.monotonic() - began_s
            after = settled(fleet, token_pools, 15.0)
            found = Sharing(
                name=name,
                load=load,
                taken=watch.taken,
                engines=engines,
                after=after,
                entries=ledger(fleet.replicas[0], files),
                length_s=length_s,
            )
    return [*_limits(found), *_tenants(found), *_ledgers(found)]


def _fleet(redis_url: str, gateways: Sequence[Mapping[str, Any]]) -> Fleet:
    entitlements = [
        entitlement("guaranteed-a", "guaranteed", concurrency=RESERVED["guaranteed-a"]),
        entitlement("guaranteed-b", "guaranteed", concurrency=RESERVED["guaranteed-b"]),
        entitlement("elastic-c", "elastic", concurrency=16, max_concurrency=LIMITS["elastic-c"]),
        entitlement(
            "metered-d",
            "elastic",
            concurrency=8,
            max_concurrency=LIMITS["metered-d"],
            tokens_per_second=METERED_PER_S,
            max_tokens_per_second=METERED_PER_S,
        ),
        entitlement("spot-e", "spot", max_concurrency=LIMITS["spot-e"]),
    ]
    return fleet_of(entitlements, [{**more, "state": {"url": redis_url}} for more in gateways])


async def _under_load(fleet: Fleet, load: ClientLoad, length_s: float) -> list[int]:
    load.start((t, n % GATEWAYS) for t, count in CLIENTS.items() for n in range(count))
    samples = []
    until_s = time.monotonic() + length_s
    while time.monotonic() < until_s:
        await asyncio.sleep(0.1)
        running = await asyncio.gather(*(asyncio.to_thread(e.running) for e in fleet.engines))
        samples.append(sum(running))
    await load.stop()
    return samples


def _limits(found: Sharing) -> list[Row]:
    statuses = found.load.statuses()
    failed = sum(n for k, n in statuses.items() if k.split()[0] not in {"200", "429", "-1"})
    protected = [sum(t.tenants.get(name, 0) for name in RESERVED) for t in found.taken]
    allowed = SLOTS + overshoot(SLOTS)
    beyond = max(t.pool - allowed - p for t, p in zip(found.taken, protected, strict=True))
    differ = sum(t.pool != t.leases or t.pool != sum(t.tenants.values()) for t in found.taken)
    stated = allowed + sum(RESERVED.values())
    return [
        Row(
            f"{found.name}: requests",
            len(found.load.sent),
            ", ".join(f"{n} x {k}" for k, n in statuses.most_common()),
        ),
        equals(f"{found.name}: requests that failed", failed, 0),
        at_most(
            f"{found.name}: most in flight, of {SLOTS} slots",
            max(t.pool for t in found.taken),
            stated,
            f"{len(found.taken):,} snapshots; {SLOTS} + overshoot {overshoot(SLOTS)} + "
            f"protected reserve {sum(RESERVED.values())}",
        ),
        at_most(
            f"{found.name}: most beyond slots, overshoot and what was protected then",
            beyond,
            0,
            "less than 0: so many short of it",
        ),
        equals(f"{found.name}: snapshots whose counters differ from their leases", differ, 0),
        at_most(
            f"{found.name}: most in the engines",
            max(found.engines),
            stated,
            f"{len(found.engines)} samples",
        ),
    ]


def _tenants(found: Sharing) -> list[Row]:
    over = max(t.tenants.get(name, 0) - most for t in found.taken for name, most in LIMITS.items())
    metered = next(e for e in found.entries if e.name == "metered-d")
    running = LIMITS["metered-d"] * _MAX_TOKENS
    allowed = metered.depth + METERED_PER_S * found.length_s + running
    return [
        at_most(f"{found.name}: most beyond an entitlement's limit", over, 0),
        at_most(
            f"{found.name}: metered tenant's tokens",
            metered.used,
            round(allowed),
            f"bucket {metered.depth} + {METERED_PER_S}/s x {found.length_s:.1f} s + {running} in "
            "flight; refused for them "
            f"{found.load.statuses()['429 tokens']:,} times",
        ),
    ]


def _ledgers(found: Sharing) -> list[Row]:
    entries, after = found.entries, found.after
    debited, refunded = sum(e.debited for e in entries), sum(e.refunded for e in entries)
    return [
        equals(f"{found.name}: leases left, and sequences counted", after.leases + after.pool, 0),
        equals(
            f"{found.name}: tokens that debited - refunded - used is off",
            sum(e.off for e in entries),
            0,
            f"{debited:,} - {refunded:,} = {sum(e.used for e in entries):,}",
        ),
        equals(
            f"{found.name}: tokens that used differs from what was exported",
            sum(abs(e.used - e.exported) for e in entries),
            0,
        ),
    ]
