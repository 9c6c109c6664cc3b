"""Four gateways on one Redis share a model: no stated limit may be exceeded.

400 clients of five entitlements ask for 64 slots, as fast as refusals allow; one in twenty
leaves before its answer. Requests in flight are read from Redis in transactions meanwhile.
"""

import asyncio
import os
import signal
import time
from collections.abc import Iterator, Mapping
from random import Random
from typing import Final

import msgspec

from bench.common.fleet import Fleet
from bench.common.raw_client import RawClient
from bench.common.report import Row, at_least, at_most, equals, scaled_s
from bench.replicas.books import (
    HUNG_S,
    Books,
    ClientLoad,
    LoadShape,
    SentRequest,
    SnapshotWatch,
    body_of,
    books_rows,
    entitlement,
    exported_row,
    ledger,
    most_at_once,
    on_redis,
    settled,
)
from gateway.admission.checks import overshoot
from gateway.admission.token_pool import LEASE_TTL_S

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


# -- a gateway is killed while it holds 50 leases: when they return, and the effect on clients


KILL_GATEWAYS: Final = 4
HELD: Final = 50
SERVED: Final = 8
_KILL_SHORT: Final = LoadShape(output_tokens=16, pause_s=(0.1, 0.3))
_ENDLESS: Final = LoadShape(output_tokens=30_000, pause_s=(0.5, 1.0), streamed=1.0)
_ASKED_LIMIT_S: Final = 20.0


class Death(msgspec.Struct, kw_only=True):
    """What a killed gateway left behind."""

    held: int = 0
    """Its leases when it died."""
    estimates: int = 0
    """Tokens these had reserved."""
    first_s: float = 0.0
    last_s: float = 0.0
    """From its death until the first and the last of them was back."""
    survivors: list[SentRequest] = msgspec.field(default_factory=list)
    again: int = 0
    """Most that were served at once in their places afterwards."""


def killed_rows() -> Iterator[Row]:
    """All killed_rows."""
    entitlements = [
        entitlement("holder", "elastic", concurrency=HELD, max_concurrency=HELD),
        entitlement("guaranteed", "guaranteed", concurrency=SERVED),
    ]
    with on_redis(entitlements, KILL_GATEWAYS, window_tokens=65_536) as (fleet, files, books):
        found = asyncio.run(_killed(fleet, books))
        after, entries = settled(fleet, books, 15.0), ledger(fleet.replicas[1], files)
    yield equals("killed: leases that it held", found.held, HELD)
    note = f"the first after {found.first_s:.1f} s; leases live {LEASE_TTL_S:g} s"
    yield at_most("killed: s until all were back", found.last_s, LEASE_TTL_S, note)
    failed = sum(s.status != 200 for s in found.survivors)
    slowest_s = max((s.length_s for s in found.survivors), default=0.0)
    note = f"of {len(found.survivors):,}; the slowest {slowest_s:.2f} s"
    yield equals("killed: requests to the others that failed", failed, 0, note)
    yield at_least("killed: of its places used at once afterwards", found.again, HELD * 0.9)
    yield from books_rows("killed", after, entries)
    holder = next(e for e in entries if e.name == "holder")
    metric = "killed: tokens charged but not exported, less the dead one's estimates"
    note = (
        f"{found.estimates:,} tokens of {found.held} expired leases: nobody was left to say what "
        "they used"
    )
    yield equals(metric, holder.used - holder.exported - found.estimates, 0, note)


async def _killed(fleet: Fleet, books: Books) -> Death:
    found = Death()
    urls = [replica.url for replica in fleet.replicas]
    holding, serving = ClientLoad(urls, _ENDLESS), ClientLoad(urls, _KILL_SHORT)
    serving.start(("guaranteed", 1 + n % (KILL_GATEWAYS - 1)) for n in range(SERVED))
    holding.start(("holder", 0) for _ in range(HELD))
    until_s = time.monotonic() + _ASKED_LIMIT_S
    while time.monotonic() < until_s:
        await asyncio.sleep(0.05)
        if books.snapshot().tenants.get("holder", 0) == HELD:
            break
    await asyncio.sleep(2.0)
    # Nobody asks in its name any more: what is in flight then was in flight before.
    stopping = asyncio.create_task(holding.stop())
    await asyncio.to_thread(fleet.kill_replica, fleet.replicas[0])
    died_s = time.monotonic()
    leases = [e for e in books.leases().values() if e["entitlement"] == "holder"]
    found.held = len(leases)
    found.estimates = sum(lease["estimate_tokens"] for lease in leases)
    await stopping
    while left := books.snapshot().tenants["holder"]:
        if left < found.held and not found.first_s:
            found.first_s = time.monotonic() - died_s
        if time.monotonic() - died_s > 2 * LEASE_TTL_S:
            break
        await asyncio.sleep(0.05)
    found.last_s = time.monotonic() - died_s
    again = ClientLoad(urls, _KILL_SHORT)
    again.start(("holder", 1 + n % (KILL_GATEWAYS - 1)) for n in range(HELD))
    await asyncio.sleep(4.0)
    await again.stop()
    await serving.stop()
    found.survivors, found.again = serving.sent, most_at_once(again.sent)
    return found


# -- three gateways on one Redis are restarted one after another under 200 clients with streams


ROLLING_GATEWAYS: Final = 3
ROLLING_CLIENTS: Final = 192
LONG: Final = 8
"""Clients whose streams last longer than DRAIN_S."""
DRAIN_S: Final = 8.0
_ROLLING_SLOTS: Final = 128
_SPARE: Final = 16
"""Clients ask again, elsewhere too, before the last answer is settled."""
_BETWEEN_S: Final = 2.0
_SHORT: Final = LoadShape(output_tokens=24, pause_s=(0.1, 0.3), streamed=1.0)
_LONG: Final = LoadShape(output_tokens=300, pause_s=(0.1, 0.3), streamed=1.0)
_ELSEWHERE: Final = frozenset({(0, "ConnectionRefusedError"), (503, "shutting_down")})


class _Balanced(ClientLoad):
    """Clients that ask the next gateway where one does not take their request."""

    async def _client(self, tenant: str, gateway: int, draw: Random) -> None:
        await asyncio.sleep(draw.uniform(0, 0.5))
        body = body_of(self._shape.output_tokens, stream=True)
        clients = [RawClient(url, f"key-of-{tenant}") for url in self._urls]
        while not self._stop.is_set():
            for _ in clients:
                found = await self._ask(clients[gateway], tenant, gateway, body, HUNG_S)
                if (found.status, found.reason) not in _ELSEWHERE:
                    break
                clients[gateway].close()
                gateway = (gateway + 1) % len(clients)
            if found.status != 200:
                await asyncio.sleep(draw.uniform(*self._shape.pause_s))
        for client in clients:
            client.close()


def rolling_rows() -> Iterator[Row]:
    """All rolling_rows."""
    entitlements = [
        entitlement("short", "guaranteed", concurrency=ROLLING_CLIENTS + _SPARE),
        entitlement("long", "guaranteed", concurrency=LONG + _SPARE),
    ]
    server = {"drain_timeout_s": DRAIN_S}
    with on_redis(entitlements, ROLLING_GATEWAYS, slots=_ROLLING_SLOTS, server=server) as (
        fleet,
        files,
        books,
    ):
        sent, ended_s, statuses = asyncio.run(_rolled(fleet))
        after, entries = settled(fleet, books, 15.0), ledger(fleet.replicas[0], files)
    name = "rolling restart"
    asked = [s for s in sent if (s.status, s.reason) not in _ELSEWHERE]
    failed = [s for s in asked if s.status != 200]
    cut = [s for s in failed if s.tenant == "long" and s.length_s > DRAIN_S]
    others = [s for s in failed if s not in cut]
    told = sorted({f"{s.tenant} {s.status} {s.reason} after {s.length_s:.2f} s" for s in others})
    note = ", ".join(told) or (
        f"of {len(asked):,}; {len(cut)} longer streams were cut off; "
        f"{len(sent) - len(asked):,} times the next gateway was asked"
    )
    metric = f"{name}: failed requests but streams longer than the drain time-out"
    yield equals(metric, len(others), 0, note)
    yield at_least(f"{name}: requests answered", len(asked) - len(failed), ROLLING_CLIENTS)
    note = f"aim: {DRAIN_S + 3.0:g}; " + ", ".join(f"{s:.1f}" for s in ended_s)
    yield Row(f"{name}: s from SIGTERM until a gateway was gone", max(ended_s), note)
    metric = f"{name}: gateways that ended otherwise than by themselves"
    yield equals(metric, sum(status != 0 for status in statuses), 0)
    yield from books_rows(name, after, entries)
    yield exported_row(name, entries)


async def _rolled(fleet: Fleet) -> tuple[list[SentRequest], list[float], list[int]]:
    """What was sent, how long each took from SIGTERM to its end, and how it ended."""
    urls = [replica.url for replica in fleet.replicas]
    loads = [_Balanced(urls, _SHORT), _Balanced(urls, _LONG)]
    for load, (tenant, count) in zip(
        loads, (("short", ROLLING_CLIENTS), ("long", LONG)), strict=True
    ):
        load.start((tenant, n % ROLLING_GATEWAYS) for n in range(count))
    ended_s, statuses = [], []
    await asyncio.sleep(_BETWEEN_S)
    for replica in fleet.replicas:
        process = replica.process
        assert process is not None
        began_s = time.monotonic()
        await asyncio.to_thread(fleet.kill_replica, replica, signal.SIGTERM, 3 * DRAIN_S)
        ended_s.append(time.monotonic() - began_s)
        statuses.append(process.returncode)
        fleet.start_replica(replica)  # not on a thread: a process ends with the one that began it
        await asyncio.to_thread(fleet.wait_ready, replica)
        await asyncio.sleep(_BETWEEN_S)
    for load in loads:
        await load.stop()
    return [one for load in loads for one in load.sent], ended_s, statuses
