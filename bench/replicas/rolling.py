"""Three gateways on one Redis are restarted one after another under 200 clients with streams.

Each gets SIGTERM, ends by itself, is started again and is ready before the next one's turn. As
behind a balancer, a client whose connection is refused, or that gets 503 `shutting_down`, asks
the next gateway. A few streams last longer than the drain time-out: those may be cut off.
"""

import asyncio
import signal
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Final

import msgspec

from bench.common.fleet import Fleet
from bench.common.raw_client import RawClient
from bench.common.redis_server import RedisServer
from bench.common.report import Row, at_least, equals
from bench.replicas.books import (
    Books,
    Entry,
    Snapshot,
    entitlement,
    exports_in,
    fleet_of,
    ledger,
    settled,
)
from bench.replicas.load import HUNG_S, ClientLoad, LoadShape, SentRequest, body_of

GATEWAYS: Final = 3
CLIENTS: Final = 192
LONG: Final = 8
"""Clients whose streams last longer than DRAIN_S."""
DRAIN_S: Final = 8.0
_SLOTS: Final = 128
_SPARE: Final = 16
"""Clients ask again, elsewhere too, before the last answer is settled."""
_BETWEEN_S: Final = 2.0
_SHORT: Final = LoadShape(output_tokens=24, pause_s=(0.1, 0.3), streamed=1.0)
_LONG: Final = LoadShape(output_tokens=300, pause_s=(0.1, 0.3), streamed=1.0)
_ELSEWHERE: Final = frozenset({(0, "ConnectionRefusedError"), (503, "shutting_down")})


class Rolling(msgspec.Struct, kw_only=True):
    """What a rolling restart showed."""

    sent: list[SentRequest] = msgspec.field(default_factory=list)
    elsewhere: int = 0
    ended_s: list[float] = msgspec.field(default_factory=list)
    """From SIGTERM until the process was gone."""
    statuses: list[int] = msgspec.field(default_factory=list)
    after: Snapshot | None = None
    entries: list[Entry] = msgspec.field(default_factory=list)


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


def rows() -> list[Row]:
    """All rows."""
    found = Rolling()
    with RedisServer() as redis, tempfile.TemporaryDirectory() as folder:
        gateways, files = exports_in(Path(folder), GATEWAYS)
        entitlements = [
            entitlement("short", "guaranteed", concurrency=CLIENTS + _SPARE),
            entitlement("long", "guaranteed", concurrency=LONG + _SPARE),
        ]
        told = [{**more, "state": {"url": redis.url}} for more in gateways]
        server = {"drain_timeout_s": DRAIN_S}
        with (
            fleet_of(entitlements, told, slots=_SLOTS, server=server) as fleet,
            redis.client() as client,
        ):
            asyncio.run(_scenario(fleet, found))
            found.after = settled(fleet, Books(client), 15.0)
            found.entries = ledger(fleet.replicas[0], files)
    return _rows(found)


async def _scenario(fleet: Fleet, found: Rolling) -> None:
    urls = [replica.url for replica in fleet.replicas]
    loads = [_Balanced(urls, _SHORT), _Balanced(urls, _LONG)]
    for load, (tenant, count) in zip(loads, (("short", CLIENTS), ("long", LONG)), strict=True):
        load.start((tenant, n % GATEWAYS) for n in range(count))
    await asyncio.sleep(_BETWEEN_S)
    for replica in fleet.replicas:
        process = replica.process
        assert process is not None
        began_s = time.monotonic()
        await asyncio.to_thread(fleet.kill_replica, replica, signal.SIGTERM, 3 * DRAIN_S)
        found.ended_s.append(time.monotonic() - began_s)
        found.statuses.append(process.returncode)
        fleet.start_replica(replica)  # not on a thread: a process ends with the one that began it
        await asyncio.to_thread(fleet.wait_ready, replica)
        await asyncio.sleep(_BETWEEN_S)
    for load in loads:
        await load.stop()
        found.sent += load.sent


def _rows(found: Rolling) -> list[Row]:
    asked = [s for s in found.sent if (s.status, s.reason) not in _ELSEWHERE]
    failed = [s for s in asked if s.status != 200]
    cut = [s for s in failed if s.tenant == "long" and s.length_s > DRAIN_S]
    others = [s for s in failed if s not in cut]
    after = found.after
    assert after is not None
    return [
        equals(
            "rolling restart: failed requests but streams longer than the drain time-out",
            len(others),
            0,
            ", ".join(
                sorted(
                    {f"{s.tenant} {s.status} {s.reason} after {s.length_s:.2f} s" for s in others}
                )
            )
            or f"of {len(asked):,}; {len(cut)} longer streams were cut off; "
            f"{len(found.sent) - len(asked):,} times the next gateway was asked",
        ),
        at_least("rolling restart: requests answered", len(asked) - len(failed), CLIENTS),
        Row(
            "rolling restart: s from SIGTERM until a gateway was gone",
            max(found.ended_s),
            f"aim: {DRAIN_S + 3.0:g}; " + ", ".join(f"{s:.1f}" for s in found.ended_s),
        ),
        equals(
            "rolling restart: gateways that ended otherwise than by themselves",
            sum(status != 0 for status in found.statuses),
            0,
        ),
        equals("rolling restart: leases left, and sequences counted", after.leases + after.pool, 0),
        equals(
            "rolling restart: tokens that debited - refunded - used is off",
            sum(e.off for e in found.entries),
            0,
        ),
        equals(
            "rolling restart: tokens that used differs from what was exported",
            sum(abs(e.used - e.exported) for e in found.entries),
            0,
            f"used {sum(e.used for e in found.entries):,}",
        ),
    ]
