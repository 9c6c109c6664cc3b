"""Redis away for 20 s under load: no request hangs, the mode holds, counters are right after.

Hanging: one server is stopped (SIGSTOP) under four gateways, two with `local_share` and two with
`closed`. Its data survive.
Killed: the node of a three-node cluster that holds the model's slot, under two gateways with
`local_share`. It comes back empty, and the gateways report their leases to it.
Stopped: one server is killed under four gateways of both modes and comes back empty.
Replaced: a master is killed under four gateways, and a sentinel promotes its replica.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
from redis import Redis
from redis.crc import key_slot

from bench.common.fleet import Fleet, RedisServer
from bench.common.gateway_books import Line, LogReader, most_at_once
from bench.common.report import Row, at_least, at_most, equals, scaled_s
from bench.replicas.books import (
    Books,
    ClientLoad,
    Entry,
    LoadShape,
    SentRequest,
    Snapshot,
    books_rows,
    entitlement,
    exported_row,
    exports_in,
    fleet_of,
    ledger,
    settled,
)
from tests.redis_nodes import RedisCluster, SentinelledRedis, node

AWAY_S: Final = scaled_s(20.0, 6.0)
FAILOVER_S: Final = 1.0
"""When a replacement for a master begins to be waited for; the sentinel needs some .5 s."""
BEFORE_S: Final = 6.0
"""Replicas hear of one another within a tick of 5 s."""
AFTER_S: Final = 3.0
NOTICED_S: Final = 2.0
"""What was in flight when Redis went has ended then."""
BACK_LIMIT_S: Final = 15.0
SLOTS: Final = 64
LIMITS: Final = {"guaranteed": 8, "elastic": 40}
CLIENTS: Final = {"guaranteed": 12, "elastic": 48}
"""Shared by the gateways, as the limits are: some more than those let in."""
_OUTPUT: Final = 32
_SHAPE: Final = LoadShape(output_tokens=_OUTPUT, pause_s=(0.1, 0.3))
_MAX_TOKENS: Final = 128
"""Of one request, input and output."""
_SERVICE_S: Final = (_OUTPUT + 1) * (0.008 + 0.00065 * SLOTS / 2)
"""The mock's default profile with all slots taken."""


class OutageResult(msgspec.Struct, kw_only=True):
    """What one outage showed."""

    sent: list[SentRequest] = msgspec.field(default_factory=list)
    away_at_s: float = 0.0
    away_unix_s: float = 0.0
    back_at_s: float = 0.0
    """Monotonic: when Redis went and came."""
    up_s: float = 0.0
    """From then until every gateway said that its store is back."""
    seen_away: int = 0
    """Gateways that said it was away."""
    after: Snapshot | None = None
    entries: list[Entry] = msgspec.field(default_factory=list)
    lines: list[list[Line]] = msgspec.field(default_factory=list)
    """What each gateway logged of its requests."""


_BOTH: Final = ("local_share", "local_share", "closed", "closed")


def hanging() -> list[Row]:
    """One server."""
    name = "Redis hanging"
    with RedisServer() as redis, redis.client() as client:
        found = _outage(redis.url, _BOTH, redis.hang, redis.resume, client)
    return [*_rows(name, found, _BOTH), exported_row(name, found.entries)]


def cluster() -> list[Row]:
    """A cluster's node."""
    name, modes = "a cluster's node killed", ("local_share", "local_share")
    with tempfile.TemporaryDirectory() as folder, RedisCluster(Path(folder)) as nodes:
        with node(1) as nobody:  # connects to nothing
            port = nodes.owner(key_slot(Books(nobody).key.encode()))
        breaking, mending = partial(nodes.kill, port), partial(nodes.start, port)
        with node(port) as client:
            found = _outage(nodes.url, modes, breaking, mending, client, since=True)
    return [*_rows(name, found, modes), _lost(name, found)]


def stopped() -> list[Row]:
    """One server that comes back empty."""
    name = "Redis stopped, back empty"
    with RedisServer() as redis, redis.client() as client:
        found = _outage(redis.url, _BOTH, redis.kill, redis.start, client, since=True)
    return [*_rows(name, found, _BOTH), _lost(name, found)]


def sentinel() -> list[Row]:
    """A master that its replica replaces; it stays away."""
    name = "a master killed, its replica takes over"
    with (
        tempfile.TemporaryDirectory() as folder,
        SentinelledRedis(Path(folder)) as servers,
        node(servers.replica) as client,
    ):
        breaking = partial(servers.kill, servers.master)
        found = _outage(servers.url, _BOTH, breaking, lambda: None, client, FAILOVER_S)
    return [*_nobody_hung(name, found, _BOTH), *_right_after(name, found), _lost(name, found)]


def _outage(
    url: str,
    modes: Sequence[str],
    breaking: Callable[[], None],
    mending: Callable[[], None],
    client: Redis,
    away_s: float = AWAY_S,
    *,
    since: bool = False,
) -> OutageResult:
    """A gateway for each mode on one Redis, which breaks and is mended under load.

    `since`: what comes back is empty, and has what was settled since then.
    """
    found = OutageResult()
    with tempfile.TemporaryDirectory() as folder:
        gateways, files = exports_in(Path(folder), len(modes))
        logs = [file.with_name(f"log-{file.name}") for file in files]
        for more, log, mode in zip(gateways, logs, modes, strict=True):
            more["state"] = {"url": url, "fail_mode": mode}
            more["request_log"] = {"path": str(log)}
        entitlements = [
            entitlement("guaranteed", "guaranteed", concurrency=LIMITS["guaranteed"]),
            entitlement("elastic", "elastic", concurrency=16, max_concurrency=LIMITS["elastic"]),
        ]
        with fleet_of(entitlements, gateways) as fleet:
            asyncio.run(_under_load(fleet, breaking, mending, found, away_s))
            found.after = settled(fleet, Books(client), 15.0)
            since_s = found.away_unix_s if since else 0.0
            found.entries = ledger(fleet.replicas[0], files, since_unix_s=since_s)
            found.lines = [LogReader(log).new() for log in logs]
    return found


def _lost(name: str, found: OutageResult) -> Row:
    at_s = found.away_at_s
    running = sum(s.status == 200 and s.at_s < at_s < s.end_s for s in found.sent)
    return at_most(
        f"{name}: tokens settled since then that the new book does not have",
        sum(abs(e.used - e.exported) for e in found.entries),
        running * _MAX_TOKENS,
        f"{running} requests were running then, {_MAX_TOKENS} tokens each at most; their "
        "leases went with what Redis knew",
    )


async def _under_load(
    fleet: Fleet,
    breaking: Callable[[], None],
    mending: Callable[[], None],
    found: OutageResult,
    away_s: float,
) -> None:
    load = ClientLoad([r.url for r in fleet.replicas], _SHAPE)
    load.start(
        (tenant, gateway)
        for gateway in range(len(fleet.replicas))
        for tenant, count in CLIENTS.items()
        for _ in range(count // len(fleet.replicas))
    )
    await asyncio.sleep(BEFORE_S)
    breaking()
    found.away_at_s, found.away_unix_s = time.monotonic(), time.time()
    await asyncio.sleep(away_s - 1.0)
    found.seen_away = len(fleet.replicas) - await asyncio.to_thread(_up, fleet)
    await asyncio.sleep(found.away_at_s + away_s - time.monotonic())
    found.back_at_s = time.monotonic()  # a server answers before all of it is started
    # Here and not on a thread: a process ends with the thread that started it.
    mending()
    while found.up_s < BACK_LIMIT_S and await asyncio.to_thread(_up, fleet) < len(fleet.replicas):
        await asyncio.sleep(0.1)
        found.up_s = time.monotonic() - found.back_at_s
    await asyncio.sleep(AFTER_S)
    await load.stop()
    found.sent = load.sent


def _up(fleet: Fleet) -> int:
    """Gateways whose store answers."""
    return sum(int(replica.metrics()["sluice_store_up"]) for replica in fleet.replicas)


def _rows(name: str, found: OutageResult, modes: Sequence[str]) -> Iterator[Row]:
    yield from _nobody_hung(name, found, modes)
    while_away = [
        s for s in found.sent if found.away_at_s + NOTICED_S <= s.at_s and s.end_s < found.back_at_s
    ]
    if "closed" in modes:
        closed = [s for s in while_away if modes[s.gateway] == "closed"]
        others = sum((s.status, s.reason) != (503, "state_unavailable") for s in closed)
        metric = f"{name}: closed, other answers than 503 state_unavailable"
        yield equals(metric, others, 0, f"of {len(closed):,}")
    shared = [n for n, mode in enumerate(modes) if mode == "local_share"]
    served = sum(s.gateway in shared and s.status == 200 for s in while_away)
    yield at_least(f"{name}: local_share, requests served while it was away", served, 100)
    ended_s = found.away_unix_s + found.back_at_s - found.away_at_s
    for tenant, limit in LIMITS.items():
        logged = [[line for line in found.lines[n] if line.entitlement == tenant] for n in shared]
        most = max(most_at_once(lines, found.away_unix_s + NOTICED_S, ended_s) for lines in logged)
        metric = f"{name}: local_share, {tenant} at once at one gateway"
        note = f"{limit} shared by {len(modes)}; {CLIENTS[tenant] // len(modes)} clients ask each"
        yield at_most(metric, most, limit // len(modes), note)
    yield equals(f"{name}: gateways that said so", found.seen_away, len(modes))
    yield from _right_after(name, found)


def _right_after(name: str, found: OutageResult) -> Iterator[Row]:
    assert found.after is not None
    yield at_most(f"{name}: s until all decide by it again", found.up_s, BACK_LIMIT_S)
    yield from books_rows(name, found.after, found.entries)


def _nobody_hung(name: str, found: OutageResult, modes: Sequence[str]) -> Iterator[Row]:
    failed = [
        s
        for s in found.sent
        if s.status not in {200, 429}
        and (modes[s.gateway] != "closed" or s.reason != "state_unavailable")
    ]
    served = [s.length_s for s in found.sent if s.status == 200]
    refused = [s.length_s for s in found.sent if s.status != 200]
    hung = sum(s > _SERVICE_S + 1.0 for s in served) + sum(s > 1.0 for s in refused)
    note = (
        f"of {len(found.sent):,}; the slowest answer {max(served):.2f} s (engines may take "
        f"{_SERVICE_S:.2f} s), the slowest refusal {max(refused, default=0):.2f} s"
    )
    yield equals(f"{name}: requests that took 1 s more than their engine", hung, 0, note)
    note = ", ".join(sorted({f"{s.status} {s.reason}" for s in failed}))
    yield equals(f"{name}: requests that failed", len(failed), 0, note)
